"""The keeper as a real process: starts, exits, signals, orphans, fences, its own end."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from aerostat.v1 import agent_pb2 as pb
from aerostat_agent.keeper.logs import bound_log, open_log
from aerostat_agent.keeper.main import check, parse_settings
from aerostat_agent.keeper.sessions import living
from aerostat_agent.keeper_client import Exit, KeeperLink
from aerostat_agent.site import EngineSite
from aerostat_core import peers
from aerostat_core.errors import PermanentError, SettingError, TemporaryError
from aerostat_core.ids import Epoch
from aerostat_runtime.framing import encode
from aerostat_testing.certificates import Authority

pytestmark = pytest.mark.cpu

DEADLINE = 10.0


def is_alive(pid: int) -> bool:
    return any(pid == other for other, _, _ in living())


async def until(condition: Callable[[], bool], what: str) -> None:
    async with asyncio.timeout(DEADLINE):
        while not condition():  # noqa: ASYNC110 - other processes set no event here
            await asyncio.sleep(0.01)
    assert condition(), what


class Rig:
    """A keeper process in a folder of its own, and scripts for it to run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = folder / "keeper.sock"
        self.process: subprocess.Popen[bytes] | None = None

    def launch(self, *extra: str) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "aerostat_agent.keeper", "--socket", str(self.socket), "--grace", "1", *extra]
        with (self.folder / "keeper.log").open("ab") as log:
            self.process = subprocess.Popen(argv, stderr=log)
        return self.process

    @asynccontextmanager
    async def attached(self) -> AsyncIterator[KeeperLink]:
        link = await KeeperLink.attach(self.socket, deadline=DEADLINE)
        try:
            yield link
        finally:
            await link.close()

    async def start(self, link: KeeperLink, script: str, *, epoch: int = 1, note: bytes = b"", env: dict[str, str] | None = None) -> int:
        argv = ["/bin/sh", "-c", script]
        return await link.start(epoch=Epoch(epoch), argv=argv, env=env or {}, log_path=self.folder / f"{epoch}.log", note=note)

    def log(self, epoch: int = 1) -> str:
        return (self.folder / f"{epoch}.log").read_text()

    async def end(self) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.terminate()
        await asyncio.to_thread(self.process.wait, DEADLINE)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path)
    rig.launch()
    yield rig
    await rig.end()
    assert not rig.socket.exists()


async def next_exit(link: KeeperLink) -> Exit:
    return await asyncio.wait_for(link.exits.get(), DEADLINE)


async def test_a_process_runs_in_its_own_session_with_the_given_environment_and_its_exit_code_is_reported(rig: Rig) -> None:
    async with rig.attached() as link:
        pid = await rig.start(link, 'read line; echo "$WORD:$line"; ps -o sid= -p $$ | tr -d " "; exit 3', env={"WORD": "hello"})
        assert await next_exit(link) == Exit(epoch=Epoch(1), exit_code=3)
        assert rig.log().splitlines() == ["hello:", str(pid)]  # nothing to read on stdin; session id = pid
        (process,) = await link.list()
        assert (process.exit_code, process.pid) == (3, pid)
        await link.forget(Epoch(1))
        assert await link.list() == ()


async def test_a_process_inherits_no_descriptor_but_its_log(rig: Rig) -> None:
    async with rig.attached() as link:
        await rig.start(link, "ls /proc/self/fd | wc -l")
        await next_exit(link)
        assert rig.log().split() == ["4"]  # stdin, stdout, stderr, and the folder that ls reads


async def test_a_program_that_does_not_exist_is_a_clear_refusal(rig: Rig) -> None:
    async with rig.attached() as link:
        with pytest.raises(PermanentError, match=r"cannot start /no/such/program: .*No such file"):
            await link.start(epoch=Epoch(1), argv=["/no/such/program"], env={}, log_path=rig.folder / "log", note=b"")
        assert await link.list() == ()


