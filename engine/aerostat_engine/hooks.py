"""What we hook of SGLang's internals, in one table; the contract test asserts the signatures.

Hooks run inside SGLang's scheduler loop. One that raises ends the engine, which is what we want of a fault: the agent starts it anew.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from aerostat_core.engine_launch import EngineLaunch
from aerostat_engine.attachment import Attachment, turn_of
from aerostat_engine.launch import LAUNCH_ENV

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
_TREE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache."

_attached: list[Attachment] = []
"""This process's attachment: none outside a scheduler process, one in it. Hooks are plain functions and find it here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    target: str
    function: Callable[..., Any]
    kind: HookType


def attach(scheduler: Any) -> None:
    """BEFORE the loop starts: everything is loaded, nothing has run."""
    _attached.append(Attachment(scheduler, EngineLaunch.from_json(os.environ[LAUNCH_ENV])))


def choose_batch(choose: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND choosing the next batch: the boundary between two."""
    for attachment in _attached:
        attachment.boundary()
    plan = choose(*args, **kwargs)
    for attachment in _attached:
        attachment.chosen(plan)
    return plan


def be_idle(scheduler: Any) -> None:
    for attachment in _attached:
        attachment.idle()


def release_request(release: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND giving a request's KV back: afterwards the cache tells what it kept, before only the request knows its tokens."""
    tokens = turn_of(request) if _attached else None
    released = release(request, *args, **kwargs)
    if tokens is not None:
        for attachment in _attached:
            attachment.released(request, tokens)
    return released


def note_eviction(result: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER the cache gave up tokens, or (without a result) all of them."""
    if result is not None and not result.num_tokens_evicted:
        return
    for attachment in _attached:
        attachment.evicted()


def fork_children(result: Any, *args: Any) -> None:
    """AFTER SGLang chose to spawn its children: fork them instead.

    They need what this process has imported already: half of an engine's start and a third of its memory are imports, which a fork shares.
    It is safe here, before any thread, event loop or socket exists.
    """
    gc.collect()
    gc.freeze()
    multiprocessing.set_start_method("fork", force=True)


def keep_routing_key(part: Any, batch: Any, index: int) -> None:
    """AFTER splitting a list of prompts, or n > 1, into single requests: SGLang forgets whose session they are."""
    part.routing_key = batch.routing_key


def load_snapshot_path(path_of: Callable[[str], str], ipc_name: str) -> str:
    """AROUND naming the file that SGLang's processes share their load in: in this engine's own folder, which is removed with it.

    In /dev/shm it would outlive every engine that is killed.
    """
    return os.path.join(tempfile.gettempdir(), os.path.basename(path_of(ipc_name)))


HOOKS: tuple[Hook, ...] = (
    Hook(target="sglang.srt.managers.load_snapshot.shm_path_for", function=load_snapshot_path, kind=HookType.AROUND),
    Hook(target="sglang.srt.entrypoints.engine._set_envs_and_config", function=fork_children, kind=HookType.AFTER),
    Hook(target=_SCHEDULER + "run_event_loop", function=attach, kind=HookType.BEFORE),
    Hook(target=_SCHEDULER + "get_next_batch_to_run", function=choose_batch, kind=HookType.AROUND),
    Hook(target=_SCHEDULER + "on_idle", function=be_idle, kind=HookType.BEFORE),
    Hook(target="sglang.srt.mem_cache.common.release_kv_cache", function=release_request, kind=HookType.AROUND),
    Hook(target=_TREE + "evict", function=note_eviction, kind=HookType.AFTER),
    Hook(target=_TREE + "evict_for_alloc", function=note_eviction, kind=HookType.AFTER),
    Hook(target=_TREE + "reset", function=note_eviction, kind=HookType.AFTER),
    Hook(target="sglang.srt.managers.io_struct.GenerateReqInput.__getitem__", function=keep_routing_key, kind=HookType.AFTER),
)


def register() -> None:
    for hook in HOOKS:
        HookRegistry.register(hook.target, hook.function, hook.kind)
