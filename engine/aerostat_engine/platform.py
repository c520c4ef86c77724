"""How the CPU device presents itself to SGLang: an out-of-tree platform whose attention backend is ours.

No policy and no memory management: the pools are SGLang's own, sized by a fixed token budget.
"""

from __future__ import annotations

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from aerostat_engine.attention import BACKEND_NAME


class AerostatCpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]  # SGLang is untyped
    """Out of tree, so that SGLang asks us instead of assuming CPU kernels that no wheel has."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def is_pin_memory_available(self, device: object = None) -> bool:
        return False

    def get_default_attention_backend(self) -> str:
        return BACKEND_NAME

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"
