"""A package index on loopback, in a thread: pages and wheels over HTTP, with ranges, cut connections and answers that never end."""

import hashlib
import io
import re
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final, Self

_WAIT_LIMIT: Final = 60.0


def wheel_of(project: str, version: str, gguf: bytes) -> bytes:
    """A package that is that file."""
    name = project.replace("-", "_")
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr(f"{name}/model.gguf", gguf)
        archive.writestr(f"{name}-{version}.dist-info/METADATA", _metadata(project, version))
        archive.writestr(
            f"{name}-{version}.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{name}-{version}.dist-info/RECORD", "")
    return made.getvalue()


def _metadata(project: str, version: str) -> str:
    return f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n"


class LoopbackIndex:
    """Context manager. `cuts`: after so many bytes the next answers with a wheel end; with `stalls`, they hang instead."""

    def __init__(self) -> None:
        self.wheels: dict[str, bytes] = {}
        self.promised: dict[str, str] = {}  # SHA-256 that is told instead of the right one
        self.cuts: list[int] = []
        self.stalls = False
        self.has_metadata = True  # beside each wheel; otherwise pip reads the end of the wheel itself
        self.password = ""  # of user `reader`; empty: anybody may have all
        self.ranges: list[str] = []  # of the answers with a wheel, in order; empty for a whole one
        self._end = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"index": self}))
        self._server.daemon_threads = False
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def url(self, user: str = "") -> str:
        return f"http://{user}127.0.0.1:{self._server.server_address[1]}/simple"

    def add(self, project: str, version: str, gguf: bytes) -> bytes:
        data = wheel_of(project, version, gguf)
        self.wheels[f"{project.replace('-', '_')}-{version}-py3-none-any.whl"] = data
        return data

    def hang(self) -> None:
        self._end.wait(_WAIT_LIMIT)


class _Handler(BaseHTTPRequestHandler):
    index: LoopbackIndex
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        if self.index.password and "Authorization" not in self.headers:
            self._send(401, b"", {"WWW-Authenticate": 'Basic realm="index"'})
        elif self.path.startswith("/simple/"):
            project = self.path.split("/")[2].replace("-", "_")
            names = [name for name in self.index.wheels if name.startswith(f"{project}-")]
            aside = 'data-core-metadata="true"' if self.index.has_metadata else ""
            links = [f'<a href="/files/{name}#sha256={self._sha256(name)}" {aside}>{name}</a>' for name in names]
            self._send(200 if names else 404, "\n".join(links).encode(), {"Content-Type": "text/html"})
        elif self.path.endswith(".metadata"):
            project, version, *_ = self.path.rpartition("/")[2].split("-")
            self._send(200, _metadata(project.replace("_", "-"), version).encode(), {})
        else:
            self._file(self.index.wheels[self.path.rpartition("/")[2]])

    def _sha256(self, name: str) -> str:
        return self.index.promised.get(name) or hashlib.sha256(self.index.wheels[name]).hexdigest()

    def _file(self, data: bytes) -> None:
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        begin, end = 0, len(data)
        if asked is not None:
            begin = int(asked[1]) if asked[1] else len(data) - int(asked[2])
            end = min(int(asked[2]) + 1, len(data)) if asked[1] and asked[2] else len(data)
        is_part = asked is not None and bool(asked[2])  # what pip reads of a wheel's end, for its metadata
        cut = self.index.cuts.pop(0) if self.command == "GET" and not is_part and self.index.cuts else None
        if self.command == "GET" and not is_part:
            self.index.ranges.append(self.headers.get("Range", ""))
        headers = {"Accept-Ranges": "bytes"} | ({"Content-Range": f"bytes {begin}-{end - 1}/{len(data)}"} if asked is not None else {})
        self._send(206 if asked is not None else 200, data[begin:end], headers, cut=cut)

    def _send(self, status: int, body: bytes, headers: dict[str, str], *, cut: int | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True
            if self.index.stalls:
                self.wfile.flush()
                self.index.hang()
