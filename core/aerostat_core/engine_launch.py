"""What an agent tells an engine at its start: one JSON object on the command line or in a file, secrets in the environment.

`python -m aerostat_engine.launch SPEC` where SPEC is the JSON itself or a path to it. The exit codes tell whether a restart can help.
Of the preparer, whose arguments are its own, only the secret is here.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Final, Self

from aerostat_core.engine_args import check_engine_args
from aerostat_core.errors import SettingError

CALL_KEY_ENV: Final = "AEROSTAT_CALL_KEY"
"""What routers present to call the model."""
ADMIN_KEY_ENV: Final = "AEROSTAT_ADMIN_KEY"
"""What the agent alone has: everything that is not a call."""
TOKEN_ENV: Final = "HF_TOKEN"
"""What the preparer presents to a Hub. An engine needs none."""
TOKEN_ENVS: Final = (TOKEN_ENV, "HUGGING_FACE_HUB_TOKEN")
"""Wherever libraries look for a Hub's token: both programs take all of them out of their environment, however they came there."""

EXIT_BAD_SPEC: Final = 64
"""The spec or a key is wrong: a restart changes nothing."""
EXIT_PLUGIN_MISSING: Final = 65
"""SGLang runs without our plugin: an installation fault, a restart changes nothing."""
EXIT_PARENT_GONE: Final = 66


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLaunch:
    """One engine process. `kv_tokens` is its fixed KV budget in tokens; `dtype` auto takes what this machine computes fastest."""

    model: str  # name of the Model object
    served_name: str
    instance: str
    epoch: int
    model_path: str
    port: int
    kv_tokens: int
    run_dir: str  # sockets and temporary files of this engine; short, since a Unix socket's path takes 107 bytes
    agent_socket: str
    host: str = "127.0.0.1"
    tls_dir: str | None = None  # it serves HTTPS, to peers of our CA, by the tls.crt, tls.key and ca.crt there
    page_size: int = 16
    dtype: str = "auto"
    context_tokens: int | None = None
    tensor_parallel: int = 1
    max_running: int = 32
    trust_remote_code: bool = False
    log_level: str = "info"
    parent_pid: int | None = None  # end when this process ends
    engine_args: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises SettingError for anything but one complete object without unknown fields, PermanentError for bad engine arguments."""
        try:
            raw = json.loads(text)
        except ValueError as error:
            raise SettingError(f"the engine's launch spec is no JSON: {error}") from error
        if not isinstance(raw, dict):
            raise SettingError("the engine's launch spec must be a JSON object")
        known = {f.name: f for f in fields(cls)}
        unknown = sorted(raw.keys() - known.keys())
        if unknown:
            raise SettingError(f"the engine's launch spec has unknown fields: {', '.join(unknown)}")
        try:
            spec = cls(**raw)
        except TypeError as error:
            raise SettingError(f"the engine's launch spec is incomplete: {error}") from error
        spec._check()
        return spec

    def _check(self) -> None:
        checks: tuple[tuple[bool, str], ...] = (
            (_whole(self.epoch, 0), "epoch must be a whole number"),
            (_whole(self.port, 1) and self.port < 65536, "port must be from 1 to 65535"),
            (_whole(self.page_size, 1), "page_size must be at least 1 token"),
            (_whole(self.kv_tokens, 1) and self.kv_tokens >= self.page_size, "kv_tokens must be at least one page"),
            (_whole(self.tensor_parallel, 1), "tensor_parallel must be at least 1"),
            (_whole(self.max_running, 1), "max_running must be at least 1"),
            (self.context_tokens is None or _whole(self.context_tokens, 1), "context_tokens must be at least 1, or null"),
            (self.dtype in ("auto", "float32", "bfloat16", "float16"), "dtype must be auto, float32, bfloat16 or float16"),
            (self.log_level in ("debug", "info", "warning", "error"), "log_level must be debug, info, warning or error"),
            (self.tls_dir is None or (isinstance(self.tls_dir, str) and self.tls_dir != ""), "tls_dir must be a folder, or null"),
            (isinstance(self.engine_args, Mapping), "engine_args must be an object"),
        )
        wrong = [f"{f.name} must be text" for f in fields(self) if f.type in ("str", str) and not isinstance(getattr(self, f.name), str)]
        wrong += [what for holds, what in checks if not holds]
        if wrong:
            raise SettingError("the engine's launch spec: " + "; ".join(wrong))
        check_engine_args(self.engine_args)


def _whole(value: object, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low
