"""`python -m aerostat_engine.launch SPEC`: one SGLang server with our plugin, in this process; what the keeper starts.

SPEC is an `EngineLaunch` as JSON, or a file with it. The keys come in the environment and leave it before SGLang starts its children.
Order matters: the environment is set before anything of SGLang or torch is imported.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import MutableMapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from aerostat_core.engine_args import to_flags
from aerostat_core.engine_launch import ADMIN_KEY_ENV, CALL_KEY_ENV, EXIT_BAD_SPEC, EXIT_PLUGIN_MISSING, TOKEN_ENVS, EngineLaunch
from aerostat_core.errors import PermanentError, SettingError
from aerostat_engine.attention import BACKEND_NAME
from aerostat_engine.plugin import PLATFORM
from aerostat_runtime.model_cache import in_use
from aerostat_runtime.process import die_with_parent
from aerostat_runtime.tls import CERTIFICATE, KEY, TlsFolder

LAUNCH_ENV = "AEROSTAT_ENGINE_LAUNCH"
"""The spec, for the scheduler processes that SGLang spawns; it holds no secret."""
_MAX_SOCKET_PATH_BYTES = 107
_LONGEST_SOCKET_NAME = "tmpxxxxxxxx"
EXIT_FAILED = 1
"""A restart may help: a TLS folder is a Secret, which somebody repairs."""
_DEFAULT_FLAGS = {"chunked-prefill-size": "512"}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Keys:
    call: str
    admin: str


def main(argv: list[str]) -> int:
    try:
        spec = read_spec(argv)
        keys = take_keys(os.environ)
        prepare_environment(spec, os.environ)
    except PermanentError as error:
        sys.stderr.write(f"aerostat engine: {error}\n")
        return EXIT_BAD_SPEC
    try:
        tls = None if spec.tls_dir is None else TlsFolder(Path(spec.tls_dir), setting="tls_dir")
    except SettingError as error:
        sys.stderr.write(f"aerostat engine: {error}\n")
        return EXIT_FAILED
    if spec.parent_pid is not None:
        die_with_parent(spec.parent_pid, signal.SIGTERM)
    with ExitStack() as held:
        with suppress(FileNotFoundError, NotADirectoryError):  # SGLang says it better
            held.enter_context(in_use(Path(spec.model_path)))
        return serve(spec, keys, tls)


def read_spec(argv: list[str]) -> EngineLaunch:
    """Raises SettingError, or PermanentError for rejected engine arguments."""
    if len(argv) != 1:
        raise SettingError("usage: python -m aerostat_engine.launch SPEC (a JSON object, or the path of a file with one)")
    text = argv[0]
    if not text.lstrip().startswith("{"):
        try:
            text = Path(text).read_text()
        except OSError as error:
            raise SettingError(f"cannot read the launch spec: {error}") from error
    return EngineLaunch.from_json(text)


def take_keys(environ: MutableMapping[str, str]) -> Keys:
    """The two keys, which are gone from `environ` afterwards. Raises SettingError when one is missing or both are the same."""
    call, admin = environ.pop(CALL_KEY_ENV, ""), environ.pop(ADMIN_KEY_ENV, "")
    if not call or not admin or call == admin:
        raise SettingError(f"set two different keys in {CALL_KEY_ENV} and {ADMIN_KEY_ENV}")
    return Keys(call=call, admin=admin)


def prepare_environment(spec: EngineLaunch, environ: MutableMapping[str, str]) -> None:
    """What SGLang, torch and their children must find. Raises SettingError for a run folder that cannot hold sockets."""
    tmp = Path(spec.run_dir).absolute() / "tmp"
    if len(os.fsencode(tmp / _LONGEST_SOCKET_NAME)) > _MAX_SOCKET_PATH_BYTES:
        raise SettingError(f"run_dir {spec.run_dir} is too long for Unix sockets: choose one of at most 90 bytes")
    try:
        if tmp.exists():
            shutil.rmtree(tmp)  # left by a killed run
        tmp.mkdir(parents=True, mode=0o700)
    except OSError as error:
        raise SettingError(f"cannot use run_dir {spec.run_dir}: {error}") from error
    for name in TOKEN_ENVS:
        environ.pop(name, None)
    environ.update(
        {
            LAUNCH_ENV: spec.to_json(),
            "SGLANG_PLATFORM": PLATFORM,
            "SGLANG_PLUGINS": "aerostat",
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # /health is open: it must not run the model for strangers
            "TMPDIR": str(tmp),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "TORCH_COMPILE_DISABLE": "1",  # some samplers would call a C++ compiler in the middle of a request
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
        }
    )
    if spec.tensor_parallel > 1:
        environ["SGLANG_CPU_OMP_THREADS_BIND"] = _core_for_each_rank(spec.tensor_parallel)


def _core_for_each_rank(n_ranks: int) -> str:
    """SGLang gives each rank a NUMA node, and refuses more ranks than nodes, unless told a core for each. Raises SettingError."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < n_ranks:
        raise SettingError(f"tensor_parallel {n_ranks} needs as many cores, this process may use {len(cores)}")
    return "|".join(str(core) for core in cores[:n_ranks])


