"""What each adapter of `Cluster` says about the cases of the validation rules.

`python -m aerostat_testing.refusals [MINOR]` prints them side by side as a table, from a real API server and from the folder;
its exit code is 1 when they differ.
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from aerostat_core.ids import NamespacedName
from aerostat_core.resources import Resource
from aerostat_runtime.cluster import open_cluster
from aerostat_runtime.cluster.port import Cluster, InvalidResourceError
from aerostat_testing.kubernetes.apiserver import ApiServer
from aerostat_testing.kubernetes.build import LATEST, programs
from aerostat_testing.rule_cases import CASES, Case, changed


async def refusal(cluster: Cluster, case: Case, namespace: str) -> str | None:
    """What is said about the case's bad object; None: it is let in. Its neighbour is written before, and must pass."""

    def here(resource: Resource) -> Resource:
        return changed(resource, {"metadata.namespace": namespace})

    passes, refused = here(case.passes), here(case.refused)
    names = {NamespacedName(namespace, resource["metadata"]["name"]) for resource in (passes, refused)}
    if case.replaced is not None:
        await cluster.apply(here(case.replaced))
    await cluster.apply(passes)
    if case.replaced is None:
        for name in names:
            await cluster.delete(case.kind, name)
    try:
        await cluster.apply(refused)
    except InvalidResourceError as error:
        return str(error)
    finally:
        for name in names:
            await cluster.delete(case.kind, name)
    return None


async def refusals(cluster: Cluster) -> list[str | None]:
    """Of all cases, in their order."""
    try:
        return [await refusal(cluster, case, "default") for case in CASES]
    finally:
        await cluster.close()


def table(server: list[str | None], folder: list[str | None]) -> str:
    """In Markdown: what was written, what was said, and whether both said it."""
    rows = ["| kind | written | said | same in the folder |", "| --- | --- | --- | --- |"]
    for case, here, there in zip(CASES, server, folder, strict=True):
        written = ", ".join(f"`{path}: {'(absent)' if value.__class__ is object else value}`" for path, value in case.bad.items())
        said = (here or "let in").partition(" is invalid: ")[2] or here or "let in"
        rows.append(f"| {case.kind} | {written[:120]} | {said} | {'yes' if here == there else f'no: {there}'} |")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m aerostat_testing.refusals", description="Compare what both adapters refuse.")
    parser.add_argument("minor", nargs="?", default=LATEST, help=f"of Kubernetes (default {LATEST})")
    found = programs(parser.parse_args().minor)
    with tempfile.TemporaryDirectory() as path, ApiServer(Path(path) / "server", found) as server:
        server.install_crds()
        over_server = asyncio.run(refusals(open_cluster(f"kubernetes:?kubeconfig={server.kubeconfig()}")))
        over_folder = asyncio.run(refusals(open_cluster(f"folder:{Path(path) / 'state'}")))
    n_same = sum(here == there for here, there in zip(over_server, over_folder, strict=True))
    sys.stdout.write(f"{table(over_server, over_folder)}\n\n{n_same} of {len(CASES)} the same, Kubernetes {found.version}\n")
    return 0 if n_same == len(CASES) else 1


if __name__ == "__main__":
    sys.exit(main())
