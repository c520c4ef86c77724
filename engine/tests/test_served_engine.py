"""A real SGLang server with our plugin and a tiny model: exact greedy tokens, keys, reports on a real socket, an idle core.

The engine is a process of its own session, as under the keeper: SGLang ends its parent when it fails.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest

from aerostat.v1 import agent_pb2 as pb
from aerostat_core.engine_launch import ADMIN_KEY_ENV, CALL_KEY_ENV, EngineLaunch
from aerostat_core.prefix_hash import token_prefix
from aerostat_runtime.framing import FrameDecoder, encode

pytestmark = pytest.mark.engine

START_TIMEOUT = 180.0
CHUNK_TOKENS = 64
N_NEW = 12
KV_TOKENS = 2048
EPOCH = 5

Kind = Literal["hello", "finished", "boundary", "profile", "tiers"]
Greedy = Callable[[list[int]], list[int]]


class Agent(threading.Thread):
    """Listens where the engine expects its agent, welcomes it, and keeps what it says."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self.frames: list[pb.EngineFrame] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._link: socket.socket | None = None

    def run(self) -> None:
        self._link, _ = self._listener.accept()
        self._say(welcome=pb.Welcome(accepted=True))
        decoder = FrameDecoder()
        with self._link:
            while data := self._link.recv(65536):
                self.frames += [pb.EngineFrame.FromString(payload) for payload in decoder.feed(data)]

    def probe(self) -> None:
        self._say(probe=pb.Probe())

    def of(self, kind: Kind) -> list[Any]:
        return [getattr(frame, kind) for frame in list(self.frames) if frame.HasField(kind)]

    def close(self) -> None:
        self.join(10)
        self._listener.close()

    def _say(self, *, welcome: pb.Welcome | None = None, probe: pb.Probe | None = None) -> None:
        assert self._link is not None
        self._link.sendall(encode(pb.AgentFrame(agent_epoch=1, engine_epoch=EPOCH, welcome=welcome, probe=probe).SerializeToString()))


@dataclass(frozen=True, kw_only=True)
class Engine:
    url: str
    pid: int
    model: Path
    agent: Agent = field(repr=False)

    def ask(self, path: str, body: object = None, *, key: str | None = "call", session: str | None = None) -> tuple[int, Any]:
        headers = {"content-type": "application/json"}
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        if session is not None:
            headers["x-smg-routing-key"] = session
        request = urllib.request.Request(self.url + path, json.dumps(body).encode() if body is not None else None, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                text = answer.read().decode()
                return answer.status, json.loads(text) if text.startswith(("{", "[")) else text
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def generate(self, prompt: list[int], session: str | None = None) -> tuple[list[int], int]:
        """Greedy tokens and how many of the prompt's were cached."""
        sampling = {"temperature": 0, "max_new_tokens": N_NEW, "ignore_eos": True}
        status, answer = self.ask("/generate", {"input_ids": prompt, "sampling_params": sampling, "routing_key": session})
        assert status == 200, answer
        return answer["output_ids"], answer["meta_info"]["cached_tokens"]

    def processes(self) -> list[psutil.Process]:
        main = psutil.Process(self.pid)
        return [main, *main.children(recursive=True)]


def wait_for(holds: Callable[[], object], what: str, timeout: float = 10.0) -> None:
    deadline = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("e")
    model = folder / "model"
    subprocess.run([sys.executable, "-m", "aerostat_engine.tiny", str(model)], check=True, timeout=120, capture_output=True)
    agent = Agent(folder / "agent.sock")
    agent.start()
    spec = EngineLaunch(
        model="tiny",
        served_name="Tiny.Qwen3",
        instance="i",
        epoch=EPOCH,
        model_path=str(model),
        port=free_port(),
        kv_tokens=KV_TOKENS,
        run_dir=str(folder),
        agent_socket=str(folder / "agent.sock"),
        dtype="float32",
        parent_pid=os.getpid(),
        engine_args={"chunked-prefill-size": str(CHUNK_TOKENS)},
    )
    log = folder / "log"
    environ = {**os.environ, CALL_KEY_ENV: "call", ADMIN_KEY_ENV: "admin"}
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "aerostat_engine.launch", spec.to_json()], env=environ, stdout=out, stderr=out, start_new_session=True
        )
    made = Engine(url=f"http://127.0.0.1:{spec.port}", pid=process.pid, model=model, agent=agent)

    def is_up() -> bool:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            return made.ask("/health")[0] == 200
        except OSError:
            return False

    try:
        wait_for(is_up, "the engine serves", START_TIMEOUT)
        wait_for(lambda: agent.of("hello"), "the engine says hello")
        yield made
        children = made.processes()
        process.send_signal(signal.SIGTERM)
        process.wait(20)
        _, left = psutil.wait_procs(children, timeout=5)
        assert not left, "the engine's children outlive it"
        assert "admin" not in {line.split("=", 1)[-1] for line in log.read_text().split()}, "a key is in the log"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
        agent.close()