@pytest.mark.parametrize("argv", [[], ["sh", "-c", "nul\0byte"]])
async def test_a_malformed_command_is_refused(rig: Rig, argv: list[str]) -> None:
    async with rig.attached() as link:
        with pytest.raises(PermanentError):
            await link.start(epoch=Epoch(1), argv=argv, env={}, log_path=rig.folder / "log", note=b"")


async def test_an_epoch_names_one_process(rig: Rig) -> None:
    async with rig.attached() as link:
        await rig.start(link, "sleep 60")
        with pytest.raises(PermanentError, match="epoch 1 belongs to another process"):
            await rig.start(link, "true")
        with pytest.raises(PermanentError, match="still runs"):
            await link.forget(Epoch(1))
        with pytest.raises(PermanentError, match="no process has epoch 2"):
            await link.signal(Epoch(2), signal.SIGTERM)
        with pytest.raises(PermanentError, match="no signal number"):
            await link._ask(pb.KeeperRequest(signal=pb.Signal(epoch=1, signal=999)))


async def test_a_signal_reaches_the_whole_session_process_groups_of_its_own_included(rig: Rig) -> None:
    async with rig.attached() as link:
        script = "import subprocess; p = subprocess.Popen(['sleep', '61'], process_group=0); print(p.pid, flush=True); p.wait()"
        await link.start(epoch=Epoch(1), argv=[sys.executable, "-c", script], env={}, log_path=rig.folder / "1.log", note=b"")
        await until(lambda: rig.log().endswith("\n"), "the script runs")
        await link.signal(Epoch(1), signal.SIGTERM)
        assert await next_exit(link) == Exit(epoch=Epoch(1), exit_code=-signal.SIGTERM)
        assert not is_alive(int(rig.log()))


async def test_what_a_dead_first_process_leaves_is_killed_before_its_exit_is_reported(rig: Rig) -> None:
    async with rig.attached() as link:
        await rig.start(link, "sleep 61 & echo $!; exit 7")
        assert await next_exit(link) == Exit(epoch=Epoch(1), exit_code=7)
        assert not is_alive(int(rig.log()))


async def test_orphans_are_reaped(rig: Rig) -> None:
    async with rig.attached() as link:
        await rig.start(link, "(setsid sh -c 'echo $$; sleep 0.3' &) ; sleep 0.1")
        await next_exit(link)
        await until(lambda: rig.log().strip() != "" and not Path("/proc", rig.log().strip()).exists(), "no zombie stays")


