"""What every engine must do that was given a TLS folder: the real one and the fake one, by the same checks, on an `EngineUnderTest`."""

import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from aerostat_core import peers
from aerostat_runtime.tls import TlsFolder
from aerostat_testing.certificates import EXPIRED, Authority
from aerostat_testing.engine_conformance import ENGINES_TLS, ROUTER_TLS, EngineUnderTest, stream_events
from aerostat_testing.raw_http import connect


async def check_strangers(engine: EngineUnderTest, authority: Authority) -> None:
    """Who shows no valid certificate of the authority gets no answer, whatever its key; nor does plain HTTP."""
    folder = Path(engine.spec.run_dir)
    bare = ssl.create_default_context(cadata=authority.certificate.decode())
    stranger = TlsFolder(Authority().issue(folder / "tls-stranger", peers.ROUTER, also_trusts=[authority]))
    late = TlsFolder(authority.issue(folder / "tls-late", peers.ROUTER, until=EXPIRED))
    for context in (bare, stranger.client_context(), late.client_context()):
        with pytest.raises(aiohttp.ClientConnectionError):
            await _health(engine, ssl=context, server_hostname=peers.ENGINES)
    with pytest.raises(aiohttp.ClientConnectionError):
        await _health(engine, scheme="http")
    for peer in (peers.AGENT, peers.ENGINES):
        own = TlsFolder(authority.issue(folder / "tls-other", peer))
        assert await _health(engine, ssl=own.client_context(), server_hostname=peers.ENGINES) == 200


async def check_renewal(engine: EngineUnderTest, authority: Authority) -> None:
    """New connections are made by the new certificate and authorities, without a restart; a stream goes on to its end."""
    assert engine.tls is not None
    folder = Path(engine.spec.run_dir)
    old = engine.tls.client_context()
    before = await _certificate(engine)
    stream = stream_events(engine, n_tokens=200)
    await anext(stream)
    successor = Authority()
    successor.issue(folder / ENGINES_TLS, peers.ENGINES)
    successor.issue(folder / ROUTER_TLS, peers.ROUTER)
    assert await _certificate(engine) != before
    assert [event async for event in stream][-1] == "[DONE]"
    old.load_verify_locations(cadata=successor.certificate.decode())  # so that it is the engine that refuses
    async with aiohttp.ClientSession() as fresh:
        with pytest.raises(aiohttp.ClientConnectionError):
            await fresh.get(f"{engine.url}/health", ssl=old, server_hostname=peers.ENGINES)


async def _health(engine: EngineUnderTest, *, scheme: str = "https", **more: Any) -> int:
    async with engine.http.get(f"{scheme}://{engine.spec.host}:{engine.spec.port}/health", **more) as answer:
        return answer.status


async def _certificate(engine: EngineUnderTest) -> bytes:
    """Of who answers a new connection."""
    assert engine.tls is not None
    async with connect(engine.spec.port, engine.tls.client_context(), name=peers.ENGINES) as peer:
        certificate: bytes = peer.writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return certificate
