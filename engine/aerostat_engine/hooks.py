"""What we hook of SGLang's internals, in one table; the contract test asserts the signatures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    target: str
    function: Callable[..., Any]
    kind: HookType


def keep_routing_key(part: Any, batch: Any, index: int) -> None:
    """AFTER splitting a list of prompts or n > 1 into single requests: SGLang forgets whose session they are."""
    part.routing_key = batch.routing_key


HOOKS: tuple[Hook, ...] = (
    Hook(target="sglang.srt.managers.io_struct.GenerateReqInput.__getitem__", function=keep_routing_key, kind=HookType.AFTER),
)


def register() -> None:
    for hook in HOOKS:
        HookRegistry.register(hook.target, hook.function, hook.kind)
