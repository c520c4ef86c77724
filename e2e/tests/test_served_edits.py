"""A folder that is edited while it is served: models come, change, sleep, wake and go; wrong manifests take nothing away."""

import signal
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest

from aerostat_testing.calls import chat, post
from aerostat_testing.leftovers import shared_memory
from aerostat_testing.manifests import cpu_pool, model, slo
from aerostat_testing.standalone import Standalone
from aerostat_testing.waiting import wait_for

pytestmark = pytest.mark.engine

HELLO = [{"role": "user", "content": "Hello!"}]


def test_the_life_of_a_folder(standalone: Standalone, tiny_models: Mapping[str, Path]) -> None:
    """One run for the whole story, since each start of an engine takes a while."""
    before = shared_memory()
    standalone.write("pool.yaml", cpu_pool())
    sleeper = model("sleeper", tiny_models["llama"], min_replicas=0)
    standalone.write("sleeper.yaml", sleeper)
    standalone.start()

    a_missing_slo_is_named_and_heals(standalone)
    a_call_wakes_a_sleeping_model(standalone)
    a_wrong_manifest_takes_nothing_away(standalone, sleeper)
    a_model_that_cannot_be_served_says_why(standalone, tiny_models)
    a_changed_model_is_served_as_it_is_declared(standalone, tiny_models)
    a_deleted_model_is_gone_for_clients(standalone)

    standalone.remember_family()
    standalone.send(signal.SIGINT)
    assert standalone.wait() == 0
    assert standalone.survivors() == []
    assert list(standalone.runtime.glob("aerostat-*/*")) == []
    assert standalone.said.endswith("stopped\n")
    assert shared_memory() <= before


def a_missing_slo_is_named_and_heals(served: Standalone) -> None:
    missing = served.wait_condition("sleeper", "False", limit=20)
    assert "interactive" in missing["message"]
    served.write("slo.yaml", slo())
    served.wait_ready("sleeper", limit=20)


def a_call_wakes_a_sleeping_model(served: Standalone) -> None:
    assert served.descendants("aerostat_engine") == []
    assert [m["id"] for m in httpx.get(f"{served.url}/v1/models", timeout=10).json()["data"]] == ["sleeper"]
    answer = chat(served.url, "sleeper", HELLO)
    assert answer.route == "wake"
    assert chat(served.url, "sleeper", HELLO).route != "wake"


def a_wrong_manifest_takes_nothing_away(served: Standalone, sleeper: dict[str, object]) -> None:
    path = served.manifests / "sleeper.yaml"
    whole = path.read_text()
    path.write_text(whole.replace("minReplicas: 0", "minReplicas: 3"))
    wait_for(lambda: "rejected sleeper.yaml:" in served.said, "the user reads what is wrong")
    assert chat(served.url, "sleeper", HELLO).text
    path.write_text(whole[: len(whole) // 2] + "\n  : [")
    wait_for(lambda: served.said.count("rejected sleeper.yaml:") > 1, "a half-written file is told")
    assert "rejected sleeper.yaml" in served.command("get", "models", "--dir", str(served.manifests)).stderr
    path.write_text(whole)
    wait_for(lambda: "all manifests are in force" in served.said, "the user reads that all is well")
    assert chat(served.url, "sleeper", HELLO).text


def a_model_that_cannot_be_served_says_why(served: Standalone, tiny_models: Mapping[str, Path]) -> None:
    served.write("wrong.yaml", model("huge", tiny_models["llama"], kv="64Gi"), model("lost", served.manifests / "nowhere"))
    huge = served.wait_condition("huge", "False", limit=20)
    assert "64Gi" in huge["message"], huge
    wait_for(lambda: "nowhere" in served.condition("lost").get("message", ""), "the broken path is named", limit=40)
    (served.manifests / "wrong.yaml").unlink()
    wait_for(lambda: "lost: deleted" in served.said, "they are gone with their file", limit=20)


def a_changed_model_is_served_as_it_is_declared(served: Standalone, tiny_models: Mapping[str, Path]) -> None:
    served.write("sleeper.yaml", model("sleeper", tiny_models["qwen3"], servedName="renamed"))
    wait_for(lambda: post(served.url, {"model": "sleeper", "messages": HELLO}).status_code == httpx.codes.NOT_FOUND, "the old name is gone")
    assert chat(served.url, "renamed", HELLO).text
    served.wait_ready("sleeper")


def a_deleted_model_is_gone_for_clients(served: Standalone) -> None:
    (served.manifests / "sleeper.yaml").unlink()
    wait_for(lambda: "sleeper: deleted" in served.said, "the user reads that it is gone", limit=20)
    gone = post(served.url, {"model": "renamed", "messages": HELLO})
    assert gone.json()["error"]["code"] == "model_not_found"
    wait_for(lambda: served.descendants("aerostat_engine") == [], "its engine ends", limit=30)
