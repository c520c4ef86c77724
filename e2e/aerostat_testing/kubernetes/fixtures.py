"""Fixtures: one API server for a whole run, with our CRDs; a namespace for each test. Mark such tests `cluster`.

`pytest -m cluster --kubernetes-minor 1.34` runs them against another version.
"""

from collections.abc import Iterator

import pytest

from aerostat_testing.kubernetes.apiserver import ApiServer
from aerostat_testing.kubernetes.build import LATEST, helm, programs
from aerostat_testing.kubernetes.chart import Chart

pytest_plugins = ["aerostat_testing.kubernetes.nodes.fixtures"]
_OPTION = "--kubernetes-minor"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(_OPTION, default=LATEST, help=f"Kubernetes that tests marked `cluster` run against (default: {LATEST})")


@pytest.fixture(scope="session")
def apiserver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """An API server that has our CRDs; its programs are built first where they are missing, and it says so."""
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        found = programs(request.config.getoption(_OPTION))
    with ApiServer(tmp_path_factory.mktemp("apiserver"), found) as server:
        server.install_crds()
        yield server


@pytest.fixture
def namespace(apiserver: ApiServer) -> str:
    """A fresh namespace."""
    return apiserver.create_namespace()


@pytest.fixture(scope="session")
def chart(request: pytest.FixtureRequest, apiserver: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Chart:
    """The chart, rendered for that API server."""
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        program = helm()
    return Chart(helm=program, kubernetes=apiserver.programs.version, home=tmp_path_factory.mktemp("helm"))
