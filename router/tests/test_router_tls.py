"""A whole router by TLS: its agents and engines prove who they are, and everything is renewed while it runs."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from aerostat.v1 import telemetry_pb2 as pb
from aerostat_core import peers
from aerostat_router.main import EXIT_BAD_SETTING, main
from aerostat_router.telemetry_client import AgentLink, AgentUnreachableError
from aerostat_runtime.clock import SystemClock
from aerostat_runtime.tls import TlsFolder
from aerostat_testing.certificates import Authority
from aerostat_testing.fake_agent import fake_agent
from aerostat_testing.relay import relay_to
from aerostat_testing.router_rig import TlsFolders, rig
from aerostat_testing.waiting import eventually

pytestmark = pytest.mark.cpu


def issue(authority: Authority, root: Path, *, engines: tuple[str, ...] = (peers.ENGINES,)) -> TlsFolders:
    """Again: a renewal."""
    return TlsFolders(
        router=authority.issue(root / "router", peers.ROUTER),
        agent=authority.issue(root / "agent", peers.AGENT),
        engines=tuple(authority.issue(root / f"engine-{i}", name) for i, name in enumerate(engines)),
    )


async def test_a_call_goes_to_an_engine_that_an_agent_tells_all_by_tls(tmp_path: Path) -> None:
    async with rig(tls=issue(Authority(), tmp_path)) as r:
        first = await r.chat(session="s")
        assert first.status_code == 200, first.text
        await eventually(lambda: r.agent.installed, "the agent has the lease")
        assert (await r.chat(session="s")).headers["x-aerostat-route"] == "lease"


async def test_a_call_that_meets_an_impostor_goes_to_another_engine_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folders = issue(Authority(), tmp_path, engines=(peers.AGENT, peers.ENGINES))
    with caplog.at_level(logging.INFO):
        async with rig(n_engines=2, tls=folders) as r:
            for _ in range(4):
                assert (await r.chat()).headers["x-aerostat-instance"] == "b"
            assert r.engines[0].got == []
    assert "failed before its first byte (connect: no TLS with" in caplog.text
    assert "Hostname mismatch" in caplog.text


@asynccontextmanager
async def linked(port: int, folder: Path) -> AsyncIterator[AgentLink]:
    link = AgentLink(f"127.0.0.1:{port}", router="r", apply=lambda *_: True, clock=SystemClock(), tls=TlsFolder(folder))
    running = asyncio.create_task(link.run())
    try:
        yield link
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await link.close()


async def test_an_agent_of_another_authority_is_not_heard(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folders = issue(Authority(), tmp_path)
    Authority().issue(folders.agent, peers.AGENT)
    with caplog.at_level(logging.INFO):
        async with fake_agent(TlsFolder(folders.agent)) as agent, linked(agent.port, folders.router) as link:
            await eventually(lambda: "CERTIFICATE_VERIFY_FAILED" in caplog.text, "the router says why it hears nothing")
            assert not link.is_connected
            with pytest.raises(AgentUnreachableError, match="CERTIFICATE_VERIFY_FAILED"):
                await link.wake(pb.WakeRequest())


async def test_after_the_authority_was_replaced_a_lost_link_comes_back_with_what_is_new(tmp_path: Path) -> None:
    folders = issue(Authority(), tmp_path)
    async with (
        fake_agent(TlsFolder(folders.agent)) as agent,
        relay_to(agent.port) as relay,
        linked(relay.port, folders.router) as link,
    ):
        await eventually(lambda: link.is_connected, "the router hears its agent")
        relay.cut()
        issue(Authority(), tmp_path)
        relay.mend()
        await eventually(lambda: agent.n_subscriptions == 2 and link.is_connected, "the router hears its agent again")
        await link.wake(pb.WakeRequest())
        assert len(agent.wakes) == 1


def test_a_tls_folder_that_cannot_work_is_a_fatal_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cluster", f"folder:{tmp_path}", "--tls-dir", str(tmp_path / "none")]) == EXIT_BAD_SETTING
    assert f"--tls-dir {tmp_path / 'none'}: cannot read" in capsys.readouterr().err
