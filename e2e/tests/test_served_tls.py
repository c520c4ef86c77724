"""A session through router, agent and a real engine, each with a TLS folder as its pod has. All is renewed between its turns."""

import shlex
import sys
import tempfile
from pathlib import Path

import httpx
import pytest

from aerostat_core.resources import API_VERSION
from aerostat_testing.agent_fakes import instance_resource
from aerostat_testing.agent_processes import node_processes
from aerostat_testing.calls import chat, stream
from aerostat_testing.certificates import Authority
from aerostat_testing.ports import free_port
from aerostat_testing.waiting import eventually

pytestmark = pytest.mark.engine

START_LIMIT = 180.0
PROGRAMS = {"launcher": "launch", "preparer": "prepare"}


async def test_a_sessions_second_turn_is_a_lease_hit_by_tls_also_with_new_certificates(tmp_path: Path) -> None:
    from aerostat_engine.tiny import write

    write(tmp_path / "m")
    uri, authority, port = f"file://{tmp_path / 'm'}", Authority(), free_port()
    model = {"source": {"uri": uri}, "pool": "cpu", "servedName": "a"}
    metadata = {"name": "a", "namespace": "default"}
    programs = [f"--{role}={shlex.join([sys.executable, '-m', f'aerostat_engine.{module}'])}" for role, module in PROGRAMS.items()]
    with tempfile.TemporaryDirectory(prefix="ae-") as folder:  # a Unix socket's path is short
        async with node_processes(tmp_path, authority, run_dir=Path(folder)) as node:
            await node.cluster.apply({"apiVersion": API_VERSION, "kind": "Model", "metadata": metadata, "spec": model})
            instance = instance_resource(uri, "a", memory="4Gi", kv="16Mi")
            instance["spec"]["routing"]["leaseTTL"] = "30s"
            await node.cluster.apply(instance)
            node.start_keeper("--engine-host", "::1")
            node.start_agent(*programs)
            node.start_router(port)
            status = await node.until_state("a", "Open", limit=START_LIMIT)
            url = f"http://127.0.0.1:{port}"
            turn = {"role": "user", "content": "count: " + ", ".join(map(str, range(40)))}
            await eventually(lambda: httpx.get(f"{url}/v1/models").json()["data"], "the router knows the model", limit=30)
            first = chat(url, "a", [turn], session="s")
            busy = stream(url, "a", "go on", n_tokens=200)  # on the connection that the first turn left
            next(busy)
            node.renew(Authority())
            answer = {"role": "assistant", "content": first.text}
            second = chat(url, "a", [turn, answer, {"role": "user", "content": "and on"}], session="s")
            assert (first.route, second.route) == ("residency", "lease")
            assert second.cached_tokens >= first.prompt_tokens // 16 * 16
            assert list(busy)[-1] == {"done": True}
            assert f"telemetry of {status['agentAddress']} ended" not in node.said("router")
