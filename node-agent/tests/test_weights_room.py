"""A preparer that needs room says how much and ends; it runs again with what it was granted, and others make way or it is told why not."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from aerostat_agent.keeper_client import KeptProcess
from aerostat_agent.launching import source_of
from aerostat_agent.weights import NOTE, RETRY_AFTER
from aerostat_core.ids import Bytes
from aerostat_core.specs import EngineState
from aerostat_runtime.model_cache import ModelCache
from aerostat_testing.agent_fakes import INSTANCE, MODEL_FACTS, AgentRig, instance_model, instance_spec, key
from aerostat_testing.waiting import eventually

pytestmark = pytest.mark.cpu

MI = 1 << 20
REAL_LIMIT = 20.0


class Preparers:
    """They ask for what the model takes, as often as they have less, and then put it into the cache."""

    def __init__(self, rig: AgentRig, folder: Path) -> None:
        self.files = ModelCache(folder)
        self.takes: dict[str, Bytes] = {}
        self.rooms: list[str | None] = []
        self._rig = rig
        rig.keeper.on_start = self._on_start

    def put(self, uri: str, used: float) -> None:
        name = uri.rpartition("/")[2]
        self.files.remember(uri, name)
        self.files.model(name).mkdir(exist_ok=True)
        (self.files.model(name) / "weights").write_bytes(b"w" * self.takes.get(uri, MI))
        os.utime(self.files.model(name), (used, used))

    def _on_start(self, process: KeptProcess) -> None:
        if process.note != NOTE:
            return
        argv = self._rig.keeper.commands[process.epoch]
        uri = argv[argv.index("--uri") + 1]
        room = argv[argv.index("--room") + 1] if "--room" in argv else None
        self.rooms.append(room)
        name, need = uri.rpartition("/")[2], self.takes.get(uri, 0)
        if not self.files.model(name).exists() and room is not None and int(room) < need:
            error = {"reason": "CacheFull", "message": "as a person reads it", "entry": name, "needs_bytes": need}
            process.log_path.write_text(json.dumps({"error": error}))
        else:
            self.put(uri, 2_000_000_000.0)
            process.log_path.write_text(json.dumps({"model": MODEL_FACTS | {"path": str(self.files.model(name))}}))
        asyncio.get_running_loop().call_soon(self._rig.keeper.end, process.epoch, 0)


@pytest.fixture
def rig(tmp_path: Path) -> AgentRig:
    return AgentRig(tmp_path, cache_limit=3 * MI + (64 << 10))


async def test_what_nobody_names_makes_way_for_what_is_named(rig: AgentRig) -> None:
    preparers = Preparers(rig, rig.settings.model_cache)
    preparers.put("hf://org/named", 1.0)
    preparers.put("hf://org/left", 2.0)
    preparers.takes["hf://org/new"] = 2 * MI
    rig.node.declare(instance_spec(instance_model("n", uri="hf://org/named", resident=False), instance_model("a", uri="hf://org/new")))
    async with rig.running():
        await rig.started("a", limit=REAL_LIMIT)
    assert preparers.rooms == ["0", str(2 * MI)]
    assert [each.key for each in preparers.files.kept()] == ["named", "new"], "not open, but an Instance names it"


async def test_what_cannot_fit_is_told_with_its_bytes_and_takes_nothing_away(rig: AgentRig) -> None:
    preparers = Preparers(rig, rig.settings.model_cache)
    preparers.put("hf://org/left", 2.0)
    preparers.takes["hf://org/new"] = 4 * MI
    rig.node.declare(instance_spec(instance_model("a", uri="hf://org/new")))
    async with rig.running():
        await eventually(lambda: key("a") in rig.node.verdicts and rig.node.verdicts[key("a")].state is EngineState.FAILED, "it is told")
    verdict = rig.node.verdicts[key("a")]
    assert verdict.reason == "CacheFull"
    assert "4Mi more are needed in the model cache, 3.062Mi can be had" in verdict.message
    assert [each.key for each in preparers.files.kept()] == ["left"]
    preparation = rig.weights.of(source_of(INSTANCE, instance_model("a", uri="hf://org/new")))
    assert preparation is not None
    assert preparation.retry_at <= rig.clock.monotonic() + RETRY_AFTER, "it is tried again"


async def test_a_model_that_was_evicted_is_prepared_anew_when_it_is_wanted_again(rig: AgentRig) -> None:
    preparers = Preparers(rig, rig.settings.model_cache)
    preparers.takes |= {"hf://org/one": 2 * MI, "hf://org/two": 2 * MI}
    async with rig.running():
        for name, runs in (("one", 2), ("two", 4), ("one", 6)):
            rig.node.declare(instance_spec(instance_model(name, uri=f"hf://org/{name}")))
            await rig.started(name, limit=REAL_LIMIT)
            assert len(preparers.rooms) == runs
            assert [each.key for each in preparers.files.kept()] == [name]
            rig.node.declare(instance_spec())
            await eventually(lambda: not rig.keeper.engines, "its engine ended: until then its weights stay")


async def test_without_a_limit_preparers_take_what_the_disk_has(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    preparers = Preparers(rig, rig.settings.model_cache)
    rig.node.declare(instance_spec(instance_model("a", uri="hf://org/new")))
    async with rig.running():
        await rig.started("a", limit=REAL_LIMIT)
    assert preparers.rooms == [None]
