"""A TLS folder over real sockets: who is let in, who is believed, and what a renewal changes for whom."""

import asyncio
import errno
import logging
import os
import ssl
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from aerostat_core import peers
from aerostat_core.errors import SettingError
from aerostat_runtime.tls import AUTHORITIES, CERTIFICATE, KEY, RETRY_AFTER, TlsFolder
from aerostat_testing.certificates import EXPIRED, Authority, put_secret
from aerostat_testing.loops import on_both_loops
from aerostat_testing.raw_http import Peer, RawServer, connect, raw_server

pytestmark = pytest.mark.cpu

REFUSED = (ssl.SSLError, ConnectionResetError, asyncio.IncompleteReadError)


async def echo(peer: Peer) -> None:
    while True:
        await peer.send(await peer.reader.readexactly(1))


def listening(folder: TlsFolder) -> AbstractAsyncContextManager[RawServer]:
    return raw_server(echo, folder.server_context())


async def certificate_of(peer: Peer) -> bytes:
    """Of who answers."""
    await peer.send(b"x")
    assert await peer.reader.readexactly(1) == b"x"
    certificate: bytes = peer.writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    return certificate


async def call(server: RawServer, context: ssl.SSLContext, name: str = peers.ENGINES) -> bytes:
    async with connect(server.port, context, name=name) as peer:
        return await certificate_of(peer)


@pytest.fixture
def authority() -> Authority:
    return Authority()


@pytest.fixture
def engine(authority: Authority, tmp_path: Path) -> Path:
    return authority.issue(tmp_path / "engine", peers.ENGINES)


@pytest.fixture
def router(authority: Authority, tmp_path: Path) -> Path:
    return authority.issue(tmp_path / "router", peers.ROUTER)


@on_both_loops
async def test_peers_of_one_authority_talk_by_tls_1_3(engine: Path, router: Path) -> None:
    context = TlsFolder(router).client_context()
    async with listening(TlsFolder(engine)) as server, connect(server.port, context, name=peers.ENGINES) as peer:
        await certificate_of(peer)
        assert peer.writer.get_extra_info("ssl_object").version() == "TLSv1.3"


@on_both_loops
async def test_a_server_with_another_name_is_not_believed(engine: Path, router: Path) -> None:
    async with listening(TlsFolder(engine)) as server:
        with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
            await call(server, TlsFolder(router).client_context(), peers.AGENT)


@on_both_loops
async def test_a_server_of_another_authority_is_not_believed(engine: Path, tmp_path: Path) -> None:
    stranger = TlsFolder(Authority().issue(tmp_path / "stranger", peers.ROUTER))
    async with listening(TlsFolder(engine)) as server:
        with pytest.raises(ssl.SSLCertVerificationError, match="self-signed certificate in certificate chain"):
            await call(server, stranger.client_context())


@on_both_loops
async def test_clients_without_a_certificate_of_the_authority_are_refused(authority: Authority, engine: Path, tmp_path: Path) -> None:
    bare = ssl.create_default_context(cadata=authority.certificate.decode())
    stranger = TlsFolder(Authority().issue(tmp_path / "stranger", peers.ROUTER, also_trusts=[authority]))
    late = TlsFolder(authority.issue(tmp_path / "late", peers.ROUTER, until=EXPIRED))
    async with listening(TlsFolder(engine)) as server:
        for context in (bare, stranger.client_context(), late.client_context()):
            with pytest.raises(REFUSED):
                await call(server, context)


@on_both_loops
async def test_an_expired_server_is_not_believed(authority: Authority, router: Path, tmp_path: Path) -> None:
    late = TlsFolder(authority.issue(tmp_path / "late", peers.ENGINES, until=EXPIRED))
    async with listening(late) as server:
        with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
            await call(server, TlsFolder(router).client_context())


@on_both_loops
async def test_new_connections_get_what_was_renewed_and_old_ones_go_on(authority: Authority, engine: Path, router: Path) -> None:
    folder, client = TlsFolder(engine), TlsFolder(router)
    async with listening(folder) as server, connect(server.port, client.client_context(), name=peers.ENGINES) as open_before:
        before = await certificate_of(open_before)
        authority.issue(engine, peers.ENGINES)
        after = await call(server, client.client_context())
        assert after != before
        assert await certificate_of(open_before) == before


@on_both_loops
async def test_an_authority_that_is_not_trusted_any_more_lets_nobody_in(authority: Authority, engine: Path, router: Path) -> None:
    """A client may even name no server."""
    old, client = TlsFolder(router).client_context(), TlsFolder(router)
    nameless = TlsFolder(router).client_context()
    nameless.check_hostname = False
    async with listening(TlsFolder(engine)) as server:
        await call(server, old)
        successor = Authority()
        successor.issue(engine, peers.ENGINES, also_trusts=[authority])
        successor.issue(router, peers.ROUTER, also_trusts=[authority])
        await call(server, client.client_context())
        successor.issue(engine, peers.ENGINES)
        nameless.load_verify_locations(cadata=successor.certificate.decode())
        with pytest.raises(REFUSED):
            await call(server, nameless, "")
        await call(server, client.client_context())


def test_what_is_damaged_later_is_told_once_and_the_old_stays_in_use(
    authority: Authority, engine: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = TlsFolder(engine)
    before = folder.material
    put_secret(engine, {CERTIFICATE: before.chain, KEY: b"", AUTHORITIES: before.authorities})
    with caplog.at_level(logging.INFO):
        assert folder.material is folder.material is before
        assert [r.levelname for r in caplog.records] == ["ERROR"]
        assert "tls.key holds no private key" in caplog.text
        authority.issue(engine, peers.ENGINES)
        assert folder.material is not before
    assert before.key.decode() not in caplog.text + repr(before)


def test_what_could_not_be_read_for_want_of_files_is_read_later_though_it_does_not_change(
    authority: Authority, engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = TlsFolder(engine)
    before = folder.material
    authority.issue(engine, peers.ENGINES)
    with monkeypatch.context() as busy:
        busy.setattr(os, "memfd_create", _too_many_files)
        assert folder.material is before
    assert folder.material is before, "not at each connection"
    later = time.monotonic() + RETRY_AFTER
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert folder.material is not before


def _too_many_files(name: str) -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        (KEY, None, r"cannot read .*tls\.key: No such file"),
        (AUTHORITIES, b"", r"ca\.crt holds no whole certificate"),
        (AUTHORITIES, b"\xff", r"ca\.crt holds no whole certificate"),
        (CERTIFICATE, b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", r"tls\.crt holds no whole certificate"),
        (KEY, b"hello", r"tls\.key holds no private key"),
    ],
)
def test_a_folder_that_cannot_work_names_the_file_and_the_setting(engine: Path, file: str, content: bytes | None, says: str) -> None:
    (engine / file).unlink()
    if content is not None:
        (engine / file).write_bytes(content)
    with pytest.raises(SettingError, match=says) as caught:
        TlsFolder(engine, setting="--some-dir")
    assert caught.value.message.startswith(f"--some-dir {engine}: ")


def test_a_key_of_another_certificate_is_refused(engine: Path, router: Path) -> None:
    (engine / KEY).unlink()
    (engine / KEY).write_bytes((router / KEY).read_bytes())
    with pytest.raises(SettingError, match=r"tls\.key is not the key of tls\.crt"):
        TlsFolder(engine)
