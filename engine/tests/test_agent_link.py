"""The link's thread against a real socket: hello first, reports in order, mail, reconnection, fences."""

from __future__ import annotations

import select
import socket
import threading
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from aerostat.v1 import agent_pb2 as pb
from aerostat_core.prefix_hash import token_prefix
from aerostat_engine.agent_link import AgentLink
from aerostat_engine.reports import Boundary, EngineFacts, Finished, Missing, Phase, Prefix, ProfilePoint, Step
from aerostat_engine.wire import Identity, Word, hello_frame
from aerostat_runtime.framing import FrameDecoder, encode

pytestmark = pytest.mark.cpu

IDENTITY = Identity(instance="i", model="m", engine_epoch=7, rank=0)
FACTS = EngineFacts(
    pid=1,
    tensor_parallel=1,
    plugin_version="0",
    sglang_version="0",
    attention_backend="aerostat_paged",
    page_size=2,
    kv_capacity_tokens=64,
    kv_bytes_per_token=8,
    weights_bytes=9,
    max_context_tokens=32,
    max_running=4,
)
PREFIX = Prefix(tokens=array("q", [5, 6, 7, 8]), page_size=2)
TIMEOUT = 10.0
FINISHED = Finished(
    session="s",
    request_id="r",
    prefix=PREFIX,
    n_prompt_tokens=3,
    n_output_tokens=2,
    n_cached_tokens=1,
    reason="stop",
    first_token_seconds=0.25,
    seconds=1.5,
)


class Agent:
    """The agent's end: one connection at a time."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.settimeout(TIMEOUT)
        self._listener.bind(str(path))
        self._listener.listen()
        self._link: socket.socket | None = None
        self._frames: list[pb.EngineFrame] = []

    def accept(self) -> None:
        self.hang_up()
        self._link, _ = self._listener.accept()
        self._link.settimeout(TIMEOUT)
        self._decoder = FrameDecoder()

    def receive(self) -> pb.EngineFrame:
        assert self._link is not None
        while not self._frames:
            data = self._link.recv(65536)
            assert data, "the engine closed the link"
            self._frames += [pb.EngineFrame.FromString(payload) for payload in self._decoder.feed(data)]
        return self._frames.pop(0)

    def say(self, frame: pb.AgentFrame) -> None:
        self.say_raw(encode(frame.SerializeToString()))

    def say_raw(self, data: bytes) -> None:
        assert self._link is not None
        self._link.sendall(data)

    def hang_up(self) -> None:
        if self._link is not None:
            self._link.close()

    def close(self) -> None:
        self.hang_up()
        self._listener.close()


class Refusals:
    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.heard = threading.Event()

    def __call__(self, reason: str) -> None:
        self.reasons.append(reason)
        self.heard.set()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    end = Agent(tmp_path / "agent.sock")
    yield end
    end.close()


@pytest.fixture
def refusals() -> Refusals:
    return Refusals()


@pytest.fixture
def trouble() -> list[str]:
    """What the scheduler's watch says from now on."""
    return []


@pytest.fixture
def link(tmp_path: Path, agent: Agent, refusals: Refusals, trouble: list[str]) -> Iterator[AgentLink]:
    end = AgentLink(
        str(tmp_path / "agent.sock"),
        IDENTITY,
        hello=lambda: hello_frame(IDENTITY, FACTS, [("s", PREFIX)]),
        refused=refusals,
        trouble=lambda: trouble[0] if trouble else None,
        check_every=0.05,
    )
    end.start()
    agent.accept()
    yield end
    end.close()


def frame_to(epoch: int = 7, agent_epoch: int = 1, **body: pb.Welcome | pb.Probe) -> pb.AgentFrame:
    frame = pb.AgentFrame(agent_epoch=agent_epoch, engine_epoch=epoch)
    for name, value in body.items():
        getattr(frame, name).CopyFrom(value)
    return frame


def wait_for_mail(link: AgentLink) -> list[Word]:
    assert select.select([link.mail_fd], [], [], TIMEOUT)[0]
    return link.take()


def test_a_link_begins_with_who_we_are_and_what_we_hold(link: AgentLink, agent: Agent) -> None:
    frame = agent.receive()
    assert (frame.engine.instance, frame.engine.model, frame.engine.engine_epoch) == ("i", "m", 7)
    assert frame.hello.kv_capacity_tokens == 64
    [session] = frame.hello.sessions
    assert session.session == "s"
    assert (session.handle.prefix_hash, session.handle.n_tokens) == token_prefix([5, 6, 7, 8], 2)


