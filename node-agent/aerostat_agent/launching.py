"""From a wanted engine and a prepared model to what the keeper is asked to start."""

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aerostat_agent.notes import EngineNote, PreparedModel
from aerostat_agent.policy.engines import Wanted
from aerostat_agent.policy.memory import Footprint, kv_tokens
from aerostat_agent.policy.tracks import EngineKey
from aerostat_agent.settings import Settings
from aerostat_agent.site import EngineSite
from aerostat_agent.weights import Source
from aerostat_core.engine_launch import ADMIN_KEY_ENV, CALL_KEY_ENV, EngineLaunch
from aerostat_core.errors import PermanentError
from aerostat_core.ids import Bytes, Epoch, NamespacedName
from aerostat_core.quantities import format_size
from aerostat_core.specs import InstanceModel, InstanceSpec

PAGE_TOKENS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """`env` holds the keys and is never logged."""

    argv: tuple[str, ...]
    env: dict[str, str]
    log_path: Path
    note: EngineNote


def source_of(instance: NamespacedName, model: InstanceModel) -> Source:
    """Its Secret is one of the instance's namespace, which is the Model's too: no other can be named."""
    return Source(
        uri=model.source_uri,
        secret=None if model.secret is None else NamespacedName(instance.namespace, model.secret),
        dtype=model.engine_args.get("dtype", "auto"),
        trust_remote_code=model.trust_remote_code,
    )


def footprint(spec: InstanceSpec, model: InstanceModel, prepared: PreparedModel) -> Footprint:
    """What the engine will hold. Raises PermanentError when its KV budget has no room for one page."""
    per_token = _kv_bytes_per_token(model, prepared)
    tokens = kv_tokens(model.kv_floor_bytes, per_token, PAGE_TOKENS)
    if tokens < PAGE_TOKENS:
        message = (
            f"a KV budget of {format_size(model.kv_floor_bytes)} holds no page of {PAGE_TOKENS} tokens "
            f"({format_size(per_token * PAGE_TOKENS)}): raise the Model's memory.kvMin"
        )
        raise PermanentError("KvBudgetTooSmall", message)
    return Footprint(weights=prepared.weights_bytes, reserve=spec.reserve_bytes * spec.tensor_parallel, kv=tokens * per_token)


def launch(
    settings: Settings, site: EngineSite, port: int, spec: InstanceSpec, want: Wanted, prepared: PreparedModel, epoch: Epoch
) -> Launch:
    """A new process, with new keys, on a port that is free at the site. Raises PermanentError as `footprint` does."""
    held = footprint(spec, want.model, prepared)
    log_path = settings.log_dir / f"{spec.name.namespace}.{spec.name.name}.{want.model.name}.log"
    note = EngineNote(
        instance=str(spec.name),
        model=want.model.name,
        generation=want.model.generation,
        fingerprint=want.fingerprint,
        host=site.host,
        port=port,
        log_offset=log_path.stat().st_size if log_path.exists() else 0,
        call_key=secrets.token_urlsafe(),
        admin_key=secrets.token_urlsafe(),
        footprint=held,
        prepared=prepared,
    )
    engine = EngineLaunch(
        model=want.model.name,
        served_name=want.model.served_name,
        instance=str(spec.name),
        epoch=epoch,
        model_path=prepared.path,
        host=site.host,
        port=port,
        tls_dir=site.tls_dir,
        kv_tokens=held.kv // _kv_bytes_per_token(want.model, prepared),
        page_size=PAGE_TOKENS,
        run_dir=str(run_dir(settings, epoch)),
        agent_socket=str(settings.agent_socket),
        dtype=prepared.dtype,
        context_tokens=want.model.context_tokens,
        tensor_parallel=spec.tensor_parallel,
        trust_remote_code=want.model.trust_remote_code,
        engine_args=dict(want.model.engine_args),
    )
    env = {CALL_KEY_ENV: note.call_key, ADMIN_KEY_ENV: note.admin_key}
    return Launch(argv=(*settings.launcher, engine.to_json()), env=env, log_path=log_path, note=note)


def run_dir(settings: Settings, epoch: Epoch) -> Path:
    """Sockets and temporary files of one engine process; short, for Unix sockets' sake."""
    return settings.run_dir / "e" / f"{epoch:x}"


def _kv_bytes_per_token(model: InstanceModel, prepared: PreparedModel) -> Bytes:
    return prepared.kv_bytes(model.engine_args.get("kv-cache-dtype", "auto"))


def describe(key: EngineKey, held: Footprint) -> str:
    """For the log: what is started, and what it will hold."""
    return f"{key}: weights {format_size(held.weights)}, KV {format_size(held.kv)}, runtime reserve {format_size(held.reserve)}"
