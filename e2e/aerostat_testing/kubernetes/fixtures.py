"""Fixtures: one API server for a whole run, with our CRDs; a namespace for each test. Mark such tests `cluster`.

`pytest -m cluster --kubernetes-minor 1.34` runs them against another version.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from aerostat_testing.kubernetes.apiserver import ApiServer
from aerostat_testing.kubernetes.build import LATEST, helm, programs
from aerostat_testing.kubernetes.chart import Chart

pytest_plugins = ["aerostat_testing.kubernetes.nodes.fixtures"]
Uncaptured = Callable[[], AbstractContextManager[None]]
_OPTION = "--kubernetes-minor"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(_OPTION, default=LATEST, help=f"Kubernetes that tests marked `cluster` run against (default: {LATEST})")


@pytest.fixture(scope="session")
def uncaptured(request: pytest.FixtureRequest) -> Uncaptured:
    """Inside of it a build says how far it is, and that is seen at once."""
    inside: Uncaptured = request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled
    return inside


@pytest.fixture(scope="session")
def apiserver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, uncaptured: Uncaptured) -> Iterator[ApiServer]:
    """An API server that has our CRDs; its programs are built first where they are missing, and it says so."""
    with uncaptured():
        found = programs(request.config.getoption(_OPTION))
    with ApiServer(tmp_path_factory.mktemp("apiserver"), found) as server:
        server.install_crds()
        yield server


@pytest.fixture
def namespace(apiserver: ApiServer) -> str:
    """A fresh namespace."""
    return apiserver.create_namespace()


@pytest.fixture(scope="session")
def chart(apiserver: ApiServer, tmp_path_factory: pytest.TempPathFactory, uncaptured: Uncaptured) -> Chart:
    """The chart, rendered for that API server."""
    with uncaptured():
        program = helm()
    return Chart(helm=program, kubernetes=apiserver.programs.version, home=tmp_path_factory.mktemp("helm"))
