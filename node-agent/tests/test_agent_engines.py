"""Which engines to start and to end: examples, then a world of random faults in which the invariants must hold."""

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aerostat_agent.policy.engines import (
    DRAIN_GRACE,
    KILL_AFTER,
    SETTLE,
    Action,
    Drain,
    End,
    Kill,
    Plan,
    Prepare,
    Prepared,
    Start,
    fingerprint,
    plan,
    wanted_engines,
)
from aerostat_agent.policy.memory import Footprint
from aerostat_agent.policy.tracks import EngineKey, Failure, Phase, Track
from aerostat_core.ids import Bytes, Epoch, ModelName, NamespacedName, NodeName, PoolName, Seconds
from aerostat_core.specs import DeviceKind, EngineState, InstanceModel, InstanceSpec, ResidencyFloor, Sharing, SloTargets

pytestmark = pytest.mark.cpu

INSTANCE = NamespacedName("default", "cpu-0")
CAPACITY: Bytes = 100
CRASH = Failure(reason="EngineExited", message="exit code 1")


def model(name: str, *, resident: bool = True, kv: Bytes = 10, uri: str = "file:///m") -> InstanceModel:
    return InstanceModel(
        name=ModelName(name),
        generation=1,
        source_uri=uri,
        secret=None,
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


def instance(*models: InstanceModel, draining: bool = False) -> InstanceSpec:
    return InstanceSpec(
        name=INSTANCE,
        pool=PoolName("cpu"),
        node=NodeName("n0"),
        device_kind=DeviceKind.CPU,
        devices=(0,),
        device_bytes=CAPACITY,
        reserve_bytes=5,
        sharing=Sharing.CONCURRENT,
        models=models,
        host_pool_bytes=0,
        idle_time=300.0,
        lease_ttl=1.0,
        memory_price=0.0,
        draining=draining,
    )


def key(name: str) -> EngineKey:
    return EngineKey(INSTANCE, ModelName(name))


def held(total: Bytes) -> Footprint:
    return Footprint(weights=total - 15, reserve=5, kv=10)


def decide(
    now: Seconds, spec: InstanceSpec, *tracks: Track, woken: tuple[str, ...] = (), prepared: dict[str, Prepared] | None = None
) -> Plan:
    wanted = wanted_engines(spec, frozenset(map(ModelName, woken)))
    ready = {w.key: Prepared(footprint=held(40)) for w in wanted} if prepared is None else {key(n): p for n, p in prepared.items()}
    return plan(now, wanted, {t.key: t for t in tracks}, ready, {spec.name: CAPACITY})


def running(name: str, spec: InstanceSpec, *, total: Bytes = 40, opened: bool = True) -> Track:
    declared = next(m for m in spec.models if m.name == name)
    track = Track(key=key(name)).started(
        epoch=Epoch(1), fingerprint=fingerprint(spec, declared), footprint=held(total), now=0.0, limit=60.0
    )
    return track.opened(1.0) if opened else track


def test_weights_are_prepared_before_an_engine_starts() -> None:
    spec = instance(model("a"))
    assert decide(0.0, spec, prepared={}).actions == (Prepare(key("a")),)
    under_way = decide(0.0, spec, prepared={"a": Prepared(progress="download 1Mi of 2Mi")})
    assert under_way.actions == ()
    assert under_way.verdicts[key("a")].message == "download 1Mi of 2Mi"
    assert decide(0.0, spec).actions == (Start(key("a")),)


def test_a_source_that_cannot_be_prepared_is_failed_with_its_own_reason() -> None:
    failure = Failure(reason="SourceNotFound", message="/nowhere does not exist")
    verdict = decide(0.0, instance(model("a")), prepared={"a": Prepared(failure=failure)}).verdicts[key("a")]
    assert (verdict.state, verdict.reason, verdict.message) == (EngineState.FAILED, "SourceNotFound", "/nowhere does not exist")


def test_a_model_that_is_not_resident_stays_absent_until_it_is_woken() -> None:
    spec = instance(model("a", resident=False))
    assert decide(0.0, spec).verdicts[key("a")].reason == "NotResident"
    assert decide(0.0, spec, woken=("a",)).actions == (Start(key("a")),)


def test_what_does_not_fit_is_refused_with_bytes_and_resident_models_come_first() -> None:
    spec = instance(model("w", resident=False), model("a"), model("b"))
    decided = decide(0.0, spec, woken=("w",))
    assert decided.actions == (Start(key("a")), Start(key("b")))
    refused = decided.verdicts[key("w")]
    assert (refused.state, refused.reason) == (EngineState.ABSENT, "InsufficientMemory")
    assert "(40 bytes" not in refused.message
    assert "there are 20 of 100" in refused.message


def test_a_changed_spec_drains_the_old_engine_and_starts_the_new_one_after_its_end() -> None:
    old = instance(model("a"))
    new = instance(model("a", uri="file:///other"))
    track = running("a", old)
    assert decide(5.0, new, track).actions == (Drain(key("a")),)
    draining = track.draining(5.0)
    assert decide(5.0 + SETTLE, new, draining).actions == ()
    assert decide(5.0 + SETTLE, new, draining.seen_idle()).actions == (End(key("a"), None),)
    assert decide(5.0 + DRAIN_GRACE, new, draining).actions == (End(key("a"), None),)
    assert decide(9.0, new, draining.ending(6.0).exited(9.0, CRASH)).actions == (Start(key("a")),)


def test_an_engine_serves_on_until_the_one_that_is_declared_in_its_place_can_start() -> None:
    old, new = instance(model("a")), instance(model("a", uri="file:///other"))
    track = running("a", old)

    def serves_on(prepared: dict[str, Prepared]) -> tuple[tuple[Action, ...], str, str]:
        decided = decide(5.0, new, track, prepared=prepared)
        verdict = decided.verdicts[key("a")]
        assert verdict.state is EngineState.OPEN
        return decided.actions, verdict.reason, verdict.message

    assert serves_on({}) == ((Prepare(key("a")),), "PreparingWeights", "")
    assert serves_on({"a": Prepared(progress="download 1Mi of 2Mi")}) == ((), "PreparingWeights", "download 1Mi of 2Mi")
    failure = Failure(reason="SourceNotFound", message="/other does not exist")
    failed = "/other does not exist; what was declared before serves on"
    assert serves_on({"a": Prepared(failure=failure)}) == ((), "SourceNotFound", failed)
    actions, reason, message = serves_on({"a": Prepared(footprint=held(CAPACITY + 1))})
    assert (actions, reason) == ((), "InsufficientMemory")
    assert f"there are {CAPACITY}" in message, "its own memory is there for the one in its place"
    assert decide(5.0, new, track, prepared={"a": Prepared(footprint=held(CAPACITY))}).actions == (Drain(key("a")),)


def test_an_adopted_engine_of_an_earlier_declaration_is_judged_once_it_is_open() -> None:
    """An agent that comes back knows nothing of what is prepared: a broken source would take the model away."""
    new, track = instance(model("a", uri="file:///other")), running("a", instance(model("a")), opened=False)
    adopted = replace(track, may_serve=True)
    assert decide(5.0, new, adopted, prepared={}).actions == ()
    assert decide(6.0, new, adopted.opened(5.5), prepared={}).actions == (Prepare(key("a")),)
    (late,) = decide(60.0, new, adopted, prepared={}).actions
    assert isinstance(late, End), "and is not waited for longer than any other"


def test_two_engines_do_not_leave_for_the_same_bytes() -> None:
    old = instance(model("a"), model("b"))
    new = instance(model("a", uri="file:///other"), model("b", uri="file:///other"))
    tracks = running("a", old), running("b", old)
    ready = {name: Prepared(footprint=held(55)) for name in "ab"}
    decided = decide(5.0, new, *tracks, prepared=ready)
    assert decided.actions == (Drain(key("a")),)
    assert decided.verdicts[key("b")].reason == "InsufficientMemory"
    assert decided.verdicts[key("b")].state is EngineState.OPEN
    later = decide(6.0, new, tracks[1], tracks[0].draining(5.0), prepared=ready)
    assert later.actions == ()
    assert later.verdicts[key("b")].state is EngineState.OPEN
    ended = decide(7.0, new, tracks[1], prepared=ready)
    assert ended.actions == (Start(key("a")),)
    tried = Track(key=key("a")).not_started(7.0, fingerprint(new, new.models[0]), CRASH)
    crashed = decide(7.0, new, tracks[1], tried, prepared=ready)
    assert crashed.actions == (), "the one that is started again keeps its promise"
    assert ended.verdicts[key("b")].state is crashed.verdicts[key("b")].state is EngineState.OPEN


def test_an_engine_that_serves_on_is_ended_for_its_own_fault_and_for_being_unwanted() -> None:
    new, track = instance(model("a", uri="file:///other")), running("a", instance(model("a")))
    assert decide(5.0, new, replace(track, fault=CRASH), prepared={}).actions == (End(key("a"), CRASH),)
    assert decide(5.0, instance(), track, prepared={}).actions == (Drain(key("a")),)
    asleep = instance(model("a", uri="file:///other", resident=False))
    assert decide(5.0, asleep, track, prepared={}).actions == (Drain(key("a")),)


def test_a_change_that_the_engine_does_not_see_leaves_it_running() -> None:
    spec = instance(model("a"))
    moved = instance(replace(spec.models[0], generation=7, slo=SloTargets(ttft=9.0, tpot=9.0, hold_budget=9.0), kv_ceiling_bytes=99))
    assert decide(5.0, moved, running("a", spec)).actions == ()


def test_an_engine_that_is_only_starting_is_ended_without_a_drain_and_an_adopted_one_is_drained() -> None:
    spec = instance(model("a"))
    starting = running("a", spec, opened=False)
    assert decide(5.0, instance(), starting).actions == (End(key("a"), None),)
    assert decide(5.0, instance(), replace(starting, may_serve=True)).actions == (Drain(key("a")),)


def test_a_draining_instance_wants_nothing() -> None:
    spec = instance(model("a"), draining=True)
    assert decide(5.0, spec, running("a", spec)).actions == (Drain(key("a")),)


def test_a_start_that_takes_too_long_and_an_end_that_does_not_come() -> None:
    spec = instance(model("a"))
    starting = running("a", spec, opened=False)
    (ended,) = decide(60.0, spec, starting).actions
    assert isinstance(ended, End)
    assert ended.failure is not None
    assert ended.failure.reason == "StartTimedOut"
    ending = starting.ending(60.0, ended.failure)
    assert decide(60.0 + KILL_AFTER, spec, ending).actions == (Kill(key("a")),)


def test_the_reason_of_a_failure_is_told_while_it_waits_and_after_the_last_try() -> None:
    spec = instance(model("a"))
    track = running("a", spec).exited(2.0, CRASH)
    waiting = decide(2.5, spec, track)
    assert waiting.actions == ()
    assert (waiting.verdicts[key("a")].state, waiting.verdicts[key("a")].reason) == (EngineState.STARTING, "EngineExited")
    assert decide(3.0, spec, track).actions == (Start(key("a")),)
    dead = running("a", spec).exited(2.0, replace(CRASH, is_permanent=True))
    failed = decide(1e9, spec, dead)
    assert (failed.actions, failed.verdicts[key("a")].state) == ((), EngineState.FAILED)
    assert failed.verdicts[key("a")].message == "exit code 1"


class World(RuleBasedStateMachine):
    """Time passes, engines open, fail and end, specs change, the agent is restarted. The plan is executed at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.epoch = 0
        self.models = {name: model(name, resident=name != "c", kv=10) for name in "abc"}
        self.is_draining = False
        self.woken: set[str] = set()
        self.tracks: dict[EngineKey, Track] = {}

    @property
    def spec(self) -> InstanceSpec:
        return instance(*self.models.values(), draining=self.is_draining)

    def processes(self) -> list[Track]:
        return [t for t in self.tracks.values() if t.has_process]

    @rule()
    def step(self) -> None:
        wanted = wanted_engines(self.spec, frozenset(map(ModelName, self.woken)))
        prepared = {w.key: Prepared(footprint=held(30 + w.model.kv_floor_bytes)) for w in wanted}
        decided = plan(self.now, wanted, self.tracks, prepared, {INSTANCE: CAPACITY})
        assert set(decided.verdicts) == {w.key for w in wanted} | {t.key for t in self.processes()}
        for action in decided.actions:
            self.execute(action, prepared)

    def execute(self, action: Action, prepared: dict[EngineKey, Prepared]) -> None:
        track = self.tracks.get(action.key, Track(key=action.key))
        match action:
            case Start():
                assert not track.has_process
                footprint = prepared[action.key].footprint
                assert footprint is not None
                self.epoch += 1
                mark = fingerprint(self.spec, self.models[action.key.model])
                assert not track.attempts.of(mark).is_exhausted
                assert self.now >= track.attempts.of(mark).retry_at
                track = track.started(epoch=Epoch(self.epoch), fingerprint=mark, footprint=footprint, now=self.now, limit=60.0)
            case Drain():
                assert track.may_serve
                track = track.draining(self.now)
            case End(failure=failure):
                is_known_idle = track.phase is Phase.DRAINING and self.now - track.since >= SETTLE
                assert failure is not None or not track.may_serve or is_known_idle, "calls run on it and routers were not told"
                track = track.ending(self.now, failure)
            case Kill():
                assert track.phase is Phase.ENDING
                track = track.killed(self.now)
        self.tracks[action.key] = track

    @rule(seconds=st.sampled_from([0.1, 0.5, 3.0, 20.0, 150.0, 400.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.processes())
    @rule(data=st.data())
    def something_happens_to_an_engine(self, data: st.DataObject) -> None:
        track = data.draw(st.sampled_from(sorted(self.processes(), key=lambda t: t.key)))
        port_taken = replace(CRASH, is_port_taken=True)
        after = data.draw(
            st.sampled_from(
                [
                    track.opened(self.now),
                    track.exited(self.now, CRASH),
                    track.exited(self.now, port_taken),
                    track.faulted(CRASH),
                    track.seen_idle() if self.now - track.since >= SETTLE else track,
                ]
            )
        )
        self.tracks[track.key] = after

    @rule(name=st.sampled_from("abc"), uri=st.sampled_from(["file:///m", "file:///n"]), kv=st.sampled_from([10, 20, 60]))
    def spec_changes(self, name: str, uri: str, kv: Bytes) -> None:
        self.models[name] = model(name, resident=name != "c", kv=kv, uri=uri)

    @rule(name=st.sampled_from("abc"))
    def model_is_removed(self, name: str) -> None:
        self.models.pop(name, None)

    @rule()
    def wake(self) -> None:
        self.woken.add("c")

    @rule(is_draining=st.booleans())
    def drain(self, is_draining: bool) -> None:
        self.is_draining = is_draining

    @rule()
    def agent_restarts(self) -> None:
        adopted = {}
        for t in self.processes():
            assert t.epoch is not None
            assert t.footprint is not None
            fresh = Track(key=t.key)
            adopted[t.key] = fresh.adopted(epoch=t.epoch, fingerprint=t.fingerprint, footprint=t.footprint, now=self.now, limit=60.0)
        self.tracks = adopted

    @invariant()
    def memory_is_never_overcommitted(self) -> None:
        assert sum(t.footprint.total for t in self.tracks.values() if t.footprint is not None) <= CAPACITY

    @invariant()
    def tracks_hold_together(self) -> None:
        for track in self.tracks.values():
            track.check_integrity()


World.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestWorld = World.TestCase
