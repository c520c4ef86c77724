"""HOST:PORT as people write it in settings, and as clients dial it."""

import re
from dataclasses import dataclass, field
from typing import Final, Self

from aerostat_core.errors import SettingError

_FORM: Final = re.compile(r"(?:(?P<host>[^][:]+)|\[(?P<bracketed>[^][]+)\]):(?P<port>[0-9]+)")


@dataclass(frozen=True, slots=True)
class Address:
    """Port 0: the kernel chooses. `flag` is what an error about this address tells people to change."""

    host: str
    port: int
    flag: str = field(default="", compare=False)

    @classmethod
    def parse(cls, text: str, flag: str) -> Self:
        """An IPv6 address is in brackets; any other host may be. Raises SettingError that names the flag."""
        match = _FORM.fullmatch(text)
        if match is None or int(match["port"]) > 65535:
            raise SettingError(f"{flag} must be HOST:PORT, an IPv6 address in brackets, got {text!r}")
        return cls(match["host"] or match["bracketed"], int(match["port"]), flag)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
