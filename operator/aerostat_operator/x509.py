"""Certificates as files of PEM, and what `policy.certificates` knows of them. The only module that makes or reads keys.

A CA is two keys of its Secret, `ID.crt` and `ID.key`, where ID is the beginning of the certificate's hash. A part has `tls.crt`,
`tls.key` and `ca.crt`, the bundle of CAs that it trusts. Keys are ECDSA P-256: what every TLS library takes, and fast to sign with.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from aerostat_core.ids import Seconds
from aerostat_operator.policy.certificates import Authority, AuthorityId, Leaf, Validity
from aerostat_runtime.tls import AUTHORITIES, CERTIFICATE, KEY

_ID_CHARS: Final = 16
_HASH: Final = hashes.SHA256()
_UNREADABLE: Final = (ValueError, TypeError, UnsupportedAlgorithm)


class DamagedError(Exception):
    """What it is not, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnAuthority:
    """A CA as we hold it. `key` None: lost, so it can only be trusted."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey | None = field(repr=False)

    @classmethod
    def make(cls, validity: Validity) -> Self:
        key = ec.generate_private_key(ec.SECP256R1())
        serial = x509.random_serial_number()
        name = _named(f"Aerostat CA {serial:x}")  # names differ, so that whoever verifies finds the right one at once
        builder = _begun(name, name, validity, serial, key.public_key(), key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        return cls(certificate=builder.add_extension(_usage(signs_certificates=True), critical=True).sign(key, _HASH), key=key)

    @classmethod
    def read(cls, name: AuthorityId, data: Mapping[str, bytes]) -> Self:
        """The CA of that name. Raises DamagedError."""
        certificate = _certificate(data.get(f"{name}.crt"))
        if id_of(certificate) != name:
            raise DamagedError(f"its certificate is {id_of(certificate)}")
        if not _may_sign(certificate):
            raise DamagedError("its certificate is not one of a CA")
        try:
            key = _key_of(certificate, data.get(f"{name}.key"))
        except DamagedError:
            key = None
        return cls(certificate=certificate, key=key)

    @property
    def id(self) -> AuthorityId:
        return id_of(self.certificate)

    def known(self) -> Authority:
        return Authority(id=self.id, validity=_validity(self.certificate), can_sign=self.key is not None)

    def files(self) -> dict[str, bytes]:
        return {f"{self.id}.crt": pem(self.certificate)} | ({f"{self.id}.key": _pem_key(self.key)} if self.key is not None else {})

    def sign(self, name: str, validity: Validity) -> dict[str, bytes]:
        """A new certificate with its key, as a part's files. For both ends of a connection: parts call each other both ways."""
        if self.key is None:
            raise ValueError(f"CA {self.id} has no key")
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = self.certificate
        builder = _begun(_named(name), issuer.subject, validity, x509.random_serial_number(), key.public_key(), self.key.public_key())
        builder = (
            builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        )
        return {CERTIFICATE: pem(builder.sign(self.key, _HASH)), KEY: _pem_key(key)}


def read_authorities(data: Mapping[str, bytes]) -> tuple[tuple[OwnAuthority, ...], tuple[tuple[AuthorityId, str], ...]]:
    """The CAs among a Secret's files, and what is none by name and reason. Other files are not ours."""
    names = sorted({stem for name in data for stem, _, kind in [name.rpartition(".")] if kind in ("crt", "key")})
    good, damaged = [], []
    for name in map(AuthorityId, names):
        try:
            good.append(OwnAuthority.read(name, data))
        except DamagedError as error:
            damaged.append((name, str(error)))
    return tuple(good), tuple(damaged)


def read_leaf(data: Mapping[str, bytes], authorities: Iterable[OwnAuthority]) -> Leaf | str:
    """A part's certificate, or why it has none that could be used."""
    try:
        certificate = _certificate(data.get(CERTIFICATE))
        _key_of(certificate, data.get(KEY))
    except DamagedError as error:
        return str(error)
    issuer = next((a.id for a in authorities if _signed(certificate, a.certificate)), None)
    return Leaf(issuer=issuer, names=_names(certificate), validity=_validity(certificate))


def read_bundle(data: Mapping[str, bytes]) -> frozenset[AuthorityId]:
    """Whom a part trusts; nobody where that cannot be read."""
    try:
        return frozenset(id_of(c) for c in x509.load_pem_x509_certificates(data.get(AUTHORITIES, b"")))
    except _UNREADABLE:
        return frozenset()


def bundle(authorities: Iterable[OwnAuthority]) -> dict[str, bytes]:
    return {AUTHORITIES: b"".join(pem(a.certificate) for a in sorted(authorities, key=lambda a: a.id))}


def id_of(certificate: x509.Certificate) -> AuthorityId:
    return AuthorityId(certificate.fingerprint(_HASH).hex()[:_ID_CHARS])


def pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


# ---------------------------------------------------------------- making


def _begun(
    subject: x509.Name,
    issuer: x509.Name,
    validity: Validity,
    serial: int,
    key: ec.EllipticCurvePublicKey,
    issuers_key: ec.EllipticCurvePublicKey,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .serial_number(serial)
        .public_key(key)
        .not_valid_before(_time(validity.since))
        .not_valid_after(_time(validity.until))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuers_key), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _pem_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _time(seconds: Seconds) -> datetime:
    return datetime.fromtimestamp(seconds // 1, UTC)  # X.509 has whole seconds


# ---------------------------------------------------------------- reading


def _certificate(data: bytes | None) -> x509.Certificate:
    if not data:
        raise DamagedError("there is no certificate")
    try:
        return x509.load_pem_x509_certificate(data)
    except _UNREADABLE as error:
        raise DamagedError("its certificate cannot be read") from error


def _key_of(certificate: x509.Certificate, data: bytes | None) -> ec.EllipticCurvePrivateKey:
    if not data:
        raise DamagedError("there is no key")
    try:
        key = serialization.load_pem_private_key(data, password=None)
        own = certificate.public_key()
    except _UNREADABLE as error:
        raise DamagedError("its key cannot be read") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != own:
        raise DamagedError("its key is not the one of its certificate")
    return key


def _may_sign(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (x509.ExtensionNotFound, *_UNREADABLE):
        return False


def _signed(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (InvalidSignature, *_UNREADABLE):
        return False
    return True


def _names(certificate: x509.Certificate) -> frozenset[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, *_UNREADABLE):
        return frozenset()
    return frozenset(names.get_values_for_type(x509.DNSName))


def _validity(certificate: x509.Certificate) -> Validity:
    return Validity(since=certificate.not_valid_before_utc.timestamp(), until=certificate.not_valid_after_utc.timestamp())
