"""What we hook of SGLang 0.5.23 is what we think it is. An upgrade breaks here, loudly and in one place.

SGLang is imported in a process of its own: the import takes seconds, changes the process, and warns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.engine

_LOOK = """
import json, os, sys, inspect, pkgutil
import sglang.srt.managers.scheduler
from sglang.srt.plugins import load_plugins
load_plugins()
from aerostat_engine.hooks import HOOKS
from aerostat_engine.selfcheck import faults
from sglang.srt.entrypoints import http_server
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.server_args import ServerArgs
from sglang.srt.managers.schedule_batch import NextBatchPlan, Req
from sglang.srt.mem_cache.rust_tree_core.adapter import RustUnifiedTreeCore
from sglang.srt.mem_cache.allocation import get_last_loc, get_last_loc_torch
import argparse
def parameters(target):
    return list(inspect.signature(inspect.unwrap(pkgutil.resolve_name(target) if isinstance(target, str) else target)).parameters)
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
batch = GenerateReqInput(text=["a", "b"], routing_key="session", sampling_params={})
batch.normalize_batch_and_arguments()
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend as native
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.observability.req_time_stats import SchedulerReqTimeStats as stats
print(json.dumps({
    "faults": faults(),
    "hooked": {hook.target.split(".srt.")[1]: parameters(hook.target) for hook in HOOKS},
    "others": {
        "match": parameters(RustUnifiedTreeCore.match_full_device_prefix),
        "set_kv_buffer": parameters(MHATokenToKVPool.set_kv_buffer)[:5],
        "forward_extend": parameters(native.forward_extend),
        "forward_decode": parameters(native.forward_decode),
        "init_forward_metadata": parameters(native.init_forward_metadata),
        "get_last_loc": parameters(get_last_loc),
        "get_last_loc_torch": parameters(get_last_loc_torch),
        "set_scheduler_recv_time": parameters(stats.set_scheduler_recv_time),
        "set_prefill_finished_time": parameters(stats.set_prefill_finished_time),
        "freeze_gc": parameters(http_server._freeze_gc_after_server_warmup),
    },
    "makes_servers_of": http_server.uvicorn.__name__,
    "server_takes": parameters(http_server.uvicorn.Config),
    "stamps": list(vars(stats())),
    "watchdog_seconds": parser.get_default("watchdog_timeout"),
    "plan": [f for f in NextBatchPlan.__struct_fields__],
    "request": [name for name in ("finished", "owned_kv_len") if callable(getattr(Req, name, None))],
    "routing_keys": [batch[0].routing_key, batch[1].routing_key],
    "flags": sorted(option for action in parser._actions for option in action.option_strings),
    "routes": sorted(str(getattr(route, "path", "")) for route in http_server.app.routes),
}))
"""


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    environ = {**os.environ, "SGLANG_PLATFORM": "aerostat_cpu", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    look = subprocess.run([sys.executable, "-c", _LOOK], env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert look.returncode == 0, look.stderr[-3000:]
    result: dict[str, Any] = json.loads(look.stdout.splitlines()[-1])
    return result


def test_the_plugin_is_taken_whole(seen: dict[str, Any]) -> None:
    assert seen["faults"] == []


def test_what_we_hook_has_the_signatures_that_we_expect(seen: dict[str, Any]) -> None:
    assert seen["hooked"] == {
        "entrypoints.engine._set_envs_and_config": ["server_args"],
        "managers.load_snapshot.shm_path_for": ["ipc_name"],
        "managers.scheduler.Scheduler.run_event_loop": ["self"],
        "managers.scheduler.Scheduler.get_next_batch_to_run": ["self", "running_batch", "last_batch"],
        "managers.scheduler.Scheduler.on_idle": ["self"],
        "mem_cache.common.release_kv_cache": ["req", "tree_cache", "checkpoint"],
        "mem_cache.unified_radix_cache.UnifiedRadixCache.evict": ["self", "params"],
        "mem_cache.unified_radix_cache.UnifiedRadixCache.evict_for_alloc": ["self", "params", "allocation_reclaim_satisfied"],
        "mem_cache.unified_radix_cache.UnifiedRadixCache.reset": ["self"],
        "managers.io_struct.GenerateReqInput.__getitem__": ["self", "i"],
    }


def test_what_we_call_and_override_has_the_signatures_that_we_expect(seen: dict[str, Any]) -> None:
    forward = ["self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache"]
    assert seen["others"] == {
        "match": ["self", "key"],
        "set_kv_buffer": ["self", "layer", "loc_info", "cache_k", "cache_v"],
        "forward_extend": forward,
        "forward_decode": forward,
        "init_forward_metadata": ["self", "forward_batch"],
        "get_last_loc": ["req_to_token", "req_pool_indices_tensor", "prefix_lens_tensor"],
        "get_last_loc_torch": ["req_to_token", "req_pool_indices_tensor", "prefix_lens_tensor"],
        "set_scheduler_recv_time": ["self", "ts"],
        "set_prefill_finished_time": ["self", "ts"],
        "freeze_gc": ["server_args"],
    }
    assert seen["plan"] == ["batch_to_run", "running_batch"]
    assert seen["request"] == ["finished", "owned_kv_len"]


def test_the_context_that_its_server_takes_can_be_ours(seen: dict[str, Any]) -> None:
    assert seen["makes_servers_of"] == "uvicorn"
    assert "ssl_context_factory" in seen["server_takes"]


def test_a_list_of_prompts_keeps_its_session(seen: dict[str, Any]) -> None:
    assert seen["routing_keys"] == ["session", "session"]


def test_every_flag_that_we_or_a_model_may_set_exists(seen: dict[str, Any], tmp_path: Any) -> None:
    from aerostat_core.engine_args import ALLOWED
    from aerostat_core.engine_launch import EngineLaunch
    from aerostat_engine.launch import sglang_flags

    spec = EngineLaunch(
        model="m",
        served_name="M",
        instance="i",
        epoch=1,
        model_path="/m",
        port=1,
        kv_tokens=64,
        run_dir=str(tmp_path),
        agent_socket="/s",
        context_tokens=64,
        trust_remote_code=True,
        tls_dir="/t",
    )
    ours = {word for word in sglang_flags(spec, "float32") if word.startswith("--")}
    assert ours | {f"--{name}" for name in ALLOWED} <= set(seen["flags"])


def test_the_paths_that_the_call_key_opens_exist(seen: dict[str, Any]) -> None:
    from aerostat_engine.auth import CALL_PATHS

    assert set(seen["routes"]) >= CALL_PATHS | {"/health"}


def test_requests_carry_the_stamps_that_turns_are_timed_by(seen: dict[str, Any]) -> None:
    assert {"scheduler_recv_time", "prefill_finished_time"} <= set(seen["stamps"])


def test_a_scheduler_has_a_time_limit_for_its_batches(seen: dict[str, Any]) -> None:
    assert seen["watchdog_seconds"] > 0
