"""Errors that callers branch on. Two words decide the reaction: temporary (retry after) or permanent.

    AerostatError
    ├── PermanentError          somebody must change something; the message says what
    │   └── SettingError        a setting of a process: fatal at start
    └── TemporaryError          the same call may work after `retry_after` seconds

What a client of the inference API sees is in `api_errors`.
"""

from aerostat_core.ids import Seconds


class AerostatError(Exception):
    """Root of what we raise on purpose."""


class PermanentError(AerostatError):
    """Retrying changes nothing. `reason` is CamelCase, as in a condition; the message names the remedy."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class SettingError(PermanentError):
    """A setting that cannot work. Fatal at start; the message says what to set, and where."""

    def __init__(self, message: str) -> None:
        super().__init__("BadSetting", message)


class TemporaryError(AerostatError):
    """The world may be different in `retry_after` seconds."""

    def __init__(self, reason: str, message: str, *, retry_after: Seconds) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry_after = retry_after
