"""Fixtures: one cluster of two nodes for a whole run; a namespace for each test, collected into a folder when the test fails.

Mark such tests `cluster`. They run as root, and need `make cluster-tools` once.
"""

import re
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Final

import pytest

from aerostat_testing.kubernetes.build import node_programs
from aerostat_testing.kubernetes.nodes.cluster import Nodes
from aerostat_testing.kubernetes.nodes.namespace import NodesNamespace
from aerostat_testing.kubernetes.nodes.requirements import require

FAILURES: Final = Path(".aerostat/failures")  # below the root of the tree
_FIXTURE: Final = "nodes_namespace"


@pytest.fixture(scope="session")
def nodes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Two nodes; their programs are built first where they are missing, and it says so."""
    capture = request.config.pluginmanager.getplugin("capturemanager")
    require()  # before the long build
    with capture.global_and_fixture_disabled():
        found = node_programs()
    with Nodes(tmp_path_factory.mktemp("nodes"), found) as cluster:
        yield cluster


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
