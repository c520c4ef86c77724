"""What every engine must do towards its agent and its callers: the real one and the fake one, by the same checks.

`engine_under_test` starts a launcher with an agent's end of the socket beside it; each `check_…` takes it as it is and leaves it idle.
"""

import asyncio
import fcntl
import json
import os
import secrets
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import aiohttp

from aerostat_agent.engine_events import Boundary, EngineEvent, Finished, Hello, Identity, ProfilePoint
from aerostat_agent.engine_link import EngineLinks
from aerostat_agent.logtail import last_lines
from aerostat_agent.notes import PreparedModel
from aerostat_agent.policy.tracks import EngineKey
from aerostat_agent.ports import free_port
from aerostat_agent.probe import judge
from aerostat_agent.unix_socket import listen
from aerostat_agent.weights import read_outcome
from aerostat_core import peers
from aerostat_core.addresses import Address
from aerostat_core.engine_launch import ADMIN_KEY_ENV, CALL_KEY_ENV, EngineLaunch
from aerostat_core.ids import Epoch, ModelName, NamespacedName, Seconds
from aerostat_runtime.tls import TlsFolder
from aerostat_testing.certificates import Authority
from aerostat_testing.waiting import eventually

EPOCH: Final = Epoch(1234)
KEY: Final = EngineKey(NamespacedName("default", "cpu-0"), ModelName("under-test"))
SERVED_NAME: Final = "Served-Name"
KV_TOKENS: Final = 2048
REPORT_LIMIT: Final[Seconds] = 20.0
ENGINES_TLS: Final = "tls-engines"
ROUTER_TLS: Final = "tls-router"
HANG_UP_LIMIT: Final[Seconds] = 2.0  # design.md section 9, for a machine that does nothing else
_T = TypeVar("_T")


@dataclass(slots=True)
class AgentEnd:
    """An `EngineListener` that welcomes one epoch and remembers what it heard."""

    hellos: list[Hello] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)  # of the hellos
    events: list[EngineEvent] = field(default_factory=list)
    n_lost: int = 0

    def on_hello(self, who: Identity, hello: Hello) -> str:
        if (who.key, who.epoch) != (KEY, EPOCH):
            return f"expected {KEY}, epoch {EPOCH}"
        self.hellos.append(hello)
        self.ranks.append(who.rank)
        return ""

    def on_event(self, who: Identity, event: EngineEvent) -> None:
        self.events.append(event)

    def on_link_lost(self, who: Identity) -> None:
        self.n_lost += 1

    async def next_event(
        self, kind: type[_T], since: int, accept: Callable[[_T], bool] = lambda _: True, limit: Seconds = REPORT_LIMIT
    ) -> _T:
        """The first such event after the first `since` ones."""

        def found() -> list[_T]:
            return [e for e in self.events[since:] if isinstance(e, kind) and accept(e)]

        return (await eventually(found, f"the engine reports {kind.__name__}", limit=limit))[0]


class EngineUnderTest:
    """`tls` is that of its callers."""

    def __init__(
        self,
        spec: EngineLaunch,
        model: PreparedModel,
        call_key: str,
        admin_key: str,
        http: aiohttp.ClientSession,
        tls: TlsFolder | None = None,
    ) -> None:
        self.spec = spec
        self.model = model
        self.call_key = call_key
        self.admin_key = admin_key
        self.http = http
        self.tls = tls
        self.agent = AgentEnd()
        self.links = EngineLinks(self.agent, Epoch(1))
        self.log = Path(spec.run_dir) / "engine.log"
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"{'http' if self.tls is None else 'https'}://{Address(self.spec.host, self.spec.port)}"

    def request(self, method: str, path: str, **more: Any) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        if self.tls is not None:
            more |= {"ssl": self.tls.client_context(), "server_hostname": peers.ENGINES}
        return self.http.request(method, self.url + path, **more)

    def serve_agent(self) -> None:
        async def serve() -> None:
            listener = listen(Path(self.spec.agent_socket))
            try:
                await self.links.serve(listener.sock)
            finally:
                listener.close()

        self._serving = asyncio.create_task(serve())

    async def stop_agent(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)

    async def status_of(self, path: str, key: str | None, body: dict[str, Any] | None = None) -> int:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        async with self.request("GET" if body is None else "POST", path, json=body, headers=headers) as answer:
            await answer.read()
            return answer.status

    async def post(self, path: str, body: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        async with self.request("POST", path, json=body, headers=self.headers(session)) as answer:
            assert answer.status == 200, await answer.text()
            return dict(await answer.json())

    def headers(self, session: str | None = None) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.call_key}"} | ({} if session is None else {"x-smg-routing-key": session})