async def test_engines_live_on_when_their_agent_is_killed_and_the_next_one_finds_them_with_their_notes(rig: Rig) -> None:
    script = (
        "import asyncio, os, sys\n"
        "from pathlib import Path\n"
        "from aerostat_agent.keeper_client import KeeperLink\n"
        "async def main():\n"
        "    link = await KeeperLink.attach(Path(sys.argv[1]), deadline=10)\n"
        "    argv = ['sleep', '60']\n"
        "    pid = await link.start(epoch=5, argv=argv, env={}, log_path=Path(sys.argv[1]).with_name('5.log'), note=b'mine')\n"
        "    print(pid, link.agent_epoch, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )
    agent = await asyncio.create_subprocess_exec(sys.executable, "-c", script, str(rig.socket), stdout=asyncio.subprocess.PIPE)
    out, _ = await asyncio.wait_for(agent.communicate(), DEADLINE)
    pid, old_epoch = map(int, out.split())
    assert agent.returncode == -signal.SIGKILL
    async with rig.attached() as link:
        assert link.agent_epoch > old_epoch
        (process,) = await link.list()
        assert (process.pid, process.note, process.exit_code) == (pid, b"mine", None)
        assert is_alive(pid)


async def test_a_new_agent_fences_the_older_one(rig: Rig) -> None:
    async with rig.attached() as old, rig.attached() as new:
        assert new.agent_epoch > old.agent_epoch
        assert new.keeper_epoch == old.keeper_epoch
        with pytest.raises(PermanentError) as refusal:
            await rig.start(old, "true")
        assert refusal.value.reason == "Fenced"
        await rig.start(new, "true")
        await next_exit(new)
        assert old.exits.empty()


async def test_an_epoch_alone_does_not_make_an_agent(rig: Rig) -> None:
    async with rig.attached() as commander, rig.attached() as other:
        commander.agent_epoch = other.agent_epoch
        with pytest.raises(PermanentError):
            await commander.list()


async def test_garbage_closes_that_connection_only(rig: Rig) -> None:
    async with rig.attached() as link:
        for garbage in (b"\xff\xff\xff\xff", encode(b"\xff\xff no protobuf")):
            with socket.socket(socket.AF_UNIX) as peer:
                peer.settimeout(DEADLINE)
                await asyncio.to_thread(peer.connect, str(rig.socket))
                peer.sendall(garbage)
                assert await asyncio.to_thread(peer.recv, 1) == b""
        assert await link.list() == ()


async def test_a_request_without_a_known_body_is_refused(rig: Rig) -> None:
    async with rig.attached() as link:
        with pytest.raises(PermanentError, match="versions differ"):
            await link._ask(pb.KeeperRequest())


async def test_describe_names_the_cpu_device_and_the_memory_of_the_host(rig: Rig) -> None:
    async with rig.attached() as link:
        described = await link.describe()
        assert [d.kind for d in described.devices] == ["CPU"]
        assert described.host_memory_bytes > 2**28


async def test_its_end_ends_its_processes_the_polite_and_the_stubborn_one(rig: Rig) -> None:
    async with rig.attached() as link:
        polite = await rig.start(link, "sleep 60", epoch=1)
        stubborn = await rig.start(link, "trap '' TERM; echo ready; while true; do sleep 0.1; done", epoch=2)
        await until(lambda: "ready" in rig.log(2), "the trap is set")
        assert rig.process is not None
        began = time.monotonic()
        rig.process.terminate()
        assert await asyncio.to_thread(rig.process.wait, DEADLINE) == 0
        assert 1.0 <= time.monotonic() - began < 5.0  # the grace, for the stubborn one
        assert not is_alive(polite)
        assert not is_alive(stubborn)
        assert not rig.socket.exists()
        with pytest.raises(TemporaryError):
            await link.list()


async def test_a_killed_keeper_takes_its_processes_along_and_the_next_one_replaces_its_socket(rig: Rig) -> None:
    async with rig.attached() as link:
        pid = await rig.start(link, "exec sleep 60")
        assert rig.process is not None
        rig.process.kill()
        await asyncio.to_thread(rig.process.wait, DEADLINE)
        await until(lambda: not is_alive(pid), "the process died with its keeper")
        assert rig.socket.exists()  # stale
        rig.launch()
        async with rig.attached() as again:
            assert again.keeper_epoch > link.keeper_epoch
            assert again.agent_epoch > link.agent_epoch
            assert await again.list() == ()


@pytest.mark.parametrize("host", ["127.0.0.2", "::1"])
async def test_engines_listen_where_the_keeper_is_told_on_ports_that_are_free_there(tmp_path: Path, host: str) -> None:
    rig = Rig(tmp_path)
    rig.launch("--engine-host", host)
    async with rig.attached() as link:
        assert link.site == EngineSite(host=host)
        ports = [await link.free_port() for _ in range(3)]
        assert len(set(ports)) == 3
        for port in ports:
            socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    await rig.end()


def test_where_engines_are_to_serve_is_checked_at_start(tmp_path: Path) -> None:
    settings = parse_settings(["--socket", "s", "--engine-host", "[::1]"])
    assert settings.site == EngineSite(host="::1")
    folder = Authority().issue(tmp_path / "tls", peers.ENGINES)
    check(parse_settings(["--socket", "s", "--tls-dir", str(folder)]).site)
    for wrong, says in (
        (["--engine-host", "localhost"], "--engine-host must be an IP address"),
        (["--engine-host", "0.0.0.0"], "no address to call"),
        (["--engine-host", "::"], "no address to call"),
        (["--engine-host", "203.0.113.7"], "nothing can listen there"),
        (["--tls-dir", str(tmp_path)], r"--tls-dir .*: cannot read .*tls\.crt"),
    ):
        with pytest.raises(SettingError, match=says):
            check(parse_settings(["--socket", "s", *wrong]).site)


async def test_a_socket_in_use_is_a_fatal_setting(rig: Rig) -> None:
    async with rig.attached():
        pass
    argv = [sys.executable, "-m", "aerostat_agent.keeper", "--socket", str(rig.socket)]
    second = await asyncio.create_subprocess_exec(*argv, stderr=asyncio.subprocess.PIPE)
    _, err = await asyncio.wait_for(second.communicate(), DEADLINE)
    assert second.returncode == 2
    assert b"another process listens" in err


async def test_it_ends_with_the_parent_it_was_told_to_die_with(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    script = (
        "import subprocess, sys, os, time\n"
        "argv = [sys.executable, '-m', 'aerostat_agent.keeper', '--socket', sys.argv[1]]\n"
        "print(subprocess.Popen([*argv, '--die-with-parent', str(os.getpid())]).pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", script, str(rig.socket), stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    keeper = int(await asyncio.wait_for(parent.stdout.readline(), DEADLINE))
    async with rig.attached() as link:
        pid = await rig.start(link, "sleep 60")
        parent.kill()
        await parent.wait()
        await until(lambda: not is_alive(keeper) and not is_alive(pid) and not rig.socket.exists(), "keeper and process are gone")


async def test_a_memory_limit_bounds_what_a_process_may_allocate(rig: Rig) -> None:
    async with rig.attached() as link:
        argv = [sys.executable, "-c", "x = bytearray(512 << 20)"]
        await link.start(epoch=Epoch(1), argv=argv, env={}, log_path=rig.folder / "1.log", note=b"", memory_limit_bytes=256 << 20)
        assert (await next_exit(link)).exit_code == 1
        assert "MemoryError" in rig.log()


async def test_a_process_lives_while_any_of_its_threads_does(rig: Rig) -> None:
    script = (
        "import ctypes, platform, threading, time\n"
        "threading.Thread(target=time.sleep, args=(61,)).start()\n"
        "print('threads', flush=True)\n"
        "ctypes.CDLL(None).syscall({'x86_64': 60, 'aarch64': 93}[platform.machine()], 0)\n"  # exit of this thread alone
    )
    async with rig.attached() as link:
        pid = await link.start(epoch=Epoch(1), argv=[sys.executable, "-c", script], env={}, log_path=rig.folder / "1.log", note=b"")
        stat = Path("/proc", str(pid), "stat")
        await until(lambda: "threads" in rig.log() and "(python) Z" in stat.read_text(), "only a thread is left")
        assert is_alive(pid)
        await link.signal(Epoch(1), signal.SIGTERM)
        assert await next_exit(link) == Exit(epoch=Epoch(1), exit_code=-signal.SIGTERM)


def test_a_log_over_its_limit_is_cut_in_place_and_what_was_cut_off_is_kept_beside(tmp_path: Path) -> None:
    path = tmp_path / "log"
    fd = open_log(path)
    try:
        os.write(fd, b"x" * 100)
        assert not bound_log(path, limit_bytes=100)
        os.write(fd, b"y")
        assert bound_log(path, limit_bytes=100)
        os.write(fd, b"after")
    finally:
        os.close(fd)
    assert path.read_bytes() == b"after"
    assert (tmp_path / "log.1").read_bytes() == b"x" * 100 + b"y"


async def test_many_short_processes_leave_no_descriptor_behind(rig: Rig) -> None:
    async with rig.attached() as link:
        assert rig.process is not None
        fds = Path("/proc", str(rig.process.pid), "fd")
        before = len(os.listdir(fds))
        for epoch in range(1, 31):
            await rig.start(link, "exit 0", epoch=epoch)
        for _ in range(30):
            await next_exit(link)
        assert len(os.listdir(fds)) == before
