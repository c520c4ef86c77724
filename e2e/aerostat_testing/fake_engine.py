"""A small real process that behaves towards agent and router as an engine does, in milliseconds instead of half a minute.

`python -m aerostat_testing.fake_engine SPEC` takes what the engine's launcher takes, and with `--uri URI --cache DIR` it answers as the
preparer does. The "model" is a folder with `fake.json` (`FakeModel`), which can also ask for faults. Its tokens follow from the prompt; it
knows what a prefix cache would tell. `engine_conformance` holds for it as for the real one.
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from aerostat.v1 import agent_pb2 as pb
from aerostat_core.engine_launch import ADMIN_KEY_ENV, CALL_KEY_ENV, EngineLaunch
from aerostat_core.prefix_hash import token_prefix
from aerostat_runtime.framing import FramedSocket
from aerostat_runtime.model_cache import in_use
from aerostat_runtime.tls import TlsFolder

DESCRIPTION: Final = "fake.json"
_PROBE_PROMPT: Final = [3, 1, 4, 1, 5, 9, 2, 6]
_RECONNECT: Final = 0.05
_SESSION_HEADER: Final = "x-smg-routing-key"
_OPEN_PATHS: Final = frozenset({"/health", "/metrics"})
_CALL_PATHS: Final = frozenset({"/generate", "/v1/chat/completions", "/v1/models"})


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeModel:
    """`exit_code`: end so instead of serving. `wrong_tokens`: the token probe must fail. `prepare_error`: reason and message."""

    weights_bytes: int = 1 << 20
    kv_bytes_per_token: int = 256
    context_tokens: int = 4096
    token_seconds: float = 0.0
    start_seconds: float = 0.0
    exit_code: int | None = None
    says: str = ""
    wrong_tokens: bool = False
    is_stubborn: bool = False  # ignores SIGTERM
    prepare_error: tuple[str, str] | None = None

    def write(self, folder: Path) -> str:
        """The model's URI."""
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / "fake.part"
        part.write_text(json.dumps(asdict(self)))
        part.replace(folder / DESCRIPTION)
        return f"file://{folder}"

    @classmethod
    def read(cls, folder: Path) -> "FakeModel":
        return cls(**json.loads((folder / DESCRIPTION).read_text()))


def next_token(tokens: list[int]) -> int:
    """Follows from the last tokens alone; never 0."""
    return sum(tokens[-8:]) % 509 + 1


