"""What surrounds a node agent, in memory and in virtual time: a keeper, engines that report, a prober, a cluster."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from aerostat_agent.agent import needs_of
from aerostat_agent.engine_events import Boundary, Handle, Hello, Identity
from aerostat_agent.epochs import EpochSource
from aerostat_agent.keeper_client import Exit, KeeperRefusalError, KeptProcess
from aerostat_agent.model_cache import NodeCache
from aerostat_agent.node import Node
from aerostat_agent.notes import EngineNote
from aerostat_agent.policy.memory import ContainerMemory
from aerostat_agent.policy.settlements import WakeAsked
from aerostat_agent.policy.tracks import EngineKey, Failure
from aerostat_agent.reports import EngineReports
from aerostat_agent.settings import Settings
from aerostat_agent.site import EngineSite
from aerostat_agent.supervisor import Supervisor
from aerostat_agent.weights import NOTE, Weights
from aerostat_core.addresses import Address
from aerostat_core.errors import PermanentError, TemporaryError
from aerostat_core.ids import Bytes, Epoch, InstanceName, ModelName, NamespacedName, NodeName, PoolName, Seconds, SessionKey
from aerostat_core.resources import Resource
from aerostat_core.specs import DeviceKind, InstanceModel, InstanceSpec, ResidencyFloor, Sharing, SloTargets
from aerostat_runtime.cluster.port import Kind
from aerostat_testing.memory_cluster import MemoryCluster

BORN: Final[Seconds] = 1_800_000_000.0  # wall clock of a virtual loop's second 0
INSTANCE: Final = NamespacedName("default", "cpu-0")
MODEL_FACTS: Final = {
    "path": "/models/m",
    "dtype": "bfloat16",
    "weights_bytes": 10 << 20,
    "kv_bytes_per_token": {"bfloat16": 1024},
    "max_context_tokens": 4096,
    "probe": {"prompt_ids": [1, 2, 3], "expected_ids": [4, 5]},
}


class LoopClock:
    """The loop's own time, which looptime makes virtual."""

    def monotonic(self) -> Seconds:
        return asyncio.get_running_loop().time()

    def wall(self) -> Seconds:
        return BORN + self.monotonic()


class FakeKeeper:
    """A `Keeper` whose processes do nothing. SIGTERM ends one after 0.1 s unless it is stubborn, SIGKILL at once."""

    def __init__(self) -> None:
        self.processes: dict[Epoch, KeptProcess] = {}
        self.exits: asyncio.Queue[Exit] = asyncio.Queue()
        self.signals: list[tuple[Seconds, Epoch, signal.Signals]] = []
        self.environments: dict[Epoch, Mapping[str, str]] = {}
        self.commands: dict[Epoch, tuple[str, ...]] = {}
        self.stubborn: set[Epoch] = set()
        self.start_fails: PermanentError | TemporaryError | None = None
        self.site = EngineSite()
        self.next_port = 40000
        self.has_ports = True
        self.on_start: Callable[[KeptProcess], None] = lambda _: None

    async def free_port(self) -> int:
        if not self.has_ports:
            raise KeeperRefusalError("NoFreePort", "no port is to be had")
        self.next_port += 1
        return self.next_port

    async def start(
        self, *, epoch: Epoch, argv: Sequence[str], env: Mapping[str, str], log_path: Path, note: bytes, memory_limit_bytes: Bytes = 0
    ) -> int:
        if self.start_fails is not None:
            raise self.start_fails
        process = KeptProcess(
            epoch=epoch, pid=1000 + len(self.commands), exit_code=None, note=note, log_path=log_path, started_at=LoopClock().wall()
        )
        self.processes[epoch] = process
        self.environments[epoch] = env
        self.commands[epoch] = tuple(argv)
        self.on_start(process)
        return process.pid

    async def signal(self, epoch: Epoch, signum: signal.Signals) -> None:
        loop = asyncio.get_running_loop()
        self.signals.append((loop.time(), epoch, signum))
        if signum is signal.SIGKILL:
            self.end(epoch, -signal.SIGKILL)
        elif epoch not in self.stubborn:
            loop.call_later(0.1, self.end, epoch, 0)

    async def forget(self, epoch: Epoch) -> None:
        del self.processes[epoch]

    async def list(self) -> tuple[KeptProcess, ...]:
        return tuple(self.processes.values())

    def end(self, epoch: Epoch, exit_code: int, says: str = "") -> None:
        """The process ends by itself, having said its last words."""
        process = self.processes.get(epoch)
        if process is not None and process.exit_code is None:
            if says:
                with process.log_path.open("a") as log:
                    log.write(says)
            self.processes[epoch] = replace(process, exit_code=exit_code)
            self.exits.put_nowait(Exit(epoch=epoch, exit_code=exit_code))

    @property
    def engines(self) -> dict[EngineKey, KeptProcess]:
        """Running ones."""
        running = [p for p in self.processes.values() if p.exit_code is None and p.note != NOTE]
        return {EngineNote.from_bytes(p.note).key: p for p in running}


