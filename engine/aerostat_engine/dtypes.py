"""Which number type a CPU computes a model in. A CPU without bfloat16 instructions emulates them, several times slower than float32."""

from __future__ import annotations

from pathlib import Path

_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"})
_FP16_FLAGS = frozenset({"avx512_fp16", "amx_fp16", "asimdhp"})


def cpu_flags(cpuinfo: str) -> frozenset[str]:
    """Instruction-set flags of the first processor of `/proc/cpuinfo` (x86 `flags`, ARM `Features`)."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def serving_dtype(stored: str, flags: frozenset[str]) -> str:
    """The type to compute in for weights that are stored as `stored`: itself where the CPU has it, else float32 (which loses nothing)."""
    fast = {"bfloat16": _BF16_FLAGS, "float16": _FP16_FLAGS}.get(stored)
    return stored if fast is None or fast & flags else "float32"


def this_cpu() -> frozenset[str]:
    return cpu_flags(Path("/proc/cpuinfo").read_text())
