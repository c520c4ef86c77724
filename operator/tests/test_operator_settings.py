"""The operator's command line."""

from pathlib import Path

import pytest

from aerostat_core.addresses import Address
from aerostat_core.errors import SettingError
from aerostat_core.ids import NamespacedName
from aerostat_core.peers import AGENT, ENGINES, ROUTER
from aerostat_operator.certificates import TlsSecrets
from aerostat_operator.settings import parse_settings

pytestmark = pytest.mark.cpu
LEASE = ["--lease", "a/b"]


def test_a_replica_needs_a_lease_and_gets_a_name_of_its_own() -> None:
    one, other = parse_settings(["--lease", "aerostat/operator"]), parse_settings(["--lease", "aerostat/operator"])
    assert one.lease == NamespacedName("aerostat", "operator")
    assert one.identity != other.identity
    assert one.listen == Address("127.0.0.1", 8085)
    with pytest.raises(SystemExit):
        parse_settings([])


def test_the_times_of_a_lease_follow_its_duration() -> None:
    timing = parse_settings(["--lease", "a/b", "--lease-duration", "30"]).timing
    assert (timing.duration, timing.hold, timing.retry) == (30.0, 20.0, 4.0)


def test_the_cluster_may_be_one_namespace_of_one_kubeconfig(tmp_path: Path) -> None:
    kubeconfig = tmp_path / "config"
    kubeconfig.touch()
    target = parse_settings(["--lease", "a/b", "--cluster", f"kubernetes:?kubeconfig={kubeconfig}&namespace=n"]).target
    assert (target.kubeconfig, target.namespace) == (kubeconfig, "n")


def test_certificates_are_kept_where_the_secrets_are_named() -> None:
    assert parse_settings(LEASE).tls_secrets is None
    given = parse_settings([*LEASE, "--tls-secrets", "ca=r/ca,router=r/router,engines=n/engines,agent=n/agent"]).tls_secrets
    parts = {ROUTER: NamespacedName("r", "router"), AGENT: NamespacedName("n", "agent"), ENGINES: NamespacedName("n", "engines")}
    assert given == TlsSecrets(ca=NamespacedName("r", "ca"), parts=parts)


@pytest.mark.parametrize(
    "given",
    [
        "",
        "ca=r/ca",
        "ca=r/ca,router=r,agent=n/a,engines=n/e",
        "ca=r/c,router=r/c,agent=n/a,engines=n/e",
        "ca=r/c,router=r/r,agent=n/a,x=n/e",
    ],
)
def test_half_of_the_secrets_are_none(given: str) -> None:
    with pytest.raises(SettingError, match="--tls-secrets takes ca=NAMESPACE/NAME,router=NAMESPACE/NAME"):
        parse_settings([*LEASE, "--tls-secrets", given])


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["--lease", "operator"], "NAMESPACE/NAME"),
        (["--lease", "a/b/c"], "NAMESPACE/NAME"),
        (["--lease", "a/b", "--lease-duration", "0"], "--lease-duration"),
        (["--lease", "a/b", "--listen", "8085"], "HOST:PORT"),
        (["--lease", "a/b", "--listen", "h:99999"], "HOST:PORT"),
        (["--lease", "a/b", "--cluster", "folder:/x"], "aerostat up"),
        (["--lease", "a/b", "--cluster", "kubernetes:?kubeconfig=/no/such/file"], "kubeconfig"),
    ],
)
def test_a_setting_that_cannot_work_says_what_to_set(arguments: list[str], remedy: str) -> None:
    with pytest.raises(SettingError, match=remedy):
        parse_settings(arguments)
