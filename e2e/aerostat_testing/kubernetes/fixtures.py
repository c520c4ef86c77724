"""Fixtures: one API server for a whole run, with our CRDs; a namespace for each test. Mark such tests `cluster`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from aerostat_testing.kubernetes.apiserver import ApiServer
from aerostat_testing.kubernetes.build import LATEST, programs


@pytest.fixture(scope="session")
def kubernetes_minor(request: pytest.FixtureRequest) -> str:
    """The minor version to run; a test module that wants others parametrises it, indirectly."""
    return str(getattr(request, "param", LATEST))


@pytest.fixture(scope="session")
def apiserver(request: pytest.FixtureRequest, kubernetes_minor: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """An API server that has our CRDs; its programs are built first where they are missing, and it says so."""
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        found = programs(kubernetes_minor)
    with ApiServer(_short(tmp_path_factory), found) as server:
        server.install_crds()
        yield server


@pytest.fixture
def namespace(apiserver: ApiServer) -> str:
    """A fresh namespace."""
    return apiserver.create_namespace()


def _short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("apiserver")
