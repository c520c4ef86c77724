"""The token probe: a fixed prompt must give its known first tokens before the model takes traffic.

A 200 from `/health` is no readiness: engines have answered it after a wake and then produced garbage.
"""

import asyncio
from typing import Final, Protocol

import aiohttp

from aerostat_agent.notes import EngineNote, TokenProbe
from aerostat_agent.policy.tracks import Failure
from aerostat_core import peers
from aerostat_core.addresses import Address
from aerostat_core.ids import Seconds
from aerostat_runtime.tls import TlsFolder

LIMIT: Final[Seconds] = 120.0  # an adopted engine may be busy with calls of its own
_RETRY_EVERY: Final[Seconds] = 0.25
_N_TOKENS_WHEN_UNKNOWN: Final = 4
REASON: Final = "TokenProbeFailed"


class Prober(Protocol):
    async def probe(self, note: EngineNote) -> Failure | None:
        """None: the engine computes what it must."""
        ...


class HttpProber:
    """Over SGLang's `/generate`, with the call key; by TLS where there is a folder for it."""

    def __init__(self, http: aiohttp.ClientSession, tls: TlsFolder | None = None) -> None:
        self._http = http
        self._tls = tls

    async def probe(self, note: EngineNote) -> Failure | None:
        expected = note.prepared.probe.expected_ids
        body: dict[str, object] = {
            "input_ids": list(note.prepared.probe.prompt_ids),
            "sampling_params": {"temperature": 0, "max_new_tokens": len(expected) or _N_TOKENS_WHEN_UNKNOWN, "ignore_eos": True},
        }
        refusals: list[str] = []
        try:
            async with asyncio.timeout(LIMIT):
                status, answer = await self._generate(note, body, refusals)
        except TimeoutError:
            why = f"; the last try: {refusals[-1]}" if refusals else ""
            return Failure(reason=REASON, message=f"the engine gave no tokens within {LIMIT:.0f} s{why}")
        if status != 200 or not isinstance(answer, dict):
            return Failure(reason=REASON, message=f"/generate answered {status}: {str(answer)[:300]}")
        return judge(note.prepared.probe, answer.get("output_ids"))

    async def _generate(self, note: EngineNote, body: dict[str, object], refusals: list[str]) -> tuple[int, object]:
        """The server may open its port a moment after its scheduler said hello. The caller bounds the wait, and reads why it was vain."""
        headers, where = {"Authorization": f"Bearer {note.call_key}"}, f"{Address(note.host, note.port)}/generate"
        while True:
            try:
                if self._tls is None:
                    call = self._http.post(f"http://{where}", json=body, headers=headers)
                else:
                    context = self._tls.client_context()
                    call = self._http.post(f"https://{where}", json=body, headers=headers, ssl=context, server_hostname=peers.ENGINES)
                async with call as answer:
                    is_json = answer.content_type == "application/json"
                    return answer.status, await answer.json() if is_json else await answer.text()
            except (aiohttp.ClientConnectionError, ConnectionError) as error:
                refusals.append(str(error))
                await asyncio.sleep(_RETRY_EVERY)


def judge(probe: TokenProbe, output_ids: object) -> Failure | None:
    """Does the output begin with the known tokens?"""
    if not isinstance(output_ids, list) or not output_ids:
        return Failure(reason=REASON, message=f"the engine gave no tokens: {output_ids!r}")
    n = len(probe.expected_ids)
    if tuple(output_ids[:n]) != probe.expected_ids:
        return Failure(reason=REASON, message=f"expected the tokens {list(probe.expected_ids)}, got {output_ids[:n]}")
    return None
