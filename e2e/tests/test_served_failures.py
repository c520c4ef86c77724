"""What clients see when processes are killed under them, and what is left of everything when the parent is."""

import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from aerostat_core.defaults import STATUS_FIGURES_EVERY
from aerostat_testing.calls import chat, stream, text_of
from aerostat_testing.kubernetes.served import ServedOnKubernetes
from aerostat_testing.leftovers import shared_memory
from aerostat_testing.manifests import cpu_pool, model, slo
from aerostat_testing.served import Served
from aerostat_testing.standalone import Standalone
from aerostat_testing.waiting import wait_for

pytestmark = pytest.mark.engine

HELLO = [{"role": "user", "content": "Hello!"}]
N_LONG = 600  # tokens that take seconds


class Listener:
    """A client of one long stream, in a thread of its own: the test acts while it is under way."""

    def __init__(self, served: Served) -> None:
        self.events: list[dict[str, Any]] = []
        self._served = served
        self._thread = threading.Thread(target=self._listen)

    def __enter__(self) -> "Listener":
        self._thread.start()
        wait_for(lambda: len(self.events) > 5, "the stream is under way", limit=60)
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive(), "the stream neither ended nor failed"

    def _listen(self) -> None:
        for event in stream(self._served.url, "qwen", "Count, and do not stop.", n_tokens=N_LONG, session="long"):
            self.events.append(event)


def test_the_life_of_one_run(served: Served, tiny_models: Mapping[str, Path]) -> None:
    """One run for the whole story, since each start of an engine takes a while."""
    before = shared_memory()
    served.write("all.yaml", cpu_pool(), slo(), model("qwen", tiny_models["qwen3"]))
    served.start()
    served.wait_ready("qwen")
    whole = text_of(list(stream(served.url, "qwen", "Count, and do not stop.", n_tokens=N_LONG)))

    agent_dies_and_no_stream_breaks(served, whole)
    engine_dies_and_the_stream_says_so(served)
    if isinstance(served, ServedOnKubernetes):
        api_server_dies_and_nobody_notices(served, whole, tiny_models)
        calls_cost_no_writes(served)
    if isinstance(served, Standalone):
        second_run_is_refused(served)

    served.remember_family()
    served.send(signal.SIGKILL)
    served.wait()
    wait_for(lambda: not served.survivors(), "all children end with a killed parent", limit=20)
    assert shared_memory() <= before
    if isinstance(served, Standalone):
        assert "no `aerostat up" in failing_get(served)


def agent_dies_and_no_stream_breaks(served: Served, whole: str) -> None:
    engine_pids = {p.pid for p in served.engines()}
    agent = served.child("aerostat_agent --node")
    with Listener(served) as client:
        agent.kill()
        wait_for(lambda: served.child("aerostat_agent --node").pid != agent.pid, "a new agent starts", limit=60)
    assert client.events[-1] == {"done": True}
    assert text_of(client.events) == whole
    served.wait_ready("qwen", limit=30)
    assert {p.pid for p in served.engines()} == engine_pids, "engines were adopted, not started again"
    assert chat(served.url, "qwen", HELLO).text
    assert "ended by SIGKILL" in served.said


def engine_dies_and_the_stream_says_so(served: Served) -> None:
    with Listener(served) as client:
        for process in served.engines():
            process.kill()
    assert client.events[-1]["error"]["code"] == "upstream_disconnected"
    # Held, over the restart, by the SLO's hold budget: the client need not know that the engine was away.
    assert chat(served.url, "qwen", HELLO).text
    served.wait_ready("qwen")


def api_server_dies_and_nobody_notices(served: ServedOnKubernetes, whole: str, tiny_models: Mapping[str, Path]) -> None:
    pids = {p.pid for p in served.descendants()}
    with Listener(served) as client:
        served.server.kill()
        assert chat(served.url, "qwen", HELLO).text
    assert client.events[-1] == {"done": True}
    assert text_of(client.events) == whole
    assert chat(served.url, "qwen", HELLO).text
    served.server.start()
    # Everybody watches again: the operator hears of it, the agent hears of that, and the router of both.
    served.write("second.yaml", model("later", tiny_models["llama"], min_replicas=0))
    served.wait_ready("later", limit=60)
    assert {p.pid for p in served.descendants()} == pids, "an outage is no reason to start anew"
    served.remove("second.yaml")


def calls_cost_no_writes(served: ServedOnKubernetes) -> None:
    """What is declared is written when it changes, and figures with the slow heartbeat, however many calls there are."""
    before, began = n_status_writes(served), time.monotonic()
    for _ in range(40):
        assert chat(served.url, "qwen", HELLO, n_tokens=1).text
    # One more for the heartbeat that is due, by the agent of the Instance and by the operator of each object that shows a figure.
    heartbeats = 1 + int((time.monotonic() - began) / STATUS_FIGURES_EVERY)
    assert n_status_writes(served) - before <= 4 * heartbeats


def n_status_writes(served: ServedOnKubernetes) -> int:
    lines = served.server.kubectl("get", "--raw", "/metrics").splitlines()
    written = [line for line in lines if line.startswith("apiserver_request_total{") and 'subresource="status"' in line]
    return int(sum(float(line.rsplit(" ", 1)[1]) for line in written if 'group="aerostat.dev"' in line and 'verb="PATCH"' in line))


def second_run_is_refused(served: Standalone) -> None:
    refused = served.command("up", str(served.manifests))
    assert refused.returncode == 1
    assert f"pid {served.pid}" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    busy = served.command("up", str(served.manifests.parent), "--port", served.routers[0].http.rpartition(":")[2])
    assert busy.returncode == 1
    assert "--port" in busy.stderr


def failing_get(served: Standalone) -> str:
    done = served.command("get", "models", "--dir", str(served.manifests))
    assert done.returncode == 1
    return done.stderr
