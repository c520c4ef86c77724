"""SGLang's HTTP application, guarded: who may connect, who may call it, and the one call that SGLang makes to itself."""

from __future__ import annotations

import ssl
from functools import partial

import uvicorn
from sglang.srt.entrypoints import http_server
from sglang.srt.utils.hf_transformers_utils import get_config

from aerostat_core.engine_launch import EngineLaunch
from aerostat_engine.auth import KeyGate
from aerostat_engine.dtypes import serving_dtype, this_cpu
from aerostat_engine.garbage import freeze_gc
from aerostat_runtime.tls import TlsFolder


def serving_dtype_of(spec: EngineLaunch) -> str:
    """The number type that SGLang is told: the one asked for, or the fastest on this CPU that loses nothing of the stored weights."""
    asked = spec.engine_args.get("dtype", spec.dtype)
    if asked != "auto":
        return asked
    stored = str(get_config(spec.model_path, trust_remote_code=spec.trust_remote_code).dtype or "float32").removeprefix("torch.")
    return serving_dtype(stored, this_cpu())


def guard_application(*, call_key: str, admin_key: str, tls: TlsFolder | None) -> None:
    """Put the gate in front, and let SGLang's own request to itself through it."""
    http_server.app.add_middleware(KeyGate, call_key=call_key, admin_key=admin_key)
    http_server._freeze_gc_after_server_warmup = lambda server_args: freeze_gc(server_args.url(), admin_key, tls)


def serve_tls(tls: TlsFolder) -> None:
    """Have clients show a certificate of our CA, which SGLang has no argument for; uvicorn has one for the whole context.

    SGLang's own renewal of certificates would only ever add CAs to those that it trusts.
    """

    def context(config: uvicorn.Config, default: object) -> ssl.SSLContext:
        return tls.server_context()

    uvicorn.Config = partial(uvicorn.Config, ssl_context_factory=context)  # type: ignore[assignment,misc]  # SGLang's is the only server here
