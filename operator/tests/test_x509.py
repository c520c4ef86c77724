"""Certificates as TLS sees them: a real handshake both ways, in memory; and what is read of files that are not whole."""

import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509 import SubjectAlternativeName, load_der_x509_certificate, load_pem_x509_certificate

from aerostat_core.ids import Seconds
from aerostat_core.peers import AGENT, ENGINES, ROUTER
from aerostat_operator.policy.certificates import DAY, LEAF_LIFE, SKEW, AuthorityId, Leaf, Validity
from aerostat_operator.x509 import OwnAuthority, bundle, id_of, pem, read_authorities, read_bundle, read_leaf
from aerostat_runtime.clock import SystemClock
from aerostat_runtime.tls import AUTHORITIES, CERTIFICATE, KEY

pytestmark = pytest.mark.cpu
NOW: Seconds = SystemClock().wall() // 1  # handshakes are judged by this machine's clock
YEAR = Validity(since=NOW - SKEW, until=NOW + 365 * DAY)
WEEK = Validity(since=NOW - SKEW, until=NOW + LEAF_LIFE)


@pytest.fixture(scope="module")
def authority() -> OwnAuthority:
    return OwnAuthority.make(YEAR)


def context(side: int, files: dict[str, bytes], folder: Path) -> ssl.SSLContext:
    """As a part makes it of its mounted Secret: it asks for a certificate, whichever side it is."""
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    made = ssl.SSLContext(side)
    made.verify_mode = ssl.CERT_REQUIRED
    made.verify_flags |= ssl.VERIFY_X509_STRICT
    made.load_cert_chain(folder / CERTIFICATE, folder / KEY)
    made.load_verify_locations(folder / AUTHORITIES)
    return made


