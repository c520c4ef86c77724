"""How the Kubernetes adapter finds its server, and what it makes of the server's answers, over a server that answers as told."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest
import yaml
from aiohttp import web

from aerostat_core.errors import AerostatError, PermanentError, SettingError, TemporaryError
from aerostat_runtime.cluster import kubernetes_connection, open_cluster
from aerostat_runtime.cluster.kubernetes import KubernetesCluster
from aerostat_runtime.cluster.kubernetes_connection import Backoff, Connection, Request, Target
from aerostat_runtime.cluster.kubernetes_errors import (
    AlreadyExistsError,
    ExpiredError,
    InternalError,
    NotFoundError,
    RefusedError,
    UnreachableError,
    error_of,
)
from aerostat_runtime.cluster.port import InvalidResourceError, Violation
from aerostat_testing.waiting import eventually

pytestmark = pytest.mark.cpu

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
GET = Request(what="get slos", method="GET", path="/thing")


def kubeconfig(folder: Path, server: str, **user: str) -> Path:
    path = folder / "kubeconfig"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.write_text(yaml.safe_dump(config))
    return path


class Server:
    """Answers /thing with what is scripted, the last entry for ever, and /readyz by `ready`."""

    def __init__(self) -> None:
        self.script: list[Handler] = []
        self.ready = True
        self.seen: list[web.Request] = []
        self.url = ""
        self.over = asyncio.Event()

    def answers(self, *script: Handler) -> None:
        self.script = list(script)

    async def thing(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(request)
        return await (self.script.pop(0) if len(self.script) > 1 else self.script[0])(request)

    async def readyz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok") if self.ready else web.Response(status=500, text="[-]poststarthook/rbac failed")


def says(code: int, body: object, **headers: str) -> Handler:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(status=code, body=orjson.dumps(body), headers={k.replace("_", "-"): v for k, v in headers.items()})

    return handler


FORBIDDEN = says(403, {"kind": "Status", "reason": "Forbidden", "message": "slos is forbidden"})
GOOD = says(200, {"fine": True})


@asynccontextmanager
async def scripted(folder: Path) -> AsyncIterator[tuple[Server, Connection]]:
    server = Server()
    app = web.Application()
    app.router.add_get("/thing", server.thing)
    app.router.add_get("/readyz", server.readyz)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    connection = Connection(Target(kubeconfig=kubeconfig(folder, server.url, token="t0")), user_agent="aerostat-test")
    yield server, connection
    server.over.set()
    await connection.close()
    await runner.cleanup()


def test_a_url_names_server_and_scope(tmp_path: Path) -> None:
    file = kubeconfig(tmp_path, "https://127.0.0.1:1")
    assert isinstance(open_cluster("kubernetes:"), KubernetesCluster)
    assert Target.parse("") == Target()
    assert Target.parse(f"?kubeconfig={file}&context=a%2Fb&namespace=ns") == Target(kubeconfig=file, context="a/b", namespace="ns")


@pytest.mark.parametrize("rest", ["//host", "?kubeconfig=", "?nonsense=1", "?", "?namespace=a&namespace=b", "?namespace"])
def test_a_url_that_says_something_else_is_a_bad_setting(rest: str) -> None:
    if rest == "?":
        assert Target.parse(rest) == Target()
        return
    with pytest.raises(SettingError, match=r"kubernetes:\?kubeconfig=PATH"):
        Target.parse(rest)


def test_a_kubeconfig_that_is_not_there_is_a_bad_setting(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="is no file"):
        Target.parse(f"?kubeconfig={tmp_path}/none")


async def test_a_context_that_is_not_there_is_a_bad_setting(tmp_path: Path) -> None:
    target = Target(kubeconfig=kubeconfig(tmp_path, "http://127.0.0.1:1"), context="none")
    with pytest.raises(SettingError, match="how to reach the API server"):
        await Connection(target, user_agent="t").call(GET)


async def test_who_we_are_is_in_every_call(tmp_path: Path) -> None:
    async with scripted(tmp_path) as (server, connection):
        server.answers(GOOD)
        assert await connection.call(GET) == {"fine": True}
        assert server.seen[0].headers["Authorization"] == "Bearer t0"
        assert server.seen[0].headers["User-Agent"] == "aerostat-test"


async def test_what_passes_is_tried_again(tmp_path: Path) -> None:
    async with scripted(tmp_path) as (server, connection):
        server.answers(says(500, {}), says(409, {"reason": "Conflict"}), says(503, {}, Retry_After="0"), GOOD)
        assert await connection.call(GET) == {"fine": True}
        assert len(server.seen) == 4


async def test_what_does_not_pass_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with scripted(tmp_path) as (server, connection):
        monkeypatch.setattr(kubernetes_connection, "CALL_LIMIT", 0.5)
        server.answers(says(429, {"message": "slow down"}, Retry_After="7"))
        with pytest.raises(TemporaryError, match="slow down") as caught:
            await connection.call(GET)
        assert caught.value.retry_after == 7
        assert len(server.seen) == 1, "it said when"


async def test_a_server_that_hangs_or_is_gone_is_unreachable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with scripted(tmp_path) as (server, connection):

        async def hang(_: web.Request) -> web.StreamResponse:
            await server.over.wait()
            return web.Response()

        monkeypatch.setattr(kubernetes_connection, "REQUEST_LIMIT", 0.2)
        monkeypatch.setattr(kubernetes_connection, "CALL_LIMIT", 0.1)
        server.answers(hang)
        with pytest.raises(UnreachableError, match="cannot get slos"):
            await connection.call(GET)
        gone = Connection(Target(kubeconfig=kubeconfig(tmp_path, "http://127.0.0.1:9")), user_agent="t")
        with pytest.raises(UnreachableError, match=r"127\.0\.0\.1:9"):
            await gone.call(GET)
        await gone.close()


async def test_a_refusal_is_believed_from_a_ready_server_that_says_it_twice(tmp_path: Path) -> None:
    async with scripted(tmp_path) as (server, connection):
        server.answers(FORBIDDEN)
        with pytest.raises(RefusedError, match="may not get slos"):
            await connection.call(GET)
        assert len(server.seen) == 2


async def test_a_refusal_of_a_server_that_has_just_started_passes(tmp_path: Path) -> None:
    async with scripted(tmp_path) as (server, connection):
        server.ready = False
        server.answers(FORBIDDEN, FORBIDDEN, FORBIDDEN, GOOD)
        assert await connection.call(GET) == {"fine": True}


async def test_credentials_that_are_not_accepted_are_read_anew(tmp_path: Path) -> None:
    async with scripted(tmp_path) as (server, connection):

        async def by_token(request: web.Request) -> web.StreamResponse:
            return await (GOOD if request.headers["Authorization"] == f"Bearer {valid}" else says(401, {"message": "Unauthorized"}))(
                request
            )

        server.answers(by_token)
        for valid in ("t0", "t1", "t2"):
            kubeconfig(tmp_path, server.url, token=valid)
            assert await connection.call(GET) == {"fine": True}
        valid = "another"
        with pytest.raises(RefusedError, match="renew the credentials"):
            await connection.call(GET)


async def test_a_closed_connection_stays_closed(tmp_path: Path) -> None:
    async with scripted(tmp_path) as (server, connection):
        server.answers(says(503, {}))
        waiting = asyncio.create_task(connection.call(GET))
        await eventually(lambda: server.seen, "the server is asked")
        await connection.close()
        with pytest.raises(PermanentError, match="was closed"):
            await waiting


async def test_a_call_under_way_is_answered_while_the_connection_closes(tmp_path: Path) -> None:
    async with scripted(tmp_path) as (server, connection):
        asked, answer = asyncio.Event(), asyncio.Event()

        async def slow(request: web.Request) -> web.StreamResponse:
            asked.set()
            await answer.wait()
            return await GOOD(request)

        server.answers(slow)
        call = asyncio.create_task(connection.call(GET))
        await asked.wait()
        closing = asyncio.create_task(connection.close())
        await asyncio.sleep(0.05)
        assert not closing.done()
        answer.set()
        assert await call == {"fine": True}
        await closing


async def test_a_stream_gives_lines_and_notices_a_torn_one(tmp_path: Path) -> None:
    async with scripted(tmp_path) as (server, connection):

        async def lines(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(b'{"n": 1}\n{"n"')
            await response.write(b": 2}\n")
            await response.write(orjson.dumps({"big": "x" * 3_000_000}) + b"\n")
            await response.write(b'{"n": 3')
            return response

        server.answers(lines)
        stream = connection.stream(GET)
        assert [await anext(stream), await anext(stream)] == [{"n": 1}, {"n": 2}]
        assert len((await anext(stream))["big"]) == 3_000_000
        with pytest.raises(UnreachableError, match="cut off"):
            await anext(stream)


async def test_a_silent_stream_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with scripted(tmp_path) as (server, connection):

        async def silent(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(b'{"n": 1}\n')
            await server.over.wait()
            return response

        monkeypatch.setattr(kubernetes_connection, "SILENCE_LIMIT", 0.3)
        server.answers(silent)
        stream = connection.stream(GET)
        assert await anext(stream) == {"n": 1}
        with pytest.raises(UnreachableError):
            await anext(stream)


@pytest.mark.parametrize(
    ("code", "status", "kind", "said"),
    [
        (422, {"message": "m is invalid", "reason": "Invalid"}, InvalidResourceError, "m is invalid"),
        (400, {"message": "unknown field", "reason": "BadRequest"}, InvalidResourceError, "unknown field"),
        (403, {"message": "no", "reason": "Forbidden"}, RefusedError, "may not list pods"),
        (404, {"message": 'slos "a" not found', "details": {"name": "a"}}, NotFoundError, 'slos "a" not found'),
        (404, {"message": "404 page not found"}, RefusedError, "install the CRDs"),
        (409, {"reason": "AlreadyExists", "message": "exists"}, AlreadyExistsError, "exists"),
        (409, {"reason": "Conflict", "message": "modified"}, TemporaryError, "modified"),
        (410, {"reason": "Expired", "message": "old"}, ExpiredError, "old"),
        (413, {"message": "too large"}, PermanentError, "too large"),
        (429, {"message": "later"}, UnreachableError, "later"),
        (504, {"reason": "Timeout", "message": "Too large resource version"}, TemporaryError, "Too large"),
        (500, {}, InternalError, "HTTP 500"),
    ],
)
def test_each_answer_has_its_error(code: int, status: dict[str, object], kind: type[AerostatError], said: str) -> None:
    error = error_of(code, status, what="list pods")
    assert type(error) is kind
    assert said in str(error)


@pytest.mark.parametrize(
    ("message", "is_a_role_the_remedy"),
    [
        ('slos "a" is forbidden: User "system:serviceaccount:n:a" cannot patch resource "slos" in API group "aerostat.dev"', True),
        ("slos \"a\" is forbidden: ValidatingAdmissionPolicy 'own' with binding 'own' denied request: not yours", False),
        ('pods "a" is forbidden: exceeded quota: few, requested: pods=1, used: pods=1, limited: pods=1', False),
    ],
)
def test_who_lacks_a_right_is_told_of_roles_and_nobody_else(message: str, is_a_role_the_remedy: bool) -> None:
    said = str(error_of(403, {"message": message, "reason": "Forbidden"}, what="patch slos"))
    assert f"may not patch slos: {message}" in said
    assert ("Role must allow it" in said) is is_a_role_the_remedy


def test_violations_are_told_by_field() -> None:
    causes = [
        {"reason": "FieldValueInvalid", "field": "spec.ttft", "message": "must be more than 0"},
        {"reason": "FieldValueInvalid", "field": "<nil>", "message": "some validation rules were not checked"},
    ]
    error = error_of(422, {"message": "all", "details": {"name": "x", "causes": causes}}, what="patch slos")
    assert isinstance(error, InvalidResourceError)
    assert error.violations == (Violation("spec.ttft", "must be more than 0"),)


def test_a_refused_patch_says_what_is_wrong_without_the_whole_object() -> None:
    cause = {"field": "patch", "message": 'Invalid value: "{\\"status\\":{\\"zz\\":1}}": strict decoding error: unknown field "status.zz"'}
    error = error_of(422, {"message": "long", "details": {"causes": [cause]}}, what="patch slos/status")
    assert str(error) == 'strict decoding error: unknown field "status.zz"'


def test_waits_double_up_to_a_limit_and_differ() -> None:
    backoff = Backoff(first=1.0, most=8.0)
    waits = [backoff.next() for _ in range(6)]
    assert all(limit / 2 <= wait <= limit for wait, limit in zip(waits, (1, 2, 4, 8, 8, 8), strict=True))
    assert backoff.next(at_least=60.0) >= 60.0
    backoff.reset()
    assert backoff.next() <= 1.0
