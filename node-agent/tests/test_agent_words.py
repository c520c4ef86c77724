"""What people and later agents read: log tails without secrets, exits, preparations, notes, settings."""

import json
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerostat_agent.exits import describe_exit
from aerostat_agent.logtail import MAX_LINES, last_lines, redact
from aerostat_agent.notes import EngineNote, PreparedModel, TokenProbe, UnreadableNoteError
from aerostat_agent.policy.figures import RATE_WINDOW, Figures, Rate
from aerostat_agent.policy.memory import Footprint
from aerostat_agent.policy.tracks import Failure
from aerostat_agent.probe import judge
from aerostat_agent.settings import parse_settings
from aerostat_agent.weights import read_outcome, read_progress
from aerostat_core.addresses import Address
from aerostat_core.errors import SettingError
from aerostat_testing.agent_fakes import MODEL_FACTS

pytestmark = pytest.mark.cpu

PREPARED = PreparedModel(
    path="/models/m",
    dtype="bfloat16",
    weights_bytes=10,
    kv_bytes_per_token={"bfloat16": 2, "float32": 4},
    context_tokens=4096,
    probe=TokenProbe(prompt_ids=(1, 2), expected_ids=(3,)),
)
NOTE = EngineNote(
    instance="default/cpu-0",
    model="a",
    generation=1,
    fingerprint="f",
    host="127.0.0.1",
    port=4000,
    log_offset=0,
    call_key="CALLKEY",
    admin_key="ADMINKEY",
    footprint=Footprint(weights=10, reserve=5, kv=32),
    prepared=PREPARED,
)


def test_a_note_comes_back_as_it_was_and_shows_no_key() -> None:
    assert EngineNote.from_bytes(NOTE.to_bytes()) == NOTE
    assert "CALLKEY" not in repr(NOTE)
    assert "ADMINKEY" not in repr(NOTE)


@pytest.mark.parametrize(
    "note", [b"", b"\xff", b"[]", b'{"prepare": {}}', b'{"engine": {"instance": "x"}}', NOTE.to_bytes().replace(b"default/", b"")]
)
def test_a_note_of_something_else_is_unreadable(note: bytes) -> None:
    with pytest.raises(UnreadableNoteError):
        EngineNote.from_bytes(note)


def test_the_kv_type_auto_is_the_weights_own() -> None:
    assert (PREPARED.kv_bytes("auto"), PREPARED.kv_bytes("float32")) == (2, 4)


def test_the_tail_of_a_log_is_its_last_lines_that_say_something(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n" + "\n\n".join(f"line {i}" for i in range(100)) + "\rprogress 1%\rprogress 2%\n" + "x" * 5000)
    lines = last_lines(log, start=7).splitlines()
    assert len(lines) == MAX_LINES
    assert lines[-3:-1] == ["progress 1%", "progress 2%"]
    assert len(lines[-1]) < 300
    assert last_lines(log, start=10**9) != ""  # the file was cut since
    assert last_lines(tmp_path / "none") == ""


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("ServerArgs(api_key='k1', admin_api_key=\"k2\", port=1)", "ServerArgs(api_key=***, admin_api_key=***, port=1)"),
        ('{"call_key": "k", "tokens": 12}', '{"call_key": ***, "tokens": 12}'),
        ("Authorization: Bearer abc.def", "Authorization: ***"),
        ("HF_TOKEN=hf_x max_tokens=12", "HF_TOKEN=*** max_tokens=12"),
        ("key error: 'x'", "key error: 'x'"),
    ],
)
def test_secrets_are_redacted_and_counts_of_tokens_are_none(said: str, shown: str) -> None:
    assert redact(said) == shown


@given(st.text(min_size=8), st.text(), st.text())
def test_a_known_secret_is_never_shown(secret: str, before: str, after: str) -> None:
    assert secret not in redact(before + secret + after, [secret]).replace("***", "")


@pytest.mark.parametrize(
    ("exit_code", "said", "expected"),
    [
        (1, "boom", ("EngineExited", False, False)),
        (-signal.SIGKILL, "", ("EngineExited", False, False)),
        (64, "unknown field", ("EngineSpecRefused", True, False)),
        (65, "reinstall", ("EnginePluginMissing", True, False)),
        (1, "[Errno 98] error while attempting to bind on address: address already in use", ("PortTaken", False, True)),
    ],
)
def test_an_exit_becomes_a_failure_with_its_reaction(tmp_path: Path, exit_code: int, said: str, expected: tuple[str, bool, bool]) -> None:
    (tmp_path / "log").write_text(said)
    failure = describe_exit(NOTE, tmp_path / "log", exit_code)
    assert (failure.reason, failure.is_permanent, failure.is_port_taken) == expected
    assert (said or "its log is empty") in failure.message


