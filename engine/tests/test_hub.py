"""Models of a Hub: what is fetched, who may have it, what is kept, and what its answers mean. The Hub is one on loopback."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest

from aerostat_core.errors import PermanentError, TemporaryError
from aerostat_engine import prepare as prepare_module
from aerostat_engine.models.acquire import Acquirer
from aerostat_engine.models.facts import read_facts
from aerostat_engine.models.hub import Hub
from aerostat_engine.models.manifest import NAME as MANIFEST
from aerostat_engine.models.room import Room
from aerostat_engine.models.source import HubSource
from aerostat_engine.prepare import Reporter, take_token
from aerostat_runtime.model_cache import ModelCache
from aerostat_testing.hub import LoopbackHub
from aerostat_testing.preparing import LIMIT, outcome, start_preparing
from aerostat_testing.tiny_files import CONFIG, safetensors

pytestmark = pytest.mark.cpu

NAME = "org/tiny"
TOKEN = "hf_of-a-reader"
SMALL = {
    "config.json": json.dumps(CONFIG).encode(),
    "tokenizer.json": b"{}",
    "tokenizer.model": b"sentencepiece",
    "chat_template.jinja": b"{{ messages }}",
}
WHOLE = SMALL | {"model.safetensors": safetensors(1000)}
INDEX = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()
SHARDED = SMALL | {
    "model.safetensors.index.json": INDEX,
    "model-1.safetensors": safetensors(1000),
    "model-2.safetensors": safetensors(2000),
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with LoopbackHub() as running:
        yield running
        huggingface_hub.close_session()


@pytest.fixture
def cache(tmp_path: Path) -> ModelCache:
    return ModelCache(tmp_path / "cache")


def fetched(
    hub: LoopbackHub, cache: ModelCache, *, name: str = NAME, revision: str = "main", token: str | None = None, with_code: bool = False
) -> Path:
    """The folder that a preparation ends with."""
    source = HubSource(repository=name, revision=revision)
    return acquirer(cache).from_hub(f"hf://{name}@{revision}", Hub(source, token, endpoint=hub.endpoint), with_code=with_code)


def acquirer(cache: ModelCache) -> Acquirer:
    return Acquirer(cache, Room(cache=cache), Reporter())


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")} - {MANIFEST}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != MANIFEST}


def test_only_what_is_served_is_fetched(hub: LoopbackHub, cache: ModelCache) -> None:
    others = ("README.md", "pytorch_model.bin", "consolidated.safetensors", "modeling.py", "onnx/model.onnx", "original/model.safetensors")
    repository = hub.add(NAME, WHOLE | dict.fromkeys(others, b"not served"))
    folder = fetched(hub, cache)
    assert folder == cache.model(f"hf-org--tiny-{repository.revisions['main']}")
    assert contents(folder) == WHOLE
    assert read_facts(folder).n_parameters == 1000
    assert sorted(hub.fetched()) == sorted(WHOLE)
    assert list(cache.download("x").parent.iterdir()) == []


def test_an_index_says_which_weights_are_served(hub: LoopbackHub, cache: ModelCache) -> None:
    hub.add(NAME, SHARDED | {"consolidated.safetensors": b"the same once more"})
    assert names(fetched(hub, cache)) == SHARDED.keys()


def test_a_second_preparation_fetches_nothing(hub: LoopbackHub, cache: ModelCache) -> None:
    hub.add(NAME, WHOLE)
    folder = fetched(hub, cache)
    hub.asked.clear()
    assert fetched(hub, cache) == folder
    assert [(asked.method, asked.path) for asked in hub.asked] == [("HEAD", f"/{NAME}/resolve/main/config.json")]


@pytest.mark.parametrize("code_first", [False, True])
def test_code_is_fetched_for_who_trusts_it_and_the_weights_once_for_both(hub: LoopbackHub, cache: ModelCache, code_first: bool) -> None:
    hub.add(NAME, WHOLE | {"modeling_tiny.py": b"print()"})
    folders = {with_code: fetched(hub, cache, with_code=with_code) for with_code in (code_first, not code_first)}
    assert names(folders[True]) - names(folders[False]) == {"modeling_tiny.py"}
    assert hub.fetched().count("model.safetensors") == 1
    assert (folders[True] / "model.safetensors").samefile(folders[False] / "model.safetensors")


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: LoopbackHub, cache: ModelCache) -> None:
    repository = hub.add(NAME, WHOLE)
    first = repository.push(WHOLE | {"tokenizer.model": b"of the tag"}, "v1/rc")
    second = repository.push(WHOLE | {"tokenizer.model": b"new"})
    assert fetched(hub, cache) == fetched(hub, cache, revision=second)
    assert fetched(hub, cache, revision="v1/rc") == fetched(hub, cache, revision=first)
    assert (fetched(hub, cache, revision=first) / "tokenizer.model").read_bytes() == b"of the tag"


@pytest.mark.parametrize(
    ("name", "revision", "token", "reason", "said"),
    [
        (
            "org/nothing",
            "main",
            None,
            "SourceNotFound",
            "is private: correct spec.source.uri, or name a Secret .* spec.source.secretRef",
        ),
        ("org/nothing", "main", TOKEN, "SourceNotFound", "or it is private and the token may not read it"),
        ("org/private", "main", None, "SourceNotFound", "or it is private: correct"),
        ("org/private", "main", "hf_of-somebody", "SourceNotFound", "or it is private and the token may not read it"),
        ("org/private", "main", "hf_expired", "SourceForbidden", r"does not take the token \(expired, revoked or mistyped\)"),
        (
            "org/gated",
            "main",
            None,
            "SourceForbidden",
            "a token is needed: accept its terms at http.*/org/gated, and then name a Secret",
        ),
        ("org/gated", "main", "hf_of-somebody", "SourceForbidden", "gated and the token's account has no access: accept its terms"),
        ("org/empty", "main", None, "ConfigMissing", "has no config.json: name a repository in the layout of transformers"),
        ("org/pickled", "main", None, "WeightsMissing", r"has no \*.safetensors file .*: name a repository that has"),
        ("org/private", "v9", TOKEN, "SourceNotFound", "has no revision 'v9': name a branch, a tag or a whole commit"),
        ("org/private", "0" * 40, TOKEN, "SourceNotFound", "has no revision"),
        ("org/a--b", "main", None, "SourceInvalid", "cannot be the name of a repository"),
        ("org/unfit", "main", None, "TokenizerMissing", "has no tokenizer"),
    ],
)
def test_what_is_refused_says_what_to_do(
    hub: LoopbackHub, cache: ModelCache, name: str, revision: str, token: str | None, reason: str, said: str
) -> None:
    hub.tokens |= {"hf_of-somebody"}
    hub.add("org/private", WHOLE, readers={TOKEN})
    hub.add("org/gated", WHOLE, readers={TOKEN}, is_gated=True)
    hub.add("org/empty", {"model.gguf": b""})
    hub.add("org/pickled", SMALL | {"pytorch_model.bin": b"pickle"})
    hub.add("org/unfit", {name: data for name, data in WHOLE.items() if "tokenizer" not in name})
    with pytest.raises(PermanentError, match=said) as caught:
        fetched(hub, cache, name=name, revision=revision, token=token)
    assert caught.value.reason == reason
    assert "hf_of" not in caught.value.message
    assert not any(cache.model("x").parent.iterdir())
    assert not any(name.endswith(".safetensors") for name in hub.fetched())


@pytest.mark.parametrize("is_gated", [False, True])
def test_what_one_model_fetched_with_its_token_no_other_has_without(hub: LoopbackHub, cache: ModelCache, is_gated: bool) -> None:
    repository = hub.add(NAME, WHOLE, readers={TOKEN}, is_gated=is_gated)
    hub.tokens.add("hf_of-somebody")
    folder = fetched(hub, cache, token=TOKEN)
    n_fetched = len(hub.fetched())
    for token in (None, "hf_of-somebody", "hf_expired"):
        for revision in ("main", repository.revisions["main"]):
            with pytest.raises(PermanentError):
                fetched(hub, cache, token=token, revision=revision)
    repository.readers = frozenset()
    with pytest.raises(PermanentError):
        fetched(hub, cache, token=TOKEN)
    repository.readers = frozenset({TOKEN})
    assert fetched(hub, cache, token=TOKEN) == folder
    assert len(hub.fetched()) == n_fetched


def test_the_storage_never_sees_the_token(hub: LoopbackHub, cache: ModelCache) -> None:
    hub.add(NAME, WHOLE, readers={TOKEN})
    fetched(hub, cache, token=TOKEN)
    stored = [asked for asked in hub.asked if asked.path.startswith("/storage/")]
    assert [asked.token for asked in stored] == [None]
    assert all(asked.token == TOKEN for asked in hub.asked if asked not in stored)


def test_without_network_a_commit_is_served_that_anybody_may_fetch(hub: LoopbackHub, cache: ModelCache) -> None:
    commit = hub.add(NAME, WHOLE).revisions["main"]
    folder = fetched(hub, cache)
    hub.status = 503
    assert fetched(hub, cache, revision=commit) == folder
    assert fetched(hub, cache, revision=commit, token=TOKEN) == folder
    for revision, with_code in (("main", False), (commit, True), ("0" * 40, False)):
        with pytest.raises(TemporaryError, match="answers with status 503"):
            fetched(hub, cache, revision=revision, with_code=with_code)


def test_without_network_a_commit_is_not_served_that_was_fetched_with_a_token(hub: LoopbackHub, cache: ModelCache) -> None:
    repository = hub.add(NAME, WHOLE, readers={TOKEN})
    commit = repository.revisions["main"]
    folder = fetched(hub, cache, revision=commit, token=TOKEN)
    cache.remember(f"hf://{NAME}@{commit}", folder.name)  # where a source led says nothing about who may have it
    hub.status = 503
    for token in (None, TOKEN):
        with pytest.raises(TemporaryError):
            fetched(hub, cache, revision=commit, token=token)
    hub.status, repository.readers = 0, None
    fetched(hub, cache)  # now anybody may
    hub.status = 503
    assert fetched(hub, cache, revision=commit) == folder


def test_what_was_fetched_with_a_token_for_everybody_needs_no_hub(hub: LoopbackHub, cache: ModelCache) -> None:
    commit = hub.add(NAME, WHOLE, readers={TOKEN}).revisions["main"]
    source = HubSource(repository=NAME, revision=commit)
    filling = Acquirer(cache, Room(cache=cache), Reporter(), for_everybody=True)
    folder = filling.from_hub(f"hf://{NAME}@{commit}", Hub(source, TOKEN, endpoint=hub.endpoint), with_code=False)
    hub.status = 503
    assert fetched(hub, cache, revision=commit) == folder


def test_weights_that_are_not_what_the_hub_promised_are_deleted(hub: LoopbackHub, cache: ModelCache) -> None:
    repository = hub.add(NAME, WHOLE)
    commit = repository.revisions["main"]
    hub.promised = {"model.safetensors": "0" * 64}
    with pytest.raises(TemporaryError, match=r"came with SHA-256 .*, 0{64} was promised") as caught:
        fetched(hub, cache)
    assert caught.value.reason == "ChecksumMismatch"
    assert "model.safetensors" not in str(list(cache.download(f"hf-org--tiny-{commit}").iterdir()))
    hub.promised = {"tokenizer.model": "0" * 40}
    with pytest.raises(TemporaryError, match=r"tokenizer\.model of org/tiny is not what the Hub promised"):
        fetched(hub, ModelCache(cache.root.parent / "another"))
    hub.promised = {}
    assert contents(fetched(hub, cache)) == WHOLE


def test_weights_that_a_killed_process_left_half_are_gone_on_with(hub: LoopbackHub, cache: ModelCache) -> None:
    commit = hub.add(NAME, WHOLE).revisions["main"]
    left = cache.download(f"hf-org--tiny-{commit}")
    left.mkdir()
    (left / "model.safetensors.part").write_bytes(WHOLE["model.safetensors"][:1500])
    assert contents(fetched(hub, cache)) == WHOLE
    assert hub.ranges == ["bytes=1500-"]


def test_a_model_of_the_cache_that_was_cut_is_fetched_anew(hub: LoopbackHub, cache: ModelCache) -> None:
    hub.add(NAME, WHOLE)
    folder = fetched(hub, cache)
    (folder / "model.safetensors").write_bytes(b"cut")
    assert contents(fetched(hub, cache)) == WHOLE
    assert hub.fetched().count("model.safetensors") == 2


def test_a_hub_that_is_not_there_is_told_of(hub: LoopbackHub, cache: ModelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = Hub(HubSource(repository=NAME), None, endpoint="http://user:password@127.0.0.1:1")
    with pytest.raises(TemporaryError, match=r"http://127.0.0.1:1 cannot be reached: .*HF_ENDPOINT") as caught:
        acquirer(cache).from_hub(f"hf://{NAME}", nowhere, with_code=False)
    assert caught.value.reason == "HubUnreachable"
    hub.status = 200
    with pytest.raises(TemporaryError, match="does not answer as a Hub does: correct HF_ENDPOINT"):
        fetched(hub, cache)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(TemporaryError, match="HF_HUB_OFFLINE"):
        fetched(hub, cache)


def test_a_cut_connection_is_resumed(hub: LoopbackHub, cache: ModelCache) -> None:
    hub.add(NAME, WHOLE)
    hub.cuts = [700, 900]
    assert (fetched(hub, cache) / "model.safetensors").read_bytes() == WHOLE["model.safetensors"]
    assert hub.cuts == []
    assert hub.fetched().count("model.safetensors") == 3


def test_what_was_cut_short_is_never_taken_for_whole_and_what_came_is_not_fetched_again(hub: LoopbackHub, cache: ModelCache) -> None:
    commit = hub.add(NAME, SHARDED).revisions["main"]
    hub.failing = {"model-2.safetensors"}
    with pytest.raises(TemporaryError, match="answers with status 503") as caught:
        fetched(hub, cache)
    assert "Signature" not in caught.value.message
    left = cache.download(f"hf-org--tiny-{commit}")
    assert not (left / "model-2.safetensors").exists()
    assert not any(cache.model("x").parent.iterdir())
    killed = left / ".cache/huggingface/download/a.b.incomplete"  # where the library had it when it was killed
    killed.parent.mkdir(parents=True, exist_ok=True)
    killed.touch()
    hub.failing = set()
    hub.asked.clear()
    assert contents(fetched(hub, cache)) == SHARDED
    assert hub.fetched() == ["model-2.safetensors"]


def test_a_disk_without_room_is_told_before_the_weights_are_fetched(
    hub: LoopbackHub, cache: ModelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NAME, WHOLE)
    real = shutil.disk_usage(cache.model("x").parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: real._replace(free=1500))
    with pytest.raises(PermanentError, match=r"takes .* in .*, 1.465Ki are free") as caught:
        fetched(hub, cache)
    assert caught.value.reason == "DiskFull"
    assert "model.safetensors" not in hub.fetched()


def test_a_disk_that_takes_no_more_is_said_so_and_nothing_half_written_stays(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.add(NAME, SMALL | {"model.safetensors": safetensors(100_000)})
    environment = os.environ | {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0"}
    file_limit = 64 << 10  # less than the weights, more than all other files
    code, lines = outcome(start_preparing(f"hf://{NAME}", tmp_path, env=environment, file_limit=file_limit))
    assert (code, lines[-1]["error"]["reason"]) == (2, "DiskFull")
    assert not list(tmp_path.rglob("*.safetensors"))
    assert not list(tmp_path.rglob("*.incomplete"))


def test_progress_is_that_of_all_weights(hub: LoopbackHub, cache: ModelCache, tmp_path: Path) -> None:
    commit = hub.add(NAME, SHARDED).revisions["main"]
    said: list[tuple[int, int]] = []
    Hub(HubSource(repository=NAME), None, endpoint=hub.endpoint).fetch(
        commit, tmp_path, lambda *now: said.append(now), lambda need: None, with_code=False
    )
    total = sum(len(data) for name, data in SHARDED.items() if name.endswith(".safetensors"))
    assert [done for done, _ in said] == sorted(done for done, _ in said)
    assert said[-1] == (total, total)


def test_the_models_of_others_are_not_served_by_their_path(hub: LoopbackHub, cache: ModelCache, capsys: pytest.CaptureFixture[str]) -> None:
    hub.add(NAME, WHOLE, readers={TOKEN})
    folder = fetched(hub, cache, token=TOKEN)
    (folder.parents[2] / "link").symlink_to(folder)
    for path in (folder, folder.parents[2] / "link", f"{folder.parent}/../models/{folder.name}"):
        assert prepare_module.main(["--uri", f"file://{path}", "--cache", str(folder.parents[1])]) == 2
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["error"]["reason"] == "SourceForbidden"


@pytest.mark.parametrize("token", [None, TOKEN])
def test_the_process_uses_the_token_of_its_environment_and_no_other(hub: LoopbackHub, tmp_path: Path, token: str | None) -> None:
    home = tmp_path / "hub"
    home.mkdir()
    (home / "token").write_text("hf_of-who-logged-in-once")
    hub.add(NAME, {name: data for name, data in WHOLE.items() if "tokenizer" not in name}, readers={TOKEN})
    variables = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"} | ({"HF_TOKEN": token} if token else {})
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")} | variables
    with start_preparing(f"hf://{NAME}", tmp_path / "cache", env=environment) as process:
        said, complaints = process.communicate(timeout=LIMIT)
    assert json.loads(said.splitlines()[-1])["error"]["reason"] == ("TokenizerMissing" if token else "SourceNotFound")
    assert {asked.token for asked in hub.asked if not asked.path.startswith("/storage/")} == {token}
    assert all(asked.user_agent.startswith("aerostat/") and "torch" not in asked.user_agent for asked in hub.asked)
    assert TOKEN not in said + complaints
    assert [path.name for path in home.iterdir()] == ["token"]


def test_a_token_leaves_the_environment_and_is_one_line_of_plain_text() -> None:
    environment = {"HF_TOKEN": f" {TOKEN}\n", "HUGGING_FACE_HUB_TOKEN": "hf_of-somebody-else", "HOME": "/"}
    assert take_token(environment) == TOKEN
    assert environment == {"HOME": "/"}
    assert take_token(environment) is None
    assert take_token({"HF_TOKEN": "\n"}) is None
    for wrong in ("hf_a\nhf_b", "hf_ä", "hf a", "hf_\x00"):
        with pytest.raises(PermanentError, match="one line of plain text") as caught:
            take_token({"HF_TOKEN": wrong})
        assert wrong not in caught.value.message
