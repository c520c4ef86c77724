"""Opening an allowed model because a router asks, and settling where. Who asks meanwhile gets the same answer: one need is one wake.

As the model's wake owner this agent settles the place, on whatever node it lies; another agent's instance is then that agent's to
open, which the router asks for by a wake that says so (`is_settled`).
"""

from dataclasses import dataclass

from aerostat_agent.node import Node
from aerostat_agent.policy.settlements import WakeAsked
from aerostat_agent.policy.tracks import EngineKey, Phase
from aerostat_agent.snapshot import open_in_seconds
from aerostat_core.ids import InstanceName, ModelName, NamespacedName, Seconds
from aerostat_core.specs import EngineState


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeAnswer:
    """Where the model opens and in how long, or why not (`refused`, CamelCase, with its message)."""

    instance: InstanceName
    open_in: Seconds = 0.0
    refused: str = ""
    message: str = ""


def wake(node: Node, asked: WakeAsked) -> WakeAnswer:
    """Idempotent."""
    if asked.is_settled:
        return _open(node, asked.model, asked.proposed)
    now = node.clock.monotonic()
    standing = node.settlements.of(asked.model, ruled_out=asked.ruled_out, now=now)
    place = standing or _under_way(node, asked.model, asked.ruled_out) or asked.proposed
    node.settlements.settle(asked.model, place, now=now)
    if asked.model.sibling(place) not in node.specs:
        return WakeAnswer(instance=place)  # another agent's to open
    answer = _open(node, asked.model, place)
    if answer.refused:
        node.settlements.void(asked.model)
    return answer


def _under_way(node: Node, model: NamespacedName, ruled_out: frozenset[InstanceName]) -> InstanceName | None:
    """An instance of this node where it comes up already, whoever wanted that. One where it is open is no answer to a new need."""
    for key in sorted(node.verdicts.keys() | node.woken):
        place = InstanceName(key.instance.name)
        is_it = key.instance.namespace == model.namespace and key.model == model.name and key.instance in node.specs
        if is_it and place not in ruled_out and _comes_up(node, key):
            return place
    return None


def _comes_up(node: Node, key: EngineKey) -> bool:
    verdict, track = node.verdicts.get(key), node.tracks.get(key)
    if track is not None and track.phase in (Phase.DRAINING, Phase.ENDING):
        return False
    if verdict is not None and verdict.state is EngineState.STARTING:
        return True
    return key in node.woken and (verdict is None or verdict.reason == "NotResident")  # asked for since the last plan


def _open(node: Node, model: NamespacedName, place: InstanceName) -> WakeAnswer:
    instance = model.sibling(place)
    spec = node.specs.get(instance)
    key = EngineKey(instance, ModelName(model.name))
    if spec is None:
        return WakeAnswer(instance=place, refused="NoSuchInstance", message=f"no Instance {instance} is on node {node.name}")
    if spec.draining:
        return WakeAnswer(instance=place, refused="InstanceDraining", message=f"Instance {instance} takes no new work")
    if all(m.name != model.name for m in spec.models):
        return WakeAnswer(instance=place, refused="ModelNotAllowed", message=f"the spec of Instance {instance} has no model {model.name}")
    verdict, track = node.verdicts.get(key), node.tracks.get(key)
    is_ending = track is not None and track.phase in (Phase.DRAINING, Phase.ENDING)
    if verdict is not None and not is_ending and verdict.state in (EngineState.OPEN, EngineState.STARTING):
        return WakeAnswer(instance=place, open_in=open_in_seconds(node, key))
    if verdict is not None and (verdict.state is EngineState.FAILED or verdict.reason == "InsufficientMemory"):
        return WakeAnswer(instance=place, refused=verdict.reason, message=verdict.message)
    node.woken.add(key)
    node.touch()
    return WakeAnswer(instance=place, open_in=node.figures_of(key).open_seconds)
