"""`python -m aerostat_testing.kubernetes.kubelet PODS.json PID`: the part of a kubelet that our processes notice.

It runs commands, each again when it ends, until SIGTERM; then it stops them, stage by stage, those of the lowest stage first.
"""

import asyncio
import json
import os
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Final

from aerostat_core.ids import Seconds
from aerostat_runtime.process import die_with_parent

_RESTART_AFTER: Final[Seconds] = 0.5


@dataclass(frozen=True, kw_only=True)
class Pod:
    name: str
    argv: tuple[str, ...]
    log: str
    grace: Seconds
    stage: int

    def opened_log(self) -> BinaryIO:
        return Path(self.log).open("ab")


def command(folder: Path, pods: list[Pod], parent_pid: int) -> list[str]:
    """What runs these pods until it is stopped or that parent ends."""
    path = folder / "pods.json"
    path.write_text(json.dumps([asdict(pod) for pod in pods]))
    return [sys.executable, "-m", "aerostat_testing.kubernetes.kubelet", str(path), str(parent_pid)]


class Container:
    """A pod's process, and the next one when it ends."""

    def __init__(self, pod: Pod) -> None:
        self.pod = pod
        self._process: asyncio.subprocess.Process | None = None
        self._is_stopping = False
        self._starting = asyncio.Lock()  # held while there is a process that `_process` is not yet

    async def run(self) -> None:
        """Until `stop`."""
        while not self._is_stopping:
            async with self._starting:
                self._process = await self._start()
            code = await self._process.wait()
            if not self._is_stopping:
                how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
                sys.stdout.write(f"{self.pod.name} ended {how}\n")
                sys.stdout.flush()
                await asyncio.sleep(_RESTART_AFTER)

    async def _start(self) -> asyncio.subprocess.Process:
        with self.pod.opened_log() as log:
            return await asyncio.create_subprocess_exec(
                *self.pod.argv, f"--die-with-parent={os.getpid()}", stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log
            )

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL after its grace."""
        self._is_stopping = True
        async with self._starting:
            pass
        if self._process is None or self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            async with asyncio.timeout(self.pod.grace):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()


async def run(pods: list[Pod]) -> None:
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    containers = [Container(pod) for pod in pods]
    running = [asyncio.create_task(container.run()) for container in containers]
    await stop.wait()
    for stage in sorted({pod.stage for pod in pods}):
        await asyncio.gather(*(container.stop() for container in containers if container.pod.stage == stage))
    await asyncio.gather(*running)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    asyncio.run(run([Pod(**pod) for pod in json.loads(Path(sys.argv[1]).read_text())]))