class FakeProber:
    def __init__(self) -> None:
        self.failure: Failure | None = None
        self.probed: list[int] = []  # ports
        self.seconds: Seconds = 0.0

    async def probe(self, note: EngineNote) -> Failure | None:
        await asyncio.sleep(self.seconds)
        self.probed.append(note.port)
        return self.failure


@dataclass(slots=True)
class FakeEngines:
    """Engines as their agent hears them; `answers` is what they say when they are asked for a boundary."""

    node: Node
    reports: EngineReports
    answers: dict[EngineKey, Boundary]

    async def ask_boundary(self, key: EngineKey) -> None:
        engine = self.node.engines.get(key)
        if (answer := self.answers.get(key)) is not None and engine is not None:
            self.reports.on_event(Identity(key=key, epoch=engine.epoch, rank=0), answer)


class RecordingCluster(MemoryCluster):
    """Keeps when a status was to be written, too."""

    def __init__(self, *resources: Resource) -> None:
        super().__init__(*resources, clock=LoopClock())
        self.written_at: list[Seconds] = []

    async def patch_status(self, kind: Kind, name: NamespacedName, status: Resource) -> bool:
        self.written_at.append(asyncio.get_running_loop().time())
        return await super().patch_status(kind, name, status)


class AgentRig:
    """The deciding half of an agent over fakes. `running` runs it; time is the loop's."""

    def __init__(self, run_dir: Path, keeper: FakeKeeper | None = None, *, cache_limit: Bytes | None = None) -> None:
        self.keeper = keeper or FakeKeeper()
        self.clock = LoopClock()
        self.cluster = MemoryCluster(clock=self.clock)
        self.prober = FakeProber()
        self.settings = settings(run_dir)
        self.settings.log_dir.mkdir(exist_ok=True)
        self.node = Node(NodeName("n0"), Epoch(1), self.clock, memory=ContainerMemory(limit=1 << 40, shared=0))
        self.reports = EngineReports(self.node, self.prober)
        self.engines = FakeEngines(self.node, self.reports, {})
        epochs = EpochSource(self.clock, max(self.keeper.processes, default=Epoch(0)))
        self.cache = NodeCache(
            self.settings.model_cache,
            cache_limit,
            needs=lambda: needs_of(self.node, self.weights),
            evicts=lambda folder: self.weights.forget(folder),
        )
        self.weights = Weights(
            self.keeper,
            self.clock,
            command=self.settings.preparer,
            cache=self.cache,
            log_dir=self.settings.log_dir,
            new_epoch=epochs,
            secrets=self.cluster,
            changed=self.node.touch,
        )
        self.supervisor = Supervisor(self.settings, self.node, self.keeper, weights=self.weights, links=self.engines, new_epoch=epochs)
        self.facts: dict[str, Any] = dict(MODEL_FACTS)
        self.n_prepared = 0
        self.keeper.on_start = self._on_start

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await self.supervisor.adopt(await self.keeper.list())
        tasks = [asyncio.create_task(self.supervisor.run()), asyncio.create_task(self.supervisor.follow_exits(self.keeper.exits))]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            await self.reports.close()
            await self.weights.close()
            for outcome in outcomes:
                if not isinstance(outcome, asyncio.CancelledError) and outcome is not None:
                    raise outcome

    async def open(self, name: str) -> KeptProcess:
        """Until the engine is started; then it says hello and passes its probe."""
        process = await self.started(name)
        assert self.hello(name) == ""
        await settle()
        return process

    async def started(self, name: str, *, after: Epoch | None = None, limit: Seconds = 60.0) -> KeptProcess:
        async with asyncio.timeout(limit):
            while (process := self.keeper.engines.get(key(name))) is None or process.epoch == after:  # noqa: ASYNC110 - virtual time
                await asyncio.sleep(0.05)
        await settle()
        return process

    def hello(self, name: str, *, epoch: Epoch | None = None, rank: int = 0, sessions: tuple[tuple[SessionKey, Handle], ...] = ()) -> str:
        """Why it is refused, or nothing."""
        return self.reports.on_hello(self.identity(name, epoch=epoch, rank=rank), hello(sessions=sessions))

    def identity(self, name: str, *, epoch: Epoch | None = None, rank: int = 0) -> Identity:
        return Identity(key=key(name), epoch=self.keeper.engines[key(name)].epoch if epoch is None else epoch, rank=rank)

    def _on_start(self, process: KeptProcess) -> None:
        if process.note == NOTE:
            self.n_prepared += 1
            process.log_path.write_text(json.dumps({"model": self.facts} if "error" not in self.facts else self.facts) + "\n")
            asyncio.get_running_loop().call_later(1.0, self.keeper.end, process.epoch, 2 if "error" in self.facts else 0)


