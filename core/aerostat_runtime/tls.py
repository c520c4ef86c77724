"""Mutual TLS between the parts of one Aerostat, by a folder that a part is given: its certificate, its key and the CAs that it trusts.

In pods the folder is a mounted Secret, which a kubelet replaces while the part runs. It is looked at whenever a connection begins, and read
anew when it changed; nothing runs for it in between. Connections that exist go on with what they began with.

A peer is known by the name in its certificate (`aerostat_core.peers`), never by its address. Credentials for gRPC are made in
`grpc_tls`, so that who needs none does not load gRPC.
"""

import logging
import math
import os
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from aerostat_core.errors import SettingError
from aerostat_core.ids import Seconds

_log = logging.getLogger(__name__)

CERTIFICATE: Final = "tls.crt"
KEY: Final = "tls.key"
AUTHORITIES: Final = "ca.crt"
FILES: Final = (CERTIFICATE, KEY, AUTHORITIES)

RETRY_AFTER: Final[Seconds] = 10.0
"""Files that could not be read are read again then, changed or not."""

_Stamp = tuple[tuple[int, int, int] | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """PEM, as it was read: the chain of our own certificate, its key, and every CA that is trusted."""

    chain: bytes
    key: bytes = field(repr=False)
    authorities: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    material: Material
    server: ssl.SSLContext
    client: ssl.SSLContext


class TlsFolder:
    """What the folder holds now, or held when it was last whole. May be shared by threads."""

    def __init__(self, path: Path, *, setting: str = "--tls-dir") -> None:
        """Raises SettingError that says what is wrong in which file."""
        self._path = path
        self._setting = setting
        self._seen = self._stamp()
        self._loaded = self._load()
        self._retry_at: Seconds = math.inf

    @property
    def material(self) -> Material:
        """The same object for as long as nothing changes."""
        return self._current().material

    def client_context(self) -> ssl.SSLContext:
        """For one connection that begins now. Whoever connects names the peer as `server_hostname`; one with another name is refused."""
        return self._current().client

    def server_context(self) -> ssl.SSLContext:
        """For a listener's whole life: each handshake is done with what the folder holds then. Clients must have a certificate."""
        context = _context(ssl.PROTOCOL_TLS_SERVER, self._current().material)
        context.sni_callback = self._choose  # OpenSSL asks it for every client, also for one that names no server
        return context

    def _choose(self, connection: ssl.SSLObject, name: str | None, listener: ssl.SSLContext) -> None:
        connection.context = self._current().server

    def _current(self) -> _Loaded:
        stamp, now = self._stamp(), time.monotonic()
        is_changed = stamp != self._seen
        if is_changed or now >= self._retry_at:
            self._seen = stamp  # of before the reading: what changes during it is seen the next time
            try:
                self._loaded = self._load()
            except (SettingError, OSError) as error:  # OSError: too many open files
                self._retry_at = now + RETRY_AFTER
                if is_changed:
                    _log.error("%s What was read before stays in use.", error)
            else:
                self._retry_at = math.inf
                _log.info("read %s anew", self._path)
        return self._loaded

    def _stamp(self) -> _Stamp:
        return tuple(_stamp_of(self._path / name) for name in FILES)

    def _load(self) -> _Loaded:
        """Raises SettingError."""
        try:
            chain, key, authorities = ((self._path / name).read_bytes() for name in FILES)
        except OSError as error:
            raise self._wrong(f"cannot read {error.filename}: {error.strerror}") from error
        for name, certificates in ((CERTIFICATE, chain), (AUTHORITIES, authorities)):
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=certificates.decode("ascii"))
            except (ssl.SSLError, ValueError) as error:
                raise self._wrong(f"{self._path / name} holds no whole certificate in PEM") from error
        material = Material(chain=chain, key=key, authorities=authorities)
        try:
            server, client = (_context(protocol, material) for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT))
        except ssl.SSLError as error:
            is_other = error.reason == "KEY_VALUES_MISMATCH"
            what = f"is not the key of {CERTIFICATE}" if is_other else "holds no private key in PEM that can be read without a password"
            raise self._wrong(f"{self._path / KEY} {what}") from error
        return _Loaded(material=material, server=server, client=client)

    def _wrong(self, what: str) -> SettingError:
        files = f"{CERTIFICATE}, its {KEY}, and the trusted CAs as {AUTHORITIES}"
        return SettingError(f"{self._setting} {self._path}: {what}. Put {files} there, as the operator's Secrets have them.")


def _stamp_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _context(protocol: int, material: Material) -> ssl.SSLContext:
    """Raises ssl.SSLError for a key that is damaged, or another certificate's."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    with _as_file(material.chain) as chain, _as_file(material.key) as key:
        context.load_cert_chain(chain, key, password="")  # without one, OpenSSL would ask at a terminal
    context.load_verify_locations(cadata=material.authorities.decode("ascii"))
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # a session that is taken up again would not be verified again
    return context


@contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """OpenSSL reads these from files only, and those of the folder may be replaced between two readings."""
    fd = os.memfd_create("tls")
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)
