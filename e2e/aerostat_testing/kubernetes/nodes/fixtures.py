"""Fixtures: one cluster of two nodes for a whole run; a namespace for each test, collected into a folder when the test fails.

Mark such tests `cluster`. They run as root, and need `make cluster-tools` once.
"""

import re
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

from aerostat_testing.kubernetes.build import NodePrograms, node_programs
from aerostat_testing.kubernetes.fixtures import Uncaptured
from aerostat_testing.kubernetes.images import build
from aerostat_testing.kubernetes.images.buildah import Image
from aerostat_testing.kubernetes.nodes.cluster import Nodes
from aerostat_testing.kubernetes.nodes.namespace import NodesNamespace
from aerostat_testing.kubernetes.nodes.requirements import require

FAILURES: Final = Path(".aerostat/failures")  # below the root of the tree
_FIXTURE: Final = "nodes_namespace"


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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    namespace = getattr(item, "funcargs", {}).get(_FIXTURE)
    if report.failed and report.when != "teardown" and isinstance(namespace, NodesNamespace):
        folder = item.config.rootpath / FAILURES / re.sub(r"[^\w.-]+", "-", item.nodeid)
        namespace.collect(folder)
        report.sections.append(("Kubernetes", f"objects, events and logs of {namespace.name} are in {folder}"))
    return report
