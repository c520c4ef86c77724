"""Instances of this node, from the cluster into the node's state. The operator talks to agents only through these objects."""

import asyncio
from collections.abc import AsyncIterator

from aerostat_agent.node import Node
from aerostat_core.resources import name_of, parse_instance
from aerostat_runtime.cluster.port import Change, Kind, WatchEvent


async def follow_instances(events: AsyncIterator[WatchEvent], node: Node, synced: asyncio.Event) -> None:
    """Until cancelled. `synced` is set once all that exists is known: nothing may be ended before that."""
    async for event in events:
        if event.change is Change.SYNCED:
            synced.set()
        elif event.kind is Kind.INSTANCE and event.resource is not None:
            is_gone = event.change is Change.DELETED or "deletionTimestamp" in event.resource["metadata"]
            if is_gone or event.resource["spec"]["node"] != node.name:
                node.withdraw(name_of(event.resource))
            else:
                node.declare(parse_instance(event.resource))
