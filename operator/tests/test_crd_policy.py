"""Which CRDs take the place of others: nothing that objects may have is taken away, and what is newer stays."""

import copy
from typing import Any

import pytest

from aerostat_core.resources import Resource
from aerostat_operator.crds import crds_of_this_release
from aerostat_operator.policy.crds import VERSION_LABEL, Verb, judge, losses

pytestmark = pytest.mark.cpu

STRING = {"type": "string"}
NAMES = ("instances.aerostat.dev", "models.aerostat.dev", "pools.aerostat.dev", "slos.aerostat.dev")


def crd(release: str = "1.2.0", *, versions: tuple[str, ...] = ("v1",), **properties: Any) -> Resource:
    spec = {"type": "object", "properties": {"size": STRING, **properties}}
    schema = {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec}}}
    served = [{"name": version, "served": True, "storage": version == versions[-1], "schema": schema} for version in versions]
    labels = {VERSION_LABEL: release} if release else {}
    return {"metadata": {"name": "things.example.com", "labels": labels}, "spec": {"versions": served}}


def verb(present: Resource | None, ours: Resource, *, allows_removal: bool = False) -> Verb:
    return judge(present, ours, allows_removal=allows_removal).verb


def test_the_crds_of_this_release_are_four_and_say_which_release_it_is() -> None:
    assert tuple(sorted(crds_of_this_release())) == NAMES
    for ours in crds_of_this_release().values():
        assert verb(None, ours) is Verb.APPLY
        assert verb(ours, ours) is Verb.APPLY
        assert list(losses(ours, ours)) == []


def test_an_older_one_gives_way() -> None:
    assert verb(crd("1.1.0"), crd(color=STRING)) is Verb.APPLY
    assert verb(crd("1.1.9"), crd("1.10.0")) is Verb.APPLY, "releases are numbers, not text"
    assert verb(crd(""), crd()) is Verb.APPLY, "made by somebody who did not say"


def test_a_newer_one_stays_as_after_a_rollback() -> None:
    judgement = judge(crd("1.3.0", color=STRING), crd(), allows_removal=True)
    assert (judgement.verb, "1.3.0" in judgement.why) == (Verb.KEEP, True)


def test_a_newer_one_that_does_not_serve_our_version_is_refused() -> None:
    judgement = judge(crd("2.0.0", versions=("v2",)), crd(), allows_removal=True)
    assert judgement.verb is Verb.REFUSE
    assert "no longer serves v1: use release 2.0.0 or later instead of 1.2.0" in judgement.why


def test_a_version_that_is_stored_or_served_is_not_taken_away() -> None:
    assert verb(crd("1.0.0", versions=("v0", "v1")), crd()) is Verb.REFUSE
    stored = crd("1.0.0") | {"status": {"storedVersions": ["v0", "v1"]}}
    assert list(losses(stored, crd())) == ["version v0"]


@pytest.mark.parametrize(
    ("old", "new", "lost"),
    [
        ({"color": STRING}, {}, ["spec.color"]),
        ({"color": STRING}, {"color": {"type": "integer"}}, ["spec.color of type string"]),
        ({"mode": STRING | {"enum": ["Hot", "Cold"]}}, {"mode": STRING | {"enum": ["Hot", "Warm"]}}, ["spec.mode=Cold"]),
        (
            {"parts": {"type": "array", "items": STRING}},
            {"parts": {"type": "array", "items": {"type": "object"}}},
            ["spec.parts[] of type string"],
        ),
        ({"more": {"type": "object", "additionalProperties": STRING}}, {"more": {"type": "object"}}, ["spec.more.*"]),
        ({"any": {"type": "object", "properties": {"a": STRING}}}, {"any": {"type": "object", "properties": {}}}, ["spec.any.a"]),
        (
            {"any": {"type": "object", "properties": {"a": STRING}}},
            {"any": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
            [],
        ),
        ({"mode": STRING}, {"mode": STRING, "color": STRING}, []),
    ],
)
def test_what_objects_would_lose_is_named_and_refused_unless_it_is_allowed(old: Any, new: Any, lost: list[str]) -> None:
    present, ours = crd("1.1.0", **old), crd(**new)
    before = copy.deepcopy((present, ours))
    assert list(losses(present, ours)) == lost
    judgement = judge(present, ours, allows_removal=False)
    assert judgement.verb is (Verb.REFUSE if lost else Verb.APPLY)
    assert all(part in judgement.why for part in lost)
    assert verb(present, ours, allows_removal=True) is Verb.APPLY
    assert (present, ours) == before
