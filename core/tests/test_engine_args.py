"""The allow-list of engine arguments says what is wrong and what would be right."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerostat_core.engine_args import ALLOWED, check_engine_args, to_flags
from aerostat_core.errors import PermanentError

pytestmark = pytest.mark.cpu


def test_allowed_arguments_become_flags_in_a_fixed_order() -> None:
    args = {"schedule-policy": "lpm", "chunked-prefill-size": "256", "enable-mixed-chunk": "true", "disable-radix-cache": "false"}
    assert to_flags(args) == ["--chunked-prefill-size", "256", "--enable-mixed-chunk", "--schedule-policy", "lpm"]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("chunked-prefill-size", "-1", "whole number from 16 to 131072"),
        ("chunked-prefill-size", "1e3", "whole number"),
        ("max-running-requests", "٣", "whole number"),
        ("schedule-conservativeness", "nan", "number from 0 to 10"),
        ("schedule-conservativeness", "11", "number from 0 to 10"),
        ("enable-mixed-chunk", "yes", "true or false"),
        ("dtype", "int8", "one of auto, float32"),
        ("tool-call-parser", "../x", "a name of at most 64"),
    ],
)
def test_a_wrong_value_is_answered_with_what_is_allowed(name: str, value: str, said: str) -> None:
    with pytest.raises(PermanentError, match=said) as caught:
        check_engine_args({name: value})
    assert caught.value.reason == "EngineArgsRejected"


@pytest.mark.parametrize("name", ["port", "api-key", "admin-api-key", "model-path", "trust-remote-code", "chat-template", "--dtype"])
def test_what_the_agent_decides_or_what_reads_files_is_refused_with_the_list(name: str) -> None:
    with pytest.raises(PermanentError, match="may not be set; allowed are attention-backend, "):
        check_engine_args({name: "x"})


def test_every_fault_is_named_at_once() -> None:
    with pytest.raises(PermanentError) as caught:
        check_engine_args({"port": "1", "dtype": "int8", "stream-interval": "0"})
    assert all(name in caught.value.message for name in ("port", "dtype", "stream-interval"))


@given(st.dictionaries(st.sampled_from(sorted(ALLOWED)), st.text(max_size=12)))
def test_no_accepted_value_can_be_taken_for_a_flag(args: dict[str, str]) -> None:
    try:
        flags = to_flags(args)
    except PermanentError:
        return
    words = [word for word in flags if word.startswith("-")]
    assert all(word.removeprefix("--") in args for word in words)
