"""Each validation rule refuses on a real API server what it refuses in the folder, in the same words."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from aerostat_core.ids import NamespacedName
from aerostat_core.resources import Resource
from aerostat_runtime.cluster import open_cluster
from aerostat_runtime.cluster.port import Cluster, InvalidResourceError
from aerostat_testing.kubernetes.apiserver import ApiServer
from aerostat_testing.rule_cases import CASE_IDS, CASES, Case, changed

pytestmark = pytest.mark.cluster


@pytest.fixture
async def folder(tmp_path: Path) -> AsyncIterator[Cluster]:
    cluster = open_cluster(f"folder:{tmp_path / 'state'}")
    yield cluster
    await cluster.close()


@pytest.fixture
async def kubernetes(apiserver: ApiServer) -> AsyncIterator[Cluster]:
    cluster = open_cluster(f"kubernetes:?kubeconfig={apiserver.kubeconfig()}", manager="rules")
    yield cluster
    await cluster.close()


async def refusal(cluster: Cluster, case: Case, namespace: str) -> str:
    """What is said about the case's bad object; its good one is let in."""

    def here(resource: Resource) -> Resource:
        return changed(resource, {"metadata.namespace": namespace})

    name = NamespacedName(namespace, case.passes["metadata"]["name"])
    await cluster.apply(here(case.replaced or case.passes))
    await cluster.apply(here(case.passes))
    if case.replaced is None:
        await cluster.delete(case.kind, name)
    try:
        with pytest.raises(InvalidResourceError) as refused:
            await cluster.apply(here(case.refused))
        return str(refused.value)
    finally:
        await cluster.delete(case.kind, name)


@pytest.mark.parametrize("case", CASES, ids=CASE_IDS)
async def test_a_rule_says_the_same_on_both(folder: Cluster, kubernetes: Cluster, case: Case) -> None:
    assert await refusal(kubernetes, case, "default") == await refusal(folder, case, "default")
