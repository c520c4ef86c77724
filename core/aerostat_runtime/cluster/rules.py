"""CEL rules of a schema (`x-kubernetes-validations`), evaluated as an API server would.

Python's CEL has the language; the two functions of Kubernetes that our rules use, `quantity` and its comparisons, are
added here. Reading this module costs most of a second, so only who checks a rule imports it.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import celpy
from celpy.celtypes import BoolType, IntType

from aerostat_core.quantities import parse_size
from aerostat_runtime.cluster.port import Violation
from aerostat_runtime.cluster.schema import Schema, schema_nodes, written


class _Quantity(int):
    """Bytes. Its own type, so that no rule compares it with a plain number, which an API server refuses."""


def _quantity(text: object) -> _Quantity:
    return _Quantity(parse_size(str(text)))


_FUNCTIONS = {
    "quantity": _quantity,
    "compareTo": lambda a, b: IntType((a > b) - (a < b)),
    "isLessThan": lambda a, b: BoolType(a < b),
    "isGreaterThan": lambda a, b: BoolType(a > b),
}


def broken_rules(structural: Schema, value: Any, old: Any) -> Iterator[Violation]:
    """Rules that a value, which fits the schema, breaks. Rules over `oldSelf` are for values that existed before."""
    for schema, part, before, path in schema_nodes(structural, value, old):
        for rule in schema.get("x-kubernetes-validations", ()):
            if "oldSelf" in rule["rule"] and before is None:
                continue
            failure = _failure(rule, part, before)
            if failure is not None:
                where = written(path) + rule.get("fieldPath", "")
                shown = "" if isinstance(part, dict | list) else f"{_shown(part)}: "
                yield Violation(where, f"Invalid value: {shown}{failure}")


def _failure(rule: Schema, part: Any, before: Any) -> str | None:
    context = {"self": celpy.json_to_cel(part)}
    if before is not None:
        context["oldSelf"] = celpy.json_to_cel(before)
    try:
        holds = _program(rule["rule"]).evaluate(context)
    except celpy.CELEvalError as error:
        return f"rule evaluation error: {error.args[0]} ({rule['message']})"
    return None if holds else str(rule["message"])


@cache
def _environment() -> celpy.Environment:
    return celpy.Environment()


@cache
def _program(text: str) -> celpy.Runner:
    environment = _environment()
    return environment.program(environment.compile(text), functions=_FUNCTIONS)


def _shown(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
