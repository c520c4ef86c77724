"""Two ranks over gloo with our plugin: the tokens of one rank, a hello from each, one report of each turn, nothing left behind."""

import sys
import tempfile
from functools import partial
from pathlib import Path

import psutil
import pytest

from aerostat_agent.engine_events import Finished
from aerostat_testing.engine_conformance import AgentEnd, EngineUnderTest, engine_under_test, prepare
from aerostat_testing.waiting import eventually

pytestmark = [pytest.mark.engine, pytest.mark.long]

START_LIMIT = 240.0
PROMPTS = [[(seed * 31 + i * i * 7 + i * 13) % 250 for i in range(n)] for seed, n in enumerate((1, 15, 40, 200, 40))]


async def _greedy(engine: EngineUnderTest) -> list[list[int]]:
    """Tokens for each prompt cold, then cached."""
    sampling = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    bodies = [{"input_ids": prompt, "sampling_params": sampling, "routing_key": f"s-{i}"} for i, prompt in enumerate(PROMPTS * 2)]
    return [(await engine.post("/generate", body))["output_ids"] for body in bodies]


def _has_hellos(agent: AgentEnd, n_ranks: int) -> bool:
    return len(agent.ranks) >= n_ranks


async def test_two_ranks_answer_as_one_and_each_turn_is_reported_once(tmp_path: Path) -> None:
    from aerostat_engine.tiny import write

    write(tmp_path / "m")
    python = sys.executable
    model = await prepare([python, "-m", "aerostat_engine.prepare", "--dtype", "float32"], f"file://{tmp_path / 'm'}", tmp_path)
    tokens: dict[int, list[list[int]]] = {}
    for n_ranks in (1, 2):
        with tempfile.TemporaryDirectory(prefix="ae-") as folder:  # a Unix socket's path is short
            command = [python, "-m", "aerostat_engine.launch"]
            async with engine_under_test(command, model, Path(folder), start_limit=START_LIMIT, tensor_parallel=n_ranks) as engine:
                agent = engine.agent
                await eventually(partial(_has_hellos, agent, n_ranks), "each rank says hello", limit=30)
                tokens[n_ranks] = await _greedy(engine)
                await agent.next_event(Finished, 0, lambda turn: turn.session == f"s-{len(PROMPTS) * 2 - 1}")
                assert sorted(agent.ranks) == list(range(n_ranks))
                assert {hello.tensor_parallel for hello in agent.hellos} == {n_ranks}
                sessions = [event.session for event in agent.events if isinstance(event, Finished)]
                assert sorted(sessions) == sorted(f"s-{i}" for i in range(len(PROMPTS) * 2))
                processes = psutil.Process().children(recursive=True)
                assert len(processes) > n_ranks
            _, alive = psutil.wait_procs(processes, timeout=10)
            assert alive == []
    assert tokens[1] == tokens[2]