def sglang_flags(spec: EngineLaunch, dtype: str) -> list[str]:
    """SGLang's command line. No key is on it: `auth` guards the application instead."""
    fixed = {
        "model-path": spec.model_path,
        "served-model-name": spec.served_name,
        "host": spec.host,
        "port": str(spec.port),
        "device": "cpu",
        "sampling-backend": "pytorch",
        "dtype": dtype,
        "page-size": str(spec.page_size),
        "max-total-tokens": str(spec.kv_tokens),
        "mem-fraction-static": "0.9",
        "tp-size": str(spec.tensor_parallel),
        "cuda-graph-backend-decode": "disabled",
        "cuda-graph-backend-prefill": "disabled",
        "log-level": spec.log_level,
        "log-level-http": "warning",
    }
    if spec.context_tokens is not None:
        fixed["context-length"] = str(spec.context_tokens)
    defaults = {"attention-backend": BACKEND_NAME, "max-running-requests": str(spec.max_running), **_DEFAULT_FLAGS}
    switches = ["skip-server-warmup", "sleep-on-idle", "enable-metrics", "enable-cache-report"]
    if spec.trust_remote_code:
        switches.append("trust-remote-code")
    if spec.tls_dir is not None:  # read by nobody: `server.serve_tls` gives the context. SGLang learns from them that its scheme is https
        fixed |= {"ssl-certfile": f"{spec.tls_dir}/{CERTIFICATE}", "ssl-keyfile": f"{spec.tls_dir}/{KEY}"}
    flags = [word for name, value in fixed.items() for word in (f"--{name}", value)] + [f"--{name}" for name in switches]
    flags += [word for name, value in defaults.items() if name not in spec.engine_args for word in (f"--{name}", value)]
    return flags + to_flags({name: value for name, value in spec.engine_args.items() if name != "dtype"})


def serve(spec: EngineLaunch, keys: Keys, tls: TlsFolder | None) -> int:
    """Run until the server ends. Everything heavy is imported here, in an environment that is ready for it."""
    import sglang.srt.managers.scheduler  # noqa: F401  # our plugin registers its hooks where this module is loaded
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    from aerostat_engine.server import guard_application, serve_tls, serving_dtype_of

    load_plugins()
    from aerostat_engine.selfcheck import faults

    missing = faults()
    if missing:
        sys.stderr.write("aerostat engine: SGLang did not take our plugin; reinstall `aerostat[engine]`: " + "; ".join(missing) + "\n")
        return EXIT_PLUGIN_MISSING
    server_args = prepare_server_args(sglang_flags(spec, serving_dtype_of(spec)))
    guard_application(call_key=keys.call, admin_key=keys.admin, tls=tls)
    if tls is not None:
        serve_tls(tls)
    from sglang.launch_server import run_server

    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