def test_reports_arrive_in_order(link: AgentLink, agent: Agent) -> None:
    link.send(FINISHED)
    link.send(Boundary(running=1, waiting=2, waiting_tokens=3, kv_used_tokens=4, kv_evictable_tokens=5, last_token_at=6.0))
    link.send(ProfilePoint(step=Step(phase=Phase.DECODE, n_new=4, n_context=100), seconds=0.25))
    link.send(Missing(sessions=("s", "t")))
    hello, finished, boundary, profile, tiers = (agent.receive() for _ in range(5))
    assert hello.WhichOneof("body") == "hello"
    assert finished.finished.handle.n_tokens == 4
    assert (finished.finished.reason, finished.finished.first_token_seconds, finished.finished.seconds) == ("stop", 0.25, 1.5)
    assert boundary.boundary.kv_evictable_tokens == 5
    assert (profile.profile.phase, profile.profile.n_new_tokens) == (pb.ProfilePoint.DECODE, 4)
    assert list(tiers.tiers.missing) == ["s", "t"]


def test_a_turn_that_ended_before_its_first_token_has_no_time_of_it(link: AgentLink, agent: Agent) -> None:
    agent.receive()
    link.send(replace(FINISHED, first_token_seconds=None))
    assert not agent.receive().finished.HasField("first_token_seconds")


def test_trouble_is_told_once_on_each_link(link: AgentLink, agent: Agent, trouble: list[str]) -> None:
    agent.receive()
    trouble.append("the scheduler hangs")
    assert agent.receive().unhealthy.why == "the scheduler hangs"
    link.send(FINISHED)
    assert agent.receive().HasField("finished"), "it is not told again and again"
    agent.accept()
    assert agent.receive().HasField("hello")
    assert agent.receive().unhealthy.why == "the scheduler hangs", "the next agent learns it too"


def test_a_probe_is_mail_for_the_scheduler(link: AgentLink, agent: Agent) -> None:
    agent.say(frame_to(welcome=pb.Welcome(accepted=True)))
    agent.say(frame_to(probe=pb.Probe()))
    assert wait_for_mail(link) == [Word.PROBE]
    assert link.take() == []


def test_words_for_another_run_or_from_an_earlier_agent_are_dropped(link: AgentLink, agent: Agent) -> None:
    agent.say(frame_to(epoch=6, probe=pb.Probe()))
    agent.say(frame_to(agent_epoch=5, welcome=pb.Welcome(accepted=True)))
    agent.say(frame_to(agent_epoch=4, probe=pb.Probe()))
    agent.say(frame_to(agent_epoch=5, probe=pb.Probe()))
    assert wait_for_mail(link) == [Word.PROBE]
    assert link.take() == []


def test_a_lost_link_is_made_again_and_says_hello_again(link: AgentLink, agent: Agent) -> None:
    agent.receive()
    agent.hang_up()
    link.send(Missing(sessions=("kept until then",)))
    agent.accept()
    assert agent.receive().WhichOneof("body") == "hello"


def test_nonsense_ends_the_link_not_the_thread(link: AgentLink, agent: Agent) -> None:
    agent.receive()
    agent.say_raw(b"\xff" * 64)
    agent.accept()
    assert agent.receive().WhichOneof("body") == "hello"


def test_a_refusal_is_told_with_its_reason(link: AgentLink, agent: Agent, refusals: Refusals) -> None:
    agent.say(frame_to(welcome=pb.Welcome(accepted=False, reason="unknown epoch")))
    assert refusals.heard.wait(TIMEOUT)
    assert refusals.reasons == ["unknown epoch"]


def test_without_an_agent_the_newest_reports_are_kept(tmp_path: Path) -> None:
    link = AgentLink(
        str(tmp_path / "late.sock"),
        IDENTITY,
        hello=lambda: hello_frame(IDENTITY, FACTS, []),
        refused=lambda reason: None,
        trouble=lambda: None,
    )
    link.start()
    for i in range(5000):
        link.send(Missing(sessions=(str(i),)))
    agent = Agent(tmp_path / "late.sock")
    agent.accept()
    assert agent.receive().WhichOneof("body") == "hello"
    assert list(agent.receive().tiers.missing) == [str(5000 - 1024)]
    link.close()
    agent.close()
