"""The Hugging Face Hub, or a mirror of it (`HF_ENDPOINT`): which commit a source means, who may read it, and its files into a folder.

All is asked with the token that is given, or with none: what the library finds on this machine (a login, its own cache) is left alone.
Errors say what to do and show no URL, since those of storage are signed. What is kept where and for how long is `prepare`'s.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, Final

os.environ["HF_HUB_DISABLE_IMPLICIT_TOKEN"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ.setdefault("HF_HUB_DISABLE_XET", "1")  # plain HTTP is the way whose failures we know

import httpx
from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_download, hf_hub_url
from huggingface_hub.constants import ENDPOINT
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import logging

from aerostat_core.errors import PermanentError, TemporaryError
from aerostat_core.ids import Bytes, Seconds
from aerostat_engine.models.facts import indexed_shards, read_config
from aerostat_engine.models.source import HubSource, Progress

_LIBRARY: Final = "aerostat"
_CONFIG: Final = "config.json"
_WEIGHTS: Final = ".safetensors"
_OTHERS: Final = (".json", ".txt", ".model", ".tiktoken", ".jinja")  # configuration, tokenizers, chat templates
_CODE: Final = ".py"
_AT_ONCE: Final = 4
_RETRY: Final[Seconds] = 10.0
_NAME_A_SECRET: Final = (
    "name a Secret with a token that may read it as key `token` in spec.source.secretRef (with aerostat up: set HF_TOKEN around it)"
)


class Hub:
    """One source, as whoever has `token` sees it. Raises PermanentError, TemporaryError, and OSError for this machine's disk."""

    def __init__(self, source: HubSource, token: str | None, *, endpoint: str = ENDPOINT) -> None:
        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        self.source = source
        self.has_token = token is not None
        self._token: str | bool = token or False
        self._endpoint = endpoint
        self._name = re.sub(r"//[^/]*@", "//", endpoint)  # for people
        self._api = HfApi(endpoint=endpoint, token=self._token, library_name=_LIBRARY)

    def commit(self) -> str:
        """What the revision is now. Asks for a file: a Hub tells everybody about repositories whose files it gives to some."""
        with self._translated():
            url = hf_hub_url(self.source.repository, _CONFIG, revision=self.source.revision, endpoint=self._endpoint)
            commit = get_hf_file_metadata(url, token=self._token, library_name=_LIBRARY).commit_hash or ""
        if re.fullmatch(r"[0-9a-f]{40}", commit) is None:
            message = f"{self._name} does not answer as a Hub does: correct HF_ENDPOINT, or the proxy in between"
            raise TemporaryError("HubUnreachable", message, retry_after=_RETRY)
        return commit

    def fetch(self, commit: str, folder: Path, progress: Progress, *, with_code: bool) -> None:
        """What is served of it into `folder`, the weights last; files that are there already are whole and stay."""
        shutil.rmtree(folder / ".cache", ignore_errors=True)  # with what was cut short: a file appears under its name when it is whole
        every = self._list(commit)
        weights = {name: size for name, size in every.items() if name.endswith(_WEIGHTS)}
        if not weights:
            raise PermanentError(
                "WeightsMissing",
                f"{self.source.repository} has no *{_WEIGHTS} file (other weight formats can run code, or are of other programs): "
                "name a repository that has the original weights as safetensors",
            )
        endings = (*_OTHERS, _CODE) if with_code else _OTHERS
        self._get(commit, {name: size for name, size in every.items() if name.endswith(endings)}, folder, lambda done, total: None)
        read_config(folder)
        self._get(commit, {name: weights[name] for name in _shards(folder, weights)}, folder, progress)
        shutil.rmtree(folder / ".cache", ignore_errors=True)

    def _list(self, commit: str) -> dict[str, Bytes]:
        """Sizes of the files of the top folder, which is where models are."""
        with self._translated():
            entries = self._api.list_repo_tree(self.source.repository, revision=commit)
            return {entry.path: entry.size for entry in entries if isinstance(entry, RepoFile) and "/" not in entry.path}

    def _get(self, commit: str, files: Mapping[str, Bytes], folder: Path, progress: Progress) -> None:
        missing = {name: size for name, size in files.items() if not (folder / name).is_file()}
        need, free = sum(missing.values()), shutil.disk_usage(folder).free
        if free < need:
            raise PermanentError("DiskFull", f"{self.source.repository} takes {need} more bytes in {folder}, {free} are free")
        bar = _bar_of(need, progress)

        def get(name: str) -> None:
            hf_hub_download(
                self.source.repository,
                name,
                revision=commit,
                local_dir=folder,
                cache_dir=folder / ".cache",
                endpoint=self._endpoint,
                token=self._token,
                library_name=_LIBRARY,
                tqdm_class=bar,
            )

        with self._translated(), ThreadPoolExecutor(_AT_ONCE) as pool:
            for _ in pool.map(get, missing):  # the first failure calls off those that did not begin
                pass

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except LocalEntryNotFoundError as error:  # what the library makes of a question that failed
            raise self._told(error.__cause__ or error) from error
        except (HfHubHTTPError, httpx.HTTPError, HFValidationError) as error:
            raise self._told(error) from error
        except OSError as error:
            if error.errno is not None:
                raise
            raise self._told(error) from error

    def _told(self, error: BaseException) -> PermanentError | TemporaryError:
        hub, repository, revision = self._name, self.source.repository, self.source.revision
        match error:
            case HFValidationError():
                return PermanentError("SourceInvalid", f"{repository!r} cannot be the name of a repository: correct spec.source.uri")
            case RevisionNotFoundError():
                message = f"{repository} has no revision {revision!r}: name a branch, a tag or a whole commit in spec.source.uri"
                return PermanentError("SourceNotFound", message)
            case RemoteEntryNotFoundError():
                message = f"{repository} at {revision} has no {_CONFIG}: name a repository in the layout of transformers, with safetensors"
                return PermanentError("ConfigMissing", message)
            case GatedRepoError():
                account = "the token's account has no access" if self.has_token else "a token is needed"
                message = f"{repository} is gated and {account}: accept its terms at {hub}/{repository}"
                return PermanentError("SourceForbidden", message if self.has_token else f"{message}, and then {_NAME_A_SECRET}")
            case HfHubHTTPError() if error.response.status_code in (401, 403, 404):
                return PermanentError(*self._refusal(error.response.status_code))
            case HfHubHTTPError():
                message = f"{hub} answers with status {error.response.status_code} about {repository}"
                return TemporaryError("HubUnreachable", message, retry_after=_RETRY)
            case httpx.TransportError() | OfflineModeIsEnabled():
                message = f"{hub} cannot be reached: {_shown(error)} (HF_ENDPOINT names a mirror)"
                return TemporaryError("HubUnreachable", message, retry_after=_RETRY)
            case _:
                return TemporaryError("DownloadFailed", f"{repository} did not come whole: {_shown(error)}", retry_after=_RETRY)

    def _refusal(self, status: int) -> tuple[str, str]:
        """Reason and message. To who may not read it a Hub says that a repository does not exist."""
        hub, repository = self._name, self.source.repository
        if not self.has_token:
            return "SourceNotFound", f"{hub} has no {repository}, or it is private: correct spec.source.uri, or {_NAME_A_SECRET}"
        if status == httpx.codes.UNAUTHORIZED:
            return "SourceForbidden", f"{hub} does not take the token (expired, revoked or mistyped): replace it in its Secret, or HF_TOKEN"
        if status == httpx.codes.FORBIDDEN:
            return "SourceForbidden", f"the token may not read {repository}: give it the right to read that repository's contents"
        return "SourceNotFound", f"{hub} has no {repository}, or it is private and the token may not read it: correct either"


def _shards(folder: Path, weights: Mapping[str, Bytes]) -> list[str]:
    """Which weight files are served, where a repository has them in several ways."""
    indexed = indexed_shards(folder)
    if indexed is not None:
        return [name for name in indexed if name in weights]
    return ["model.safetensors"] if "model.safetensors" in weights else sorted(weights)


def _bar_of(total: Bytes, progress: Progress) -> type[Any]:
    """What the library takes for a class of progress bars, one for each file: here they all add to one sum."""
    lock = Lock()
    done = 0

    class Bar:
        def __init__(self, **_: object) -> None: ...

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None: ...

        def update(self, n: float) -> None:
            nonlocal done
            with lock:
                done += int(n)
                progress(min(done, total), total)

    return Bar


def _shown(error: BaseException) -> str:
    return re.sub(r"https?://\S+", "…", str(error)) or type(error).__name__