async def prepare(command: Sequence[str], uri: str, cache: Path) -> PreparedModel:
    """Run a preparer as the agent does. `cache` is a folder."""
    log = cache / "prepare.log"
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(*command, "--uri", uri, "--cache", str(cache), stdout=out, stderr=out)
    outcome = read_outcome(log, await process.wait())
    assert isinstance(outcome, PreparedModel), outcome
    return outcome


@asynccontextmanager
async def engine_under_test(
    command: Sequence[str],
    model: PreparedModel,
    folder: Path,
    *,
    start_limit: Seconds,
    tensor_parallel: int = 1,
    authority: Authority | None = None,
) -> AsyncIterator[EngineUnderTest]:
    """Started, linked to an agent's end, idle. `folder` has a short path. Afterwards nobody of its session lives.

    With an authority it serves by TLS, and is called as by a router.
    """
    tls_dir = None if authority is None else str(authority.issue(folder / ENGINES_TLS, peers.ENGINES))
    tls = None if authority is None else TlsFolder(authority.issue(folder / ROUTER_TLS, peers.ROUTER))
    spec = EngineLaunch(
        model=KEY.model,
        served_name=SERVED_NAME,
        instance=str(KEY.instance),
        epoch=EPOCH,
        model_path=model.path,
        port=free_port(),
        tls_dir=tls_dir,
        kv_tokens=KV_TOKENS,
        run_dir=str(folder),
        agent_socket=str(folder / "agent.sock"),
        dtype=model.dtype,
        tensor_parallel=tensor_parallel,
    )
    keys = secrets.token_urlsafe(), secrets.token_urlsafe()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=start_limit)) as http:
        engine = EngineUnderTest(spec, model, *keys, http, tls)
        engine.serve_agent()
        env = os.environ | {CALL_KEY_ENV: keys[0], ADMIN_KEY_ENV: keys[1]}
        with engine.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *command, spec.to_json(), env=env, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        try:
            await _ready(engine, process, start_limit)
            yield engine
            assert process.returncode is None, last_lines(engine.log)
        finally:
            await engine.stop_agent()
            await _end(process)


async def _ready(engine: EngineUnderTest, process: asyncio.subprocess.Process, limit: Seconds) -> None:
    def is_linked() -> bool:
        assert process.returncode is None, last_lines(engine.log)
        return bool(engine.agent.hellos)

    await eventually(is_linked, "the engine says hello", limit=limit)
    async with asyncio.timeout(limit):
        while True:
            try:
                if await engine.status_of("/health", None) == 200:
                    return
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.1)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), 15)
        except TimeoutError:
            sys.stderr.write("the engine under test does not end by SIGTERM\n")
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


# ---------------------------------------------------------------- checks


async def check_hello(engine: EngineUnderTest) -> None:
    """It introduces itself with what the agent and routers compute with."""
    hello, spec = engine.agent.hellos[0], engine.spec
    assert (hello.tensor_parallel, hello.page_size_tokens, hello.max_running) == (1, spec.page_size, spec.max_running)
    assert spec.kv_tokens - spec.page_size <= hello.kv_capacity_tokens <= spec.kv_tokens
    assert hello.kv_bytes_per_token == engine.model.kv_bytes("auto")
    assert 0.9 * engine.model.weights_bytes <= hello.weights_bytes <= 1.1 * engine.model.weights_bytes
    assert 0 < hello.max_context_tokens <= engine.model.context_tokens
    assert hello.pid > 0


async def check_keys(engine: EngineUnderTest) -> None:
    """Liveness is open; calls need the call key, the rest needs the other one."""
    probe = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1}}
    assert await engine.status_of("/health", None) == 200
    assert await engine.status_of("/generate", None, probe) == 401
    assert await engine.status_of("/generate", "wrong", probe) == 401
    assert await engine.status_of("/generate", engine.call_key, probe) == 200
    assert await engine.status_of("/v1/models", None) == 401
    assert await engine.status_of("/server_info", engine.call_key) == 401
    assert await engine.status_of("/server_info", engine.admin_key) == 200


