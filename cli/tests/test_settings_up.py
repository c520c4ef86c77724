"""Ports and command lines of `aerostat up`."""

import socket
from pathlib import Path

import pytest

from aerostat_cli.main import main
from aerostat_cli.standalone.settings import UpSettings, agent_spec, router_addresses, router_spec
from aerostat_core.errors import SettingError
from aerostat_testing.ports import free_port

pytestmark = pytest.mark.cpu


def test_a_busy_port_is_refused_with_the_flag_that_helps() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(SettingError, match=rf"port {port} is not to be had .*--grpc-port"):
            router_addresses(1, http=0, grpc=port, admin=0)


def test_each_router_has_the_next_ports() -> None:
    first = free_port()
    addresses = router_addresses(2, http=first, grpc=0, admin=0)
    assert [a.http for a in addresses] == [f"127.0.0.1:{first}", f"127.0.0.1:{first + 1}"]


def test_ports_that_the_kernel_chose_are_all_different() -> None:
    addresses = router_addresses(8, http=0, grpc=0, admin=0)
    assert len({x for a in addresses for x in (a.http, a.grpc, a.admin)}) == 24


def test_two_listeners_on_one_port_are_refused() -> None:
    port = free_port()
    with pytest.raises(SettingError, match=r"--admin-port: port \d+ is wanted twice"):
        router_addresses(1, http=port, grpc=0, admin=port)


@pytest.mark.parametrize("port", [-1, 65536])
def test_what_is_no_port_is_refused(port: int) -> None:
    with pytest.raises(SettingError, match=f"--port: {port} is no port"):
        router_addresses(1, http=port, grpc=0, admin=0)


def test_children_are_told_where_everything_is(tmp_path: Path) -> None:
    settings = UpSettings(
        manifests=tmp_path,
        state=tmp_path / "state",
        model_cache=tmp_path / "models",
        model_cache_limit="9Gi",
        routers=router_addresses(1, http=0, grpc=0, admin=0),
    )
    agent = agent_spec(settings, tmp_path / "run", 7).argv
    assert agent[1:3] == ("-m", "aerostat_agent")
    assert agent[agent.index("--cluster") + 1] == f"folder:{tmp_path}/state"
    assert agent[agent.index("--die-with-parent") + 1] == "7"
    assert agent[agent.index("--model-cache-limit") + 1] == "9Gi"
    router = router_spec(settings, 0, 7).argv
    assert router[router.index("--listen") + 1] == settings.routers[0].http


def test_a_limit_that_is_no_size_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="1"):
        main(["up", str(tmp_path), "--model-cache-limit", "much"])
    assert "--model-cache-limit: expected a size such as 512Mi" in capsys.readouterr().err


def test_a_model_cache_that_is_a_file_is_refused_before_anything_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(SystemExit, match="1"):
        main(["up", str(tmp_path), "--model-cache", str(tmp_path / "cache")])
    said = capsys.readouterr().err
    assert "--model-cache" in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / ".aerostat").exists()
