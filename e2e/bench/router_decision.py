"""What one decision of the router costs, without sockets: reading the body, naming the session, placing the call among candidates.

Measures CPU time (a decision waits for nothing, and what else a shared machine does is not its cost), asserts nothing. Progress
on stderr, a table, then one JSON object as the last line of stdout. QUICK=1 makes fewer rounds.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Final

import orjson

from aerostat_core.ids import Epoch, LeaseId, NamespacedName, Seconds, SessionKey
from aerostat_core.latency import LatencyProfile
from aerostat_core.specs import EngineState
from aerostat_router.fleet import AgentUpdate, Fleet
from aerostat_router.policy.placement import Placement, Send, Situation, honour, judge_lease, place
from aerostat_router.policy.sessions import given_session_id, named_session, tenant_of
from aerostat_router.policy.views import CallView, EngineView, InstanceView, LeaseView, SessionView, Tier, Timing
from aerostat_router.request_body import Api, read_body

MODEL: Final = NamespacedName("default", "m")
N_CANDIDATES: Final = 40
PROFILE: Final = LatencyProfile(prefill={64: 0.05, 1024: 1.0, 8192: 11.0}, decode={1: 0.03, 8: 0.07, 16: 0.1})
HEADERS: Final = {b"content-type": b"application/json", b"authorization": b"Bearer key", b"x-session-id": b"session-7"}
BODY: Final = orjson.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": "word " * 180}]})
KEY: Final = named_session(tenant_of(HEADERS), "session-7")


def make_fleet() -> Fleet:
    """Forty open instances, none idle in the same way; the session's KV is on one of them."""
    timing = Timing.of(PROFILE)
    instances, fleet = [], Fleet(lambda models: None)
    for i in range(N_CANDIDATES):
        name = NamespacedName("default", f"instance-{i}")
        engine = EngineView(
            instance=name,
            model=MODEL,
            state=EngineState.OPEN,
            epoch=Epoch(1),
            timing=timing,
            host="10.0.0.1",
            port=30000 + i,
            running=i % 7,
            max_running=16,
            queue_seconds=(i * 37 % 11) / 10,
            kv_capacity_tokens=100_000,
            kv_free_tokens=50_000 + 100 * i,
        )
        instances.append(InstanceView(name=name, pool="p", node=f"n{i}", sharing="Concurrent", is_draining=False, engines=(engine,)))
    held = SessionView(session=KEY, model=MODEL, instance=instances[17].name, epoch=Epoch(1), tier=Tier.DEVICE, n_tokens=160)
    fleet.apply("agent", AgentUpdate(agent_epoch=1, version=0, is_full=True, instances=tuple(instances), sessions=(held,)), 0.0)
    return fleet


def decide(fleet: Fleet, now: Seconds, session: SessionKey) -> Placement:
    holdings = fleet.holdings(session, MODEL)
    view = CallView(model=MODEL, session=session, n_prompt_tokens=220, n_output_tokens=100)
    lease = fleet.leases.find(session, MODEL, now)
    if lease is not None:
        candidate = fleet.candidate(lease.instance, MODEL)
        if candidate is not None and judge_lease(lease, candidate, holdings, ()) is None:
            fleet.leases.consume(lease)
            return honour(lease, view, candidate, holdings, now)
    situation = Situation(now=now, ttft=1.0, replica_penalty=lambda instance: 0.0, n_calls=lambda: 10)
    return place(view, fleet.candidates(MODEL), holdings, situation)


def placed(fleet: Fleet, now: Seconds) -> None:
    placement = decide(fleet, now, KEY)
    assert isinstance(placement, Send)
    with fleet.enter(placement.candidate, seconds=0.1, tokens=60):
        pass


def returned(fleet: Fleet, now: Seconds) -> None:
    """With the lease that the completion before it left."""
    lease = LeaseView(
        id=LeaseId(str(now)),
        session=KEY,
        model=MODEL,
        instance=NamespacedName("default", "instance-17"),
        epoch=Epoch(1),
        expires_at=now + 1,
    )
    fleet.leases.install(lease)
    placed(fleet, now)


def understood(fleet: Fleet, now: Seconds) -> None:
    document = read_body(Api.CHAT, BODY)
    session_id = given_session_id(HEADERS, document)
    assert session_id is not None
    named_session(tenant_of(HEADERS), session_id)


def microseconds(step: Callable[[Fleet, Seconds], None], fleet: Fleet, n: int) -> list[float]:
    clock, took = time.thread_time_ns, []
    for i in range(n):
        now = i * 1e-9  # the snapshot stays fresh
        began = clock()
        step(fleet, now)
        took.append((clock() - began) / 1000)
    return took


def main() -> None:
    n, n_rounds = (2_000, 3) if os.environ.get("QUICK") else (20_000, 7)
    steps: Mapping[str, Callable[[Fleet, Seconds], None]] = {"decision": placed, "lease": returned, "intake": understood}
    found: dict[str, list[float]] = {f"{name}_us_{p}": [] for name in steps for p in ("p50", "p99")}
    fleet = make_fleet()
    for round_number in range(n_rounds):
        sys.stderr.write(f"round {round_number + 1} of {n_rounds}\n")
        for name, step in steps.items():
            took = sorted(microseconds(step, fleet, n))
            found[f"{name}_us_p50"].append(took[n // 2])
            found[f"{name}_us_p99"].append(took[n * 99 // 100])
    figures = {key: round(statistics.median(values), 2) for key, values in found.items()}
    spread = {key: [round(min(values), 2), round(max(values), 2)] for key, values in found.items()}
    out = sys.stdout.write
    for key, value in figures.items():
        out(f"{key:20} {value:8.1f} us   {spread[key][0]:.1f} to {spread[key][1]:.1f}\n")
    baseline = {"candidates": N_CANDIDATES, "body_bytes": len(BODY)}
    out(json.dumps({"bench": "router", "runs": n_rounds, "figures": figures, "spread": spread, "baseline": baseline}) + "\n")


if __name__ == "__main__":
    main()
