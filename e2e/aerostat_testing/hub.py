"""A Hugging Face Hub on loopback, in a thread: what the library asks of one, answered as huggingface.co does, over files in memory.

Small files are served by the Hub itself; weights lie on another host, to which it redirects with a signed URL.
"""

import hashlib
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final, Self
from urllib.parse import parse_qs, unquote, urlsplit

_SIGNATURE: Final = "signed-for-an-hour"
_STORAGE: Final = "localhost"  # another host than 127.0.0.1, which the Hub itself is


@dataclass(slots=True)
class Repository:
    """`readers`: the tokens that may read it; None: anybody. A gated one is known to all, a private one to its readers."""

    readers: frozenset[str] | None = None
    is_gated: bool = False
    revisions: dict[str, str] = field(default_factory=dict)  # commits by branch or tag
    commits: dict[str, Mapping[str, bytes]] = field(default_factory=dict)

    def push(self, files: Mapping[str, bytes], branch: str = "main") -> str:
        """The new commit."""
        commit = hashlib.sha1(repr((sorted(files.items()), len(self.commits))).encode()).hexdigest()
        self.commits[commit] = dict(files)
        self.revisions[branch] = commit
        return commit


@dataclass(frozen=True, slots=True)
class Asked:
    method: str
    path: str
    token: str | None
    user_agent: str


class LoopbackHub:
    """Context manager. `tokens` are valid ones, whatever they may read."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.tokens: set[str] = set()
        self.asked: list[Asked] = []
        self.cuts: list[int] = []  # after so many bytes the next answers with weights end, and their connections
        self.status = 0  # answer everything with it; 0: as usual
        self.failing: set[str] = set()  # files that the storage has no good answer for
        self.promised: dict[str, str] = {}  # hashes that are told instead of the right ones
        self.ranges: list[str] = []  # that the storage was asked for, in order
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"hub": self}))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def storage(self) -> str:
        return f"http://{_STORAGE}:{self._server.server_address[1]}"

    def add(self, name: str, files: Mapping[str, bytes], *, readers: set[str] | None = None, is_gated: bool = False) -> Repository:
        repository = self.repositories[name] = Repository(readers=None if readers is None else frozenset(readers), is_gated=is_gated)
        self.tokens |= readers or set()
        repository.push(files)
        return repository

    def fetched(self) -> list[str]:
        """Names of the files that were read, in order."""
        read = [a.path for a in self.asked if a.method == "GET" and "/api/" not in a.path]
        return [path.rpartition("/")[2] for path in read if path.startswith("/storage/") or not _is_large(path)]


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class _Handler(BaseHTTPRequestHandler):
    hub: LoopbackHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        self.hub.asked.append(Asked(self.command, path, token if scheme == "Bearer" else None, self.headers["User-Agent"]))
        if self.hub.status:
            return self._refuse(self.hub.status, "Unavailable", "try again")
        if path.startswith("/storage/"):
            return self._storage(path, parse_qs(url.query))
        is_tree = path.startswith("/api/models/")
        org, name, _, revision, *rest = [unquote(part) for part in url.path.removeprefix("/api/models").split("/")[1:]]
        repository = self.hub.repositories.get(f"{org}/{name}")
        if token and token not in self.hub.tokens:
            return self._refuse(401, "", "Invalid credentials in Authorization header")
        may_read = repository is not None and (repository.readers is None or token in repository.readers)
        if repository is None or (not may_read and not repository.is_gated):
            return self._refuse(404 if token else 401, "RepoNotFound", "Repository not found")
        commit = repository.revisions.get(revision, revision)
        if commit not in repository.commits:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if is_tree:
            return self._tree(repository.commits[commit])
        if not may_read:
            return self._refuse(403 if token else 401, "GatedRepo", f"Access to model {org}/{name} is restricted")
        return self._file(commit, "/".join(rest), repository.commits[commit].get("/".join(rest)), f"{org}/{name}")

    def _tree(self, files: Mapping[str, bytes]) -> None:
        entries: list[dict[str, object]] = [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()}
            for name, data in files.items()
        ]
        for entry in entries:
            entry["oid"] = self.hub.promised.get(str(entry["path"]), entry["oid"])
            if _is_large(str(entry["path"])):
                data = files[str(entry["path"])]
                told = self.hub.promised.get(str(entry["path"]), hashlib.sha256(data).hexdigest())
                entry["lfs"] = {"oid": told, "size": len(data), "pointerSize": 134}
        self._send(200, json.dumps(entries).encode(), {"Content-Type": "application/json"})

    def _file(self, commit: str, name: str, data: bytes | None, repository: str) -> None:
        if data is None:
            return self._refuse(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit})
        if not _is_large(name):
            return self._send(200, data, {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'})
        linked = {"X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{hashlib.sha256(data).hexdigest()}"'}
        location = f"{self.hub.storage}/storage/{repository}/{commit}/{name}?Signature={_SIGNATURE}"
        return self._send(302, b"", {"X-Repo-Commit": commit, "Location": location} | linked)

    def _storage(self, path: str, query: Mapping[str, list[str]]) -> None:
        """Another host than the Hub: who has a signed URL gets the file, and a token has no business here."""
        org, name, commit, file = path.split("/", 5)[2:]
        assert self.headers["Host"].startswith(_STORAGE)
        if query.get("Signature") != [_SIGNATURE] or "Authorization" in self.headers:
            return self._refuse(403, "", "not signed, or signed and with a token")
        if file in self.hub.failing:
            return self._refuse(503, "", "SlowDown")
        data = self.hub.repositories[f"{org}/{name}"].commits[commit][file]
        self.hub.ranges += [self.headers["Range"]] if "Range" in self.headers else []
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        ranged = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if start else {}
        cut = self.hub.cuts.pop(0) if self.hub.cuts and self.command == "GET" else None
        return self._send(206 if start else 200, data[start:], ranged, cut=cut)

    def _refuse(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        body = json.dumps({"error": message}).encode()
        self._send(status, body, {"X-Error-Code": code, "X-Error-Message": message, **(headers or {})})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str], *, cut: int | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True


def _is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".bin"))
