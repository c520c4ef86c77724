"""The telemetry stream: a full snapshot for each new subscriber, then what changed, with consecutive versions.

Every message goes to all subscribers, soon after a change and each heartbeat anyway. Changes of a few milliseconds share a message,
and a busy node sends no more than fifty a second: routers read every one. A subscriber that reads too slowly loses its queue and
gets a full snapshot next; nobody waits for it.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Final

from aerostat.v1 import telemetry_pb2 as tpb
from aerostat_agent import wire
from aerostat_agent.node import Node
from aerostat_agent.policy.demand import Demand
from aerostat_agent.snapshot import instance_states, session_state, session_states
from aerostat_core.defaults import HEARTBEAT
from aerostat_core.ids import NamespacedName, Seconds

MAX_QUEUED: Final = 32
COALESCE: Final[Seconds] = 0.005
MIN_INTERVAL: Final[Seconds] = 0.02


class Subscriber:
    """One stream's queue. `needs_full` until its next message is a snapshot."""

    def __init__(self) -> None:
        self.queue: deque[tpb.TelemetryMessage] = deque()
        self.ready = asyncio.Event()
        self.needs_full = True


class Publisher:
    """Mutable; `run` publishes until cancelled, `subscribe` streams."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._version = 0
        self._published: dict[NamespacedName, tpb.InstanceState] = {}
        self._demand: dict[NamespacedName, Demand] = {}
        self._subscribers: set[Subscriber] = set()

    @property
    def n_subscribers(self) -> int:
        return len(self._subscribers)

    async def run(self) -> None:
        changed, clock = self._node.watch(), self._node.clock
        published_at = clock.monotonic() - MIN_INTERVAL
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT):
                    await changed.wait()
                    await asyncio.sleep(max(COALESCE, published_at + MIN_INTERVAL - clock.monotonic()))
            changed.clear()
            published_at = clock.monotonic()
            self.publish()

    async def subscribe(self) -> AsyncIterator[tpb.TelemetryMessage]:
        """Ends when the caller closes it."""
        subscriber = Subscriber()
        self._subscribers.add(subscriber)
        try:
            yield self._take(subscriber)
            while True:
                await subscriber.ready.wait()
                yield self._take(subscriber)
        finally:
            self._subscribers.discard(subscriber)

    def publish(self) -> None:
        """One message with what changed since the last, to everybody."""
        self._node.expire_leases()
        message = self._delta()
        for subscriber in self._subscribers:
            if len(subscriber.queue) >= MAX_QUEUED:
                subscriber.queue.clear()
                subscriber.needs_full = True
            if not subscriber.needs_full:
                subscriber.queue.append(message)
            subscriber.ready.set()

    def _take(self, subscriber: Subscriber) -> tpb.TelemetryMessage:
        if subscriber.needs_full:
            subscriber.needs_full = False
            subscriber.queue.clear()
            message = self._full()
        else:
            message = subscriber.queue.popleft()
        if not subscriber.queue:
            subscriber.ready.clear()
        return message

    def _full(self) -> tpb.TelemetryMessage:
        """Of now, under the last version: what changed since that one is in the next delta again, as the same whole states."""
        message = self._message(full=True)
        message.instances.extend(instance_states(self._node).values())
        message.sessions.extend(session_states(self._node))
        message.demand.extend(map(wire.demand_message, self._demand.values()))
        return message

    def _delta(self) -> tpb.TelemetryMessage:
        self._version += 1
        message = self._message(full=False)
        now = instance_states(self._node)
        message.instances.extend(state for name, state in now.items() if self._published.get(name) != state)
        message.removed_instances.extend(str(name) for name in sorted(self._published.keys() - now.keys()))
        self._published = now
        rows, forgotten = self._node.sessions.take_changes()
        for row in rows:
            record = self._node.sessions.get(row)
            assert record is not None, "only rows that are there are reported as changed"
            message.sessions.append(session_state(self._node, row, record))
        message.forgotten_sessions.extend(forgotten)
        demand = {d.model: d for d in self._node.demand.sums(self._node.clock.monotonic())}
        silent = {model: Demand(model=model) for model in self._demand.keys() - demand.keys()}
        message.demand.extend(wire.demand_message(d) for d in (demand | silent).values() if self._demand.get(d.model) != d)
        self._demand = demand
        return message

    def _message(self, *, full: bool) -> tpb.TelemetryMessage:
        node = self._node
        return tpb.TelemetryMessage(agent_epoch=node.agent_epoch, version=self._version, sent_at=node.clock.wall(), full=full)
