"""Keeps the certificates of mTLS between parts, while this replica leads: reads Secrets, asks the policy, writes what it says.

The chart makes the Secrets, empty; all rights that this takes are to get and patch those four. No failure of it ends the operator,
and none is urgent: what parts hold is good for days.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Final

from aerostat_core.clock import Clock
from aerostat_core.errors import PermanentError, TemporaryError
from aerostat_core.ids import NamespacedName, Seconds
from aerostat_operator.policy.certificates import AuthorityId, DropAuthority, Fill, Held, Holding, Leaf, MakeAuthority, decide
from aerostat_operator.policy.statuses import format_time, parse_time
from aerostat_operator.secret_store import Edit, SecretStore, Stored
from aerostat_operator.x509 import OwnAuthority, bundle, read_authorities, read_bundle, read_leaf
from aerostat_runtime.cluster.kubernetes_connection import Backoff

CHECK_EVERY: Final[Seconds] = 120.0
FIRST_RETRY: Final[Seconds] = 1.0
LAST_RETRY: Final[Seconds] = 60.0
CA: Final = "ca"  # what metrics call it; a part is called as in its certificate
SINCE: Final = "aerostat.dev/trusted-since"  # annotation of a part's Secret: {CA: time} for each CA of its bundle
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSecrets:
    """Where they are. `parts`: by the name in the certificate."""

    ca: NamespacedName
    parts: Mapping[str, NamespacedName]


@dataclass(slots=True, kw_only=True)
class Checked:
    """What a check came to. `ends`: of each certificate, now where there is none, and of the CA that lasts longest.

    `failed`: reasons by what was to be done.
    """

    ends: dict[str, Seconds] = field(default_factory=dict)
    made: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """`parts` lacks those whose Secret cannot be had."""

    ca: Stored
    parts: Mapping[str, Stored]
    authorities: Mapping[AuthorityId, OwnAuthority]
    held: Held


class CertificateKeeper:
    """`writing` is entered around each write, and refuses when another replica may lead."""

    def __init__(
        self, store: SecretStore, clock: Clock, secrets: TlsSecrets, *, writing: Callable[[], AbstractAsyncContextManager[None]]
    ) -> None:
        self._store, self._clock, self._secrets, self._writing = store, clock, secrets, writing

    async def run(self, settle: Callable[[Checked], None]) -> None:
        """For ever: at once, then every few minutes, and sooner after a failure."""
        backoff = Backoff(FIRST_RETRY, LAST_RETRY)
        while True:
            checked = await self.check()
            settle(checked)
            if not checked.failed:
                backoff.reset()
            await asyncio.sleep(backoff.next() if checked.failed else CHECK_EVERY)

    async def check(self) -> Checked:
        """Does what can be done; what cannot is logged, and left to a later check."""
        checked = Checked()
        with _trying("check the certificates", checked):
            seen = await self._look(checked)
            actions = decide(seen.held, self._clock.wall())
            if not all(isinstance(a, Fill) for a in actions):
                await self._change_authorities(seen, [a for a in actions if not isinstance(a, Fill)], checked)
                seen = await self._look(checked)
                actions = decide(seen.held, self._clock.wall())
            checked.ends |= _ends(seen.held, now=self._clock.wall())
            for fill in actions:
                if isinstance(fill, Fill) and fill.name in seen.parts:
                    with _trying(f"fill Secret {self._secrets.parts[fill.name]}", checked):
                        await self._fill(seen, fill, checked)
        return checked

    async def _look(self, checked: Checked) -> _Seen:
        ca = await self._store.read(self._secrets.ca)
        parts = {}
        for name, secret in self._secrets.parts.items():
            with _trying(f"read Secret {secret}", checked, PermanentError):
                parts[name] = await self._store.read(secret)
        authorities, damaged = read_authorities(ca.data)
        holdings = tuple(_holding(name, parts.get(name), authorities) for name in self._secrets.parts)
        held = Held(authorities=tuple(a.known() for a in authorities), holdings=holdings, damaged=damaged)
        return _Seen(ca=ca, parts=parts, authorities={a.id: a for a in authorities}, held=held)

    async def _change_authorities(self, seen: _Seen, steps: Sequence[MakeAuthority | DropAuthority], checked: Checked) -> None:
        data: dict[str, bytes | None] = {}
        told, names = [], []
        for step in steps:
            if isinstance(step, DropAuthority):
                data |= {f"{step.id}.crt": None, f"{step.id}.key": None}
                told.append(f"CA {step.id} goes: {step.reason}")
            else:
                made = OwnAuthority.make(step.validity)
                data |= made.files()
                names.append(CA)
                told.append(f"CA {made.id} is new, until {format_time(step.validity.until)}: {step.reason}")
        async with self._writing():
            await self._store.change(self._secrets.ca, Edit(data=data), version=seen.ca.version)
        checked.made += names
        for line in told:
            _log.info("%s", line)

    async def _fill(self, seen: _Seen, fill: Fill, checked: Checked) -> None:
        data: dict[str, bytes | None] = {**bundle(seen.authorities[id_] for id_ in fill.trusted)}
        if fill.sign is not None:
            data |= seen.authorities[fill.sign.by].sign(fill.name, fill.sign.validity)
        since = json.dumps({id_: format_time(since) for id_, since in sorted(fill.trusted.items())})
        async with self._writing():
            edit = Edit(data=data, annotations={SINCE: since})
            await self._store.change(self._secrets.parts[fill.name], edit, version=seen.parts[fill.name].version)
        if fill.reason:
            _log.info("the bundle of %s is written anew: %s", fill.name, fill.reason)
        if fill.sign is not None:
            checked.made.append(fill.name)
            checked.ends[fill.name] = fill.sign.validity.until
            ends = format_time(fill.sign.validity.until)
            _log.info("the certificate of %s is new, by CA %s until %s: %s", fill.name, fill.sign.by, ends, fill.sign.reason)


@contextmanager
def _trying(what: str, checked: Checked, kind: type[Exception] = Exception) -> Iterator[None]:
    """A failure of that kind ends here: what is tried beside it, and the operator, go on."""
    try:
        yield
    except kind as error:
        if isinstance(error, (PermanentError, TemporaryError)):
            checked.failed[what] = error.reason
            _log.warning("cannot %s: %s: %s", what, error.reason, error)
        else:
            checked.failed[what] = "Unexpected"
            _log.exception("cannot %s", what)


def _holding(name: str, stored: Stored | None, authorities: Sequence[OwnAuthority]) -> Holding:
    if stored is None:
        return Holding(name=name, leaf="its Secret cannot be had", trusted={})
    record = _record(stored.annotations.get(SINCE, ""))
    return Holding(
        name=name,
        leaf=read_leaf(stored.data, authorities),
        trusted={id_: record.get(id_) for id_ in read_bundle(stored.data)},
    )


def _record(text: str) -> dict[AuthorityId, Seconds]:
    """Nothing, where somebody else wrote it."""
    try:
        return {AuthorityId(id_): parse_time(since) for id_, since in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError):
        return {}


def _ends(held: Held, *, now: Seconds) -> dict[str, Seconds]:
    ends = {h.name: h.leaf.validity.until if isinstance(h.leaf, Leaf) else now for h in held.holdings}
    return ends | ({CA: max(a.validity.until for a in held.authorities)} if held.authorities else {})
