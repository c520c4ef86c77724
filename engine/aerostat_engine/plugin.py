"""The two entry points by which SGLang finds us. Kept free of imports: SGLang loads this module in every process that it starts.

What is registered lives elsewhere (`platform`, `attention.backend`, `hooks`); whether it took is checked by `selfcheck`.
"""

from __future__ import annotations

PLATFORM = "aerostat_cpu"
"""The platform's entry-point name, selected by SGLANG_PLATFORM. Nothing of ours is active under another platform."""


def platform() -> str:
    """Entry point `sglang.srt.platforms`: the class that describes this device to SGLang."""
    return "aerostat_engine.platform.AerostatCpuPlatform"


def register() -> None:
    """Entry point `sglang.srt.plugins`: our attention backend and scheduler hooks, where our platform is the active one.

    The detokenizer has no scheduler and gets nothing: importing one there would cost memory and time for hooks that never run.
    """
    import os
    import sys

    if os.environ.get("SGLANG_PLATFORM") != PLATFORM or "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from aerostat_engine import hooks
    from aerostat_engine.attention import backend

    backend.register()
    hooks.register()
