"""The launch spec survives its JSON, and a wrong one says what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aerostat_core.engine_launch import EngineLaunch
from aerostat_core.errors import PermanentError, SettingError

pytestmark = pytest.mark.cpu

SPEC = EngineLaunch(
    model="m",
    served_name="M",
    instance="i",
    epoch=3,
    model_path="/models/m",
    port=30000,
    kv_tokens=4096,
    run_dir="/run/m",
    agent_socket="/run/agent.sock",
    engine_args={"schedule-policy": "lpm"},
)


def changed(**fields: Any) -> str:
    return json.dumps({**json.loads(SPEC.to_json()), **fields})


def test_a_spec_survives_its_json() -> None:
    assert EngineLaunch.from_json(SPEC.to_json()) == SPEC


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "no JSON"),
        ("[]", "must be a JSON object"),
        ("{}", "incomplete"),
        (changed(api_key="x"), "unknown fields: api_key"),
        (changed(port=0), "port must be"),
        (changed(port=True), "port must be"),
        (changed(kv_tokens=8), "at least one page"),
        (changed(dtype="int8"), "dtype must be"),
        (changed(model_path=None), "model_path must be text"),
        (changed(context_tokens=0), "context_tokens"),
    ],
)
def test_a_wrong_spec_says_what_is_wrong(text: str, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        EngineLaunch.from_json(text)


def test_rejected_engine_arguments_are_rejected_here_too() -> None:
    with pytest.raises(PermanentError, match="may not be set"):
        EngineLaunch.from_json(changed(engine_args={"port": "1"}))
