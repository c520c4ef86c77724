"""What a Model may set of its engine: the allow-list of `engineArgs`, with types and bounds.

Checked by the operator (condition) and the agent (before a start). What is absent here either belongs to the agent (addresses, keys,
memory, devices) or reads files, loads code or logs content. Names are SGLang's flags without the dashes; values are strings, as in the CRD.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from aerostat_core.errors import PermanentError


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    low: int
    high: int

    def refusal(self, value: str) -> str | None:
        if re.fullmatch(r"[0-9]{1,9}", value) and self.low <= int(value) <= self.high:
            return None
        return f"a whole number from {self.low} to {self.high}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decimal:
    low: float
    high: float

    def refusal(self, value: str) -> str | None:
        if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", value) and self.low <= float(value) <= self.high:
            return None
        return f"a number from {self.low:g} to {self.high:g}"


@dataclass(frozen=True, slots=True)
class Choice:
    values: tuple[str, ...]

    def refusal(self, value: str) -> str | None:
        return None if value in self.values else "one of " + ", ".join(self.values)


@dataclass(frozen=True, slots=True)
class Switch:
    """A flag without a value: `true` sets it, `false` leaves it out."""

    def refusal(self, value: str) -> str | None:
        return None if value in ("true", "false") else "true or false"


@dataclass(frozen=True, slots=True)
class Name:
    """A name that SGLang looks up in a list of its own, which grows with its versions."""

    def refusal(self, value: str) -> str | None:
        return None if re.fullmatch(r"[a-z0-9][a-z0-9_.-]{0,63}", value) else "a name of at most 64 of a-z, 0-9, '_', '.', '-'"


ALLOWED: Mapping[str, Whole | Decimal | Choice | Switch | Name] = {
    "attention-backend": Choice(("aerostat_paged", "torch_native")),
    "chunked-prefill-size": Whole(low=16, high=131072),
    "disable-overlap-schedule": Switch(),
    "disable-radix-cache": Switch(),
    "dtype": Choice(("auto", "float32", "bfloat16", "float16")),
    "enable-mixed-chunk": Switch(),
    "enable-priority-scheduling": Switch(),
    "grammar-backend": Choice(("xgrammar", "none")),
    "hf-chat-template-name": Name(),
    "kv-cache-dtype": Choice(("auto", "bfloat16")),
    "max-prefill-tokens": Whole(low=16, high=1048576),
    "max-queued-requests": Whole(low=1, high=1000000),
    "max-running-requests": Whole(low=1, high=4096),
    "num-continuous-decode-steps": Whole(low=1, high=64),
    "random-seed": Whole(low=0, high=999999999),
    "reasoning-parser": Name(),
    "sampling-defaults": Choice(("model", "openai")),
    "schedule-conservativeness": Decimal(low=0.0, high=10.0),
    "schedule-policy": Choice(("lpm", "fcfs", "lof", "dfs-weight")),
    "stream-interval": Whole(low=1, high=1024),
    "tool-call-parser": Name(),
    "watchdog-timeout": Whole(low=30, high=86400),
}


def check_engine_args(args: Mapping[str, str]) -> None:
    """Raises PermanentError (`EngineArgsRejected`) that names every wrong entry and what is allowed in its place."""
    wrong = []
    for name, value in sorted(args.items()):
        rule = ALLOWED.get(name)
        if rule is None:
            wrong.append(f"{name!r} may not be set")
        elif (refusal := rule.refusal(value)) is not None:
            wrong.append(f"{name!r} must be {refusal}, got {value!r}")
    if any(name not in ALLOWED for name in args):
        wrong.append("allowed are " + ", ".join(sorted(ALLOWED)))
    if wrong:
        raise PermanentError("EngineArgsRejected", "spec.engineArgs: " + "; ".join(wrong))


def to_flags(args: Mapping[str, str]) -> list[str]:
    """SGLang's command line for checked arguments, in a fixed order. Raises PermanentError as `check_engine_args` does."""
    check_engine_args(args)
    flags: list[str] = []
    for name, value in sorted(args.items()):
        if not isinstance(ALLOWED[name], Switch):
            flags += [f"--{name}", value]
        elif value == "true":
            flags.append(f"--{name}")
    return flags
