"""Writes docs/reference/*.md, the reference of our kinds, from `crds/`, which says it all: descriptions, ranges, rules.

`python scripts/generate_crd_reference.py [--output FOLDER]`. A test generates it anew and compares.
"""

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).resolve().parents[1]
CRDS: Final = ("models.yaml", "pools.yaml", "slos.yaml", "instances.yaml")
SIZE: Final = r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?$"
PIPE: Final = "\\|"  # within a cell of a table
DURATION: Final = r"^([0-9]{1,6}(\.[0-9]{1,18})?(ms|s|m|h)){1,4}$"

Schema = Mapping[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the reference of our kinds from crds/.")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/reference", help="folder to write to (default docs/reference)")
    output: Path = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    for name in CRDS:
        crd = yaml.safe_load((ROOT / "crds" / name).read_text())
        (output / f"{crd['spec']['names']['singular']}.md").write_text(page(crd, source=f"crds/{name}"))


def page(crd: Schema, *, source: str) -> str:
    spec, names = crd["spec"], crd["spec"]["names"]
    (version,) = spec["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    lines = [
        f"# {names['kind']}",
        "",
        f"<!-- Generated from {source} by scripts/generate_crd_reference.py: edit that file, then run it. -->",
        "",
        schema["description"],
        "",
        *_table(("", ""), _identity(spec, version)),
        "",
        "A size is written as `64Gi`, a duration as `800ms`, `1.5s` or `1h30m`. Unknown fields are refused.",
    ]
    for part in ("spec", "status"):
        described = schema["properties"][part]
        lines += ["", f"## {part}", "", described["description"], "", *_fields(described, part)]
    lines += ["", "## Conditions", "", schema["properties"]["status"]["properties"]["conditions"]["description"]]
    lines += ["", "## Rules", "", "Checked when an object is written, after the defaults are filled in.", ""]
    lines += _table(("field", "rule (CEL)", "what it says when it is broken"), _rules(schema, ""))
    lines += ["", f"## Columns of `kubectl get {names['plural']}`", ""]
    lines += _table(("column", "shows", ""), map(_column, version["additionalPrinterColumns"]))
    return "\n".join(lines) + "\n"


def _identity(spec: Schema, version: Schema) -> Iterator[tuple[str, str]]:
    names = spec["names"]
    yield "apiVersion", _code(f"{spec['group']}/{version['name']}")
    yield "kind", _code(names["kind"])
    yield "kubectl", ", ".join(_code(name) for name in dict.fromkeys((names["plural"], names["singular"], *names["shortNames"])))
    yield "belongs to", "a namespace" if spec["scope"] == "Namespaced" else "the cluster"
    if scale := version["subresources"].get("scale"):
        yield "`/scale`", f"sets {_code(scale['specReplicasPath'][1:])}, reports {_code(scale['statusReplicasPath'][1:])}"


def _fields(schema: Schema, path: str) -> list[str]:
    return _table(("field", "type", "default", "meaning"), _rows(schema, path))


def _rows(schema: Schema, path: str) -> Iterator[tuple[str, str, str, str]]:
    """Of all fields below, depth first, in the order of the CRD."""
    for name, field in schema.get("properties", {}).items():
        here = f"{path}.{name}"
        default = _code(_yaml(field["default"])) if "default" in field else "required" if name in schema.get("required", ()) else ""
        yield _code(here), _type(field), default, _meaning(field)
        yield from _rows(field, here)
        if field["type"] == "array":
            yield from _rows(field["items"], f"{here}[]")


def _type(field: Schema) -> str:
    if field["type"] == "array":
        return f"list of {_type(field['items'])}s"
    if "additionalProperties" in field:
        return f"map of {_type(field['additionalProperties'])}s"
    known = {SIZE: "size", DURATION: "duration"}.get(field.get("pattern", ""))
    return known or ("time" if field.get("format") == "date-time" else "enum" if "enum" in field else str(field["type"]))


def _meaning(field: Schema) -> str:
    text, values = _explained(field["description"], field.get("enum", ()))
    parts = [text] if text else []
    parts += [f"{_code(value)}: {explanation}" for value, explanation in values.items()]
    parts += [" ".join(bounds)] if (bounds := list(_bounds(field))) else []
    return "<br>".join(parts)


def _explained(description: str, values: Iterable[str]) -> tuple[str, dict[str, str]]:
    """A description without what it says of each value of an enum, and that: one sentence each, `Value: …`."""
    explained = {}
    for value in values:
        found = re.search(rf"(?:^|(?<=[.] )){re.escape(value)}: (.+?[.])(?= |$)", description)
        explained[value] = found[1] if found else ""
        if found:
            description = description[: found.start()] + description[found.end() :].lstrip()
    return description.strip(), explained


def _bounds(field: Schema) -> Iterator[str]:
    match field.get("minimum"), field.get("maximum"):
        case None, None:
            pass
        case low, None:
            yield f"At least {low}."
        case low, high:
            yield f"From {low} to {high}."
    for key, unit in (("Items", "entries"), ("Properties", "entries")):
        if field.get(f"min{key}"):
            yield f"At least {field[f'min{key}']} {'entry' if field[f'min{key}'] == 1 else unit}."
        if f"max{key}" in field:
            yield f"At most {field[f'max{key}']} {unit}."
    if "pattern" in field and field["pattern"] not in (SIZE, DURATION):
        yield f"Matches {_code(field['pattern'])}."
    if "maxLength" in field and _type(field) == "string":
        yield f"At most {field['maxLength']} characters."


def _rules(schema: Schema, path: str) -> Iterator[tuple[str, str, str]]:
    for rule in schema.get("x-kubernetes-validations", ()):
        field_path = path + rule.get("fieldPath", "")
        yield _code(field_path) if field_path else "the object", _code(rule["rule"]), rule["message"]
    for name, field in schema.get("properties", {}).items():
        yield from _rules(field, f"{path}.{name}".removeprefix("."))
    if "items" in schema:
        yield from _rules(schema["items"], f"{path}[]")


def _column(column: Schema) -> tuple[str, str, str]:
    notes = [column.get("description", ""), "With `-o wide` only." if column.get("priority") else ""]
    return column["name"], _code(column["jsonPath"][1:]), " ".join(filter(None, notes))


def _yaml(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=1000).removesuffix("...\n").strip()


def _code(text: str) -> str:
    return f"`{' '.join(text.split())}`"


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    written = [header, tuple("---" for _ in header), *rows]
    return [f"| {' | '.join(text.replace('|', PIPE) for text in row)} |" for row in written]


if __name__ == "__main__":
    main()
