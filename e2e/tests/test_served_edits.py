"""What is declared is edited while it is served: models come, change, sleep, wake and go; wrong manifests take nothing away."""

import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from aerostat_runtime.cluster.port import Kind
from aerostat_testing.calls import chat, post
from aerostat_testing.hub import LoopbackHub, files_of
from aerostat_testing.kubernetes.served import ServedOnKubernetes
from aerostat_testing.leftovers import shared_memory
from aerostat_testing.manifests import cpu_pool, model, slo
from aerostat_testing.served import Served
from aerostat_testing.standalone import Standalone
from aerostat_testing.waiting import wait_for

pytestmark = pytest.mark.engine

HELLO = [{"role": "user", "content": "Hello!"}]
TOKEN = "hf_of-a-reader"
PRIVATE = "hf://org/tiny"


@pytest.fixture
def hub(tiny_models: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    """With a private model."""
    with LoopbackHub() as running:
        running.add(PRIVATE.removeprefix("hf://"), files_of(tiny_models["qwen3"]), readers={TOKEN})
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        yield running


def private_source(served: Served) -> dict[str, Any]:
    """With a token that may read it; `aerostat up` has it in its environment."""
    if not isinstance(served, ServedOnKubernetes):
        return {"uri": PRIVATE}
    served.kubectl("create", "secret", "generic", "hub", f"--from-literal=token={TOKEN}")
    return {"uri": PRIVATE, "secretRef": {"name": "hub"}}


def test_the_life_of_a_declaration(
    served: Served, tiny_models: Mapping[str, Path], hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run for the whole story, since each start of an engine takes a while."""
    if isinstance(served, Standalone):
        monkeypatch.setenv("HF_TOKEN", TOKEN)
    before = shared_memory()
    served.write("pool.yaml", cpu_pool())
    sleeper = model("sleeper", tiny_models["llama"], min_replicas=0)
    served.write("sleeper.yaml", sleeper)
    served.start()

    a_missing_slo_is_named_and_heals(served)
    a_call_wakes_a_sleeping_model(served)
    a_wrong_manifest_takes_nothing_away(served, sleeper)
    a_model_that_cannot_be_served_says_why(served, tiny_models)
    a_changed_model_is_served_as_it_is_declared(served, tiny_models, hub)
    a_broken_source_takes_nothing_away(served, tiny_models)
    a_deleted_model_is_gone_for_clients(served)

    served.remember_family()
    served.send(signal.SIGINT)
    assert served.wait() == 0
    assert served.survivors() == []
    assert shared_memory() <= before
    if isinstance(served, Standalone):
        assert list(served.runtime.glob("aerostat-*/*")) == []
        assert served.said.endswith("stopped\n")


def a_missing_slo_is_named_and_heals(served: Served) -> None:
    missing = served.wait_condition("sleeper", "False", limit=20)
    assert "interactive" in missing["message"]
    served.write("slo.yaml", slo())
    served.wait_ready("sleeper", limit=20)


def a_call_wakes_a_sleeping_model(served: Served) -> None:
    assert served.engines() == []
    wait_for(lambda: listed(served) == ["sleeper"], "the router knows it")
    answer = chat(served.url, "sleeper", HELLO)
    assert answer.route == "wake"
    assert chat(served.url, "sleeper", HELLO).route != "wake"


def listed(served: Served) -> list[str]:
    return [m["id"] for m in httpx.get(f"{served.url}/v1/models", timeout=10).json().get("data", ())]


def a_wrong_manifest_takes_nothing_away(served: Served, sleeper: dict[str, object]) -> None:
    whole = yaml.safe_dump(sleeper)
    for text, named in ((whole.replace("minReplicas: 0", "minReplicas: 3"), "minReplicas"), (whole[: len(whole) // 2] + "\n  : [", "yaml")):
        assert named in served.refusal("sleeper.yaml", text).lower().replace("minreplicas", "minReplicas")
        assert chat(served.url, "sleeper", HELLO).text


def a_model_that_cannot_be_served_says_why(served: Served, tiny_models: Mapping[str, Path]) -> None:
    nowhere = tiny_models["llama"] / "nowhere"
    locked = model("locked", nowhere, source={"uri": PRIVATE, "secretRef": {"name": "nobody-s"}})
    served.write("wrong.yaml", model("huge", tiny_models["llama"], kv="64Gi"), model("lost", nowhere), locked)
    huge = served.wait_condition("huge", "False", limit=20)
    assert "64Gi" in huge["message"], huge
    wait_for(lambda: "nowhere" in served.condition("lost").get("message", ""), "the broken path is named", limit=40)
    wait_for(lambda: "nobody-s" in served.condition("locked").get("message", ""), "the missing Secret is named", limit=40)
    served.remove("wrong.yaml")
    served.wait_gone("lost", limit=20)


def a_changed_model_is_served_as_it_is_declared(served: Served, tiny_models: Mapping[str, Path], hub: LoopbackHub) -> None:
    changed = model("sleeper", tiny_models["qwen3"], source=private_source(served), servedName="renamed")
    served.write("sleeper.yaml", changed)
    old = {"model": "sleeper", "messages": HELLO, "max_tokens": 1}
    wait_for(lambda: post(served.url, old).status_code == httpx.codes.NOT_FOUND, "the old name is gone", limit=60)
    served.wait_ready("sleeper")
    assert chat(served.url, "renamed", HELLO).route != "wake", "Ready is said of what is declared now, not of what ran before"
    assert "model.safetensors" in hub.fetched()
    assert TOKEN not in served.said + served.logs(n_bytes=1 << 20) + str(served.objects(Kind.INSTANCE)) + str(served.objects(Kind.MODEL))


def a_broken_source_takes_nothing_away(served: Served, tiny_models: Mapping[str, Path]) -> None:
    """The engine that serves stays until one of the new declaration can start."""
    served.write("sleeper.yaml", model("sleeper", tiny_models["llama"] / "nowhere", servedName="renamed"))
    wait_for(lambda: "nowhere" in served.condition("sleeper")["message"], "the broken path is named", limit=60)
    assert served.condition("sleeper")["status"] == "False"
    assert served.condition("sleeper", "Available")["status"] == "True"
    assert chat(served.url, "renamed", HELLO).text


def a_deleted_model_is_gone_for_clients(served: Served) -> None:
    served.remove("sleeper.yaml")
    served.wait_gone("sleeper", limit=20)
    wait_for(lambda: listed(served) == [], "the router knows that it is gone")
    gone = post(served.url, {"model": "renamed", "messages": HELLO})
    assert gone.json()["error"]["code"] == "model_not_found"
    wait_for(lambda: served.engines() == [], "its engine ends", limit=30)
