"""A repository that brings code, prepared by real processes: it runs for who trusts it, with no token in its environment and no Hub."""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from aerostat_testing.hub import LoopbackHub, files_of
from aerostat_testing.preparing import LIMIT, start_preparing

pytestmark = pytest.mark.engine

TOKEN: Final = "hf_of-a-reader"
TRUST: Final = "--trust-remote-code"
CODE: Final = b"""
import os

from transformers import LlamaConfig, LlamaForCausalLM

assert not os.environ.keys() & {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"}


class OddConfig(LlamaConfig):
    model_type = "odd"


class OddForCausalLM(LlamaForCausalLM):
    config_class = OddConfig
"""


def test_code_runs_for_who_trusts_it_and_that_of_another_repository_never(tiny_models: Mapping[str, Path], tmp_path: Path) -> None:
    with LoopbackHub() as hub:
        for name, where in (("org/odd", ""), ("org/elsewhere", "org/code--")):
            hub.add(name, _odd(files_of(tiny_models["llama"]), where), readers={TOKEN})
        hub.add("org/code", {"odd.py": CODE})
        runs = [_start(hub, name, tmp_path / name, TRUST) for name in ("org/odd", "org/elsewhere")]
        trusted, elsewhere = map(_outcome, runs)
        distrusted = _outcome(_start(hub, "org/odd", tmp_path / "org/odd"))
        assert trusted["model"]["architecture"] == "OddForCausalLM"
        assert "set trustRemoteCode of the Model" in distrusted["error"]["message"]
        assert "code of another repository: put them beside its weights" in elsewhere["error"]["message"]
        assert not any(asked.path.startswith("/org/code/") for asked in hub.asked)


def _odd(files: Mapping[str, bytes], where: str) -> Mapping[str, bytes]:
    """That Llama, as a model that only the code at `where` knows."""
    classes = {"AutoConfig": f"{where}odd.OddConfig", "AutoModelForCausalLM": f"{where}odd.OddForCausalLM"}
    config = json.loads(files["config.json"]) | {"model_type": "odd", "architectures": ["OddForCausalLM"], "auto_map": classes}
    return {**files, "config.json": json.dumps(config).encode(), "odd.py": CODE}


def _start(hub: LoopbackHub, name: str, folder: Path, *flags: str) -> subprocess.Popen[str]:
    tokens = {"HF_TOKEN": TOKEN, "HUGGING_FACE_HUB_TOKEN": TOKEN}
    environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "0", **tokens}
    folder.mkdir(parents=True, exist_ok=True)
    return start_preparing(f"hf://{name}", folder / "cache", *flags, env=os.environ | environment)


def _outcome(run: subprocess.Popen[str]) -> dict[str, Any]:
    said, complaints = run.communicate(timeout=LIMIT)
    outcome: dict[str, Any] = json.loads(said.splitlines()[-1])
    assert TOKEN not in said + complaints
    return outcome
