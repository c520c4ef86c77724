"""What an API server does with an object before it stores it: refuse unknown fields, default, check schema and rules.

Messages follow the API server's, so that a manifest is refused in the same words in both ways to run. Whether an object
makes sense beside the others (its Pool exists, it fits) is for whoever reconciles.
"""

from collections.abc import Iterator
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, Self

import jsonschema
from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.exceptions import ValidationError

from aerostat_core.ids import NamespacedName
from aerostat_core.resources import Resource
from aerostat_runtime.cluster.port import InvalidResourceError, Kind, Violation
from aerostat_runtime.cluster.schema import (
    Path_,
    ResourceSchema,
    Schema,
    crds_folder,
    load_schemas,
    schema_nodes,
    with_defaults,
    written,
)

_SERVER_SET = ("uid", "resourceVersion", "creationTimestamp", "generation", "managedFields")
_FORMATS = FormatChecker(formats=())


@_FORMATS.checks("date-time", raises=ValueError)
def _is_date_time(value: object) -> bool:
    return not isinstance(value, str) or datetime.fromisoformat(value).tzinfo is not None


# An integer is written as one: 1.0 is a number that some client rounded.
_TYPES = Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, v: isinstance(v, int) and not isinstance(v, bool))
_Validator: Any = jsonschema.validators.extend(Draft202012Validator, type_checker=_TYPES)  # type: ignore[no-untyped-call]


class Admission:
    """Built from CRDs; stateless."""

    def __init__(self, schemas: dict[str, ResourceSchema]) -> None:
        self._schemas = schemas
        self._objects = {kind: _Validator(schema.object_json, format_checker=_FORMATS) for kind, schema in schemas.items()}
        self._statuses = {kind: _Validator(schema.status_json, format_checker=_FORMATS) for kind, schema in schemas.items()}

    @classmethod
    def from_crds(cls, folder: Path) -> Self:
        return cls(load_schemas(folder))

    @classmethod
    def of_this_build(cls) -> "Admission":
        return _of_this_build()

    def kind_of(self, resource: Resource) -> Kind:
        """Raises InvalidResourceError for an object that is of no kind of ours."""
        kind, version = resource.get("kind"), resource.get("apiVersion")
        schema = self._schemas.get(kind) if isinstance(kind, str) else None
        if schema is None:
            known = ", ".join(sorted(self._schemas))
            raise _refused("object", [Violation("kind", f"no kind {_shown(kind)}: there are {known}")])
        if version != schema.api_version:
            raise _refused(schema.kind, [Violation("apiVersion", f"no version {_shown(version)} of {kind}: use {schema.api_version}")])
        return Kind(schema.kind)

    def admit(self, resource: Resource, old: Resource | None) -> Resource:
        """The object with defaults, without status. `old` is what it replaces. Raises InvalidResourceError."""
        kind = self.kind_of(resource)
        schema = self._schemas[kind]
        body = {key: value for key, value in resource.items() if key != "status"}
        admitted: Resource = with_defaults(schema.structural, body)
        subject = f"{kind}.{schema.api_version.partition('/')[0]} {_shown(_name(admitted))}"
        violations = list(_violations(self._objects[kind], admitted)) or list(_duplicates(schema.structural, admitted))
        if violations:
            raise _refused(subject, violations)
        if old is None or old["spec"] != admitted["spec"]:  # what is stored already has passed the rules
            # Imported late: only who stores objects with rules pays for reading CEL.
            from aerostat_runtime.cluster.rules import broken_rules

            broken = list(broken_rules(schema.structural, admitted, old))
            if broken:
                raise _refused(subject, broken)
        metadata = {key: value for key, value in admitted["metadata"].items() if key not in _SERVER_SET}
        return {**admitted, "metadata": metadata}

    def check_status(self, kind: Kind, name: NamespacedName, status: Resource) -> None:
        """Raises InvalidResourceError."""
        schema = self._schemas[kind]
        document = {"status": status}
        violations = list(_violations(self._statuses[kind], document)) or list(_duplicates(schema.structural, document))
        if violations:
            raise _refused(f'{kind}.{schema.api_version.partition("/")[0]} "{name.name}"', violations)


@cache
def _of_this_build() -> Admission:
    return Admission.from_crds(crds_folder())


def _refused(subject: str, violations: list[Violation]) -> InvalidResourceError:
    said = [str(violation) for violation in violations]
    return InvalidResourceError(f"{subject} is invalid: " + (said[0] if len(said) == 1 else f"[{', '.join(said)}]"), tuple(violations))


def _name(resource: Resource) -> Any:
    metadata = resource.get("metadata")
    return metadata.get("name") if isinstance(metadata, dict) else None


def _violations(validator: Any, document: Any) -> Iterator[Violation]:
    errors = list(validator.iter_errors(document))
    wrong_type = {tuple(error.absolute_path) for error in errors if error.validator == "type"}
    seen = set()
    for error in errors:
        path = tuple(error.absolute_path)
        if path in wrong_type and error.validator != "type":
            continue
        for violation in _of_error(error, path):
            if violation not in seen:
                seen.add(violation)
                yield violation


def _of_error(error: ValidationError, path: Path_) -> Iterator[Violation]:
    """In the words of an API server."""
    where = written(path)
    value: Any = error.instance
    limit: Any = error.validator_value
    match error.validator:
        case "additionalProperties":
            known = error.schema.get("properties", {}) if isinstance(error.schema, dict) else {}
            for key in value:
                if key not in known:
                    yield Violation(written((*path, key)), "unknown field")
        case "required":
            for key in limit:
                if key not in value:
                    yield Violation(written((*path, key)), "Required value")
        case "type":
            yield Violation(where, f'Invalid value: "{_type_name(value)}": must be of type {limit}')
        case "enum":
            yield Violation(where, f"Unsupported value: {_shown(value)}: supported values: {', '.join(map(_shown, limit))}")
        case "maxLength":
            yield Violation(where, f"Too long: may not be more than {limit} characters")
        case "maxItems" | "maxProperties":
            yield Violation(where, f"Too many: {len(value)}: must have at most {limit} items")
        case _:
            yield Violation(where, f"Invalid value: {_shown(value)}: {_expectation(error)}")


def _expectation(error: ValidationError) -> str:
    limit = error.validator_value
    if isinstance(error.schema, dict) and "x-says" in error.schema:
        return str(error.schema["x-says"])
    match error.validator:
        case "minimum":
            return f"should be greater than or equal to {limit}"
        case "maximum":
            return f"should be less than or equal to {limit}"
        case "pattern":
            return f"should match '{str(limit).removesuffix(chr(92) + 'Z')}$'"
        case "minLength":
            return f"should be at least {limit} chars long"
        case "minItems" | "minProperties":
            return f"should have at least {limit} items"
        case "uniqueItems":
            return "has an item twice"
        case _:
            return error.message


def _duplicates(structural: Schema, document: Any) -> Iterator[Violation]:
    """Items of a list that is a map by some of their fields."""
    for schema, part, _, path in schema_nodes(structural, document, None):
        if schema.get("x-kubernetes-list-type") != "map":
            continue
        seen = set()
        for i, item in enumerate(part):
            key = tuple(item.get(name) for name in schema["x-kubernetes-list-map-keys"])
            if key in seen:
                yield Violation(written((*path, i)), f"Duplicate value: {', '.join(map(_shown, key))}")
            seen.add(key)


def _type_name(value: Any) -> str:
    names: dict[type, str] = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _shown(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return f'"{value if len(value) <= 100 else value[:97] + "..."}"'
        case dict() | list():
            return f'"{_type_name(value)}"'
        case _:
            return str(value)