async def settle() -> None:
    """Let everything be decided and done that is due."""
    await asyncio.sleep(0.05)


def key(name: str) -> EngineKey:
    return EngineKey(INSTANCE, ModelName(name))


def asked(model: NamespacedName, place: str = INSTANCE.name, *ruled_out: str, is_settled: bool = False) -> WakeAsked:
    """A router's wake."""
    ruled = frozenset(map(InstanceName, ruled_out))
    return WakeAsked(model=model, proposed=InstanceName(place), is_settled=is_settled, ruled_out=ruled)


def hello(*, tensor_parallel: int = 1, sessions: tuple[tuple[SessionKey, Handle], ...] = ()) -> Hello:
    return Hello(
        pid=1,
        tensor_parallel=tensor_parallel,
        versions="fake",
        page_size_tokens=16,
        kv_capacity_tokens=1024,
        kv_bytes_per_token=1024,
        weights_bytes=10 << 20,
        max_context_tokens=4096,
        max_running=4,
        sessions=sessions,
    )


def settings(run_dir: Path) -> Settings:
    return Settings(
        node=NodeName("n0"),
        cluster="fake",
        run_dir=run_dir,
        model_cache=run_dir / "models",
        model_cache_limit=None,
        telemetry_listen=Address("127.0.0.1", 0),
        admin_listen=Address("127.0.0.1", 0),
        parent_pid=None,
        start_limit=60.0,
        launcher=("launch",),
        preparer=("prepare",),
    )


def instance_model(
    name: str, *, resident: bool = True, uri: str = "file:///m", secret: str | None = None, kv: Bytes = 1 << 20, generation: int = 1
) -> InstanceModel:
    return InstanceModel(
        name=ModelName(name),
        generation=generation,
        source_uri=uri,
        secret=secret,
        served_name=name,
        engine_args={},
        context_tokens=None,
        trust_remote_code=False,
        resident=resident,
        residency_floor=ResidencyFloor.PARKED,
        weights_bytes=None,
        kv_floor_bytes=kv,
        kv_ceiling_bytes=kv,
        slo=SloTargets(ttft=1.0, tpot=0.1, hold_budget=10.0),
    )


def instance_spec(*models: InstanceModel, memory: Bytes = 100 << 20, draining: bool = False) -> InstanceSpec:
    return InstanceSpec(
        name=INSTANCE,
        pool=PoolName("cpu"),
        node=NodeName("n0"),
        device_kind=DeviceKind.CPU,
        devices=(0,),
        device_bytes=memory,
        reserve_bytes=1 << 20,
        sharing=Sharing.CONCURRENT,
        models=models,
        host_pool_bytes=0,
        idle_time=300.0,
        lease_ttl=1.0,
        memory_price=0.0,
        draining=draining,
    )


def instance_resource(uri: str, *names: str, node: str = "n0", memory: str = "1Gi", resident: bool = True, kv: str = "1Mi") -> Resource:
    """As the operator writes it."""
    models = [
        {
            "name": name,
            "generation": 1,
            "source": {"uri": uri},
            "servedName": name,
            "resident": resident,
            "residencyFloor": "Parked",
            "kvFloor": kv,
            "kvCeiling": kv,
            "slo": {"ttft": "1s", "tpot": "100ms", "holdBudget": "10s"},
        }
        for name in names
    ]
    return {
        "apiVersion": "aerostat.dev/v1alpha1",
        "kind": "Instance",
        "metadata": {"name": INSTANCE.name, "namespace": INSTANCE.namespace},
        "spec": {
            "pool": "cpu",
            "node": node,
            "devices": {"kind": "CPU", "indices": [0], "memory": memory, "reserve": "1Mi"},
            "sharing": "Concurrent",
            "models": models,
            "limits": {"hostPool": "1Gi", "idleTime": "300s"},
            "routing": {"leaseTTL": "1s", "memoryPricePerGi": "1s"},
        },
    }