def continuation(prompt: list[int], n: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@dataclass(slots=True)
class _State:
    spec: EngineLaunch
    model: FakeModel
    call_key: str
    admin_key: str
    running: int = 0
    sessions: dict[str, pb.PrefixHandle] = field(default_factory=dict)
    cached: set[tuple[int, ...]] = field(default_factory=set)
    outbox: "asyncio.Queue[pb.EngineFrame]" = field(default_factory=asyncio.Queue)

    def report(self, **body: Any) -> None:
        identity = pb.EngineIdentity(instance=self.spec.instance, model=self.spec.model, engine_epoch=self.spec.epoch)
        self.outbox.put_nowait(pb.EngineFrame(engine=identity, **body))

    def boundary(self) -> None:
        self.report(boundary=pb.Boundary(running=self.running))

    def hello(self) -> pb.Hello:
        return pb.Hello(
            pid=os.getpid(),
            tensor_parallel=self.spec.tensor_parallel,
            plugin_version="fake",
            sglang_version="none",
            attention_backend="none",
            page_size_tokens=self.spec.page_size,
            kv_capacity_tokens=self.spec.kv_tokens,
            kv_bytes_per_token=self.model.kv_bytes_per_token,
            weights_bytes=self.model.weights_bytes,
            max_context_tokens=self.model.context_tokens,
            max_running=self.spec.max_running,
            sessions=[pb.SessionPrefix(session=s, handle=h) for s, h in self.sessions.items()],
        )


# ---------------------------------------------------------------- HTTP


def _application(state: _State) -> web.Application:
    @web.middleware
    async def guard(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        may_call = request.path in _CALL_PATHS and key == state.call_key
        if request.path not in _OPEN_PATHS and not may_call and key != state.admin_key:
            return web.json_response({"error": {"message": "wrong key"}}, status=401)
        return await handler(request)

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        output = [t async for t in _tokens(state, body["input_ids"], body["sampling_params"]["max_new_tokens"], body.get("routing_key"))]
        meta = {"prompt_tokens": len(body["input_ids"]), "completion_tokens": len(output), "cached_tokens": 0}
        return web.json_response({"text": _text(output), "output_ids": output, "meta_info": meta})

    async def chat(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = list("\n".join(f"{m['role']}: {m['content']}" for m in body["messages"]).encode())
        n_cached = _cached_tokens(state, prompt)
        tokens = _tokens(state, prompt, body.get("max_tokens", 16), request.headers.get(_SESSION_HEADER))
        usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": n_cached}}
        if body.get("stream"):
            return await _stream_chat(request, state, tokens, usage, with_usage=bool(body.get("stream_options", {}).get("include_usage")))
        output = [t async for t in tokens]
        message = {"role": "assistant", "content": _text(output)}
        usage["completion_tokens"] = len(output)
        choice = {"index": 0, "message": message, "finish_reason": "length"}
        return web.json_response({"object": "chat.completion", "model": state.spec.served_name, "choices": [choice], "usage": usage})

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": state.spec.served_name, "object": "model"}]})

    async def server_info(_: web.Request) -> web.Response:
        return web.json_response({"pid": os.getpid()})

    app = web.Application(middlewares=[guard])
    app.add_routes(
        [
            web.get("/health", health),
            web.post("/generate", generate),
            web.post("/v1/chat/completions", chat),
            web.get("/v1/models", models),
            web.get("/server_info", server_info),
        ]
    )
    return app


async def _stream_chat(
    request: web.Request, state: _State, tokens: AsyncGenerator[int, None], usage: dict[str, Any], *, with_usage: bool
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)

    async def send(choices: list[dict[str, Any]], **more: Any) -> None:
        chunk = {"object": "chat.completion.chunk", "model": state.spec.served_name, "choices": choices, **more}
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())

    n = 0
    async with aclosing(tokens) as produced:
        async for token in produced:
            n += 1
            await send([{"index": 0, "delta": {"content": _text([token])}, "finish_reason": None}])
    await send([{"index": 0, "delta": {}, "finish_reason": "length"}])
    if with_usage:
        await send([], usage=usage | {"completion_tokens": n})
    await response.write(b"data: [DONE]\n\n")
    return response


async def _tokens(state: _State, prompt: list[int], n: int, session: str | None) -> AsyncGenerator[int, None]:
    """Generated one by one; reported as an engine reports a turn, whole or broken off."""
    state.running += 1
    state.boundary()
    n_cached = _cached_tokens(state, prompt)
    tokens = list(prompt)
    arrived_at, first_at = time.monotonic(), None
    try:
        for _ in range(n):
            await asyncio.sleep(state.model.token_seconds)
            token = 0 if state.model.wrong_tokens else next_token(tokens)
            tokens.append(token)
            first_at = first_at or time.monotonic()
            yield token
    finally:
        state.running -= 1
        digest, length = token_prefix(tokens[:-1], state.spec.page_size)
        handle = pb.PrefixHandle(engine_epoch=state.spec.epoch, prefix_hash=digest, n_tokens=length)
        state.cached.add(tuple(tokens[:length]))
        if session:
            state.sessions[session] = handle
        n_output = len(tokens) - len(prompt)
        turn = pb.Finished(session=session or "", handle=handle, n_prompt_tokens=len(prompt), n_output_tokens=n_output)
        turn.n_cached_tokens = n_cached
        turn.seconds = time.monotonic() - arrived_at
        if first_at is not None:
            turn.first_token_seconds = first_at - arrived_at
        turn.reason = "length" if n_output == n else "abort"
        state.report(finished=turn)
        state.report(profile=pb.ProfilePoint(phase=pb.ProfilePoint.PREFILL, n_new_tokens=max(len(prompt) - n_cached, 1), seconds=0.001))
        state.report(profile=pb.ProfilePoint(phase=pb.ProfilePoint.DECODE, n_new_tokens=1, seconds=max(state.model.token_seconds, 0.001)))
        state.boundary()


def _cached_tokens(state: _State, prompt: list[int]) -> int:
    """Of the prompt, whole pages that a turn before left."""
    page = state.spec.page_size
    shared = (
        next((i for i, (a, b) in enumerate(zip(known, prompt, strict=False)) if a != b), min(len(known), len(prompt)))
        for known in state.cached
    )
    return min(max(shared, default=0), max(len(prompt) - 1, 0)) // page * page


def _text(tokens: list[int]) -> str:
    return "".join(chr(ord("a") + t % 26) for t in tokens)


# ---------------------------------------------------------------- link to the agent


async def _link(state: _State) -> None:
    """Connect, say hello, report, answer; again after each loss. A refusal ends the process, as it ends an engine."""
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            await asyncio.get_running_loop().sock_connect(sock, state.spec.agent_socket)
        except OSError:
            sock.close()
        else:
            await _talk(state, FramedSocket(sock))
        await asyncio.sleep(_RECONNECT)


async def _talk(state: _State, peer: FramedSocket) -> None:
    while not state.outbox.empty():
        state.outbox.get_nowait()  # a new link begins with all sessions
    state.report(hello=state.hello())
    state.boundary()
    sender = asyncio.create_task(_send(state, peer))
    try:
        while (received := await peer.receive()) is not None:
            frame = pb.AgentFrame.FromString(received[0])
            if frame.engine_epoch != state.spec.epoch:
                continue
            if frame.WhichOneof("body") == "probe":
                state.boundary()
            elif frame.WhichOneof("body") == "welcome" and not frame.welcome.accepted:
                sys.stderr.write(f"refused: {frame.welcome.reason}\n")
                os._exit(1)
    except OSError:
        pass
    finally:
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)
        peer.close()


async def _send(state: _State, peer: FramedSocket) -> None:
    while True:
        await peer.send((await state.outbox.get()).SerializeToString())


# ---------------------------------------------------------------- the process


async def serve(spec: EngineLaunch, call_key: str, admin_key: str) -> int:
    model = FakeModel.read(Path(spec.model_path))
    sys.stderr.write(f"fake engine, api_key={call_key!r}\n{model.says}\n")  # as careless as a real one may be
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, (lambda: None) if model.is_stubborn else stop.set)
    await asyncio.sleep(model.start_seconds)
    if model.exit_code is not None:
        return model.exit_code
    state = _State(spec=spec, model=model, call_key=call_key, admin_key=admin_key)
    runner = web.AppRunner(_application(state), access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    tls = None if spec.tls_dir is None else TlsFolder(Path(spec.tls_dir)).server_context()
    await web.TCPSite(runner, spec.host, spec.port, reuse_address=True, ssl_context=tls).start()
    link = asyncio.create_task(_link(state))
    await stop.wait()
    link.cancel()
    await asyncio.gather(link, return_exceptions=True)
    await runner.cleanup()
    return 0


def prepare(uri: str) -> int:
    folder = Path(uri.removeprefix("file://"))

    def emit(line: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()

    emit({"progress": {"step": "read", "done_bytes": 1, "total_bytes": 2}})
    if not (folder / DESCRIPTION).is_file():
        emit({"error": {"reason": "SourceNotFound", "message": f"{folder} is no folder with a model"}})
        return 2
    model = FakeModel.read(folder)
    if model.prepare_error is not None:
        emit({"error": {"reason": model.prepare_error[0], "message": model.prepare_error[1]}})
        return 2
    emit(
        {
            "model": {
                "path": str(folder),
                "dtype": "bfloat16",
                "weights_bytes": model.weights_bytes,
                "kv_bytes_per_token": {"bfloat16": model.kv_bytes_per_token},
                "max_context_tokens": model.context_tokens,
                "probe": {"prompt_ids": _PROBE_PROMPT, "expected_ids": continuation(_PROBE_PROMPT, 4), "margin": 1.0},
            }
        }
    )
    return 0


def main(argv: list[str]) -> int:
    if argv and argv[0].startswith("{"):
        keys = os.environ.pop(CALL_KEY_ENV), os.environ.pop(ADMIN_KEY_ENV)
        spec = EngineLaunch.from_json(argv[0])
        Path(spec.run_dir).mkdir(parents=True, exist_ok=True)
        with in_use(Path(spec.model_path)):
            return asyncio.run(serve(spec, *keys))
    parser = argparse.ArgumentParser()
    parser.add_argument("--uri", required=True)
    parser.add_argument("--cache", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--room")
    return prepare(parser.parse_args(argv).uri)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
