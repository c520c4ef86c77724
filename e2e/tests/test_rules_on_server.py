"""Each validation rule refuses on a real API server what it refuses in the folder, in the same words."""

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from aerostat_runtime.cluster import open_cluster
from aerostat_runtime.cluster.port import Cluster
from aerostat_testing.kubernetes.apiserver import ApiServer
from aerostat_testing.kubernetes.build import LATEST
from aerostat_testing.refusals import refusal
from aerostat_testing.rule_cases import CASE_IDS, CASES, Case

pytestmark = pytest.mark.cluster


@pytest.fixture
async def folder(tmp_path: Path) -> AsyncIterator[Cluster]:
    cluster = open_cluster(f"folder:{tmp_path / 'state'}")
    yield cluster
    await cluster.close()


@pytest.fixture
async def kubernetes(apiserver: ApiServer) -> AsyncIterator[Cluster]:
    cluster = open_cluster(f"kubernetes:?kubeconfig={apiserver.kubeconfig()}")
    yield cluster
    await cluster.close()


def without_values(said: str) -> str:
    return re.sub(r'Invalid value: ("[^"]*"|\d+): ', "Invalid value: ", said)


@pytest.mark.parametrize("case", CASES, ids=CASE_IDS)
async def test_a_rule_says_the_same_on_both(apiserver: ApiServer, folder: Cluster, kubernetes: Cluster, namespace: str, case: Case) -> None:
    said, there = await refusal(kubernetes, case, namespace), await refusal(folder, case, namespace)
    assert said is not None
    assert there is not None
    assert case.message in said
    if not apiserver.programs.version.startswith(f"{LATEST}."):  # older ones show the value's type instead of the value
        said, there = without_values(said), without_values(there)
    assert said == there
