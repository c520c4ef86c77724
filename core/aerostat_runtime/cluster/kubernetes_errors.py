"""What an API server answers instead of a result, as errors that callers branch on. Pure.

PermanentError   InvalidResourceError   schema or rule refuses the object, in the server's words
                 RefusedError           who we are may not do that, or there is no such resource
                 NotFoundError          the object, or its namespace, is not there
                 AlreadyExistsError
TemporaryError   ExpiredError           the resourceVersion is too old: list again
                 UnreachableError       no answer, or one that says to come back
                 (itself)               everything else, conflicts included
"""

from collections.abc import Mapping
from typing import Any, Final

from aerostat_core.errors import AerostatError, PermanentError, TemporaryError
from aerostat_core.ids import Seconds
from aerostat_runtime.cluster.port import InvalidResourceError, Violation

RETRY_AFTER: Final[Seconds] = 1.0  # for callers, where the server does not say
_WHOLE_OBJECT: Final = "<nil>"  # what a server calls the field of a rule over the whole object
_IS_RIGHTS: Final = "is forbidden: User "  # said by who checks rights; a policy, a quota or a webhook says itself what is amiss
_LEFT_OUT: Final = "some validation rules were not checked"  # for what the other violations say; itself none


class RefusedError(PermanentError):
    pass


class NotFoundError(PermanentError):
    def __init__(self, message: str) -> None:
        super().__init__("NotFound", message)


class AlreadyExistsError(PermanentError):
    def __init__(self, message: str) -> None:
        super().__init__("AlreadyExists", message)


class ExpiredError(TemporaryError):
    def __init__(self, message: str) -> None:
        super().__init__("Expired", message, retry_after=0.0)


class UnreachableError(TemporaryError):
    """`asked`: for how long the server wants to be left alone; 0 where it did not say."""

    def __init__(self, message: str, *, asked: Seconds = 0.0) -> None:
        super().__init__("ApiUnavailable", message, retry_after=asked or RETRY_AFTER)
        self.asked = asked


class InternalError(TemporaryError):
    def __init__(self, message: str) -> None:
        super().__init__("InternalError", message, retry_after=RETRY_AFTER)


def error_of(code: int, status: Mapping[str, Any], *, what: str, retry_after: str | None = None) -> AerostatError:
    """`status`: the answer's body, a Status object where it is an API server's. `what`: verb and resource, for people."""
    message = str(status.get("message") or f"HTTP {code}")
    reason = str(status.get("reason") or "")
    match code:
        case 400 | 422:
            return _invalid(message, status)
        case 401:
            return RefusedError(
                "Unauthorized", f"the API server does not know who we are ({what}): renew the credentials of the kubeconfig"
            )
        case 403:
            remedy = "; the component's Role must allow it" if _IS_RIGHTS in message else ""
            return RefusedError("Forbidden", f"may not {what}: {message}{remedy}")
        case 404 if (status.get("details") or {}).get("name"):
            return NotFoundError(message)
        case 404:
            return RefusedError("NoSuchResource", f"cannot {what}: the cluster does not have that kind; install the CRDs")
        case 409 if reason == "AlreadyExists":
            return AlreadyExistsError(message)
        case 410:
            return ExpiredError(message)
        case 429 | 503:
            return UnreachableError(f"cannot {what} now: {message}", asked=_seconds(retry_after))
        case 500:
            return InternalError(f"cannot {what}: {message}")
        case _ if code in (405, 413, 415):
            return PermanentError(reason or "Refused", f"cannot {what}: {message}")
        case _:
            return TemporaryError(reason or f"Http{code}", f"cannot {what}: {message}", retry_after=RETRY_AFTER)


def _invalid(message: str, status: Mapping[str, Any]) -> InvalidResourceError:
    causes = (status.get("details") or {}).get("causes") or ()
    found = [(str(cause.get("field", "")), str(cause.get("message", ""))) for cause in causes]
    if [path for path, _ in found] == ["patch"]:  # the whole object, and then what is wrong with it
        message = found[0][1].rpartition('}": ')[2]
        return InvalidResourceError(message, (Violation("", message),))
    violations = tuple(Violation("" if path == _WHOLE_OBJECT else path, text) for path, text in found if _LEFT_OUT not in text)
    return InvalidResourceError(message.replace(f"{_WHOLE_OBJECT}: ", ""), violations)


def _seconds(retry_after: str | None) -> Seconds:
    return float(retry_after) if retry_after and retry_after.isdecimal() else 0.0