def shake_hands(server: dict[str, bytes], client: dict[str, bytes], expected: str, folder: Path) -> tuple[str, str]:
    """The names that server and client see of each other. Raises ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        context(ssl.PROTOCOL_TLS_SERVER, server, folder / "server").wrap_bio(to_server, to_client, server_side=True),
        context(ssl.PROTOCOL_TLS_CLIENT, client, folder / "client").wrap_bio(to_client, to_server, server_hostname=expected),
    )
    for _ in range(10):
        for end in reversed(ends):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return _seen(ends[0]), _seen(ends[1])


def _seen(end: ssl.SSLObject) -> str:
    certificate = end.getpeercert(binary_form=True)
    assert certificate is not None
    (name,) = load_der_x509_certificate(certificate).extensions.get_extension_for_class(SubjectAlternativeName).value
    return str(name.value)


@pytest.mark.parametrize(("server", "client"), [(AGENT, ROUTER), (ENGINES, ROUTER), (ENGINES, AGENT), (ENGINES, ENGINES)])
def test_parts_take_each_others_certificates(authority: OwnAuthority, tmp_path: Path, server: str, client: str) -> None:
    files = {name: authority.sign(name, WEEK) | bundle([authority]) for name in (server, client)}
    assert shake_hands(files[server], files[client], server, tmp_path) == (client, server)


def test_during_a_rotation_both_cas_are_taken(authority: OwnAuthority, tmp_path: Path) -> None:
    other = OwnAuthority.make(YEAR)
    both = bundle([authority, other])
    server, client = other.sign(AGENT, WEEK) | both, authority.sign(ROUTER, WEEK) | both
    assert shake_hands(server, client, AGENT, tmp_path) == (ROUTER, AGENT)


def test_a_certificate_of_another_ca_or_name_or_time_is_refused(authority: OwnAuthority, tmp_path: Path) -> None:
    server, trust = authority.sign(AGENT, WEEK) | bundle([authority]), bundle([authority])
    stranger = OwnAuthority.make(YEAR)
    past = Validity(since=NOW - 2 * DAY, until=NOW - DAY)
    for client, expected in (
        (stranger.sign(ROUTER, WEEK) | trust, AGENT),
        (authority.sign(ROUTER, WEEK) | trust, ENGINES),
        (authority.sign(ROUTER, past) | trust, AGENT),
        (authority.sign(ROUTER, WEEK) | bundle([stranger]), AGENT),
    ):
        with pytest.raises(ssl.SSLError, match="verify failed"):
            shake_hands(server, client, expected, tmp_path)


def test_a_part_cannot_act_as_a_ca(authority: OwnAuthority, tmp_path: Path) -> None:
    """What a part holds signs no certificate that anybody takes."""
    trust = bundle([authority])
    router = authority.sign(ROUTER, WEEK)
    key = load_pem_private_key(router[KEY], password=None)
    assert isinstance(key, EllipticCurvePrivateKey)
    impostor = OwnAuthority(certificate=load_pem_x509_certificate(router[CERTIFICATE]), key=key)
    forged = impostor.sign(AGENT, WEEK)
    client = forged | {CERTIFICATE: forged[CERTIFICATE] + router[CERTIFICATE]} | trust
    with pytest.raises(ssl.SSLError, match="verify failed"):
        shake_hands(authority.sign(ENGINES, WEEK) | trust, client, ENGINES, tmp_path)


# ---------------------------------------------------------------- reading


def test_what_is_written_is_read(authority: OwnAuthority) -> None:
    (found,), damaged = read_authorities({**authority.files(), "README": b"not ours"})
    assert damaged == ()
    assert found.known() == authority.known()
    assert found.known().validity == YEAR
    assert found.known().can_sign
    files = found.sign(ROUTER, WEEK) | bundle([found])
    assert read_leaf(files, [OwnAuthority.make(YEAR), found]) == Leaf(issuer=found.id, names=frozenset({ROUTER}), validity=WEEK)
    assert read_leaf(files, []) == Leaf(issuer=None, names=frozenset({ROUTER}), validity=WEEK)
    assert read_bundle(files) == {found.id}


def test_a_ca_without_its_key_is_trusted_and_does_not_sign(authority: OwnAuthority) -> None:
    other = OwnAuthority.make(YEAR)
    key = f"{authority.id}.key"
    for key_file in (None, b"", b"no key", other.files()[f"{other.id}.key"]):
        files = {name: data for name, data in authority.files().items() if name != key} | ({key: key_file} if key_file is not None else {})
        (found,), damaged = read_authorities(files)
        assert damaged == ()
        assert not found.known().can_sign
        with pytest.raises(ValueError, match="has no key"):
            found.sign(ROUTER, WEEK)


def test_what_is_no_ca_is_named_with_the_reason(authority: OwnAuthority) -> None:
    leaf = authority.sign(ROUTER, WEEK)
    leaf_id = id_of(load_pem_x509_certificate(leaf[CERTIFICATE]))
    files = {
        "renamed.crt": pem(authority.certificate),
        "cut.crt": pem(authority.certificate)[:200],
        "alone.key": leaf[KEY],
        f"{leaf_id}.crt": leaf[CERTIFICATE],
    }
    found, damaged = read_authorities(files)
    assert found == ()
    assert dict(damaged) == {
        "renamed": f"its certificate is {authority.id}",
        "cut": "its certificate cannot be read",
        "alone": "there is no certificate",
        leaf_id: "its certificate is not one of a CA",
    }


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({CERTIFICATE: b""}, "there is no certificate"),
        ({CERTIFICATE: b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"}, "its certificate cannot be read"),
        ({KEY: b""}, "there is no key"),
        ({KEY: b"\xff\x00"}, "its key cannot be read"),
        ({KEY: OwnAuthority.make(YEAR).sign(ROUTER, WEEK)[KEY]}, "its key is not the one of its certificate"),
    ],
)
def test_a_certificate_that_is_not_whole_says_why(authority: OwnAuthority, changes: dict[str, bytes], said: str) -> None:
    assert read_leaf({**authority.sign(ROUTER, WEEK), **changes}, [authority]) == said


def test_an_empty_secret_holds_nothing() -> None:
    assert read_authorities({}) == ((), ())
    assert read_leaf({}, []) == "there is no certificate"
    assert read_bundle({}) == read_bundle({AUTHORITIES: b"nothing"}) == frozenset[AuthorityId]()


def test_keys_are_in_no_log(authority: OwnAuthority) -> None:
    assert "key" not in repr(authority)
