"""One suite over the fake engine and the real one: what passes here can stand in for an engine in other tests."""

import sys
import tempfile
from pathlib import Path

import pytest

from aerostat_testing.certificates import Authority
from aerostat_testing.engine_conformance import CHECKS, check_hang_up, engine_under_test, prepare
from aerostat_testing.engine_tls_conformance import check_renewal, check_strangers
from aerostat_testing.fake_engine import FakeModel


@pytest.mark.cpu
@pytest.mark.parametrize("by_tls", [False, True], ids=["plain", "tls"])
async def test_the_fake_engine_conforms(tmp_path: Path, by_tls: bool) -> None:
    authority = Authority() if by_tls else None
    uri = FakeModel(token_seconds=0.01).write(tmp_path / "m")
    command = [sys.executable, "-m", "aerostat_testing.fake_engine"]
    model = await prepare(command, uri, tmp_path)
    async with engine_under_test(command, model, tmp_path, start_limit=30, authority=authority) as engine:
        for check in CHECKS:
            await check(engine)
        if authority is not None:
            await check_strangers(engine, authority)
            await check_renewal(engine, authority)


@pytest.mark.engine
async def test_the_real_engine_conforms(tmp_path: Path) -> None:
    """By TLS, since without is what other tests start engines like."""
    from aerostat_engine.tiny import write

    write(tmp_path / "m")
    python = sys.executable
    model = await prepare([python, "-m", "aerostat_engine.prepare"], f"file://{tmp_path / 'm'}", tmp_path)
    with tempfile.TemporaryDirectory(prefix="ae-") as folder:  # a Unix socket's path is short
        command, authority = [python, "-m", "aerostat_engine.launch"], Authority()
        async with engine_under_test(command, model, Path(folder), start_limit=240, authority=authority) as engine:
            for check in (c for c in CHECKS if c is not check_hang_up):
                await check(engine)
            await check_hang_up(engine, limit=10)  # the machine is shared with other tests
            await check_strangers(engine, authority)
            await check_renewal(engine, authority)
            assert "garbage collection is not frozen" not in engine.log.read_text()
