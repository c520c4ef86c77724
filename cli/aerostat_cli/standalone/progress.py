"""What the user of `aerostat up` reads about each model: one line when something changes, and how to try it.

Pure: objects and `now` come in, lines go out.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final

from aerostat_core.ids import Seconds
from aerostat_core.resources import Resource, name_of

# Progress inside a state (a download's percentage) is told at most this often; a change of state at once.
PROGRESS_EVERY: Final[Seconds] = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """One model's. `name` is the object's, as `aerostat get` shows it. `step` changes rarely and is told at once, `detail` often."""

    name: str
    served_name: str
    step: str
    detail: str
    ready: bool
    instance: str


@dataclass(slots=True)
class _Told:
    situation: Situation
    since: Seconds  # of the last time that the model began to become ready
    at: Seconds


class ProgressTeller:
    """Remembers what was told. `lines` gives what is new."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._told: dict[str, _Told] = {}
        self._has_shown_call = False

    def lines(self, models: Iterable[Resource], instances: Iterable[Resource], *, now: Seconds) -> list[str]:
        found = list(instances)
        present = {str(name_of(model)): situation_of(model, found) for model in models}
        lines = [f"{self._told.pop(name).situation.name}: deleted" for name in sorted(self._told.keys() - present.keys())]
        for name in sorted(present):
            lines += self._news(name, present[name], now)
        return lines

    def _news(self, name: str, situation: Situation, now: Seconds) -> list[str]:
        told = self._told.get(name)
        if told is None or (told.situation.ready and not situation.ready):
            self._told[name] = _Told(situation, since=now, at=now)
            return [_line(situation, Seconds(0))] if situation.step or situation.ready else []
        if situation == told.situation:
            return []
        is_step = (situation.step, situation.ready) != (told.situation.step, told.situation.ready)
        if not is_step and now - told.at < PROGRESS_EVERY:
            return []
        told.situation, told.at = situation, now
        lines = [_line(situation, now - told.since)]
        if situation.ready and not self._has_shown_call:
            self._has_shown_call = True
            lines += self._how_to_call(situation.served_name)
        return lines

    def _how_to_call(self, served_name: str) -> list[str]:
        body = f'{{"model": "{served_name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
        return [
            "  try it:",
            f"    curl {self._url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'",
            f"    aerostat chat {served_name}",
        ]


def _line(situation: Situation, took: Seconds) -> str:
    if situation.ready:
        after = f" after {took:.0f} s" if took >= 1 else ""
        where = f"{after} on {situation.instance}" if situation.instance else "; its first call opens it"
        return f"{situation.name}: ready{where}"
    return ": ".join(filter(None, (situation.name, situation.step, situation.detail)))


def situation_of(model: Resource, instances: Iterable[Resource]) -> Situation:
    """From the model's own conditions and from what agents report about its replicas; the furthest replica counts."""
    name = model["metadata"]["name"]
    conditions = {c["type"]: c for c in model.get("status", {}).get("conditions", ())}
    ready = conditions.get("Ready", {})
    situation = partial(Situation, name=name, served_name=model["spec"].get("servedName") or name)
    replicas = [
        (instance["metadata"]["name"], replica)
        for instance in instances
        for replica in instance.get("status", {}).get("models", ())
        if replica["name"] == name
    ]
    open_on = ", ".join(instance for instance, replica in replicas if replica["state"] == "Open")
    if ready.get("status") == "True" and (open_on or not model["spec"].get("minReplicas")):
        return situation(step="ready", detail="", ready=True, instance=open_on)
    reporting = [
        replica for _, replica in replicas if replica["state"] != "Open" and (replica["state"] != "Absent" or replica.get("reason"))
    ]
    if reporting:
        replica = reporting[0]
        # A failure's message says what to do; while all goes well the progress says more.
        words = replica.get("progress") or replica.get("message", "")
        return situation(step=replica.get("reason") or replica["state"], detail=words, ready=False, instance="")
    return situation(step=ready.get("reason", ""), detail=ready.get("message", ""), ready=False, instance="")
