"""The parts of the cluster kit that need no cluster: images, identities, what is asked of the machine, what is kept of a failure."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from aerostat_testing.kubernetes.nodes import cgroups, oci, requirements
from aerostat_testing.kubernetes.nodes.init import Boot, Program
from aerostat_testing.kubernetes.nodes.processes import Process
from aerostat_testing.kubernetes.nodes.requirements import MissingError, require

pytestmark = pytest.mark.cpu

# A test that has a namespace, for pytest in a process of its own. There is no cluster: what would be collected is a word.
FAILING_TEST = """
import pytest
from aerostat_testing.kubernetes.nodes.namespace import NodesNamespace

class Namespace(NodesNamespace):
    def __init__(self):
        self.name = "test-1"
    def collect(self, folder):
        folder.mkdir(parents=True)
        (folder / "events.txt").write_text("it was too late")

@pytest.fixture
def nodes_namespace():
    return Namespace()

def test_one_that_passes(nodes_namespace):
    pass

@pytest.mark.parametrize("size", ["too/big"])
def test_one_that_fails(nodes_namespace, size):
    raise AssertionError
"""


def test_an_archive_has_one_program_by_its_digest(tmp_path: Path) -> None:
    program = tmp_path / "hello"
    program.write_bytes(b"static")
    oci.write_archive(tmp_path / "a.tar", name="localhost/hello:1", program=program)
    oci.write_archive(tmp_path / "b.tar", name="localhost/hello:1", program=program)
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()
    with tarfile.open(tmp_path / "a.tar") as archive:
        files = {name: file.read() for name in archive.getnames() if (file := archive.extractfile(name))}
    blobs = {name.removeprefix("blobs/sha256/"): content for name, content in files.items() if name.startswith("blobs/")}
    assert {digest: hashlib.sha256(blob).hexdigest() for digest, blob in blobs.items()} == {digest: digest for digest in blobs}

    def blob(reference: dict[str, Any]) -> bytes:
        found = blobs[reference["digest"].removeprefix("sha256:")]
        assert len(found) == reference["size"]
        return found

    (manifest,) = json.loads(files["index.json"])["manifests"]
    assert manifest["annotations"] == {"io.containerd.image.name": "localhost/hello:1"}
    (layer,) = json.loads(blob(manifest))["layers"]
    config = json.loads(blob(json.loads(blob(manifest))["config"]))
    assert config["config"] == {"Entrypoint": ["/hello"], "User": "65534:65534"}
    assert config["rootfs"]["diff_ids"] == [layer["digest"]]
    assert b"static" in blob(layer)


def test_what_a_machine_is_to_run_reaches_it_whole() -> None:
    program = Program(name="kubelet", argv=("/run/kubelet", "--config=a b"), needs="/run/images-are-there")
    boot = Boot(hostname="node1", programs=(program,), path="/bin", logs="/var/log", held="/held", disk="/disk", shown={"/run/a": "/b"})
    assert Boot.parse(boot.line()) == boot
    assert boot.line().count(b"\n") == 1


def test_a_process_id_that_is_used_again_is_another_process() -> None:
    me = Process.of(os.getpid())
    assert Process.parse(str(me)) == me
    assert me.is_alive
    assert not Process(me.pid, me.started + 1).is_alive
    assert Process.parse("") is None
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        other = Process.of(child.pid)
        other.kill()
        assert other.has_ended(10.0)
    other.kill()


def test_the_name_of_a_cgroup_tells_whether_somebody_keeps_it() -> None:
    me = Process.of(os.getpid())
    assert cgroups.is_kept(cgroups.name_for(me))
    assert not cgroups.is_kept(cgroups.name_for(Process(me.pid, me.started + 1)))
    assert not cgroups.is_kept(cgroups.PREFIX)


def test_who_is_not_root_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(MissingError, match="run as root"):
        require()


def test_a_missing_program_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(requirements, "_effective", lambda: -1)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "iptables" else f"/bin/{name}")
    with pytest.raises(MissingError, match="nodes need iptables: run `make cluster-tools`"):
        require()


def test_a_failed_test_says_where_its_namespace_was_collected(tmp_path: Path) -> None:
    (tmp_path / "test_inner.py").write_text(FAILING_TEST)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "aerostat_testing.plugin",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        "test_inner.py",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    folder = tmp_path / ".aerostat/failures/test_inner.py-test_one_that_fails-too-big-"
    assert f"objects, events and logs are in {folder}" in done.stdout, done.stdout + done.stderr
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "nothing is kept of a test that passes"
    assert (folder / "events.txt").read_text() == "it was too late"
