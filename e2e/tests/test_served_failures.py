"""What clients see when processes are killed under them, and what is left of everything when the parent is."""

import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from aerostat_testing.calls import chat, stream, text_of
from aerostat_testing.leftovers import shared_memory
from aerostat_testing.manifests import cpu_pool, model, slo
from aerostat_testing.standalone import Standalone
from aerostat_testing.waiting import wait_for

pytestmark = pytest.mark.engine

HELLO = [{"role": "user", "content": "Hello!"}]
N_LONG = 600  # tokens that take seconds


class Listener:
    """A client of one long stream, in a thread of its own: the test acts while it is under way."""

    def __init__(self, served: Standalone) -> None:
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


def test_the_life_of_one_run(standalone: Standalone, tiny_models: Mapping[str, Path]) -> None:
    """One run for the whole story, since each start of an engine takes a while."""
    before = shared_memory()
    standalone.write("all.yaml", cpu_pool(), slo(), model("qwen", tiny_models["qwen3"]))
    standalone.start()
    standalone.wait_ready("qwen")
    whole = text_of(list(stream(standalone.url, "qwen", "Count, and do not stop.", n_tokens=N_LONG)))

    agent_dies_and_no_stream_breaks(standalone, whole)
    engine_dies_and_the_stream_says_so(standalone)
    second_run_is_refused(standalone)

    standalone.remember_family()
    standalone.send(signal.SIGKILL)
    standalone.wait()
    wait_for(lambda: not standalone.survivors(), "all children end with a killed parent", limit=20)
    assert "no `aerostat up" in failing_get(standalone)
    assert shared_memory() <= before


def agent_dies_and_no_stream_breaks(served: Standalone, whole: str) -> None:
    engine_pids = {p.pid for p in served.descendants("aerostat_engine")}
    agent = served.child("aerostat_agent --node")
    with Listener(served) as client:
        agent.kill()
        wait_for(lambda: served.child("aerostat_agent --node").pid != agent.pid, "a new agent starts")
    assert client.events[-1] == {"done": True}
    assert text_of(client.events) == whole
    served.wait_ready("qwen", limit=30)
    assert {p.pid for p in served.descendants("aerostat_engine")} == engine_pids, "engines were adopted, not started again"
    assert chat(served.url, "qwen", HELLO).text
    assert "agent ended by SIGKILL" in served.said


def engine_dies_and_the_stream_says_so(served: Standalone) -> None:
    with Listener(served) as client:
        for process in served.descendants("aerostat_engine"):
            process.kill()
    assert client.events[-1]["error"]["code"] == "upstream_disconnected"
    # Held, over the restart, by the SLO's hold budget: the client need not know that the engine was away.
    assert chat(served.url, "qwen", HELLO).text
    served.wait_ready("qwen")


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
