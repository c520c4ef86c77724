"""The engine's values as frames of `aerostat.v1`, and back. The only module here that touches protobuf."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from aerostat.v1 import agent_pb2 as pb
from aerostat_engine.reports import Boundary, EngineFacts, Finished, Missing, Phase, Prefix, ProfilePoint, Report, Unhealthy


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Whose frames these are; each carries it, so that a frame of an earlier run is told apart."""

    instance: str
    model: str
    engine_epoch: int
    rank: int


class Word(Enum):
    """What an agent says to an engine."""

    PROBE = "probe"


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    accepted: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FromAgent:
    agent_epoch: int
    engine_epoch: int
    body: Welcome | Word | None
    """None: a word of a later version, which an engine of this one ignores."""


def hello_frame(identity: Identity, facts: EngineFacts, sessions: Iterable[tuple[str, Prefix]]) -> bytes:
    hello = pb.Hello(
        pid=facts.pid,
        tensor_parallel=facts.tensor_parallel,
        plugin_version=facts.plugin_version,
        sglang_version=facts.sglang_version,
        attention_backend=facts.attention_backend,
        page_size_tokens=facts.page_size,
        kv_capacity_tokens=facts.kv_capacity_tokens,
        kv_bytes_per_token=facts.kv_bytes_per_token,
        weights_bytes=facts.weights_bytes,
        max_context_tokens=facts.max_context_tokens,
        max_running=facts.max_running,
        sessions=[pb.SessionPrefix(session=session, handle=_handle(identity, prefix)) for session, prefix in sessions],
    )
    return _frame(identity, hello=hello)


def report_frame(identity: Identity, report: Report) -> bytes:
    match report:
        case Finished():
            return _frame(identity, finished=_finished(identity, report))
        case Boundary():
            return _frame(identity, boundary=_boundary(report))
        case ProfilePoint():
            return _frame(identity, profile=_profile(report))
        case Missing():
            return _frame(identity, tiers=pb.SessionTiers(missing=report.sessions))
        case Unhealthy():
            return _frame(identity, unhealthy=pb.Unhealthy(why=report.why))


def read_agent_frame(payload: bytes) -> FromAgent:
    """Raises google.protobuf.message.DecodeError for what is no frame."""
    frame = pb.AgentFrame.FromString(payload)
    body: Welcome | Word | None = None
    if frame.HasField("welcome"):
        body = Welcome(accepted=frame.welcome.accepted, reason=frame.welcome.reason)
    elif frame.HasField("probe"):
        body = Word.PROBE
    return FromAgent(agent_epoch=frame.agent_epoch, engine_epoch=frame.engine_epoch, body=body)


def _frame(
    identity: Identity,
    *,
    hello: pb.Hello | None = None,
    finished: pb.Finished | None = None,
    boundary: pb.Boundary | None = None,
    profile: pb.ProfilePoint | None = None,
    tiers: pb.SessionTiers | None = None,
    unhealthy: pb.Unhealthy | None = None,
) -> bytes:
    who = pb.EngineIdentity(instance=identity.instance, model=identity.model, engine_epoch=identity.engine_epoch, rank=identity.rank)
    frame = pb.EngineFrame(engine=who, hello=hello, finished=finished, boundary=boundary, profile=profile, tiers=tiers, unhealthy=unhealthy)
    return frame.SerializeToString()


def _handle(identity: Identity, prefix: Prefix) -> pb.PrefixHandle:
    return pb.PrefixHandle(engine_epoch=identity.engine_epoch, prefix_hash=prefix.hash, n_tokens=len(prefix.tokens))


def _finished(identity: Identity, turn: Finished) -> pb.Finished:
    return pb.Finished(
        session=turn.session,
        request_id=turn.request_id,
        handle=_handle(identity, turn.prefix),
        n_prompt_tokens=turn.n_prompt_tokens,
        n_output_tokens=turn.n_output_tokens,
        n_cached_tokens=turn.n_cached_tokens,
        reason=turn.reason,
        first_token_seconds=turn.first_token_seconds,
        seconds=turn.seconds,
    )


def _boundary(boundary: Boundary) -> pb.Boundary:
    return pb.Boundary(
        running=boundary.running,
        waiting=boundary.waiting,
        waiting_tokens=boundary.waiting_tokens,
        kv_used_tokens=boundary.kv_used_tokens,
        kv_evictable_tokens=boundary.kv_evictable_tokens,
        last_token_at=boundary.last_token_at,
    )


def _profile(point: ProfilePoint) -> pb.ProfilePoint:
    phase = pb.ProfilePoint.PREFILL if point.step.phase is Phase.PREFILL else pb.ProfilePoint.DECODE
    return pb.ProfilePoint(phase=phase, n_new_tokens=point.step.n_new, n_context_tokens=point.step.n_context, seconds=point.seconds)
