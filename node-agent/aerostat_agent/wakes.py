"""Opening an allowed model because a router asks. Who asks while it opens gets the same answer: one need is one wake."""

from dataclasses import dataclass

from aerostat_agent.node import Node
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


def wake(node: Node, model: NamespacedName, proposed: NamespacedName) -> WakeAnswer:
    """Idempotent. The first proposal wins while it lasts."""
    if (under_way := _under_way(node, model)) is not None:
        return WakeAnswer(instance=InstanceName(under_way.instance.name), open_in=open_in_seconds(node, under_way))
    spec = node.specs.get(proposed)
    key = EngineKey(proposed, ModelName(model.name))
    instance = InstanceName(proposed.name)
    if spec is None:
        return WakeAnswer(instance=instance, refused="NoSuchInstance", message=f"no Instance {proposed} is on node {node.name}")
    if spec.draining:
        return WakeAnswer(instance=instance, refused="InstanceDraining", message=f"Instance {proposed} takes no new work")
    if proposed.namespace != model.namespace or all(m.name != model.name for m in spec.models):
        return WakeAnswer(
            instance=instance, refused="ModelNotAllowed", message=f"the spec of Instance {proposed} has no model {model.name}"
        )
    verdict = node.verdicts.get(key)
    if verdict is not None and (verdict.state is EngineState.FAILED or verdict.reason == "InsufficientMemory"):
        return WakeAnswer(instance=instance, refused=verdict.reason, message=verdict.message)
    node.woken.add(key)
    node.touch()
    return WakeAnswer(instance=instance, open_in=node.figures_of(key).open_seconds)


def _under_way(node: Node, model: NamespacedName) -> EngineKey | None:
    """An instance of this node where it is open or opens."""
    for key, verdict in sorted(node.verdicts.items()):
        if key.instance.namespace == model.namespace and key.model == model.name:
            is_ending = key in node.tracks and node.tracks[key].phase in (Phase.DRAINING, Phase.ENDING)
            if not is_ending and verdict.state in (EngineState.OPEN, EngineState.STARTING):
                return key
    for key in sorted(node.woken):  # asked for since the last plan
        is_new = key not in node.verdicts or node.verdicts[key].reason == "NotResident"
        if is_new and key.instance.namespace == model.namespace and key.model == model.name and key.instance in node.specs:
            return key
    return None
