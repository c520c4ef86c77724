"""Two models of different architecture behind two routers, however they are run: sessions of every kind of client."""

import json
import subprocess
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import anthropic
import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from openai.types.chat import ChatCompletionMessageParam

from aerostat.v1 import inference_pb2, inference_pb2_grpc
from aerostat_testing.calls import CALL_LIMIT, Answer, chat, post, stream, text_of
from aerostat_testing.manifests import cpu_pool, model, slo
from aerostat_testing.served import Served

pytestmark = pytest.mark.engine

N_ROUTERS = 2
# Long enough for several KV pages: the byte-level tokenizer makes a token of each byte.
LONG = "Repeat after me, slowly and in order: " + "alpha beta gamma delta epsilon zeta eta theta. " * 6
REUSED = {"lease", "kv"}


@pytest.fixture(scope="module")
def served(shared_served: Served, tiny_models: Mapping[str, Path]) -> Served:
    models = [model("qwen", tiny_models["qwen3"]), model("llama", tiny_models["llama"], servedName="Tiny/Llama-1.0")]
    shared_served.write("all.yaml", cpu_pool(), slo(), *models)
    shared_served.start(n_routers=N_ROUTERS)
    shared_served.wait_ready("qwen", "llama")
    return shared_served


def urls(served: Served) -> list[str]:
    return [f"http://{router.http}" for router in served.routers]


def three_turns(served: Served, model_name: str, *, session: str | None, opening: str) -> list[Answer]:
    """Each turn through the other router."""
    messages = [{"role": "user", "content": opening}]
    answers = []
    for turn in range(3):
        answer = chat(urls(served)[turn % N_ROUTERS], model_name, messages, session=session)
        answers.append(answer)
        messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": f"And then? ({turn})"}]
    return answers


def assert_reused(answers: list[Answer]) -> None:
    assert [a.route in REUSED for a in answers] == [False, True, True], answers
    cached = [a.cached_tokens for a in answers]
    assert cached[0] < cached[1] < cached[2], answers
    # All of the earlier turn but its last, partly filled page, and the answer's text that was tokenized anew.
    assert all(later.cached_tokens > 0.8 * earlier.prompt_tokens for earlier, later in pairwise(answers)), answers
    assert len({a.instance for a in answers}) == 1


@pytest.mark.parametrize("model_name", ["qwen", "Tiny/Llama-1.0"])
def test_a_session_with_an_id_reuses_its_prefix_through_either_router(served: Served, model_name: str) -> None:
    assert_reused(three_turns(served, model_name, session=f"with-id-{model_name}", opening=f"{model_name} one. {LONG}"))


@pytest.mark.parametrize("model_name", ["qwen", "Tiny/Llama-1.0"])
def test_a_session_without_an_id_is_inferred_from_its_messages(served: Served, model_name: str) -> None:
    assert_reused(three_turns(served, model_name, session=None, opening=f"{model_name} two. {LONG}"))


def test_two_sessions_do_not_see_each_other(served: Served) -> None:
    same = [{"role": "user", "content": f"Say it once. {LONG}"}]
    first, second = (chat(served.url, "qwen", same, session=f"apart-{i}") for i in range(2))
    assert first.text == second.text
    assert second.route == "residency" or second.cached_tokens > 0


async def test_the_openai_client_streams_and_sees_the_usage(served: Served) -> None:
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="unused", timeout=CALL_LIMIT) as client:
        listed = [m.id async for m in client.models.list()]
        assert sorted(listed) == ["Tiny/Llama-1.0", "qwen"]
        cached = []
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": f"openai. {LONG}"}]
        for _ in range(2):
            streamed = await client.chat.completions.create(
                model="qwen",
                messages=messages,
                max_tokens=8,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
                extra_headers={"x-session-id": "openai-client"},
            )
            chunks = [chunk async for chunk in streamed]
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            usage = chunks[-1].usage
            assert usage is not None
            assert usage.prompt_tokens_details is not None
            cached.append(usage.prompt_tokens_details.cached_tokens or 0)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "More."}]
        assert cached[0] < cached[1]
        completion = await client.completions.create(model="qwen", prompt="One, two,", max_tokens=4, temperature=0)
        assert completion.choices[0].text


async def test_the_anthropic_client_holds_a_conversation(served: Served) -> None:
    async with anthropic.AsyncAnthropic(base_url=served.url, api_key="unused", timeout=CALL_LIMIT) as client:
        said = f"anthropic. {LONG}"
        first = await client.messages.create(model="qwen", max_tokens=8, messages=[{"role": "user", "content": said}])
        text = "".join(block.text for block in first.content if block.type == "text")
        async with client.messages.stream(
            model="qwen",
            max_tokens=8,
            messages=[{"role": "user", "content": said}, {"role": "assistant", "content": text}, {"role": "user", "content": "More."}],
        ) as events:
            second = await events.get_final_message()
    assert first.usage.input_tokens > 0
    assert second.stop_reason in {"max_tokens", "end_turn"}
    assert second.usage.cache_read_input_tokens or second.usage.input_tokens > first.usage.input_tokens


