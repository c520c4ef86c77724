"""Sources with a token: where it is read, where it goes, and what is told while it is not there."""

import asyncio
from pathlib import Path

import pytest

from aerostat_agent.launching import source_of
from aerostat_agent.policy.tracks import Failure
from aerostat_agent.weights import NOTE, RETRY_AFTER, read_outcome, read_progress
from aerostat_core.errors import TemporaryError
from aerostat_core.ids import NamespacedName
from aerostat_core.specs import EngineState
from aerostat_testing.agent_fakes import INSTANCE, AgentRig, instance_model, instance_spec, key, settle

pytestmark = [pytest.mark.cpu, pytest.mark.looptime]

URI = "hf://org/private"
SECRET = NamespacedName(INSTANCE.namespace, "hub")


def failure(rig: AgentRig, name: str = "a") -> tuple[str, str]:
    verdict = rig.node.verdicts[key(name)]
    assert verdict.state is EngineState.FAILED
    return verdict.reason, verdict.message


def preparers(rig: AgentRig) -> list[tuple[dict[str, str], tuple[str, ...]]]:
    """Environment and arguments of those that run."""
    running = [p.epoch for p in rig.keeper.processes.values() if p.note == NOTE and p.exit_code is None]
    return [(dict(rig.keeper.environments[epoch]), rig.keeper.commands[epoch]) for epoch in running]


async def test_a_token_is_in_the_environment_of_its_preparer_and_nowhere_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rig = AgentRig(tmp_path)
    rig.cluster.secrets[SECRET] = {"token": b"hf_mine\n", "other": b"x"}
    rig.node.declare(instance_spec(instance_model("a", uri=URI, secret="hub"), instance_model("b", uri=URI)))
    async with rig.running():
        await settle()
        assert sorted(environment.get("HF_TOKEN", "") for environment, _ in preparers(rig)) == ["", "hf_mine"]
        assert not any("hf_mine" in argument for _, argv in preparers(rig) for argument in argv)
        for name in ("a", "b"):
            process = await rig.started(name)
            assert "HF_TOKEN" not in rig.keeper.environments[process.epoch]
            assert b"hf_mine" not in process.note
    assert "hf_mine" not in caplog.text + repr(rig.node.verdicts)


async def test_a_token_is_read_anew_for_each_preparation_and_what_is_missing_is_named(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    rig.node.declare(instance_spec(instance_model("a", uri=URI, secret="hub")))
    async with rig.running():
        await settle()
        assert failure(rig) == (
            "SecretNotFound",
            'there is no Secret "hub" in namespace "default": create it (its key "token" is the token for hf://org/private)',
        )
        for held in ({}, {"token": b""}, {"TOKEN": b"hf_mine"}):
            rig.cluster.secrets[SECRET] = held
            await asyncio.sleep(RETRY_AFTER + 1)
            reason, said = failure(rig)
            assert reason == "SecretKeyMissing"
            assert said == 'Secret "hub" in namespace "default" has no key "token": put the token for hf://org/private there'
        assert rig.n_prepared == 0
        rig.cluster.secrets[SECRET] = {"token": b"hf_mine"}
        await rig.started("a")


async def test_a_keeper_that_is_lost_is_no_failure_of_the_model(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    rig.node.declare(instance_spec(instance_model("a", uri=URI)))
    rig.keeper.start_fails = TemporaryError("KeeperLost", "the keeper does not answer", retry_after=1.0)
    async with rig.running():
        await settle()
        assert rig.node.verdicts[key("a")].state is EngineState.STARTING


async def test_another_secret_is_another_preparation(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    for name in ("hub", "other"):
        rig.cluster.secrets[NamespacedName(INSTANCE.namespace, name)] = {"token": f"hf_{name}".encode()}
    rig.node.declare(
        instance_spec(*(instance_model(name, uri=URI, secret=secret) for name, secret in (("a", "hub"), ("b", "hub"), ("c", "other"))))
    )
    async with rig.running():
        for name in "abc":
            await rig.started(name)
        assert rig.n_prepared == 2
        first = rig.keeper.engines[key("a")].epoch
        rig.node.declare(instance_spec(instance_model("a", uri=URI)))
        await rig.started("a", after=first)
        assert rig.n_prepared == 3


@pytest.mark.parametrize("name", ["hub", "other/hub", "../../kube-system/secrets/admin"])
def test_a_secret_is_one_of_the_models_own_namespace(name: str) -> None:
    assert source_of(NamespacedName("team", "cpu-0"), instance_model("a", uri=URI, secret=name)).secret == NamespacedName("team", name)


def test_a_token_that_a_preparer_says_is_not_told(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for text, exit_code in (
        ('{"error": {"reason": "X", "message": "the hub says: hf_mine is odd"}}', 2),
        ('{"model": {"path": "/models/hf_mine"}}', 0),
        ("Traceback\nValueError: Bearer hf_mine", 1),
    ):
        log.write_text(text)
        outcome = read_outcome(log, exit_code, secrets=["hf_mine"])
        assert "***" in str(outcome)
        assert "hf_mine" not in str(outcome)


@pytest.mark.parametrize(
    "chatter",
    [
        '{"error": "boom"}',
        '{"error": {"message": "x"}}',
        '{"error": {"reason": "no word", "message": "x"}}',
        '{"error": null, "progress": 1}',
        '{"progress": {"done_bytes": 1, "total_bytes": 2}}',
        '{"model": 1',
    ],
)
def test_lines_that_look_like_a_preparers_are_chatter(tmp_path: Path, chatter: str) -> None:
    log = tmp_path / "log"
    log.write_text(f'{{"progress": {{"step": "download", "done_bytes": 1024, "total_bytes": 2048}}}}\n{chatter}\n')
    assert read_progress(log) == "download 1Ki of 2Ki"
    assert read_outcome(log, 3) == Failure(
        reason="PrepareFailed", message=f"the preparer ended with exit code 3; the last lines of its log:\n{log.read_text().strip()}"
    )
