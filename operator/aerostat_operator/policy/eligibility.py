"""Whether a Model can be placed at all, and in which Pool. What a schema cannot say, since it spans objects, is said here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aerostat_core.engine_args import check_engine_args
from aerostat_core.errors import PermanentError
from aerostat_core.ids import NamespacedName
from aerostat_core.resources import BEST_EFFORT
from aerostat_core.specs import Model, Pool, Sharing, Slo, SloTargets
from aerostat_operator.policy.membership import Membership

SHARING_NOT_SUPPORTED = "sharing Rounds is not supported yet: set spec.sharing to Concurrent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """`keeps_running`: what runs of an earlier version goes on, so that a bad edit takes nothing down."""

    reason: str
    message: str
    keeps_running: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`pool` is the one that the model names, refused or not; None where there is none."""

    model: Model
    pool: Pool | None = None
    targets: SloTargets = BEST_EFFORT
    objective: float = 0.0
    has_slo: bool = False
    refusal: Refusal | None = None


def judge(
    models: Sequence[Model],
    memberships: Mapping[NamespacedName, Membership],
    slos: Mapping[NamespacedName, Slo],
    unreadable: Mapping[tuple[str, NamespacedName], str],
) -> dict[NamespacedName, Verdict]:
    """A verdict for each model, older models first."""
    owners: dict[str, Model] = {}
    verdicts = {}
    for model in sorted(models, key=lambda m: (m.created_at, m.name)):
        owner = owners.setdefault(model.served_name, model)
        verdicts[model.name] = _judge_one(model, owner, memberships, slos, unreadable)
    return verdicts


def _judge_one(
    model: Model,
    name_owner: Model,
    memberships: Mapping[NamespacedName, Membership],
    slos: Mapping[NamespacedName, Slo],
    unreadable: Mapping[tuple[str, NamespacedName], str],
) -> Verdict:
    pool, refusal = _find_pool(model, memberships, unreadable)
    slo = slos.get(model.name.sibling(model.slo)) if model.slo else None
    if name_owner is not model:
        refusal = Refusal(
            reason="ServedNameConflict",
            message=f"spec.servedName {model.served_name!r} belongs to the older Model {name_owner.name}: choose another one",
            keeps_running=False,
        )
    if refusal is None and pool is not None:
        refusal = _refuse_in_pool(model, memberships[pool.name]) or _refuse_slo(model, slo, unreadable) or _refuse_args(model)
    if slo is None:
        return Verdict(model=model, pool=pool, refusal=refusal)
    targets = SloTargets(ttft=slo.ttft, tpot=slo.tpot, hold_budget=slo.hold_budget)
    return Verdict(model=model, pool=pool, targets=targets, objective=slo.objective, has_slo=True, refusal=refusal)


def _find_pool(
    model: Model, memberships: Mapping[NamespacedName, Membership], unreadable: Mapping[tuple[str, NamespacedName], str]
) -> tuple[Pool | None, Refusal | None]:
    """By name, or of those with the labels the oldest, first of those whose devicesPerInstance suits the model."""
    if model.pool is not None:
        name = model.name.sibling(model.pool)
        if (why := unreadable.get(("Pool", name))) is not None:
            return None, Refusal(reason="PoolInvalid", message=f"Pool {name} cannot be read: {why}")
        if name in memberships:
            return memberships[name].pool, None
        message = f"spec.pool names {model.pool!r}, and namespace {name.namespace} has no such Pool: create it, or name another one"
        return None, Refusal(reason="PoolNotFound", message=message)
    wanted = model.pool_labels.items()
    matching = [m.pool for m in memberships.values() if m.pool.name.namespace == model.name.namespace and wanted <= m.pool.labels.items()]
    if not matching:
        labels = ", ".join(f"{key}={value}" for key, value in sorted(wanted))
        message = f"no Pool of namespace {model.name.namespace} has the labels of spec.poolSelector ({labels})"
        return None, Refusal(reason="PoolNotFound", message=message)
    return min(matching, key=lambda p: (p.devices_per_instance != model.tensor_parallel, p.created_at, p.name)), None


def _refuse_in_pool(model: Model, membership: Membership) -> Refusal | None:
    pool, tp = membership.pool, model.tensor_parallel
    if pool.sharing is Sharing.ROUNDS:
        return Refusal(reason="SharingNotSupported", message=f"Pool {pool.name.name}: {SHARING_NOT_SUPPORTED}")
    if 0 < membership.devices_per_node < tp:
        have = membership.devices_per_node
        message = f"spec.tensorParallel {tp} needs more devices than a node of Pool {pool.name.name} has ({have})"
        return Refusal(reason="NotSupported", message=f"{message}: multi-node tensor parallel is not supported yet")
    if tp != pool.devices_per_instance:
        has = f"devicesPerInstance {pool.devices_per_instance} of Pool {pool.name.name}"
        message = f"spec.tensorParallel {tp} differs from {has}: name a Pool where they are equal"
        return Refusal(reason="TensorParallelMismatch", message=message)
    if model.trust_remote_code and not pool.allow_remote_code:
        message = f"spec.trustRemoteCode needs spec.allowRemoteCode in Pool {pool.name.name}: set it there, or remove it here"
        return Refusal(reason="RemoteCodeNotAllowed", message=message, keeps_running=False)
    return None


def _refuse_slo(model: Model, slo: Slo | None, unreadable: Mapping[tuple[str, NamespacedName], str]) -> Refusal | None:
    if model.slo is None or slo is not None:
        return None
    name = model.name.sibling(model.slo)
    if (why := unreadable.get(("SLO", name))) is not None:
        return Refusal(reason="SLOInvalid", message=f"SLO {name} cannot be read: {why}")
    message = f"spec.slo names {model.slo!r}, and namespace {name.namespace} has no such SLO: create it, or remove the field"
    return Refusal(reason="SLONotFound", message=message)


def _refuse_args(model: Model) -> Refusal | None:
    try:
        check_engine_args(model.engine_args)
    except PermanentError as error:
        return Refusal(reason=error.reason, message=error.message)
    return None
