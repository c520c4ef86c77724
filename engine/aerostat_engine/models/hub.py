"""The Hugging Face Hub, or a mirror of it (`HF_ENDPOINT`): which commit a source means, who may read it, and its files into a folder.

All is asked with the token that is given, or with none: what the library finds on this machine (a login, its own cache) is left alone.
Errors say what to do and show no URL, since those of storage are signed. What is kept where and for how long is `prepare`'s.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Final

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
from huggingface_hub.utils._headers import build_hf_headers
from huggingface_hub.utils._http import hf_raise_for_status

from aerostat_core.errors import PermanentError, TemporaryError
from aerostat_core.ids import Bytes, Seconds
from aerostat_engine.models.download import Remote, download, part_of
from aerostat_engine.models.facts import indexed_shards, read_config
from aerostat_engine.models.manifest import Progress
from aerostat_engine.models.source import HubSource

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

    def fetch(self, commit: str, folder: Path, progress: Progress, take: Callable[[Bytes], None], *, with_code: bool) -> None:
        """What is served of it into `folder`, the weights last, once `take` had no objection to that many bytes more.

        Files that are there already are whole and stay; of weights that were cut short the rest is fetched.
        """
        every = self._list(commit)
        if not any(name.endswith(_WEIGHTS) for name in every):
            raise PermanentError(
                "WeightsMissing",
                f"{self.source.repository} has no *{_WEIGHTS} file (other weight formats can run code, or are of other programs): "
                "name a repository that has the original weights as safetensors",
            )
        endings = (*_OTHERS, _CODE) if with_code else _OTHERS
        self._each(lambda name: self._small(commit, every[name], folder), [n for n in every if n.endswith(endings)], folder)
        shutil.rmtree(folder / ".cache", ignore_errors=True)
        read_config(folder)
        weights = [name for name in _shards(folder, every) if not (folder / name).is_file()]
        came = {name: part.stat().st_size if (part := part_of(folder / name)).exists() else 0 for name in weights}
        total = sum(every[name].size for name in weights)
        take(total - sum(came.values()))
        bars = _Sum(total, progress)
        self._each(lambda name: self._large(commit, every[name], folder, bars.part(name)), weights, folder)

    def _list(self, commit: str) -> dict[str, RepoFile]:
        """The files of the top folder, which is where models are."""
        with self._translated():
            entries = self._api.list_repo_tree(self.source.repository, revision=commit)
            return {entry.path: entry for entry in entries if isinstance(entry, RepoFile) and "/" not in entry.path}

    def _each(self, get: Callable[[str], None], names: list[str], folder: Path) -> None:
        missing = [name for name in names if not (folder / name).is_file()]
        with self._translated(), ThreadPoolExecutor(_AT_ONCE) as pool:
            for _ in pool.map(get, missing):  # the first failure calls off those that did not begin
                pass

    def _small(self, commit: str, file: RepoFile, folder: Path) -> None:
        """The library's way: from the beginning each time."""
        hf_hub_download(
            self.source.repository,
            file.path,
            revision=commit,
            local_dir=folder,
            cache_dir=folder / ".cache",
            endpoint=self._endpoint,
            token=self._token,
            library_name=_LIBRARY,
            tqdm_class=_Silent,
        )
        data = (folder / file.path).read_bytes()
        right = hashlib.sha256(data).hexdigest() == file.lfs.sha256 if file.lfs is not None else _git_hash(data) == file.blob_id
        if not right:
            (folder / file.path).unlink()
            message = f"{file.path} of {self.source.repository} is not what the Hub promised: deleted, to be fetched again"
            raise TemporaryError("ChecksumMismatch", message, retry_after=_RETRY)

    def _large(self, commit: str, file: RepoFile, folder: Path, progress: Progress) -> None:
        """Each try asks the Hub anew, since a signed URL of its storage ends; a redirect elsewhere leaves the token behind."""
        url = hf_hub_url(self.source.repository, file.path, revision=commit, endpoint=self._endpoint)
        headers = build_hf_headers(token=self._token, library_name=_LIBRARY)
        remote = Remote(url=url, sha256=file.lfs.sha256 if file.lfs is not None else None, headers=headers)
        try:
            download(remote, folder / file.path, progress)
        except httpx.HTTPStatusError as error:
            hf_raise_for_status(error.response)
            raise

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


def _shards(folder: Path, files: Mapping[str, RepoFile]) -> list[str]:
    """Which weight files are served, where a repository has them in several ways."""
    weights = sorted(name for name in files if name.endswith(_WEIGHTS))
    indexed = indexed_shards(folder)
    if indexed is not None:
        return [name for name in indexed if name in weights]
    return ["model.safetensors"] if "model.safetensors" in weights else weights


def _git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


class _Sum:
    """Progress of several files that come at once, as that of all."""

    def __init__(self, total: Bytes, progress: Progress) -> None:
        self._total = total
        self._progress = progress
        self._done: dict[str, Bytes] = {}
        self._lock = Lock()

    def part(self, name: str) -> Progress:
        def progress(done: Bytes, _: Bytes) -> None:
            with self._lock:
                self._done[name] = done
                self._progress(sum(self._done.values()), self._total)

        return progress


class _Silent:
    """What the library takes for a class of progress bars."""

    def __init__(self, **_: object) -> None: ...

    def __enter__(self) -> _Silent:
        return self

    def __exit__(self, *_: object) -> None: ...

    def update(self, n: float) -> None: ...


def _shown(error: BaseException) -> str:
    return re.sub(r"https?://\S+", "…", str(error)) or type(error).__name__
