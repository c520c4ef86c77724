"""HTTP to one API server: who we are, which server, one call at a time with a time limit. It knows no kinds and no policy.

`kubernetes_asyncio` brings configuration, credentials and TLS. Objects stay JSON: its classes know none of our kinds.
"""

import asyncio
import logging
import os
import random
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, Self
from urllib.parse import parse_qsl

import aiohttp
import orjson
from kubernetes_asyncio.client import ApiClient, Configuration
from kubernetes_asyncio.config import ConfigException, load_incluster_config, load_kube_config

from aerostat_core.errors import AerostatError, PermanentError, SettingError, TemporaryError
from aerostat_core.ids import Seconds
from aerostat_core.resources import Resource
from aerostat_runtime.cluster.kubernetes_errors import ExpiredError, RefusedError, UnreachableError, error_of

CONNECT_LIMIT: Final[Seconds] = 5.0
REQUEST_LIMIT: Final[Seconds] = 10.0
CALL_LIMIT: Final[Seconds] = 20.0  # for a call with all its retries
# Servers send a bookmark about once a minute: a stream that is silent for longer has lost its server.
SILENCE_LIMIT: Final[Seconds] = 90.0
_FORM: Final = "kubernetes:, or kubernetes:?kubeconfig=PATH&context=NAME&namespace=NAME (each of them optional)"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Which API server, and what of it. Without `kubeconfig`: the pod's own, or else what kubectl would use."""

    kubeconfig: Path | None = None
    context: str | None = None
    namespace: str | None = None  # None: all namespaces

    @classmethod
    def parse(cls, rest: str) -> Self:
        """What follows `kubernetes:`. Raises SettingError."""
        path, _, query = rest.partition("?")
        try:
            given = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
        except ValueError:
            given = [("", "")]
        values = dict(given)
        if path or len(values) < len(given) or not values.keys() <= {"kubeconfig", "context", "namespace"} or not all(values.values()):
            raise SettingError(f"--cluster takes {_FORM}, got {'kubernetes:' + rest!r}")
        kubeconfig = Path(values["kubeconfig"]).expanduser() if "kubeconfig" in values else None
        if kubeconfig is not None and not kubeconfig.is_file():
            raise SettingError(f"--cluster names a kubeconfig that is no file: {kubeconfig}")
        return cls(kubeconfig=kubeconfig, context=values.get("context"), namespace=values.get("namespace"))

    async def configuration(self) -> Configuration:
        """Raises SettingError."""
        configuration = Configuration()
        try:
            if self.kubeconfig is None and self.context is None and "KUBERNETES_SERVICE_HOST" in os.environ:
                load_incluster_config(configuration)  # type: ignore[no-untyped-call]
            else:
                file = None if self.kubeconfig is None else str(self.kubeconfig)
                await load_kube_config(file, self.context, configuration, persist_config=False)
        except ConfigException as error:
            where = self.kubeconfig or "this pod's ServiceAccount or kubectl's kubeconfig"
            raise SettingError(f"cannot tell from {where} how to reach the API server: {error}; --cluster takes {_FORM}") from error
        return configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    what: str  # verb and resource, as RBAC has them: `patch models/status`
    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    body: Any = None
    content_type: str = "application/json"


class Api(Protocol):
    """What the parts of the adapter ask of a connection. All raise AerostatError."""

    async def call(self, request: Request, *, at_once: tuple[type[AerostatError], ...] = ()) -> Resource:
        """Tries again while that may help, within a limit, but for the errors `at_once`."""
        ...

    async def once(self, request: Request) -> Resource:
        """One try."""
        ...

    def stream(self, request: Request) -> AsyncGenerator[Resource, None]:
        """The objects of the answer's lines, until the server ends it."""
        ...


class Backoff:
    """Doubling and jittered, so that thousands of watches do not come back at once."""

    def __init__(self, first: Seconds = 0.1, most: Seconds = 10.0) -> None:
        self._first = self._next = first
        self._most = most

    def reset(self) -> None:
        self._next = self._first

    def next(self, *, at_least: Seconds = 0.0) -> Seconds:
        wait, self._next = self._next, min(self._next * 2, self._most)
        return max(wait * random.uniform(0.5, 1.0), at_least * random.uniform(1.0, 1.5))


class _Session:
    """A client, who uses it, and so when it may be closed: aiohttp does not take it well before the last answer is read."""

    def __init__(self, client: ApiClient) -> None:
        self.client = client
        self._n_uses = 0
        self._is_retired = False
        self._closed = asyncio.Event()

    @asynccontextmanager
    async def use(self) -> AsyncIterator[ApiClient]:
        self._n_uses += 1
        try:
            yield self.client
        finally:
            self._n_uses -= 1
            await self._close_if_idle()

    async def retire(self) -> None:
        """Its users are the last ones."""
        self._is_retired = True
        await self._close_if_idle()

    async def closed(self) -> None:
        await self._closed.wait()

    async def _close_if_idle(self) -> None:
        if self._is_retired and self._n_uses == 0:
            await self.client.close()
            self._closed.set()


