"""CRDs as they are read: per kind the structural schema, and the JSON schema that says the same.

A structural schema leaves much to the API server: unknown fields are refused, a missing value takes its default, null
counts as missing. This module spells that out for the standard validator. What a rule (CEL) says is not in here.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

import aerostat_runtime
from aerostat_core.errors import SettingError

Schema = Mapping[str, Any]
Path_ = tuple[str | int, ...]

_KEYWORDS = frozenset(
    {"type", "format", "enum", "minimum", "maximum", "required"}
    | {f"{end}{what}" for end in ("min", "max") for what in ("Length", "Items", "Properties")}
)
_DNS_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with one"
)
_QUALIFIED = r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)"
_STRING = {"type": "string"}

# What an API server checks of every object's metadata. Fields that it sets itself are accepted and have no effect.
OBJECT_META: Final[Schema] = {
    "type": "object",
    "required": ["name"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "maxLength": 253, "pattern": rf"^{_DNS_LABEL}(\.{_DNS_LABEL})*\Z", "x-says": _SUBDOMAIN},
        "namespace": {"type": "string", "maxLength": 63, "pattern": rf"^{_DNS_LABEL}\Z", "x-says": "a lowercase RFC 1123 label"},
        "labels": {
            "type": "object",
            "propertyNames": {
                "pattern": rf"^(?=.{{1,317}}\Z)({_DNS_LABEL}(\.{_DNS_LABEL})*/)?{_QUALIFIED}\Z",
                "x-says": "no name of a label",
            },
            "additionalProperties": {"type": "string", "maxLength": 63, "pattern": rf"^{_QUALIFIED}?\Z", "x-says": "no value of a label"},
        },
        "annotations": {"type": "object", "additionalProperties": _STRING},
        "ownerReferences": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["apiVersion", "kind", "name", "uid"],
                "additionalProperties": False,
                "properties": {key: _STRING for key in ("apiVersion", "kind", "name", "uid")}
                | {key: {"type": "boolean"} for key in ("controller", "blockOwnerDeletion")},
            },
        },
        "uid": _STRING,
        "resourceVersion": _STRING,
        "creationTimestamp": {"type": ["string", "null"]},
        "generation": {"type": "integer"},
        "managedFields": {"type": "array"},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceSchema:
    """One kind. `structural` has defaults and rules; `spec_json` and `status_json` are for the standard validator."""

    kind: str
    api_version: str
    structural: Schema
    object_json: Schema  # all but the status
    status_json: Schema


def crds_folder() -> Path:
    """Where this build's CRDs are: beside the package when installed, at the top of a checkout."""
    package = Path(aerostat_runtime.__file__).parent
    for folder in (package / "crds", package.parents[1] / "crds"):
        if (folder / "models.yaml").is_file():
            return folder
    raise SettingError(f"the CRDs are missing beside {package}: install the package again")


def load_schemas(folder: Path) -> dict[str, ResourceSchema]:
    """By kind, all CRDs of a folder."""
    crds = (yaml.safe_load(path.read_text()) for path in sorted(folder.glob("*.yaml")))
    schemas = (_resource_schema(crd["spec"]) for crd in crds)
    return {schema.kind: schema for schema in schemas}


def _resource_schema(spec: Schema) -> ResourceSchema:
    (version,) = spec["versions"]
    structural = version["schema"]["openAPIV3Schema"]
    whole = json_schema(structural)
    properties = whole["properties"]
    body = {key: value for key, value in properties.items() if key != "status"}
    return ResourceSchema(
        kind=spec["names"]["kind"],
        api_version=f"{spec['group']}/{version['name']}",
        structural=structural,
        object_json={**whole, "properties": body | {"metadata": OBJECT_META}, "required": ["metadata", *whole.get("required", ())]},
        status_json={"type": "object", "properties": {"status": properties["status"]}},
    )


def json_schema(structural: Schema) -> dict[str, Any]:
    """The JSON schema (2020-12) of a structural schema."""
    out = {key: value for key, value in structural.items() if key in _KEYWORDS}
    if structural.get("nullable"):
        out["type"] = [structural["type"], "null"]
    if "pattern" in structural:  # RE2's $ is the end of the text, Python's also stands before a last newline
        pattern = structural["pattern"]
        out["pattern"] = pattern.removesuffix("$") + r"\Z" if pattern.endswith("$") else pattern
    if structural.get("x-kubernetes-list-type") == "set":
        out["uniqueItems"] = True
    if "items" in structural:
        out["items"] = json_schema(structural["items"])
    if "additionalProperties" in structural:
        out["additionalProperties"] = json_schema(structural["additionalProperties"])
    elif structural.get("type") == "object":
        out["properties"] = {name: json_schema(child) for name, child in structural.get("properties", {}).items()}
        out["additionalProperties"] = bool(structural.get("x-kubernetes-preserve-unknown-fields"))
    return out


def with_defaults(structural: Schema, value: Any) -> Any:
    """A copy of the value with the defaults of what is missing or null."""
    if isinstance(value, dict):
        out = dict(value)
        properties, more = structural.get("properties", {}), structural.get("additionalProperties")
        for name, child in properties.items():
            if "default" in child and (name not in out or (out[name] is None and not child.get("nullable"))):
                out[name] = copy.deepcopy(child["default"])
        for name in out:
            child = properties.get(name, more)
            if child is not None:
                out[name] = with_defaults(child, out[name])
        return out
    if isinstance(value, list) and "items" in structural:
        return [with_defaults(structural["items"], item) for item in value]
    return value


def schema_nodes(structural: Schema, value: Any, old: Any, path: Path_ = ()) -> Iterator[tuple[Schema, Any, Any, Path_]]:
    """Each part of a value with its schema, and with what it was before (None: new, or not to be matched up)."""
    yield structural, value, old, path
    if isinstance(value, dict):
        properties, more = structural.get("properties", {}), structural.get("additionalProperties")
        for name, item in value.items():
            child = properties.get(name, more)
            if child is not None:
                yield from schema_nodes(child, item, old.get(name) if isinstance(old, dict) else None, (*path, name))
    elif isinstance(value, list) and "items" in structural:
        for i, item in enumerate(value):
            yield from schema_nodes(structural["items"], item, None, (*path, i))


def written(path: Path_) -> str:
    """`spec.models[0].name`"""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