@pytest.fixture(scope="module")
def expected(engine: Engine) -> Greedy:
    """Greedy tokens by transformers, in float32, without a cache."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(engine.model, dtype=torch.float32).eval()

    def tokens(prompt: list[int]) -> list[int]:
        made = list(prompt)
        with torch.inference_mode():
            for _ in range(N_NEW):
                made.append(int(model(input_ids=torch.tensor([made]), use_cache=False).logits[0, -1].argmax()))
        return made[len(prompt) :]

    return tokens


def prompt_of(n_tokens: int, seed: int) -> list[int]:
    return [(seed * 31 + i * i * 7 + i * 13) % 250 for i in range(n_tokens)]


@pytest.mark.parametrize("n_tokens", [1, 15, 16, 40, 200], ids=lambda n: f"{n} tokens")
def test_greedy_tokens_equal_transformers_cold_and_cached(engine: Engine, expected: Greedy, n_tokens: int) -> None:
    prompt = prompt_of(n_tokens, seed=n_tokens)
    cold, n_cold = engine.generate(prompt)
    cached, n_cached = engine.generate(prompt)
    longer, _ = engine.generate(prompt + cold + prompt_of(9, seed=1))
    assert cold == cached == expected(prompt)
    assert longer == expected(prompt + cold + prompt_of(9, seed=1))
    assert n_cold == 0
    assert n_cached == (n_tokens - 1) // 16 * 16, "all full pages but what the last token needs"


def test_greedy_tokens_equal_transformers_in_a_mixed_crowd(engine: Engine, expected: Greedy) -> None:
    prompts = [prompt_of(n, seed=100 + n) for n in (3, 17, 33, 64, 90, 130, 131, 150)]
    with ThreadPoolExecutor(len(prompts)) as crowd:
        answers = list(crowd.map(lambda prompt: engine.generate(prompt)[0], prompts))
    assert answers == [expected(prompt) for prompt in prompts]


def test_a_finished_turn_is_reported_with_its_session_and_handle(engine: Engine) -> None:
    prompt = prompt_of(50, seed=7)
    asked = time.monotonic()
    output, _ = engine.generate(prompt, session="session-a")
    took = time.monotonic() - asked
    wait_for(lambda: [turn for turn in engine.agent.of("finished") if turn.session == "session-a"], "the turn is reported")
    [turn] = [turn for turn in engine.agent.of("finished") if turn.session == "session-a"]
    assert (turn.n_prompt_tokens, turn.n_output_tokens, turn.n_cached_tokens, turn.reason) == (50, N_NEW, 0, "length")
    assert (turn.handle.prefix_hash, turn.handle.n_tokens) == token_prefix((prompt + output)[:-1], 16)
    assert turn.handle.engine_epoch == EPOCH
    assert 0 < turn.first_token_seconds < turn.seconds < took, "inside the engine, the client sees HTTP on top"
    assert turn.seconds > took / 4, "and not just the last batch"


def test_the_wait_in_the_engines_queue_is_in_the_time_to_the_first_token(engine: Engine) -> None:
    crowd = 24  # more than run at once
    with ThreadPoolExecutor(crowd) as callers:
        list(callers.map(lambda i: engine.generate(prompt_of(60, seed=300 + i), session=f"crowd-{i}"), range(crowd)))
    wait_for(lambda: {t.session for t in engine.agent.of("finished")} >= {f"crowd-{i}" for i in range(crowd)}, "all are reported")
    turns = {turn.session: turn for turn in engine.agent.of("finished")}
    first = sorted(turns[f"crowd-{i}"].first_token_seconds for i in range(crowd))
    assert first[-1] > 2 * first[0]
    assert all(turns[f"crowd-{i}"].seconds >= turns[f"crowd-{i}"].first_token_seconds for i in range(crowd))


def test_the_session_header_reaches_every_kind_of_call(engine: Engine) -> None:
    message = [{"role": "user", "content": "hello"}]
    calls: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": message, "n": 2},
        "/v1/completions": {"prompt": ["one", "two"]},
        "/v1/messages": {"messages": message},
    }
    for path, body in calls.items():
        status, answer = engine.ask(path, {"model": "Tiny.Qwen3", "max_tokens": 3, **body}, session=path)
        assert status == 200, answer
    turns = engine.agent.of
    wait_for(lambda: {turn.session for turn in turns("finished")} >= calls.keys(), "all are reported")
    sessions = [turn.session for turn in turns("finished")]
    assert [sessions.count(path) for path in calls] == [2, 2, 1]


def test_a_session_whose_prefix_was_evicted_is_reported_missing(engine: Engine) -> None:
    engine.generate(prompt_of(300, seed=11), session="evictee")
    wait_for(lambda: [turn for turn in engine.agent.of("finished") if turn.session == "evictee"], "the turn is reported")
    for seed in range(20, 20 + KV_TOKENS // 300 + 1):
        engine.generate(prompt_of(300, seed=seed))
    wait_for(lambda: [tiers for tiers in engine.agent.of("tiers") if "evictee" in tiers.missing], "the session is reported missing")


def test_a_probe_is_answered_by_an_idle_engine_which_burns_no_core(engine: Engine) -> None:
    def used() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in engine.processes())

    wait_for(lambda: engine.agent.of("boundary")[-1].running == 0, "the engine is idle")
    before, began = used(), time.monotonic()
    time.sleep(2.0)  # processor time is what is measured
    assert (used() - before) / (time.monotonic() - began) < 0.25
    n = len(engine.agent.of("boundary"))
    asked = time.monotonic()
    engine.agent.probe()
    wait_for(lambda: len(engine.agent.of("boundary")) > n, "the probe is answered", timeout=2.0)
    assert time.monotonic() - asked < 1.0, "the idle scheduler is woken, it does not wait for its next look"


def test_hello_describes_the_engine(engine: Engine) -> None:
    [hello] = engine.agent.of("hello")
    assert hello.attention_backend == "aerostat_paged"
    assert hello.kv_capacity_tokens == KV_TOKENS
    assert hello.kv_bytes_per_token == 4 * 2 * (32 + 32) * 4
    assert hello.page_size_tokens == 16
    assert hello.weights_bytes > 0


@pytest.mark.parametrize(
    ("path", "open_to"),
    [
        ("/health", {None, "wrong", "call", "admin"}),
        ("/metrics", {None, "wrong", "call", "admin"}),
        ("/v1/models", {"call", "admin"}),
        ("/server_info", {"admin"}),
        ("/health_generate", {"admin"}),
        ("/openapi.json", {"admin"}),
    ],
)
def test_keys_are_enforced(engine: Engine, path: str, open_to: set[str | None]) -> None:
    answers = {key: engine.ask(path, key=key)[0] for key in (None, "wrong", "call", "admin")}
    assert answers == {key: 200 if key in open_to else 401 for key in answers}


def test_what_the_engine_tells_about_itself_holds_no_key(engine: Engine) -> None:
    _, info = engine.ask("/server_info", key="admin")
    assert info["api_key"] is None
    assert info["admin_api_key"] is None
    assert engine.ask("/v1/models")[1]["data"][0]["id"] == "Tiny.Qwen3"