async def check_model_is_held(engine: EngineUnderTest) -> None:
    """Nobody who asks for it first, as a cache does before it evicts, gets the folder that an engine serves."""
    folder = os.open(engine.spec.model_path, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    finally:
        os.close(folder)
    raise AssertionError(f"{engine.spec.model_path} could be evicted")


async def check_token_probe(engine: EngineUnderTest) -> None:
    """Greedy tokens are the known ones, twice."""
    expected = engine.model.probe
    body = {"input_ids": list(expected.prompt_ids), "sampling_params": {"temperature": 0, "max_new_tokens": len(expected.expected_ids)}}
    for _ in range(2):
        answer = await engine.post("/generate", body)
        assert judge(expected, answer["output_ids"]) is None, answer


async def check_turns_are_reported(engine: EngineUnderTest) -> None:
    """The second turn of a session is served from the first one's prefix, and the agent learns where that is."""
    turn = [{"role": "user", "content": "count: " + ", ".join(map(str, range(1, 40)))}]
    since = len(engine.agent.events)
    first = await _chat(engine, turn, "session-a")
    reported = await engine.agent.next_event(Finished, since, lambda e: e.session == "session-a")
    _check_report(engine, reported, first["usage"])
    turn += [first["choices"][0]["message"], {"role": "user", "content": "and on"}]
    since = len(engine.agent.events)
    second = await _chat(engine, turn, "session-a")
    again = await engine.agent.next_event(Finished, since, lambda e: e.session == "session-a")
    _check_report(engine, again, second["usage"])
    assert again.n_cached_tokens >= first["usage"]["prompt_tokens"] // engine.spec.page_size * engine.spec.page_size
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == again.n_cached_tokens
    assert again.handle != reported.handle
    await engine.agent.next_event(ProfilePoint, 0, lambda e: e.is_prefill and e.n >= 1 and e.seconds > 0)
    await engine.agent.next_event(ProfilePoint, 0, lambda e: not e.is_prefill and e.seconds > 0)


def _check_report(engine: EngineUnderTest, turn: Finished, usage: dict[str, Any]) -> None:
    assert (turn.n_prompt_tokens, turn.n_output_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert turn.handle is not None
    assert turn.handle.epoch == EPOCH
    assert turn.handle.n_tokens % engine.spec.page_size == 0
    committed = turn.n_prompt_tokens + turn.n_output_tokens - 1  # the last token's KV is not computed
    assert turn.handle.n_tokens == committed // engine.spec.page_size * engine.spec.page_size
    assert len(turn.handle.prefix_hash) == 16


async def check_stream(engine: EngineUnderTest) -> None:
    """Events, the usage last, `[DONE]`."""
    events = [line async for line in stream_events(engine, n_tokens=8)]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(e) for e in events[:-1]]
    assert {c["model"] for c in chunks} == {SERVED_NAME}
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 8
    assert any(c["choices"] and c["choices"][0]["delta"].get("content") for c in chunks)
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"] and c["choices"][0].get("finish_reason")] == ["length"]


async def check_boundary_on_ask(engine: EngineUnderTest) -> None:
    """An idle engine answers when the agent asks."""
    since = len(engine.agent.events)
    await engine.links.ask_boundary(KEY)
    boundary = await engine.agent.next_event(Boundary, since)
    assert (boundary.running, boundary.waiting) == (0, 0)


async def check_reconnect(engine: EngineUnderTest) -> None:
    """A new agent gets a hello with the sessions that are there; calls went on meanwhile."""
    await _chat(engine, [{"role": "user", "content": "remember " * 20}], "session-b")
    n = len(engine.agent.hellos)
    await engine.stop_agent()
    await _chat(engine, [{"role": "user", "content": "nobody listens " * 20}], "session-c")
    engine.serve_agent()
    await eventually(lambda: len(engine.agent.hellos) > n, "the engine says hello again", limit=REPORT_LIMIT)
    sessions = dict(engine.agent.hellos[-1].sessions)
    assert {"session-b", "session-c"} <= set(sessions)
    assert all(handle.epoch == EPOCH and handle.n_tokens > 0 for handle in sessions.values())


async def check_hang_up(engine: EngineUnderTest, *, limit: Seconds = HANG_UP_LIMIT) -> None:
    """A client that hangs up in mid-stream leaves nothing running."""
    since = len(engine.agent.events)
    stream = stream_events(engine, n_tokens=1000)
    await anext(stream)
    await engine.agent.next_event(Boundary, since, lambda b: b.running == 1)
    since = len(engine.agent.events)
    await stream.aclose()
    await engine.links.ask_boundary(KEY)
    await engine.agent.next_event(Boundary, since, lambda b: (b.running, b.waiting) == (0, 0), limit)


CHECKS: Final = (
    check_hello,
    check_keys,
    check_model_is_held,
    check_token_probe,
    check_turns_are_reported,
    check_stream,
    check_boundary_on_ask,
    check_reconnect,
    check_hang_up,
)


async def _chat(engine: EngineUnderTest, messages: list[dict[str, str]], session: str) -> dict[str, Any]:
    body = {"model": SERVED_NAME, "messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return await engine.post("/v1/chat/completions", body, session)


async def stream_events(engine: EngineUnderTest, *, n_tokens: int) -> AsyncGenerator[str, None]:
    """The data of each event."""
    body = {
        "model": SERVED_NAME,
        "messages": [{"role": "user", "content": "go on"}],
        "max_tokens": n_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with engine.request("POST", "/v1/chat/completions", json=body, headers=engine.headers("session-s")) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").strip().decode()
