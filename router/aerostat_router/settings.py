"""The router's command line, read once into a frozen value. What is declared by objects is not here."""

import argparse
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from aerostat_core.addresses import Address
from aerostat_core.errors import SettingError
from aerostat_core.ids import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    cluster: str
    listen: Address
    grpc_listen: Address
    admin_listen: Address
    name: str  # of this router among its replicas: in lease ids and request ids
    drain: Seconds
    max_body_bytes: int
    die_with_parent: int | None
    log_level: str
    tls_dir: Path | None = None


def parse_settings(argv: Sequence[str]) -> Settings:
    """Raises SettingError for a value that cannot work; argparse itself ends the process for unknown flags."""
    parser = argparse.ArgumentParser(prog="aerostat_router", description="Routes inference calls to the engines of an Aerostat cluster.")
    parser.add_argument("--cluster", required=True, help="where the declared objects are: folder:STATE, or kubernetes:")
    parser.add_argument("--listen", default="127.0.0.1:8080", help="HTTP API, host:port (default %(default)s)")
    parser.add_argument("--grpc-listen", default="127.0.0.1:0", help="gRPC API, host:port; port 0 lets the system choose")
    parser.add_argument("--admin-listen", default="127.0.0.1:0", help="health, metrics and admin API, host:port")
    parser.add_argument("--name", default="", help="name among the replicas, letters and digits (default: random)")
    parser.add_argument("--drain-seconds", type=float, default=30.0, help="how long streams may finish on SIGTERM (default %(default)s)")
    parser.add_argument("--max-body-bytes", type=int, default=32 << 20, help="largest request body (default %(default)s)")
    parser.add_argument("--die-with-parent", type=int, metavar="PID", help="end when the process PID, the parent, ends")
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    parser.add_argument(
        "--tls-dir", type=Path, metavar="DIR", help="mutual TLS with agents and engines, by tls.crt, tls.key and ca.crt there"
    )
    given = parser.parse_args(argv)
    name = given.name or secrets.token_hex(4)
    if not (name.isascii() and name.replace("-", "").replace(".", "").isalnum() and len(name) <= 63):
        raise SettingError(f"--name takes at most 63 letters, digits, dots and dashes, got {given.name!r}")
    if not 0 <= given.drain_seconds < float("inf"):
        raise SettingError(f"--drain-seconds must be 0 or more, got {given.drain_seconds}")
    if given.max_body_bytes < 1:
        raise SettingError(f"--max-body-bytes must be 1 or more, got {given.max_body_bytes}")
    return Settings(
        cluster=given.cluster,
        listen=Address.parse(given.listen, "--listen"),
        grpc_listen=Address.parse(given.grpc_listen, "--grpc-listen"),
        admin_listen=Address.parse(given.admin_listen, "--admin-listen"),
        name=name,
        drain=given.drain_seconds,
        max_body_bytes=given.max_body_bytes,
        die_with_parent=given.die_with_parent,
        log_level=given.log_level,
        tls_dir=given.tls_dir,
    )
