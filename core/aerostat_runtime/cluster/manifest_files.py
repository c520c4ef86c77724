"""Text of a manifest file to documents that know their lines. Nothing is known here of what the documents mean.

Stricter than YAML where a manifest would surprise its writer: a key that stands twice, a value that JSON cannot hold.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson
import yaml

from aerostat_core.errors import AerostatError

# Of one document. Aliases of aliases stand for billions in a few lines.
MAX_VALUES: Final = 100_000


class ManifestSyntaxError(AerostatError):
    """The file cannot be read as documents."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line
        self.message = message


@dataclass(frozen=True, slots=True)
class Document:
    """One object as it was written. `line` is where it begins, from 1."""

    resource: Any
    line: int
    node: yaml.Node | None = None

    def line_of(self, path: str) -> int:
        """Where a field stands (`spec.models[0].name`), or the innermost parent of it that stands anywhere."""
        return self.line if self.node is None else _line_of(self.node, path, self.line)


def parse_yaml(text: str) -> Sequence[Document]:
    """All documents but empty ones. Raises ManifestSyntaxError."""
    try:
        return _documents(_Loader(text))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        said = error.problem or error.context or "no YAML"
        raise ManifestSyntaxError(mark.line + 1 if mark else 1, f"no YAML: {said}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ManifestSyntaxError(line, f"no YAML: {error.reason}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ManifestSyntaxError(1, f"no YAML: {error}") from error


def parse_json(text: str) -> Sequence[Document]:
    """The one document of the file. Raises ManifestSyntaxError."""
    try:
        value = json.loads(text, object_pairs_hook=_object_without_duplicates)
    except json.JSONDecodeError as error:
        raise ManifestSyntaxError(error.lineno, f"no JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise ManifestSyntaxError(1, f"no JSON: {error}") from error
    return [Document(_json_value(value, 1), 1)]


def _documents(loader: "_Loader") -> Sequence[Document]:
    documents = []
    while loader.check_node() and (node := loader.get_node()) is not None:
        line = node.start_mark.line + 1
        if _n_values(node, {}) > MAX_VALUES:
            raise ManifestSyntaxError(line, f"stands for more than {MAX_VALUES} values with its aliases written out: write less")
        value = loader.construct_document(node)
        if value is not None:
            documents.append(Document(_json_value(value, line), line, node))
    return documents


class _Loader(yaml.SafeLoader):
    """Dates stay text, as in JSON; a key that stands twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"the key {key.value!r} stands twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _n_values(node: yaml.Node, known: dict[int, int]) -> int:
    """How many values it stands for, aliases written out. Each node is counted once; one that contains itself is too many."""
    if (found := known.get(id(node))) is not None:
        return found
    known[id(node)] = MAX_VALUES + 1  # until it is counted
    children: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        children = [child for pair in node.value for child in pair]
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    known[id(node)] = n = 1 + sum(_n_values(child, known) for child in children)
    return n


def _json_value(value: Any, line: int) -> Any:
    try:
        same = orjson.loads(orjson.dumps(value))
    except TypeError as error:
        raise ManifestSyntaxError(line, f"has a value that JSON cannot hold: {error}") from error
    if same != value:
        raise ManifestSyntaxError(line, "has a value that JSON cannot hold: numbers must be finite")
    return same


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} stands twice")
    return out


def _line_of(node: yaml.Node, path: str, line: int) -> int:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            rest = path.removeprefix(key.value) if isinstance(key, yaml.ScalarNode) else path
            if rest != path and (not rest or rest[0] in ".["):
                return _line_of(value, rest.removeprefix("."), key.start_mark.line + 1)
    elif isinstance(node, yaml.SequenceNode) and path.startswith("["):
        index, _, rest = path[1:].partition("]")
        if int(index) < len(node.value):
            item = node.value[int(index)]
            return _line_of(item, rest.removeprefix("."), item.start_mark.line + 1)
    return line
