"""The launcher before it touches SGLang: its spec, keys, environment and flags."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from aerostat_core.engine_launch import ADMIN_KEY_ENV, CALL_KEY_ENV, EXIT_BAD_SPEC, EngineLaunch
from aerostat_core.errors import SettingError
from aerostat_engine import launch

pytestmark = pytest.mark.cpu


def spec_in(run_dir: Path, **engine_args: str) -> EngineLaunch:
    return EngineLaunch(
        model="m",
        served_name="M",
        instance="i",
        epoch=1,
        model_path="/models/m",
        port=30000,
        kv_tokens=4096,
        run_dir=str(run_dir),
        agent_socket="/run/agent.sock",
        engine_args={name.replace("_", "-"): value for name, value in engine_args.items()},
    )


def flag(flags: list[str], name: str) -> str:
    assert flags.count(f"--{name}") == 1
    return flags[flags.index(f"--{name}") + 1]


def test_the_spec_is_read_from_the_argument_or_from_a_file(tmp_path: Path) -> None:
    spec = spec_in(tmp_path)
    file = tmp_path / "spec.json"
    file.write_text(spec.to_json())
    assert launch.read_spec([spec.to_json()]) == launch.read_spec([str(file)]) == spec


def test_the_keys_leave_the_environment() -> None:
    environ = {CALL_KEY_ENV: "a", ADMIN_KEY_ENV: "b", "PATH": "/bin"}
    keys = launch.take_keys(environ)
    assert (keys.call, keys.admin) == ("a", "b")
    assert environ == {"PATH": "/bin"}
    assert "'a'" not in repr(keys)


@pytest.mark.parametrize("environ", [{}, {CALL_KEY_ENV: "a"}, {CALL_KEY_ENV: "a", ADMIN_KEY_ENV: "a"}])
def test_missing_or_equal_keys_are_refused(environ: dict[str, str]) -> None:
    with pytest.raises(SettingError, match="two different keys"):
        launch.take_keys(environ)


def test_temporary_files_stay_in_the_run_folder_and_those_of_an_earlier_run_go(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / "stale").touch()
    environ: dict[str, str] = {}
    launch.prepare_environment(spec_in(tmp_path), environ)
    assert environ["TMPDIR"] == str(tmp_path / "tmp")
    assert list((tmp_path / "tmp").iterdir()) == []


def test_an_engine_has_no_token_of_who_fetched_its_weights(tmp_path: Path) -> None:
    environ = {"HF_TOKEN": "secret", "HUGGING_FACE_HUB_TOKEN": "secret", "PATH": "/bin"}
    launch.prepare_environment(spec_in(tmp_path), environ)
    assert "secret" not in environ.values()
    assert environ["PATH"] == "/bin"


def test_a_run_folder_that_is_too_long_for_sockets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="too long for Unix sockets"):
        launch.prepare_environment(spec_in(tmp_path / ("x" * 90)), {})


def test_each_tensor_parallel_rank_gets_a_core(tmp_path: Path) -> None:
    environ: dict[str, str] = {}
    with pytest.raises(SettingError, match="needs as many cores"):
        launch.prepare_environment(replace(spec_in(tmp_path), tensor_parallel=100_000), environ)
    launch.prepare_environment(replace(spec_in(tmp_path), tensor_parallel=1), environ)
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in environ


def test_the_models_own_arguments_replace_our_defaults(tmp_path: Path) -> None:
    plain = launch.sglang_flags(spec_in(tmp_path), "float32")
    assert flag(plain, "attention-backend") == "aerostat_paged"
    assert flag(plain, "dtype") == "float32"
    own = launch.sglang_flags(spec_in(tmp_path, attention_backend="torch_native", max_running_requests="3", dtype="auto"), "float32")
    assert flag(own, "attention-backend") == "torch_native"
    assert flag(own, "max-running-requests") == "3"
    assert flag(own, "dtype") == "float32"


def test_with_a_tls_folder_sglang_knows_that_it_serves_https(tmp_path: Path) -> None:
    spec = replace(spec_in(tmp_path), tls_dir="/etc/tls")
    assert flag(launch.sglang_flags(spec, "float32"), "ssl-certfile") == "/etc/tls/tls.crt"
    assert "--ssl-certfile" not in launch.sglang_flags(spec_in(tmp_path), "float32")


def test_a_tls_folder_that_cannot_be_read_may_be_whole_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "environ", {CALL_KEY_ENV: "a", ADMIN_KEY_ENV: "b"})
    assert launch.main([replace(spec_in(tmp_path), tls_dir=str(tmp_path)).to_json()]) == launch.EXIT_FAILED
    assert f"tls_dir {tmp_path}: cannot read" in capsys.readouterr().err


def test_a_bad_spec_ends_the_launcher_with_its_own_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["{"]) == EXIT_BAD_SPEC
    assert "no JSON" in capsys.readouterr().err
