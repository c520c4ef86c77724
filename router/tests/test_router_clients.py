"""Real client libraries against the whole router, with a scripted engine behind it: OpenAI, Anthropic, gRPC, and bad input by hand."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from aerostat.v1 import inference_pb2 as pb
from aerostat.v1 import inference_pb2_grpc
from aerostat_core.ids import NamespacedName
from aerostat_router.admin import why_not_ready
from aerostat_router.app import RouterApp, running_router
from aerostat_router.settings import parse_settings
from aerostat_runtime.clock import SystemClock
from aerostat_testing.declared import instance_object, model_object
from aerostat_testing.fake_agent import fake_agent, instance_state, model_state
from aerostat_testing.memory_cluster import MemoryCluster
from aerostat_testing.scripted_engine import ScriptedEngine, scripted_engine
from aerostat_testing.waiting import eventually

pytestmark = pytest.mark.cpu

SMALL = NamespacedName("default", "small")
SETTINGS = parse_settings(["--cluster", "folder:unused", "--listen", "127.0.0.1:0", "--name", "r"])
USER = {"role": "user", "content": "Hi"}


@asynccontextmanager
async def served(**figures: Any) -> AsyncIterator[tuple[RouterApp, ScriptedEngine]]:
    async with fake_agent() as agent, scripted_engine() as engine:
        agent.put(instance_state("a", model_state("small", port=engine.port, max_context_tokens=4096, **figures)))
        cluster = MemoryCluster(model_object("small"), instance_object("a", ["small"], address=agent.address))
        async with running_router(SETTINGS, cluster, SystemClock()) as app:
            await eventually(lambda: app.fleet.candidates(SMALL), "the router knows the engine")
            yield app, engine
            await eventually(lambda: app.dispatcher.n_active == 0, "no call left")
            app.dispatcher.check_integrity()


async def test_openai_s_client_talks_streams_and_reads_usage() -> None:
    async with served() as (app, engine):
        engine.cached_tokens = 16
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{app.http_port}/v1", api_key="k", max_retries=0) as client:
            assert [m.id async for m in client.models.list()] == ["small"]
            assert (await client.models.retrieve("small")).owned_by == "aerostat"
            whole = await client.chat.completions.create(model="small", messages=[{"role": "user", "content": "Hi"}])
            assert whole.choices[0].message.content == "Hello there."
            assert whole.usage is not None
            assert whole.usage.prompt_tokens_details is not None
            assert whole.usage.prompt_tokens_details.cached_tokens == 16
            stream = await client.chat.completions.create(
                model="small", messages=[{"role": "user", "content": "Hi"}], stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello there."
            assert chunks[-1].usage is not None
            text = await client.completions.create(model="small", prompt="Hi")
            assert text.choices[0].text == "Hello there."
            with pytest.raises(openai.NotFoundError) as unknown:
                await client.chat.completions.create(model="nope", messages=[{"role": "user", "content": "Hi"}])
            assert unknown.value.code == "model_not_found"


async def test_anthropic_s_client_talks_streams_and_gets_errors_in_its_shape() -> None:
    async with served() as (app, engine):
        async with anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{app.http_port}", api_key="k", max_retries=0) as client:
            message = await client.messages.create(model="small", max_tokens=9, messages=[{"role": "user", "content": "Hi"}])
            assert message.content[0].type == "text"
            async with client.messages.stream(model="small", max_tokens=9, messages=[{"role": "user", "content": "Hi"}]) as stream:
                assert "".join([text async for text in stream.text_stream]) == "Hello there."
            assert [m.id async for m in client.models.list()] == ["small"]
            with pytest.raises(anthropic.NotFoundError) as unknown:
                await client.messages.create(model="nope", max_tokens=9, messages=[{"role": "user", "content": "Hi"}])
            assert isinstance(unknown.value.body, dict)
            assert unknown.value.body["error"]["type"] == "not_found_error"
        assert "x-api-key" not in engine.got[0].headers
        assert engine.got[0].headers["anthropic-version"]


async def test_grpc_speaks_the_same_calls() -> None:
    async with served() as (app, engine), grpc.aio.insecure_channel(f"127.0.0.1:{app.grpc_port}") as channel:
        engine.cached_tokens = 16
        stub = inference_pb2_grpc.InferenceStub(channel)
        options = pb.CallOptions(session_id="s", max_tokens=5)
        options.extra.update({"top_k": 3})
        request = pb.ChatRequest(model="small", messages=[pb.ChatMessage(role="user", content="Hi")], options=options)
        reply = await stub.Chat(request)
        assert (reply.message.content, reply.served.instance, reply.served.route) == ("Hello there.", "a", "residency")
        assert reply.usage.cached_tokens == 16
        assert engine.got[0].body["top_k"] == 3
        chunks = [chunk async for chunk in stub.ChatStream(request)]
        assert "".join(c.delta for c in chunks) == "Hello there."
        assert chunks[0].served.route == "lease"
        assert chunks[-1].usage.completion_tokens == 3
        text = await stub.Complete(pb.CompletionRequest(model="small", prompt="Hi"))
        assert text.text == "Hello there."
        pieces = [chunk.delta async for chunk in stub.CompleteStream(pb.CompletionRequest(model="small", prompt="Hi"))]
        assert "".join(pieces) == "Hello there."
        models = await stub.ListModels(pb.ListModelsRequest())
        assert [m.id for m in models.models] == ["small"]


async def test_grpc_errors_have_a_code_and_the_typed_reason_in_a_trailer() -> None:
    async with served() as (app, engine), grpc.aio.insecure_channel(f"127.0.0.1:{app.grpc_port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        engine.statuses = [400]
        for request, code, reason in (
            (pb.ChatRequest(model="nope", messages=[pb.ChatMessage(role="user")]), grpc.StatusCode.NOT_FOUND, "model_not_found"),
            (pb.ChatRequest(model="small"), grpc.StatusCode.INVALID_ARGUMENT, "invalid_value"),
            (pb.ChatRequest(model="small", messages=[pb.ChatMessage(role="user")]), grpc.StatusCode.INVALID_ARGUMENT, "invalid_value"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await stub.Chat(request)
            assert failed.value.code() is code
            assert dict(failed.value.trailing_metadata())["aerostat-error-code"] == reason


async def test_a_cancelled_grpc_stream_aborts_the_engine_s_call() -> None:
    async with served() as (app, engine), grpc.aio.insecure_channel(f"127.0.0.1:{app.grpc_port}") as channel:
        engine.mid_gate.clear()
        stub = inference_pb2_grpc.InferenceStub(channel)
        stream = stub.ChatStream(pb.ChatRequest(model="small", messages=[pb.ChatMessage(role="user", content="Hi")]))
        await stream.read()
        stream.cancel()
        await eventually(lambda: engine.n_aborted == 1, "the engine's call is aborted")
        engine.mid_gate.set()


async def test_grpc_has_health_and_reflection() -> None:
    async with served() as (app, _), grpc.aio.insecure_channel(f"127.0.0.1:{app.grpc_port}") as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        await eventually(lambda: why_not_ready(app.catalog, app.fleet, is_draining=False) is None, "ready")
        request = health_pb2.HealthCheckRequest(service="readiness")
        for _ in range(100):  # readiness is published once a heartbeat
            told = await check(request)
            if told.status == health_pb2.HealthCheckResponse.SERVING:
                break
            await asyncio.sleep(0.05)
        assert told.status == health_pb2.HealthCheckResponse.SERVING
        info = channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        answers = [a async for a in info(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))]
        assert "aerostat.v1.Inference" in [s.name for s in answers[0].list_services_response.service]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/chat/completions", b"", 400, None),
        ("/v1/chat/completions", b"{", 400, None),
        ("/v1/chat/completions", b"[]", 400, None),
        ("/v1/chat/completions", b'{"messages": []}', 400, "model"),
        ("/v1/chat/completions", b'{"model": 3}', 400, "model"),
        ("/v1/chat/completions", b'{"model": "small"}', 400, "messages"),
        ("/v1/chat/completions", b'{"model": "small", "messages": []}', 400, "messages"),
        ("/v1/chat/completions", b'{"model": "small", "messages": ["x"]}', 400, "messages[0]"),
        ("/v1/chat/completions", b'{"model": "small", "messages": [{"content": "x"}]}', 400, "messages[0].role"),
        ("/v1/chat/completions", b'{"model": "small", "stream": "yes", "messages": [{"role": "user"}]}', 400, "stream"),
        ("/v1/chat/completions", b'{"model": "small", "max_tokens": 1.5, "messages": [{"role": "user"}]}', 400, "max_tokens"),
        ("/v1/chat/completions", b'{"model": "small", "session_id": 5, "messages": [{"role": "user"}]}', 400, "session_id"),
        ("/v1/completions", b'{"model": "small"}', 400, "prompt"),
        ("/v1/completions", b'{"model": "small", "prompt": 5}', 400, "prompt"),
        ("/v1/embeddings", b'{"model": "small"}', 400, "input"),
        ("/v1/chat/completions", b'{"model": "other", "messages": [{"role": "user"}]}', 404, "model"),
        ("/v1/nothing", b"{}", 404, None),
        ("/v1/models", b"{}", 405, None),
    ],
)
async def test_bad_input_is_answered_with_what_to_do(path: str, body: bytes, status: int, param: str | None) -> None:
    async with served() as (app, engine), httpx.AsyncClient(base_url=f"http://127.0.0.1:{app.http_port}") as client:
        answer = await client.post(path, content=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (status, param), error
        assert error["message"]
        assert answer.headers["x-request-id"]
        assert not engine.got


async def test_a_call_that_is_surely_too_long_never_reaches_an_engine() -> None:
    async with served() as (app, engine), httpx.AsyncClient(base_url=f"http://127.0.0.1:{app.http_port}") as client:
        too_long = {"model": "small", "messages": [USER | {"content": "x" * (4097 * 128)}]}
        answer = await client.post("/v1/chat/completions", json=too_long)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert not engine.got


async def test_the_admin_side_tells_the_truth() -> None:
    async with served() as (app, _), httpx.AsyncClient(base_url=f"http://127.0.0.1:{app.admin_port}") as admin:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{app.http_port}") as client:
            call = {"model": "small", "messages": [USER]}
            assert (await client.post("/v1/chat/completions", json=call, headers={"x-session-id": "s"})).status_code == 200
        assert (await admin.get("/healthz")).status_code == 200
        assert (await admin.get("/readyz")).status_code == 200
        fleet = (await admin.get("/admin/v1/fleet")).json()
        assert fleet["instances"][0]["models"][0]["state"] == "Open"
        assert "call-key" not in (await admin.get("/admin/v1/fleet")).text
        await eventually(lambda: any(True for _ in app.fleet.sessions()), "the session is known")
        assert (await admin.get("/admin/v1/sessions")).json()["sessions"][0]["model"] == "small"
        metrics = (await admin.get("/metrics")).text
        assert 'aerostat_requests_total{model="default/small",outcome="completed"} 1.0' in metrics
        assert 'aerostat_leases_installed_total{reason=""} 1.0' in metrics
        assert "aerostat_snapshot_age_seconds" in metrics
        app.dispatcher.drain()
        assert (await admin.get("/readyz")).status_code == 503