def test_grpc_serves_the_same_session_with_health_and_reflection(served: Served) -> None:
    with grpc.insecure_channel(served.routers[0].grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        options = inference_pb2.CallOptions(session_id="over-grpc", max_tokens=8, temperature=0.0)
        messages = [inference_pb2.ChatMessage(role="user", content=f"grpc. {LONG}")]
        reply = stub.Chat(inference_pb2.ChatRequest(model="qwen", messages=messages, options=options), timeout=CALL_LIMIT)
        messages += [reply.message, inference_pb2.ChatMessage(role="user", content="More.")]
        request = inference_pb2.ChatRequest(model="qwen", messages=messages, options=options)
        chunks = list(stub.ChatStream(request, timeout=CALL_LIMIT))
        assert "".join(c.delta for c in chunks)
        assert chunks[0].served.route in REUSED
        assert chunks[-1].usage.cached_tokens > reply.usage.cached_tokens
        assert [m.id for m in stub.ListModels(inference_pb2.ListModelsRequest(), timeout=10).models]

        health = health_pb2_grpc.HealthStub(channel)
        for service in ("liveness", "readiness"):
            checked = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)  # type: ignore[attr-defined]
            assert checked.status == health_pb2.HealthCheckResponse.SERVING
        assert "aerostat.v1.Inference" in ProtoReflectionDescriptorDatabase(channel).get_services()

        with pytest.raises(grpc.RpcError) as unknown:
            stub.Chat(inference_pb2.ChatRequest(model="absent", messages=messages), timeout=10)
        assert unknown.value.code() == grpc.StatusCode.NOT_FOUND


REFERENCE = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
text, n_tokens, folders = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
answers = []
for folder in folders:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**prompt, max_new_tokens=n_tokens, do_sample=False)
    new = out[0, prompt["input_ids"].shape[1]:].tolist()
    answers.append(tokenizer.decode(new, skip_special_tokens=True))
sys.stdout.write(json.dumps(answers))
"""


def test_answers_are_those_that_transformers_gives(served: Served, tiny_models: Mapping[str, Path]) -> None:
    text, n_tokens = "What comes after nine?", 24
    folders = [str(tiny_models["qwen3"]), str(tiny_models["llama"])]
    command = [sys.executable, "-c", REFERENCE, text, str(n_tokens), *folders]
    expected = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=120).stdout)
    for again in (False, True):
        asked = [{"role": "user", "content": text}]
        answers = [chat(served.url, name, asked, session="exact", n_tokens=n_tokens) for name in ("qwen", "Tiny/Llama-1.0")]
        assert [a.text for a in answers] == expected
        assert not again or all(a.cached_tokens > 0 for a in answers), "the second time it came out of the cache"


def test_a_stream_has_the_text_of_the_whole_answer_and_says_that_it_is_done(served: Served) -> None:
    events = list(stream(served.url, "qwen", "Stream this.", n_tokens=16))
    assert events[-1] == {"done": True}
    assert sum(1 for e in events if e.get("choices")) > 4
    assert text_of(events)


def test_a_client_that_hangs_up_leaves_nothing_running(served: Served) -> None:
    for i, _ in enumerate(stream(served.url, "qwen", "Hang up.", n_tokens=4000)):
        if i == 3:
            break
    served.wait_idle("qwen", limit=4.0)


def test_errors_are_openai_objects_that_name_the_remedy(served: Served) -> None:
    unknown = post(served.url, {"model": "absent", "messages": [{"role": "user", "content": "hi"}]})
    assert unknown.status_code == httpx.codes.NOT_FOUND
    assert unknown.json()["error"]["code"] == "model_not_found"
    assert "Tiny/Llama-1.0" in unknown.json()["error"]["message"]
    too_long = post(served.url, {"model": "qwen", "messages": [{"role": "user", "content": "x" * 20_000}]})
    assert too_long.status_code == httpx.codes.BAD_REQUEST
    assert too_long.json()["error"]["code"] == "context_length_exceeded"
    broken = httpx.post(f"{served.url}/v1/chat/completions", content=b"{", headers={"content-type": "application/json"}, timeout=10)
    assert broken.status_code == httpx.codes.BAD_REQUEST


def test_the_commands_show_what_runs(served: Served) -> None:
    models = served.table("models")
    assert models[0][:4] == ["NAME", "READY", "POOL", "STATE"]
    assert [line[:4] for line in models[1:]] == [["llama", "True", "cpu", "Open"], ["qwen", "True", "cpu", "Open"]]
    instance = served.table("instances")[1]
    assert instance[:4] == [f"cpu-{served.node}-0", "True", "cpu", served.node]
    assert instance[4:8] == ["llama", "Open,", "qwen", "Open"]
    assert "Cold" in served.table("pools")[1]
    assert "5s" in served.table("slos")[1]
    chat(served.url, "qwen", [{"role": "user", "content": "hi"}], session="shown")
    sessions = served.command("get", "sessions", "--router", served.routers[1].admin)
    assert f"cpu-{served.node}-0" in sessions.stdout.splitlines()[1], sessions.stderr
    said = served.command("chat", "qwen", "-m", "Hello!", "--max-tokens", "8", "--url", served.url)
    assert said.returncode == 0, said.stderr
    assert said.stdout.strip()
    assert "prompt tokens cached · route " in said.stderr
