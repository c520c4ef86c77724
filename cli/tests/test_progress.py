"""What the user of `aerostat up` reads, over the life of a model."""

from typing import Any

import pytest

from aerostat_cli.standalone.progress import PROGRESS_EVERY, ProgressTeller

pytestmark = pytest.mark.cpu

Resource = dict[str, Any]


def model(
    *, ready: str = "False", reason: str = "Progressing", message: str = "", served_name: str = "SmolLM2", min_replicas: int = 1
) -> Resource:
    conditions = [{"type": "Ready", "status": ready, "reason": reason, "message": message}]
    return {
        "metadata": {"name": "smollm2"},
        "spec": {"servedName": served_name, "minReplicas": min_replicas},
        "status": {"conditions": conditions},
    }


def instance(state: str, *, reason: str = "", progress: str = "", message: str = "") -> Resource:
    replica = {"name": "smollm2", "state": state, "reason": reason, "progress": progress, "message": message}
    return {"metadata": {"name": "cpu-local-0"}, "status": {"models": [replica]}}


def test_a_model_is_followed_from_its_download_to_its_first_call() -> None:
    teller = ProgressTeller("http://127.0.0.1:8080")
    fetching = instance("Starting", reason="Fetching", progress="12 %")
    assert teller.lines([model()], [fetching], now=0.0) == ["smollm2: Fetching: 12 %"]
    assert teller.lines([model()], [instance("Starting", reason="Converting")], now=9.0) == ["smollm2: Converting"]
    ready = teller.lines([model(ready="True")], [instance("Open")], now=41.0)
    assert ready[0] == "smollm2: ready after 41 s on cpu-local-0"
    assert "http://127.0.0.1:8080/v1/chat/completions" in ready[2]
    assert '"model": "SmolLM2"' in ready[2]


def test_how_to_call_is_shown_for_the_first_model_only() -> None:
    teller = ProgressTeller("http://router")
    teller.lines([model()], [instance("Starting")], now=0.0)
    teller.lines([model(ready="True")], [instance("Open")], now=1.0)
    teller.lines([model()], [instance("Starting", reason="Restarting")], now=2.0)
    assert teller.lines([model(ready="True")], [instance("Open")], now=32.0) == ["smollm2: ready after 30 s on cpu-local-0"]


def test_progress_inside_a_step_is_told_at_most_every_few_seconds() -> None:
    teller = ProgressTeller("http://router")
    told = []
    for second in range(11):
        fetching = instance("Starting", reason="Fetching", progress=f"{second} %")
        told += teller.lines([model()], [fetching], now=float(second))
    assert told == [f"smollm2: Fetching: {n} %" for n in (0, int(PROGRESS_EVERY), int(2 * PROGRESS_EVERY))]


def test_what_did_not_change_is_not_told_again() -> None:
    teller = ProgressTeller("http://router")
    teller.lines([model(ready="True")], [instance("Open")], now=0.0)
    assert teller.lines([model(ready="True")], [instance("Open")], now=100.0) == []


def test_a_model_that_cannot_be_placed_says_why() -> None:
    teller = ProgressTeller("http://router")
    refused = model(reason="InsufficientMemory", message="needs 3Gi, 1Gi is there")
    assert teller.lines([refused], [], now=0.0) == ["smollm2: InsufficientMemory: needs 3Gi, 1Gi is there"]


def test_a_deleted_model_is_said_goodbye_to() -> None:
    teller = ProgressTeller("http://router")
    teller.lines([model(ready="True")], [instance("Open")], now=0.0)
    assert teller.lines([], [], now=1.0) == ["smollm2: deleted"]


def test_a_model_without_a_replica_is_ready_for_its_first_call() -> None:
    teller = ProgressTeller("http://router")
    assert teller.lines([model(ready="True", min_replicas=0)], [], now=0.0) == ["smollm2: ready; its first call opens it"]


def test_a_model_whose_served_name_is_taken_is_not_mistaken_for_the_one_that_has_it() -> None:
    teller = ProgressTeller("http://router")
    twin = model(reason="ServedNameConflict", message="it belongs to the older Model default/smollm2", served_name="SmolLM2")
    twin["metadata"]["name"] = "twin"
    lines = teller.lines([model(ready="True"), twin], [instance("Open")], now=0.0)
    assert lines[-1] == "twin: ServedNameConflict: it belongs to the older Model default/smollm2"
    assert teller.lines([model(ready="True")], [instance("Open")], now=1.0) == ["twin: deleted"]
