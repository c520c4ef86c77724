"""Keeping certificates over Secrets that change under our hands, are missing, or cannot be had; in virtual time."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass

import pytest

from aerostat_core.errors import PermanentError, TemporaryError
from aerostat_core.ids import NamespacedName, Seconds
from aerostat_core.peers import AGENT, ENGINES, ROUTER
from aerostat_operator.certificates import CA, CHECK_EVERY, LAST_RETRY, SINCE, CertificateKeeper, Checked, TlsSecrets
from aerostat_operator.leader import NotLeadingError
from aerostat_operator.metrics import Metrics
from aerostat_operator.policy.certificates import AUTHORITY_LIFE, DAY, LEAF_LIFE, RENEW_AT, Leaf
from aerostat_operator.secret_store import Edit, Stored
from aerostat_operator.x509 import read_authorities, read_bundle, read_leaf
from aerostat_runtime.tls import AUTHORITIES, CERTIFICATE, KEY
from aerostat_testing.agent_fakes import LoopClock

pytestmark = [pytest.mark.cpu, pytest.mark.looptime]
SECRETS = TlsSecrets(
    ca=NamespacedName("release", "aerostat-ca"),
    parts={
        ROUTER: NamespacedName("release", "aerostat-router-tls"),
        AGENT: NamespacedName("nodes", "aerostat-agent-tls"),
        ENGINES: NamespacedName("nodes", "aerostat-engines-tls"),
    },
)


class MemorySecrets:
    """A `SecretStore` that is as an API server's."""

    def __init__(self) -> None:
        self.stored = {name: Stored(version="0", data={}, annotations={}) for name in (SECRETS.ca, *SECRETS.parts.values())}
        self.failing: dict[NamespacedName, Exception] = {}
        self.interfering: list[NamespacedName] = []  # Secrets that somebody changes between our read and our write
        self.n_reads = self.n_writes = 0

    async def read(self, name: NamespacedName) -> Stored:
        self.n_reads += 1
        self._fail(name)
        return self.stored[name]

    async def change(self, name: NamespacedName, edit: Edit, *, version: str) -> None:
        self._fail(name)
        if name in self.interfering:
            self.interfering.remove(name)
            self.put(name, {**self.stored[name].data})
        found = self.stored[name]
        if found.version != version:
            raise TemporaryError("Conflict", "the object has been modified", retry_after=1.0)
        self.n_writes += 1
        self.put(name, {key: value for key, value in {**found.data, **edit.data}.items() if value is not None}, edit.annotations)

    def put(self, name: NamespacedName, data: dict[str, bytes], annotations: Mapping[str, str] | None = None) -> None:
        found = self.stored[name]
        kept = {**found.annotations, **(annotations or {})}
        self.stored[name] = Stored(version=str(int(found.version) + 1), data=data, annotations=kept)

    def _fail(self, name: NamespacedName) -> None:
        if error := self.failing.get(name):
            raise error

    def part(self, name: str) -> dict[str, bytes]:
        return dict(self.stored[SECRETS.parts[name]].data)

    def leaf(self, name: str) -> Leaf:
        authorities, _ = read_authorities(self.stored[SECRETS.ca].data)
        leaf = read_leaf(self.part(name), authorities)
        assert isinstance(leaf, Leaf), leaf
        return leaf

    def check_whole(self, now: Seconds | None = None) -> None:
        authorities, damaged = read_authorities(self.stored[SECRETS.ca].data)
        assert not damaged
        for name in SECRETS.parts:
            assert self.part(name).keys() == {CERTIFICATE, KEY, AUTHORITIES}
            assert read_bundle(self.part(name)) == {a.id for a in authorities}
            assert self.leaf(name).names == {name}
            assert self.leaf(name).issuer in {a.id for a in authorities}
            assert self.leaf(name).validity.covers(LoopClock().wall() if now is None else now)


@dataclass
class Calendar:
    """A `Clock` that is turned by hand: no loop waits for days at once."""

    now: Seconds = 1_800_000_000.0

    def monotonic(self) -> Seconds:
        return self.now

    def wall(self) -> Seconds:
        return self.now


def keeper(store: MemorySecrets) -> CertificateKeeper:
    return CertificateKeeper(store, LoopClock(), SECRETS, writing=nullcontext)


