"""What an engine refuses reaches clients in our words, and says nothing of the server that it ran on."""

import orjson
import pytest

from aerostat_router.calls import Result
from aerostat_router.engine_errors import engine_error
from aerostat_router.http.exchange import Outcome

pytestmark = pytest.mark.cpu

VALIDATION = """1 validation error:
  {'type': 'float_parsing', 'loc': ('body', 'temperature'), 'msg': 'Input should be a valid number', 'input': 'hot'}

  File "/usr/lib/python3/site-packages/sglang/srt/entrypoints/http_server.py", line 1601, in openai_v1_chat_completions
    POST /v1/chat/completions [{'status': 422}]"""


def refused(status: int, body: bytes) -> Result:
    return Result(outcome=Outcome.REFUSED, status=status, refusal=body)


@pytest.mark.parametrize(
    "body",
    [
        orjson.dumps({"error": {"message": VALIDATION}}),
        orjson.dumps({"object": "error", "message": VALIDATION}),
        orjson.dumps({"detail": VALIDATION}),
        orjson.dumps({"error": VALIDATION}),
        VALIDATION.encode(),
    ],
    ids=["openai", "flat", "fastapi", "text in error", "no JSON"],
)
def test_a_validation_error_says_what_is_wrong_and_not_where_in_the_engine(body: bytes) -> None:
    error = engine_error("coder", refused(422, body))
    assert error.status == 400
    assert "Input should be a valid number" in error.message
    assert "site-packages" not in error.message
    assert "http_server" not in error.message


def test_a_message_of_many_spaces_is_cut_as_any_other() -> None:
    spaces = " " * (4 << 20)  # a search in quadratic time would take days
    where = 'File "/usr/lib/x.py", line 7, in f'
    assert engine_error("coder", refused(422, orjson.dumps({"detail": f"input: {spaces}{where}"}))).message == "input:"
    assert len(engine_error("coder", refused(422, orjson.dumps({"detail": f"input: {spaces}."}))).message) == 2000


def test_too_long_a_context_keeps_its_own_word() -> None:
    body = orjson.dumps({"message": "The input is longer than the model's context length (8192 tokens)."})
    assert engine_error("coder", refused(400, body)).code == "context_length_exceeded"


def test_an_answer_without_words_still_says_whose_it_was() -> None:
    assert engine_error("coder", refused(500, b"{}")).message == "The engine of coder answered 500 without a reason."
