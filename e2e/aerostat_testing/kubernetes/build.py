"""Builds the programs of Kubernetes from the Go modules under `e2e/cluster`, once, into a cache.

`python -m aerostat_testing.kubernetes.build [--nodes] [MINOR...]` builds ahead of the tests; a fixture that misses
something builds it as well. What an API server needs is one group, what nodes need besides is another. The cache lies
outside the tree, a folder for each version, and Go keeps what it compiled, so a build that was interrupted goes on
where it stopped. Several processes may ask at once: one builds, the others wait.
Which versions there are is written in the `go.mod` files and nowhere else.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from aerostat_testing.kubernetes.caches import (
    BUILD_LIMIT,
    CACHE_VARIABLE,
    BuildError,
    Say,
    alone,
    default_cache,
    run_patiently,
    say_on_stderr,
)

# What every test runs against, and the oldest that we support. Upstream maintains the newest three minors, and clusters
# lag by one. All that we ask for has been stable two minors before that: CEL rules with quantities and fieldPath, strict
# field validation, server-side apply, ValidatingAdmissionPolicy, and the node's name in a ServiceAccount's token.
LATEST: Final = "1.37"
OLDEST: Final = "1.34"
GO: Final = "go1.27.3"
SOURCES: Final = Path(__file__).resolve().parents[2] / "cluster"
_CONTROL_PLANE: Final = ("kube-apiserver", "kube-controller-manager", "kubectl")
_NODE: Final = ("kubelet", "kube-proxy", "kube-scheduler")
_STAMP: Final = ".built"  # names what the folder was built from; written last


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """Folders of executables, and the version of Kubernetes that they are."""

    version: str
    kubernetes: Path
    etcd: Path

    @property
    def apiserver(self) -> Path:
        return self.kubernetes / "kube-apiserver"

    @property
    def controller_manager(self) -> Path:
        return self.kubernetes / "kube-controller-manager"

    @property
    def kubectl(self) -> Path:
        return self.kubernetes / "kubectl"

    @property
    def etcd_server(self) -> Path:
        return self.etcd / "etcd"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePrograms:
    """What makes nodes of an API server: folders of executables."""

    control_plane: Programs
    kubernetes: Path  # kubelet, kube-proxy, kube-scheduler
    containerd: Path  # with its shim and ctr
    runc: Path
    cni: Path
    coredns: Path
    images: Path  # static programs that are the only file of an image each
    helm: Path

    @property
    def folders(self) -> tuple[Path, ...]:
        """For the PATH of a node."""
        return self.kubernetes, self.containerd, self.runc, self.cni


@dataclass(frozen=True, slots=True, kw_only=True)
class _Module:
    """One Go module, since the dependency trees of the tools conflict."""

    name: str
    source: Path
    version: str
    linker_flags: str = "-s -w"
    renamed: Mapping[str, str] = field(default_factory=dict)  # what Go calls a program after its package, and what everybody else does
    tools: tuple[str, ...] = ()  # packages; all of its `tool` lines unless told
    tags: str = ""
    links_c: bool = False

    @property
    def label(self) -> str:
        return f"{self.name} {self.version}"

    @property
    def key(self) -> str:
        """Of the sources and settings that tell one build from another."""
        sources = [path.read_bytes() for path in sorted(self.source.rglob("*")) if path.is_file()]
        settings = (GO, self.linker_flags, sorted(self.renamed.items()), self.tools, self.tags, self.links_c)
        return hashlib.sha256(b"\0".join([*sources, repr(settings).encode()])).hexdigest()

    @property
    def packages(self) -> tuple[str, ...]:
        return self.tools or ("tool",)


def programs(minor: str = LATEST, *, cache: Path | None = None, say: Say | None = None) -> Programs:
    """The executables, built where they are not there yet: some ten minutes of two cores with nothing cached. Raises BuildError."""
    cache, say = cache or default_cache(), say or say_on_stderr
    kubernetes, etcd = _kubernetes(minor), _etcd()
    return Programs(version=kubernetes.version, kubernetes=_built(kubernetes, cache, say), etcd=_built(etcd, cache, say))


def node_programs(*, cache: Path | None = None, say: Say | None = None) -> NodePrograms:
    """All of a cluster with nodes, which are of the latest version: five minutes more, with nothing cached. Raises BuildError."""
    cache, say = cache or default_cache(), say or say_on_stderr
    modules = (_kubernetes_node(), _containerd(), _runc(), _cni(), _coredns(), _images())
    if any(module.links_c and not _is_built(_folder(module, cache), module) for module in modules):
        _require_c_libraries()  # before the long build
    plane = programs(LATEST, cache=cache, say=say)
    made = {module.name: _built(module, cache, say) for module in modules}
    return NodePrograms(
        control_plane=plane,
        kubernetes=made["kubernetes-node"],
        containerd=made["containerd"],
        runc=made["runc"],
        cni=made["cni"],
        coredns=made["coredns"],
        images=made["images"],
        helm=helm(cache=cache, say=say).parent,
    )


def helm(*, cache: Path | None = None, say: Say | None = None) -> Path:
    """The executable, built where it is not there yet. Raises BuildError."""
    return _built(_helm(), cache or default_cache(), say or say_on_stderr) / "helm"


def _require_c_libraries() -> None:
    """Raises BuildError where runc cannot be built."""
    try:
        has_seccomp = subprocess.run(["pkg-config", "--exists", "libseccomp"], timeout=10).returncode == 0
    except FileNotFoundError:
        has_seccomp = False
    if not has_seccomp or shutil.which("gcc") is None:
        raise BuildError("runc needs gcc, pkg-config and libseccomp's headers: run `make cluster-tools` as root (Debian), or install them")


def _kubernetes(minor: str) -> _Module:
    source = SOURCES / f"kubernetes-{minor}"
    if not source.is_dir():
        known = ", ".join(sorted(p.name.removeprefix("kubernetes-") for p in SOURCES.glob("kubernetes-*")))
        raise BuildError(f"no Kubernetes {minor} under {SOURCES}: there are {known}")
    version = _required_version(source, "k8s.io/kubernetes")
    major, minor_number, _ = version.split(".")
    package = "k8s.io/component-base/version"  # else it says 0.0.0, which clients and charts refuse
    values = {"gitVersion": f"v{version}", "gitMajor": major, "gitMinor": minor_number, "gitTreeState": "clean"}
    flags = "".join(f" -X {package}.{name}={value}" for name, value in values.items())
    return _Module(name="kubernetes", source=source, version=version, linker_flags=f"-s -w{flags}", tools=_commands(*_CONTROL_PLANE))


def _kubernetes_node() -> _Module:
    return replace(_kubernetes(LATEST), name="kubernetes-node", tools=_commands(*_NODE))


def _commands(*names: str) -> tuple[str, ...]:
    return tuple(f"k8s.io/kubernetes/cmd/{name}" for name in names)


def _etcd() -> _Module:
    source = SOURCES / "etcd"
    version = _required_version(source, "go.etcd.io/etcd/server/v3")
    return _Module(name="etcd", source=source, version=version, renamed={"server": "etcd"})


def _helm() -> _Module:
    source = SOURCES / "helm"
    version = _required_version(source, "helm.sh/helm/v4")
    flags = f"-s -w -X helm.sh/helm/v4/internal/version.version=v{version}"
    return _Module(name="helm", source=source, version=version, linker_flags=flags)


def _containerd() -> _Module:
    source, package = SOURCES / "containerd", "github.com/containerd/containerd/v2"
    version = _required_version(source, package)
    return _Module(name="containerd", source=source, version=version, linker_flags=f"-s -w -X {package}/version.Version=v{version}")


def _runc() -> _Module:
    source = SOURCES / "runc"
    version = _required_version(source, "github.com/opencontainers/runc")
    # A runc without seccomp refuses every pod, since the runtime's default profile is one.
    return _Module(name="runc", source=source, version=version, tags="seccomp", links_c=True)


def _cni() -> _Module:
    source = SOURCES / "cni"
    return _Module(name="cni", source=source, version=_required_version(source, "github.com/containernetworking/plugins"))


def _coredns() -> _Module:
    source = SOURCES / "coredns"
    return _Module(name="coredns", source=source, version=_required_version(source, "github.com/coredns/coredns"))


def _images() -> _Module:
    """Ours, so its version is what it says."""
    module = _Module(name="images", source=SOURCES / "images", version="")
    return replace(module, version=module.key[:12])


def _required_version(source: Path, module: str) -> str:
    found = re.search(rf"^(?:require |\t){re.escape(module)} v(\S+)", (source / "go.mod").read_text(), re.M)
    if not found:
        raise BuildError(f"{source / 'go.mod'} does not require {module}")
    return found[1]


def _folder(module: _Module, cache: Path) -> Path:
    return cache / module.name / module.version


def _built(module: _Module, cache: Path, say: Say) -> Path:
    folder = _folder(module, cache)
    if not _is_built(folder, module):
        folder.mkdir(parents=True, exist_ok=True)
        with alone(folder, module.label, say):
            if not _is_built(folder, module):  # another process may have built it meanwhile
                _build(module, folder, say)
    return folder


def _is_built(folder: Path, module: _Module) -> bool:
    try:
        return (folder / _STAMP).read_text() == module.key
    except FileNotFoundError:
        return False


def _build(module: _Module, folder: Path, say: Say) -> None:
    began = time.monotonic()
    environment = os.environ | {"GOTOOLCHAIN": GO, "CGO_ENABLED": str(int(module.links_c)), "GOWORK": "off"}
    if shutil.which("go") is None:
        raise BuildError("there is no `go`: install Go 1.21 or later, which fetches the toolchain that is needed by itself")
    say(f"{module.label}: fetching sources")
    total = len(_run(["go", "list", "-deps", *module.packages], module, environment).split())
    with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as made:
        # -v names each package when it is compiled; what Go has in its own cache is not named.
        command = ["go", "build", "-v", "-mod=readonly", "-trimpath", "-buildvcs=false", "-ldflags", module.linker_flags]
        command += [f"-tags={module.tags}", "-o", f"{made}/", *module.packages]

        def progress(said: str) -> str:
            return f"compiled {said.count(chr(10))} of at most {total} packages"

        run_patiently(command, module.label, progress=progress, say=say, cwd=module.source, environment=environment)
        for program in Path(made).iterdir():
            program.replace(folder / module.renamed.get(program.name, program.name))
    (folder / _STAMP).write_text(module.key)
    say(f"{module.label}: built in {time.monotonic() - began:.0f} s")


def _run(command: list[str], module: _Module, environment: dict[str, str]) -> str:
    try:
        done = subprocess.run(
            command, cwd=module.source, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=BUILD_LIMIT
        )
    except subprocess.TimeoutExpired:
        raise BuildError(f"{module.label}: `{' '.join(command)}` has run for {BUILD_LIMIT:.0f} s") from None
    if done.returncode:
        raise BuildError(f"{module.label}: `{' '.join(command)}` failed:\n{done.stderr[-4000:]}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m aerostat_testing.kubernetes.build", description="Build what tests run as Kubernetes.")
    parser.add_argument("minor", nargs="*", default=[LATEST], help=f"minor versions, such as {OLDEST} (default: {LATEST})")
    parser.add_argument("--cache", type=Path, help=f"where to put them (default: {CACHE_VARIABLE}, or {default_cache()})")
    parser.add_argument("--nodes", action="store_true", help="what nodes need as well")
    arguments = parser.parse_args()
    try:
        if arguments.nodes:
            node_programs(cache=arguments.cache)
        for minor in arguments.minor:
            found, charts = programs(minor, cache=arguments.cache), helm(cache=arguments.cache)
            say_on_stderr(f"kubernetes {found.version} is in {found.kubernetes}, etcd in {found.etcd}, helm in {charts.parent}")
    except BuildError as error:
        raise SystemExit(f"kubernetes for tests: {error}") from None


if __name__ == "__main__":
    main()