def test_the_outcome_of_a_preparation_is_its_last_word(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text('{"progress": {"step": "read", "message": "x"}}\nchatter\n' + json.dumps({"model": MODEL_FACTS}))
    prepared = read_outcome(log, 0)
    assert isinstance(prepared, PreparedModel)
    assert prepared.probe == TokenProbe(prompt_ids=(1, 2, 3), expected_ids=(4, 5))


@pytest.mark.parametrize(
    ("log", "exit_code", "reason", "says"),
    [
        ('{"error": {"reason": "DiskFull", "message": "no room"}}', 2, "DiskFull", "no room"),
        ("Traceback\nValueError: x", 1, "PrepareFailed", "ValueError: x"),
        ("", -9, "PrepareFailed", "SIGKILL"),
        ('{"model": {"path": "/m"}}', 0, "PreparerMismatch", "different versions"),
        ('{"model": ', 0, "PrepareFailed", "exit code 0"),
    ],
)
def test_a_preparation_that_failed_says_why(tmp_path: Path, log: str, exit_code: int, reason: str, says: str) -> None:
    (tmp_path / "log").write_text(log)
    failure = read_outcome(tmp_path / "log", exit_code)
    assert isinstance(failure, Failure)
    assert failure.reason == reason
    assert says in failure.message


def test_progress_is_told_in_the_words_of_a_person(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for said, words in (
        ({"step": "download", "done_bytes": 12 << 20, "total_bytes": 90 << 20}, "download 12Mi of 90Mi"),
        ({"step": "convert", "message": "to safetensors, once"}, "convert to safetensors, once"),
    ):
        log.write_text(json.dumps({"progress": said}))
        assert read_progress(log) == words


@pytest.mark.parametrize("output", [None, [], [3, 4], "3"])
def test_the_probe_passes_only_for_the_known_tokens(output: object) -> None:
    failure = judge(TokenProbe(prompt_ids=(1,), expected_ids=(3, 5)), output)
    assert failure is not None
    assert failure.reason == "TokenProbeFailed"
    assert judge(TokenProbe(prompt_ids=(1,), expected_ids=(3, 5)), [3, 5, 9]) is None


def test_a_rate_is_over_the_last_minute() -> None:
    rate = Rate()
    for second in range(120):
        rate.add(6, float(second))
    assert rate.per_second(119.0) == pytest.approx(6.0)
    assert rate.per_second(119.0 + RATE_WINDOW / 2) == pytest.approx(3.0, rel=0.05)
    assert rate.per_second(1000.0) == 0.0


def test_the_cost_of_opening_is_measured_and_a_queue_is_predicted_from_the_profile() -> None:
    figures = Figures()
    figures.opened(12.0)
    assert figures.open_seconds == 12.0
    figures.opened(22.0)
    assert figures.open_seconds == pytest.approx(14.0)
    figures.profile = figures.profile.observe_prefill(64, 0.64).observe_decode(2, 0.1)
    assert figures.queue_seconds(running=0, waiting_tokens=0) == 0.0
    assert figures.queue_seconds(running=2, waiting_tokens=64) == pytest.approx(0.74)


def test_settings_name_what_to_set(tmp_path: Path) -> None:
    base = ["--node", "n", "--cluster", "folder:x", "--run-dir", str(tmp_path), "--model-cache", "m"]
    settings = parse_settings([*base, "--telemetry-listen", "127.0.0.1:9", "--launcher", "python -m 'x y'"])
    assert settings.telemetry_listen == Address("127.0.0.1", 9)
    assert settings.launcher == ("python", "-m", "x y")
    assert settings.model_cache_limit is None
    assert parse_settings([*base, "--model-cache-limit", "1.5Gi"]).model_cache_limit == 3 << 29
    assert settings.keeper_socket == tmp_path / "keeper.sock"
    for wrong, message in (
        (["--model-cache-limit", "much"], "--model-cache-limit: expected a size such as"),
        (["--telemetry-listen", "9"], "--telemetry-listen must be HOST:PORT"),
        (["--admin-listen", "h:99999"], "--admin-listen must be HOST:PORT"),
        (["--telemetry-listen", "fd00::7:9700"], "an IPv6 address in brackets"),
        (["--telemetry-listen", "[fd00::7:9700"], "an IPv6 address in brackets"),
        (["--telemetry-listen", "[]:9700"], "--telemetry-listen must be HOST:PORT"),
        (["--run-dir", str(tmp_path / "none")], "is no folder"),
        (["--start-limit", "0"], "more than 0 seconds"),
    ):
        with pytest.raises(SettingError, match=message):
            parse_settings([*base, *wrong])
