"""Fixtures: one cluster of two nodes for a whole run; a namespace for each test, collected into a folder when the test fails.

Mark such tests `cluster`. They run as root, and need `make cluster-tools` once.
"""

import re
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

from aerostat_testing.kubernetes.build import NodePrograms, node_programs
from aerostat_testing.kubernetes.fixtures import Uncaptured
from aerostat_testing.kubernetes.images import build
from aerostat_testing.kubernetes.images.buildah import Image
from aerostat_testing.kubernetes.nodes.cluster import Nodes
from aerostat_testing.kubernetes.nodes.namespace import NodesNamespace
from aerostat_testing.kubernetes.nodes.release import Release
from aerostat_testing.kubernetes.nodes.requirements import require

FAILURES: Final = Path(".aerostat/failures")  # below the root of the tree
TRANSCRIPTS: Final = Path(".aerostat/transcripts")
Tell = Callable[[str], None]
_COLLECTED: Final = ("nodes_namespace", "release")


@pytest.fixture(scope="session")
def found_node_programs(uncaptured: Uncaptured) -> NodePrograms:
    """What makes nodes, built first where it is missing, and it says so."""
    require()  # before the long build
    with uncaptured():
        return node_programs()


@pytest.fixture(scope="session")
def nodes(found_node_programs: NodePrograms, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Two of them."""
    with Nodes(tmp_path_factory.mktemp("nodes"), lambda: found_node_programs) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def images(nodes: Nodes, uncaptured: Uncaptured) -> Mapping[str, Image]:
    """Those of all components, which the nodes have; built first where they are missing, and it says so."""
    with uncaptured():
        built = build.images()
    nodes.add_images(built.values())
    return built


@pytest.fixture
def nodes_namespace(nodes: Nodes) -> Iterator[NodesNamespace]:
    namespace = NodesNamespace(nodes)
    yield namespace
    namespace.delete()


@pytest.fixture(scope="module")
def release(nodes: Nodes, images: Mapping[str, Image], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    """For the tests of a module; nothing is installed at first, and nothing is left."""
    assert images
    found = Release(nodes, tmp_path_factory.mktemp("release"))
    yield found
    found.remove()


@pytest.fixture(scope="module")
def tell(request: pytest.FixtureRequest, uncaptured: Uncaptured) -> Tell:
    """Says something at once, with the time since the module began, and keeps it in a file of the module."""
    transcript, began = request.config.rootpath / TRANSCRIPTS / f"{request.path.stem}.txt", time.monotonic()
    transcript.parent.mkdir(parents=True, exist_ok=True)
    transcript.write_text("")

    def say(text: str) -> None:
        line = f"{time.monotonic() - began:7.1f} s  {text}\n"
        with uncaptured(), transcript.open("a") as kept:
            sys.stderr.write(line)
            sys.stderr.flush()
            kept.write(line)

    return say


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and report.when != "teardown":
        for name in _COLLECTED:
            found = getattr(item, "funcargs", {}).get(name)
            if isinstance(found, NodesNamespace | Release):
                folder = item.config.rootpath / FAILURES / re.sub(r"[^\w.-]+", "-", item.nodeid)
                found.collect(folder)
                report.sections.append(("Kubernetes", f"objects, events and logs are in {folder}"))
    return report
