"""`python -m aerostat_operator.crds`: give a cluster the CRDs of this release.

Helm itself never updates CRDs, or puts old ones over new ones, so a hook of the chart runs this before each installation and
upgrade. All CRDs are judged before any is written, and it returns when all are established.
"""

import argparse
import asyncio
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import yaml

from aerostat_core.errors import PermanentError, SettingError, TemporaryError
from aerostat_core.ids import Seconds
from aerostat_core.resources import Resource
from aerostat_operator.policy.crds import Judgement, Verb, judge
from aerostat_runtime.cluster.kubernetes_connection import Api, Connection, Request, Target
from aerostat_runtime.cluster.kubernetes_errors import NotFoundError
from aerostat_runtime.cluster.schema import crds_folder
from aerostat_runtime.logs import set_up_logs

MANAGER: Final = "aerostat-crds"
ESTABLISH_LIMIT: Final[Seconds] = 60.0
EXIT_FAILED: Final = 1
EXIT_BAD_SETTING: Final = 2
_ASK_EVERY: Final[Seconds] = 0.5
_PATH: Final = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    target: Target
    allows_removal: bool


def parse_settings(argv: Sequence[str]) -> Settings:
    """Raises SettingError."""
    parser = argparse.ArgumentParser(prog="python -m aerostat_operator.crds", description="Apply the CRDs of this release.")
    parser.add_argument("--cluster", default="kubernetes:", help="kubernetes:[?kubeconfig=PATH&context=NAME]")
    parser.add_argument("--allow-removal", action="store_true", help="also where objects lose fields that this release no longer has")
    given = parser.parse_args(argv)
    scheme, _, rest = given.cluster.partition(":")
    if scheme != "kubernetes":
        raise SettingError(f"--cluster takes kubernetes:, got {given.cluster!r}")
    return Settings(target=Target.parse(rest), allows_removal=given.allow_removal)


def crds_of_this_release() -> dict[str, Resource]:
    """By name. Raises SettingError where the package lacks them."""
    crds = (yaml.safe_load(path.read_text()) for path in sorted(crds_folder().glob("*.yaml")))
    return {crd["metadata"]["name"]: crd for crd in crds}


async def bring(api: Api, crds: Mapping[str, Resource], *, allows_removal: bool) -> dict[str, Judgement]:
    """What was done about each. Raises PermanentError, with nothing written, where one is refused."""
    judgements = {name: judge(await _present(api, name), crd, allows_removal=allows_removal) for name, crd in crds.items()}
    refused = [f"{name}: {j.why}" for name, j in judgements.items() if j.verb is Verb.REFUSE]
    if refused:
        raise PermanentError("CrdsRefused", "; ".join(refused))
    for name, judgement in judgements.items():
        if judgement.verb is Verb.APPLY:
            await api.call(_apply(crds[name]))
    for name in judgements:
        await _await_established(api, name)
    return judgements


def _apply(crd: Resource) -> Request:
    return Request(
        what="patch customresourcedefinitions",
        method="PATCH",
        path=f"{_PATH}/{crd['metadata']['name']}",
        query={"fieldManager": MANAGER, "force": "true", "fieldValidation": "Strict"},
        body=crd,
        content_type="application/apply-patch+yaml",
    )


async def _present(api: Api, name: str) -> Resource | None:
    try:
        return await api.call(Request(what="get customresourcedefinitions", method="GET", path=f"{_PATH}/{name}"))
    except NotFoundError:
        return None


async def _await_established(api: Api, name: str) -> None:
    """Raises PermanentError where another kind has its names, TemporaryError when it takes too long."""
    try:
        async with asyncio.timeout(ESTABLISH_LIMIT):
            while True:
                crd = await _present(api, name) or {}
                conditions = {c["type"]: c for c in crd.get("status", {}).get("conditions", ())}
                if conditions.get("Established", {}).get("status") == "True":
                    return
                if (names := conditions.get("NamesAccepted", {})).get("status") == "False":
                    raise PermanentError("NamesTaken", f"{name} is not served: {names.get('message', '')}: remove the other kind")
                await asyncio.sleep(_ASK_EVERY)
    except TimeoutError:
        message = f"{name} is not established after {ESTABLISH_LIMIT:g} s: look at its conditions"
        raise TemporaryError("NotEstablished", message, retry_after=_ASK_EVERY) from None


async def _run(settings: Settings) -> None:
    connection = Connection(settings.target, user_agent=MANAGER)
    try:
        for name, judgement in (await bring(connection, crds_of_this_release(), allows_removal=settings.allows_removal)).items():
            _log.info("%s %s: %s", judgement.verb.value, name, judgement.why)
    finally:
        await connection.close()


def main(argv: Sequence[str] | None = None) -> int:
    set_up_logs()
    try:
        asyncio.run(_run(parse_settings(sys.argv[1:] if argv is None else argv)))
    except SettingError as error:
        _log.error("%s", error.message)
        return EXIT_BAD_SETTING
    except (PermanentError, TemporaryError) as error:
        _log.error("%s", error)
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
