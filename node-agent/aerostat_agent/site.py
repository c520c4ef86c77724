"""Where the engines of a keeper run. The keeper says it, since an agent is in another pod, which has another address and other files."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSite:
    """`host` is the IP address at which engines listen and are called, `tls_dir` a path of theirs; without one they speak plain HTTP."""

    host: str = "127.0.0.1"
    tls_dir: str | None = None
