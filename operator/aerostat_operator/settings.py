"""The operator's command line in a cluster, read once into a frozen value. What is declared by objects is not here."""

import argparse
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from aerostat_core.addresses import Address
from aerostat_core.defaults import STATUS_FIGURES_EVERY
from aerostat_core.errors import SettingError
from aerostat_core.ids import NamespacedName, Seconds
from aerostat_core.peers import AGENT, ENGINES, ROUTER
from aerostat_operator.certificates import CA, TlsSecrets
from aerostat_operator.policy.leadership import Timing
from aerostat_runtime.cluster.kubernetes_connection import Target

_TLS_FORM: Final = "ca=NAMESPACE/NAME,router=NAMESPACE/NAME,agent=NAMESPACE/NAME,engines=NAMESPACE/NAME"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`url` goes to Model.status.url. `sweep`: how often everything is listed, should a watch have missed something.

    `tls_secrets` None: somebody else sees to certificates, or there are none.
    """

    target: Target
    lease: NamespacedName
    identity: str
    listen: Address
    url: str = ""
    tls_secrets: TlsSecrets | None = None
    timing: Timing = field(default_factory=Timing)
    resync: Seconds = STATUS_FIGURES_EVERY
    sweep: Seconds = 120.0
    log_level: str = "info"
    die_with_parent: int | None = None


def parse_settings(argv: Sequence[str]) -> Settings:
    """Raises SettingError."""
    given = _parser().parse_args(argv)
    scheme, _, rest = given.cluster.partition(":")
    if scheme != "kubernetes":
        raise SettingError(f"--cluster takes kubernetes:, got {given.cluster!r}; over a folder `aerostat up` operates itself")
    try:
        timing = Timing(duration=given.lease_duration, hold=given.lease_duration * 2 / 3, retry=given.lease_duration * 2 / 15)
    except ValueError:
        raise SettingError(f"--lease-duration takes seconds above 0, got {given.lease_duration:g}") from None
    return Settings(
        target=Target.parse(rest),
        lease=_namespaced(given.lease, f"--lease takes NAMESPACE/NAME, got {given.lease!r}"),
        identity=given.identity or f"{socket.gethostname()}_{secrets.token_hex(4)}",
        listen=Address.parse(given.listen, "--listen"),
        url=given.url,
        tls_secrets=_tls_secrets(given.tls_secrets) if given.tls_secrets is not None else None,
        timing=timing,
        log_level=given.log_level,
        die_with_parent=given.die_with_parent,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="aerostat_operator", description="Aerostat's operator for a Kubernetes cluster.")
    parser.add_argument("--cluster", default="kubernetes:", help="kubernetes:[?kubeconfig=PATH&context=NAME&namespace=NAME]")
    parser.add_argument("--lease", required=True, metavar="NAMESPACE/NAME", help="the Lease by which replicas agree on who writes")
    parser.add_argument("--lease-duration", type=float, default=Timing().duration, help="seconds after which a silent replica is replaced")
    parser.add_argument("--identity", default="", help="this replica in the Lease (default: the host's name and something random)")
    parser.add_argument("--listen", default="127.0.0.1:8085", metavar="HOST:PORT", help="/healthz, /readyz and /metrics")
    parser.add_argument("--url", default="", help="where clients find the routers: what Models show as their URL")
    parser.add_argument("--tls-secrets", metavar="ca=NAMESPACE/NAME,…", help=f"keep certificates there: {_TLS_FORM}")
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    parser.add_argument("--die-with-parent", type=int, metavar="PID", help="end when that parent ends")
    return parser


def _namespaced(text: str, refusal: str) -> NamespacedName:
    try:
        return NamespacedName.parse(text)
    except ValueError:
        raise SettingError(refusal) from None


def _tls_secrets(text: str) -> TlsSecrets:
    refusal = f"--tls-secrets takes {_TLS_FORM}, got {text!r}"
    given = {role: _namespaced(name, refusal) for role, _, name in (part.partition("=") for part in text.split(","))}
    names = {"router": ROUTER, "agent": AGENT, "engines": ENGINES}
    if given.keys() != {CA, *names} or len({*given.values()}) < len(given):
        raise SettingError(refusal)
    return TlsSecrets(ca=given[CA], parts={name: given[role] for role, name in names.items()})
