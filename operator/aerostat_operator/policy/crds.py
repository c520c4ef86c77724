"""May this release's CRD take the place of the one that a cluster has? Pure.

An upgrade must never take something away from objects that exist, and after a rollback the newer CRDs stay: an older
release finds in them all that it knows. Which one is newer, their label `app.kubernetes.io/version` says.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from aerostat_core.resources import Resource

VERSION_LABEL: Final = "app.kubernetes.io/version"
REMEDY: Final = "set crds.allowRemoval=true once no object has them"


class Verb(Enum):
    APPLY = "apply"
    KEEP = "keep"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """`why`: for people, with the remedy where it is refused."""

    verb: Verb
    why: str


def judge(present: Resource | None, ours: Resource, *, allows_removal: bool) -> Judgement:
    """`present`: what the cluster has under that name."""
    release = _release(ours)
    if present is None:
        return Judgement(verb=Verb.APPLY, why="the cluster does not have it")
    there = _release(present)
    if _order(there) > _order(release):
        missing = sorted(_served(ours) - _served(present))
        if missing:
            why = (
                f"it is of release {there}, which no longer serves {', '.join(missing)}: use release {there} or later instead of {release}"
            )
            return Judgement(verb=Verb.REFUSE, why=why)
        why = f"it is of release {there}, newer than this one ({release}), and stays, so that objects lose nothing"
        return Judgement(verb=Verb.KEEP, why=why)
    lost = tuple(losses(present, ours))
    if lost and not allows_removal:
        return Judgement(verb=Verb.REFUSE, why=f"objects would lose {', '.join(lost)}: {REMEDY}")
    why = f"it was of {f'release {there}' if there else 'no release that it says'}" + (f", and loses {', '.join(lost)}" if lost else "")
    return Judgement(verb=Verb.APPLY, why=why)


def losses(present: Resource, ours: Resource) -> Iterator[str]:
    """What objects may have today and could not have under ours: versions, fields, types and values of enums."""
    new = {version["name"]: version for version in ours["spec"]["versions"]}
    kept = set(present.get("status", {}).get("storedVersions", ())) | _served(present)
    yield from (f"version {name}" for name in sorted(kept - new.keys()))
    for version in present["spec"]["versions"]:
        if version["name"] in new:
            pair = (v.get("schema", {}).get("openAPIV3Schema", {}) for v in (version, new[version["name"]]))
            yield from _lost_in_schema(*pair, path="")


def _lost_in_schema(old: Any, new: Any, *, path: str) -> Iterator[str]:
    if old.get("type") != new.get("type"):
        yield f"{path} of type {old.get('type')}"
        return
    if "enum" in new:
        yield from (f"{path}={value}" for value in old.get("enum", ()) if value not in new["enum"])
    keeps_unknown = new.get("x-kubernetes-preserve-unknown-fields", False)
    properties = new.get("properties", {})
    for name, child in old.get("properties", {}).items():
        inner = f"{path}.{name}".removeprefix(".")
        if name in properties:
            yield from _lost_in_schema(child, properties[name], path=inner)
        elif not keeps_unknown:
            yield inner
    for part, suffix in (("items", "[]"), ("additionalProperties", ".*")):
        if isinstance(old.get(part), dict):
            if isinstance(new.get(part), dict):
                yield from _lost_in_schema(old[part], new[part], path=f"{path}{suffix}")
            elif not keeps_unknown:
                yield f"{path}{suffix}"


def _served(crd: Resource) -> set[str]:
    return {version["name"] for version in crd["spec"]["versions"] if version["served"]}


def _release(crd: Resource) -> str:
    """Empty: its maker did not say."""
    label: str = crd["metadata"].get("labels", {}).get(VERSION_LABEL, "")
    return label


def _order(release: str) -> tuple[int, ...]:
    """Of the numbers in front; what stands behind (`-rc1`) does not count."""
    match = re.match(r"\d+(\.\d+)*", release)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
