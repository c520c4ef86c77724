"""Is the plugin really in? SGLang only logs a plugin that fails to load, and then serves without it."""

from __future__ import annotations

from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.platforms import current_platform
from sglang.srt.plugins.hook_registry import HookRegistry

from aerostat_engine.attention import BACKEND_NAME
from aerostat_engine.attention.backend import GET_LAST_LOC, PagedAttention
from aerostat_engine.hooks import HOOKS
from aerostat_engine.platform import AerostatCpuPlatform


def faults() -> list[str]:
    """What of ours SGLang did not take, in words; empty when all is in."""
    found = []
    if not isinstance(current_platform, AerostatCpuPlatform):
        found.append(f"the platform is {type(current_platform).__qualname__}, not AerostatCpuPlatform")
    if ATTENTION_BACKENDS.get(BACKEND_NAME) is not PagedAttention:
        found.append(f"the attention backend {BACKEND_NAME} is not registered")
    applied = HookRegistry._patched
    found += [
        f"the hook on {target} is not applied" for target in (GET_LAST_LOC, *(hook.target for hook in HOOKS)) if target not in applied
    ]
    return found
