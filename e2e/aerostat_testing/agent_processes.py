"""A keeper, agents and routers as real processes over a state folder: what `aerostat up` starts, without the parent and the operator.

Engines are fake ones unless a test says otherwise. With an authority every process has a TLS folder, as in pods.
"""

import asyncio
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import grpc
import psutil

from aerostat.v1 import telemetry_pb2 as tpb
from aerostat.v1 import telemetry_pb2_grpc as rpc
from aerostat_core import peers
from aerostat_core.ids import Seconds
from aerostat_core.resources import Resource
from aerostat_runtime.cluster.folder import FolderCluster
from aerostat_runtime.cluster.port import Kind
from aerostat_runtime.grpc_tls import peer_channel
from aerostat_runtime.tls import TlsFolder
from aerostat_testing.certificates import Authority
from aerostat_testing.command_lines import command_line
from aerostat_testing.waiting import eventually

LIMIT: Final[Seconds] = 60.0  # generous: it only matters on a machine that is overloaded, or when something is wrong
FAKE: Final = shlex.join([sys.executable, "-m", "aerostat_testing.fake_engine"])


class NodeProcesses:
    """Everything is below `root`, sockets in `run_dir`; `engines` are those that the keeper runs now."""

    def __init__(self, root: Path, authority: Authority | None = None, *, run_dir: Path | None = None) -> None:
        self.root = root
        self.authority = authority
        self.run_dir = run_dir or root / "run"
        self.run_dir.mkdir(mode=0o700, exist_ok=True)
        if authority is not None:
            self.renew(authority)
        (root / "state").mkdir()
        self.cluster = FolderCluster(root / "state")
        self.keeper: subprocess.Popen[bytes] | None = None
        self.agent: subprocess.Popen[bytes] | None = None
        self.router: subprocess.Popen[bytes] | None = None

    def renew(self, authority: Authority) -> None:
        """New certificates of every part, trusted by this authority alone."""
        for peer in (peers.ENGINES, peers.AGENT, peers.ROUTER):
            authority.issue(self.tls_dir(peer), peer)

    def tls_dir(self, peer: str) -> Path:
        return self.root / peer

    def start_keeper(self, *flags: str) -> None:
        settings = ["--socket", str(self.run_dir / "keeper.sock"), "--grace", "5", *self._tls_flags(peers.ENGINES), *flags]
        self.keeper = self._start("keeper", "aerostat_agent.keeper", *settings)

    def start_agent(self, *flags: str) -> None:
        settings = ["--node", "n0", "--cluster", f"folder:{self.root / 'state'}", "--run-dir", str(self.run_dir)]
        settings += ["--model-cache", str(self.root / "models"), "--launcher", FAKE, "--preparer", FAKE, *self._tls_flags(peers.AGENT)]
        self.agent = self._start("agent", "aerostat_agent", *settings, *flags)

    def start_router(self, port: int) -> None:
        settings = ["--cluster", f"folder:{self.root / 'state'}", "--listen", f"127.0.0.1:{port}", *self._tls_flags(peers.ROUTER)]
        self.router = self._start("router", "aerostat_router", *settings)

    def _tls_flags(self, peer: str) -> tuple[str, ...]:
        return () if self.authority is None else ("--tls-dir", str(self.tls_dir(peer)))

    def _start(self, name: str, module: str, *args: str) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", module, *args, "--die-with-parent", str(os.getpid())]
        with (self.root / f"{name}.log").open("ab") as log:
            return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def said(self, name: str) -> str:
        return (self.root / f"{name}.log").read_text()

    @property
    def engines(self) -> dict[str, psutil.Process]:
        """Running engine processes by the name of their model."""
        assert self.keeper is not None
        found = {}
        for process in psutil.Process(self.keeper.pid).children():
            argv = command_line(process)
            if argv and argv[-1].startswith("{"):
                found[argv[-1].split('"model": "')[1].split('"')[0]] = process
        return found

    async def status(self) -> Resource:
        """Of the one Instance; empty before an agent wrote it."""
        instances = await self.cluster.list(Kind.INSTANCE)
        return dict(instances[0].get("status", {})) if instances else {}

    async def until_state(self, model: str, state: str, *, agent_epoch_after: int = 0, limit: Seconds = LIMIT) -> Resource:
        """Wait until the status says so; returns it."""
        async with asyncio.timeout(limit):
            while True:
                status = await self.status()
                states = {m["name"]: m["state"] for m in status.get("models", ())}
                if states.get(model) == state and status["agentEpoch"] > agent_epoch_after:
                    return status
                await asyncio.sleep(0.05)

    async def end(self, process: subprocess.Popen[bytes], signum: signal.Signals = signal.SIGTERM) -> int:
        process.send_signal(signum)
        code = await eventually(lambda: None if process.poll() is None else (process.returncode,), f"{process.args!r} ends", limit=LIMIT)
        return code[0]


@asynccontextmanager
async def node_processes(root: Path, authority: Authority | None = None, *, run_dir: Path | None = None) -> AsyncIterator[NodeProcesses]:
    """Whatever happened, nothing of it runs afterwards, and no socket is left."""
    node = NodeProcesses(root, authority, run_dir=run_dir)
    try:
        yield node
    finally:
        await node.cluster.close()
        for process in (node.router, node.agent, node.keeper):
            if process is not None and process.poll() is None:
                await node.end(process)


@asynccontextmanager
async def telemetry_of(  # that name is in the generated types only
    address: str, tls: TlsFolder | None = None
) -> "AsyncIterator[rpc.TelemetryAsyncStub]":
    async with grpc.aio.insecure_channel(address) if tls is None else peer_channel(address, tls.material, peers.AGENT) as channel:
        yield rpc.TelemetryStub(channel)


async def next_message(stream: AsyncIterator[tpb.TelemetryMessage]) -> tpb.TelemetryMessage:
    async with asyncio.timeout(LIMIT):
        return await anext(stream)
