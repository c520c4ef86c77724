"""The builder of Kubernetes' programs, with a Go that only pretends: once for all who ask, resumed, and loud when it fails."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aerostat_testing.kubernetes import build
from aerostat_testing.kubernetes.build import LATEST, OLDEST, node_programs, programs
from aerostat_testing.kubernetes.caches import BuildError
from aerostat_testing.waiting import wait_for

pytestmark = pytest.mark.cpu

# Writes down each build, and takes as long as the file `slow` says.
FAKE_GO = """#!/bin/sh
here=$(dirname "$0")
case $1 in
list) echo one; echo two; exit ;;
esac
echo "$PWD" >>"$here/builds"
sleep "$(cat "$here/slow")"
[ ! -f "$here/broken" ] || { echo "undefined: everything"; exit 1; }
case $PWD in
*etcd) names=server ;;
*/kubernetes-*)
  names=
  for word in "$@"; do case $word in k8s.io/kubernetes/cmd/*) names="$names ${word##*/}" ;; esac; done
  ;;
*) names=$(basename "$PWD") ;;
esac
while [ "$1" != -o ]; do shift; done
for name in $names; do echo "$PWD" >"$2$name"; done
"""


@pytest.fixture
def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the pretended Go."""
    folder = tmp_path / "go"
    folder.mkdir()
    (folder / "go").write_text(FAKE_GO)
    (folder / "go").chmod(0o755)
    (folder / "slow").write_text("0")
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def pkg_config(go: Path, *, finds: bool) -> None:
    (go / "pkg-config").write_text(f"#!/bin/sh\nexit {int(not finds)}\n")
    (go / "gcc").write_text("#!/bin/sh\n")
    for name in ("pkg-config", "gcc"):
        (go / name).chmod(0o755)


def n_builds(go: Path) -> int:
    return len((go / "builds").read_text().splitlines())


def silent(_: str) -> None:
    pass


def test_what_is_built_is_kept_by_version(go: Path, tmp_path: Path) -> None:
    said: list[str] = []
    first = programs(cache=tmp_path / "cache", say=said.append)
    assert first.version.startswith(f"{LATEST}.")
    assert first.kubernetes == tmp_path / "cache/kubernetes" / first.version
    assert all(p.is_file() for p in (first.apiserver, first.controller_manager, first.kubectl, first.etcd_server))
    assert any("built in" in line for line in said)
    assert programs(cache=tmp_path / "cache", say=said.append) == first
    assert n_builds(go) == 2, "Kubernetes and etcd, once each"
    oldest = programs(OLDEST, cache=tmp_path / "cache", say=silent)
    assert oldest.etcd == first.etcd
    assert n_builds(go) == 3


def test_other_sources_of_the_same_version_are_built_anew(go: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "sources"
    shutil.copytree(build.SOURCES, sources)
    monkeypatch.setattr(build, "SOURCES", sources)
    programs(cache=tmp_path / "cache", say=silent)
    with (sources / "etcd/go.sum").open("a") as file:
        file.write("\n")
    programs(cache=tmp_path / "cache", say=silent)
    assert n_builds(go) == 3


@pytest.mark.parametrize(
    "change",
    [{"linker_flags": "-s"}, {"renamed": {"runc": "other"}}, {"tools": ("example.org/a",)}, {"tags": ""}, {"links_c": False}],
    ids=lambda change: "-".join(change),
)
def test_what_is_built_otherwise_is_not_taken_for_the_same(change: dict[str, Any]) -> None:
    runc = build._runc()
    assert replace(runc, **change) != runc
    assert replace(runc, **change).key != runc.key


def test_of_several_that_ask_at_once_one_builds(go: Path, tmp_path: Path) -> None:
    (go / "slow").write_text("0.5")
    command = [sys.executable, "-m", "aerostat_testing.kubernetes.build", "--cache", str(tmp_path / "cache")]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    told = [process.communicate(timeout=60)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert all("kubernetes 1." in text for text in told)
    built = (go / "builds").read_text().splitlines()
    assert {str(build.SOURCES / "etcd"), str(build.SOURCES / f"kubernetes-{LATEST}")} <= set(built)
    assert len(built) == len(set(built)), "each once"


def test_a_build_that_was_killed_leaves_nothing_that_counts(go: Path, tmp_path: Path) -> None:
    (go / "slow").write_text("60")
    command = [sys.executable, "-m", "aerostat_testing.kubernetes.build", "--cache", str(tmp_path / "cache")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stderr is not None
        assert "fetching sources" in process.stderr.readline()
        wait_for(lambda: (go / "builds").exists(), "it compiles")
        subprocess.run(["kill", "-9", "--", f"-{process.pid}"], check=True, timeout=10)
    (go / "slow").write_text("0")
    assert programs(cache=tmp_path / "cache", say=silent).apiserver.is_file()


def test_what_nodes_need_is_a_group_of_its_own(go: Path, tmp_path: Path) -> None:
    pkg_config(go, finds=True)
    plane = programs(cache=tmp_path / "cache", say=silent)
    assert not (plane.kubernetes / "kubelet").exists()
    found = node_programs(cache=tmp_path / "cache", say=silent)
    assert found.control_plane == plane
    assert {path.name for path in found.kubernetes.iterdir() if path.is_file()} >= {"kubelet", "kube-proxy", "kube-scheduler"}
    assert not (found.kubernetes / "kube-apiserver").exists()
    assert n_builds(go) == 2 + 7, "Kubernetes' part for nodes, containerd, runc, the network's plugins, DNS, the images, and Helm"


def test_without_seccomps_headers_it_says_what_to_run_before_anything_is_built(go: Path, tmp_path: Path) -> None:
    pkg_config(go, finds=False)
    with pytest.raises(BuildError, match="make cluster-tools"):
        node_programs(cache=tmp_path / "cache", say=silent)
    command = [sys.executable, "-m", "aerostat_testing.kubernetes.build", "--nodes", "--cache", str(tmp_path / "cache")]
    assert "make cluster-tools" in subprocess.run(command, capture_output=True, text=True, timeout=60).stderr
    assert not (go / "builds").exists()


def test_what_is_built_already_needs_no_headers(go: Path, tmp_path: Path) -> None:
    pkg_config(go, finds=True)
    found = node_programs(cache=tmp_path / "cache", say=silent)
    pkg_config(go, finds=False)
    assert node_programs(cache=tmp_path / "cache", say=silent) == found


def test_a_failure_says_what_the_compiler_said(go: Path, tmp_path: Path) -> None:
    (go / "broken").touch()
    with pytest.raises(BuildError, match="undefined: everything"):
        programs(cache=tmp_path / "cache", say=silent)
    (go / "broken").unlink()
    assert programs(cache=tmp_path / "cache", say=silent).apiserver.is_file()


def test_without_go_it_says_what_to_install(go: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="install Go"):
        programs(cache=tmp_path / "cache", say=silent)


def test_an_unknown_version_names_those_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=rf"there are {OLDEST}, {LATEST}"):
        programs("1.2", cache=tmp_path, say=silent)


def test_sources_are_pinned_by_hash() -> None:
    for module in ("cni", "containerd", "coredns", "etcd", "runc", f"kubernetes-{LATEST}", f"kubernetes-{OLDEST}"):
        assert (build.SOURCES / module / "go.sum").stat().st_size > 5_000