@asynccontextmanager
async def keeping(store: MemorySecrets) -> AsyncIterator[list[Checked]]:
    """What its checks came to."""
    seen: list[Checked] = []
    task = asyncio.create_task(keeper(store).run(seen.append))
    try:
        yield seen
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_empty_secrets_are_filled_at_once_and_then_left_alone() -> None:
    store = MemorySecrets()
    async with keeping(store) as seen:
        await asyncio.sleep(0.1)
        store.check_whole()
        (first,) = seen
        assert sorted(first.made) == sorted([CA, *SECRETS.parts])
        assert not first.failed
        now = LoopClock().wall()
        assert first.ends[ROUTER] == pytest.approx(now + LEAF_LIFE, abs=2)
        assert first.ends[CA] == pytest.approx(now + AUTHORITY_LIFE, abs=2)
        n_writes = store.n_writes
        await asyncio.sleep(10 * CHECK_EVERY)
    assert store.n_writes == n_writes
    assert [checked.made for checked in seen[1:]] == [[]] * 10


async def test_certificates_and_cas_are_renewed_in_time() -> None:
    store, calendar = MemorySecrets(), Calendar()
    keeper = CertificateKeeper(store, calendar, SECRETS, writing=nullcontext)
    made: list[str] = []
    for _ in range(int(AUTHORITY_LIFE * RENEW_AT / DAY) + 20):
        checked = await keeper.check()
        made += checked.made
        assert not checked.failed
        store.check_whole(calendar.now)
        calendar.now += DAY
    (authority,), _ = read_authorities(store.stored[SECRETS.ca].data)
    assert authority.known().validity.since > calendar.now - 30 * DAY
    assert made.count(CA) == 2
    assert [made.count(name) for name in SECRETS.parts] == [1 + 262 // 5] * 3


async def test_a_secret_that_somebody_emptied_is_filled_by_the_next_check() -> None:
    store = MemorySecrets()
    async with keeping(store):
        await asyncio.sleep(1.0)
        before = store.leaf(ROUTER)
        store.put(SECRETS.parts[AGENT], {})
        await asyncio.sleep(CHECK_EVERY)
        store.check_whole()
        assert store.leaf(ROUTER) == before


async def test_a_key_of_a_ca_that_was_taken_away_makes_a_new_one_and_no_certificate_at_once() -> None:
    store = MemorySecrets()
    async with keeping(store):
        await asyncio.sleep(1.0)
        before = store.leaf(ROUTER)
        store.put(SECRETS.ca, {name: data for name, data in store.stored[SECRETS.ca].data.items() if name.endswith(".crt")})
        await asyncio.sleep(CHECK_EVERY)
        store.check_whole()
        authorities, _ = read_authorities(store.stored[SECRETS.ca].data)
        assert [a.known().can_sign for a in sorted(authorities, key=lambda a: a.id == before.issuer)] == [True, False]
        assert store.leaf(ROUTER) == before


async def test_what_is_no_ca_of_ours_goes_and_other_data_stays() -> None:
    store = MemorySecrets()
    async with keeping(store):
        await asyncio.sleep(1.0)
        store.put(SECRETS.ca, {**store.stored[SECRETS.ca].data, "x.crt": b"what", "x.key": b"ever", "note": b"theirs"})
        await asyncio.sleep(CHECK_EVERY)
        data = store.stored[SECRETS.ca].data
        assert data["note"] == b"theirs"
        assert not {"x.crt", "x.key"} & data.keys()
        assert len(data) == 3


async def test_since_when_a_ca_is_trusted_is_on_record() -> None:
    store = MemorySecrets()
    await keeper(store).check()
    assert (await keeper(store).check()).made == []
    assert store.n_writes == 4, "what is on record is read again"
    annotations = store.stored[SECRETS.parts[ROUTER]].annotations
    for record in ("", "{", "[]", '{"a": 7}', '{"a": "yesterday"}'):
        store.put(SECRETS.parts[ROUTER], store.part(ROUTER), {SINCE: record})
        n_writes = store.n_writes
        await keeper(store).check()
        assert store.n_writes == n_writes + 1
        assert store.stored[SECRETS.parts[ROUTER]].annotations.keys() == annotations.keys()


async def test_a_write_that_somebody_was_faster_with_is_decided_anew() -> None:
    store = MemorySecrets()
    store.interfering = [SECRETS.ca, SECRETS.parts[AGENT]]
    async with keeping(store) as seen:
        await asyncio.sleep(10.0)
    store.check_whole()
    assert [list(checked.failed.values()) for checked in seen] == [["Conflict"], ["Conflict"], []]
    assert [sorted(checked.made) for checked in seen] == [[], sorted([CA, ROUTER, ENGINES]), [AGENT]]
    authorities, _ = read_authorities(store.stored[SECRETS.ca].data)
    assert len(authorities) == 1


async def test_while_the_server_is_away_it_asks_again_and_then_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    store = MemorySecrets()
    store.failing = dict.fromkeys(store.stored, TemporaryError("ApiUnavailable", "no answer", retry_after=1.0))
    async with keeping(store) as seen:
        await asyncio.sleep(3600.0)
        assert 3600 / LAST_RETRY <= len(seen) <= 2 * 3600 / LAST_RETRY + 10
        assert all(checked.failed == {"check the certificates": "ApiUnavailable"} for checked in seen)
        assert "cannot check the certificates: ApiUnavailable: no answer" in caplog.text
        store.failing = {}
        await asyncio.sleep(LAST_RETRY)
        store.check_whole()


@pytest.mark.parametrize("error", [PermanentError("SecretNotFound", "there is no Secret"), PermanentError("Forbidden", "may not")])
async def test_a_secret_that_cannot_be_had_holds_up_no_other(error: PermanentError) -> None:
    store = MemorySecrets()
    store.failing = {SECRETS.parts[ENGINES]: error}
    async with keeping(store) as seen:
        await asyncio.sleep(1.0)
        assert seen[0].failed == {"read Secret nodes/aerostat-engines-tls": error.reason}
        assert store.leaf(ROUTER).issuer == store.leaf(AGENT).issuer
        store.failing = {}
        await asyncio.sleep(LAST_RETRY)
        store.check_whole()


async def test_nothing_is_written_without_the_lease() -> None:
    class Refusing(nullcontext[None]):
        async def __aenter__(self) -> None:
            raise NotLeadingError

    store = MemorySecrets()
    checked = await CertificateKeeper(store, LoopClock(), SECRETS, writing=Refusing).check()
    assert checked.failed == {"check the certificates": "NotLeading"}
    assert store.n_writes == 0


async def test_an_error_that_nobody_expected_is_loud_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    store = MemorySecrets()
    store.failing = {SECRETS.ca: RuntimeError("what nobody thought of")}
    async with keeping(store) as seen:
        await asyncio.sleep(1.0)
        assert seen[0].failed == {"check the certificates": "Unexpected"}
        store.failing = {}
        await asyncio.sleep(LAST_RETRY)
        store.check_whole()
    assert [record.levelno for record in caplog.records if record.exc_info] == [logging.ERROR] * sum(bool(c.failed) for c in seen)


async def test_no_log_has_a_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    store = MemorySecrets()
    await keeper(store).check()
    store.put(SECRETS.parts[AGENT], {})
    await keeper(store).check()
    assert "is new, by CA" in caplog.text
    assert "PRIVATE" not in caplog.text + repr(store.stored)


async def test_metrics_say_how_long_certificates_last_while_this_replica_leads() -> None:
    def remaining(metrics: Metrics, *, later: Seconds) -> dict[str, Seconds]:
        metrics.show(now=LoopClock().wall() + later, queue_depth=0, is_leading=True)
        samples = [s for family in metrics.registry.collect() for s in family.samples]
        return {s.labels["certificate"]: s.value for s in samples if s.name == "aerostat_certificate_remaining_seconds"}

    store, metrics = MemorySecrets(), Metrics()
    metrics.checked(await keeper(store).check())
    assert remaining(metrics, later=DAY)[AGENT] == pytest.approx(LEAF_LIFE - DAY, abs=2)
    assert remaining(metrics, later=DAY)[CA] == pytest.approx(AUTHORITY_LIFE - DAY, abs=2)
    store.put(SECRETS.parts[AGENT], {})
    store.interfering = [SECRETS.parts[AGENT]]
    metrics.checked(await keeper(store).check())
    assert remaining(metrics, later=0.0)[AGENT] <= 0, "there is none"
    assert metrics.registry.get_sample_value("aerostat_certificates_made_total", {"certificate": AGENT}) == 1
    assert metrics.registry.get_sample_value("aerostat_certificate_errors_total", {"reason": "Conflict"}) == 1
    metrics.rested()
    assert remaining(metrics, later=0.0) == {}