class Connection:
    """The `Api` of one server. Opens when it is first used."""

    def __init__(self, target: Target, *, user_agent: str) -> None:
        self._target = target
        self._user_agent = user_agent
        self._session: _Session | None = None
        self._opening = asyncio.Lock()
        self._is_closed = False

    async def call(self, request: Request, *, at_once: tuple[type[AerostatError], ...] = ()) -> Resource:
        """Within CALL_LIMIT."""
        deadline = asyncio.get_running_loop().time() + CALL_LIMIT
        backoff = Backoff()
        doubted = False
        while True:
            try:
                return await self.once(request)
            except TemporaryError as error:
                if isinstance(error, (ExpiredError, *at_once)):
                    raise
                failure: PermanentError | TemporaryError = error
                wait = backoff.next(at_least=error.asked if isinstance(error, UnreachableError) else 0.0)
            except RefusedError as error:
                # A server that has just started refuses what it does not know yet: its roles, accounts and CRDs.
                if doubted and await self._is_ready():
                    raise
                doubted = True
                failure = error
                wait = backoff.next()
            if asyncio.get_running_loop().time() + wait > deadline:
                raise failure
            await asyncio.sleep(wait)

    async def once(self, request: Request) -> Resource:
        """Within REQUEST_LIMIT."""
        timeout = aiohttp.ClientTimeout(total=REQUEST_LIMIT, sock_connect=CONNECT_LIMIT)
        async with self._answer(request, timeout) as response:
            answer: Resource = orjson.loads(await response.read())
            return answer

    async def stream(self, request: Request) -> AsyncGenerator[Resource, None]:
        """A server that is silent for SILENCE_LIMIT is lost."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_LIMIT, sock_read=SILENCE_LIMIT)
        async with self._answer(request, timeout) as response:
            while line := await response.content.readline():
                if not line.endswith(b"\n"):
                    raise UnreachableError(f"cannot {request.what}: the answer was cut off")
                yield orjson.loads(line)

    async def close(self) -> None:
        """Waits for calls that are under way, within their limit; they are not tried again."""
        self._is_closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.retire()
            await session.closed()

    @asynccontextmanager
    async def _answer(self, request: Request, limits: aiohttp.ClientTimeout) -> AsyncIterator[aiohttp.ClientResponse]:
        """A good answer, not read yet."""
        session = await self._opened()
        host = session.client.configuration.host
        try:
            async with session.use() as client, await _asked(client, request, limits) as response:
                if response.status >= 300:
                    status = _status_of(await response.read())
                    if response.status == 401 and self._session is session:
                        self._session = None  # plugins and token files give others from time to time: the next try reads them
                        await session.retire()
                    raise error_of(response.status, status, what=request.what, retry_after=response.headers.get("Retry-After"))
                try:
                    yield response
                finally:
                    _hang_up_if_unread(response)
        except aiohttp.ClientConnectorCertificateError as error:
            raise SettingError(
                f"{host} shows a certificate that the kubeconfig does not trust "
                f"({error.certificate_error}): correct certificate-authority or server"
            ) from error
        except (aiohttp.ClientError, TimeoutError, OSError, orjson.JSONDecodeError) as error:
            said = str(error) or type(error).__name__
            raise UnreachableError(f"cannot {request.what}: no good answer from {host}: {said}") from error
        except ConfigException as error:  # the pod's token, in the moment in which it is replaced
            raise UnreachableError(f"cannot {request.what}: no credentials now: {error}") from error

    async def _opened(self) -> _Session:
        async with self._opening:
            if self._is_closed:
                raise PermanentError("Closed", "this connection to the API server was closed: open another")
            if self._session is None:
                client = ApiClient(await self._target.configuration())
                client.user_agent = self._user_agent
                self._session = _Session(client)
            return self._session

    async def _is_ready(self) -> bool:
        request = Request(what="get /readyz", method="GET", path="/readyz")
        try:
            async with self._answer(request, aiohttp.ClientTimeout(total=REQUEST_LIMIT)):
                return True
        except (PermanentError, TemporaryError):
            return False


async def _asked(client: ApiClient, request: Request, limits: aiohttp.ClientTimeout) -> aiohttp.ClientResponse:
    response: aiohttp.ClientResponse = await client.call_api(
        request.path,
        request.method,
        query_params=list(request.query.items()),
        header_params={"Accept": "application/json", "Content-Type": request.content_type},
        body=request.body,
        auth_settings=["BearerToken"],
        _preload_content=False,
        _request_timeout=limits,
    )
    return response


def _hang_up_if_unread(response: aiohttp.ClientResponse) -> None:
    """At once: TLS would say goodbye, and wait for a server that may hang. An answer that was read has given its connection back."""
    connection = response.connection
    if connection is not None and connection.transport is not None:
        connection.transport.abort()


def _status_of(data: bytes) -> Mapping[str, Any]:
    try:
        status = orjson.loads(data)
    except orjson.JSONDecodeError:
        return {"message": data[:500].decode(errors="replace").strip()}
    return status if isinstance(status, dict) else {"message": str(status)}
