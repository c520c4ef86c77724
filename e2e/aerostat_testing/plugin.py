"""Fixtures shared by the suites of all components; loaded as a pytest plugin, since there are no `conftest.py` files."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from aerostat_testing.kubernetes.served import ServedOnKubernetes
from aerostat_testing.leaks import can_check_tasks, failing_on_leaked_children, failing_on_leaked_tasks
from aerostat_testing.served import Served
from aerostat_testing.standalone import Standalone

pytest_plugins = ["aerostat_testing.kubernetes.fixtures"]
WAYS = ("standalone", "kubernetes")
TINY_ARCHITECTURES = ("qwen3", "llama")


def pytest_configure() -> None:
    """Without a loop said to be absent, looptime's look for one makes one in a plain test, and nobody closes it."""
    asyncio.set_event_loop(None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and can_check_tasks(item.obj):
            item.obj = failing_on_leaked_tasks(item.obj)


@pytest.fixture(autouse=True)
def _no_leaked_children() -> Iterator[None]:
    with failing_on_leaked_children():
        yield


@pytest.fixture
def standalone(tmp_path: Path) -> Iterator[Standalone]:
    """An `aerostat up` of this test alone, over `tmp_path/manifests`: write manifests, then `start()` it."""
    with Standalone(tmp_path) as run:
        yield run


@pytest.fixture(params=WAYS)
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Served]:
    """Aerostat of this test alone, in each way of running it."""
    with _served(request, tmp_path) as run:
        yield run


@pytest.fixture(scope="module", params=WAYS)
def shared_served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One for all tests of a module, since an engine takes half a minute to start."""
    with _served(request, tmp_path_factory.mktemp("served")) as run:
        yield run


def _served(request: pytest.FixtureRequest, root: Path) -> Served:
    if request.param == "standalone":
        return Standalone(root)
    return ServedOnKubernetes(root, request.getfixturevalue("apiserver"), request.getfixturevalue("chart"))


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Folders of generated models by architecture, each with another KV shape."""
    folder = tmp_path_factory.mktemp("tiny")
    for architecture in TINY_ARCHITECTURES:
        command = [sys.executable, "-m", "aerostat_engine.tiny", str(folder / architecture), "--arch", architecture]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    return {architecture: folder / architecture for architecture in TINY_ARCHITECTURES}
