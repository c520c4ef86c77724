"""HOST:PORT in settings."""

import pytest

from aerostat_core.addresses import Address
from aerostat_core.errors import SettingError

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    ("given", "host", "told"),
    [
        ("10.0.0.7:9700", "10.0.0.7", "10.0.0.7:9700"),
        ("[10.0.0.7]:9700", "10.0.0.7", "10.0.0.7:9700"),  # where the family is not known, both are in brackets
        ("[fd00::7]:9700", "fd00::7", "[fd00::7]:9700"),
    ],
)
def test_an_address_is_told_as_clients_dial_it(given: str, host: str, told: str) -> None:
    address = Address.parse(given, "--listen")
    assert (address.host, address.port, str(address)) == (host, 9700, told)


@pytest.mark.parametrize("given", ["8080", ":8080", "h:", "h:x", "h:99999", "fd00::7:9700", "[fd00::7:9700", "h:80:80", ""])
def test_what_is_no_address_is_refused_with_the_flag(given: str) -> None:
    with pytest.raises(SettingError, match="--listen must be HOST:PORT, an IPv6 address in brackets"):
        Address.parse(given, "--listen")
