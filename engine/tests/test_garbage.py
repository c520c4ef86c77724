"""Freezing what start-up made is a saving: whatever comes of the call, the engine serves."""

import logging
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from aerostat_core import peers
from aerostat_engine.garbage import freeze_gc
from aerostat_runtime.tls import TlsFolder
from aerostat_testing.certificates import Authority

pytestmark = pytest.mark.cpu


@contextmanager
def server(status: int, asked: list[tuple[str, str | None]], tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Answers each POST with that status."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append((self.path, self.headers["Authorization"]))
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        if tls is not None:
            http.socket = tls.wrap_socket(http.socket, server_side=True)
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"{'http' if tls is None else 'https'}://127.0.0.1:{http.server_port}"
        finally:
            http.shutdown()
            thread.join()


def test_it_asks_with_the_key_that_only_the_agent_has(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[tuple[str, str | None]] = []
    with server(200, asked) as url:
        freeze_gc(url, "secret")
    assert asked == [("/freeze_gc", "Bearer secret")]
    assert not caplog.records


def test_by_tls_the_engine_knows_itself_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked: list[tuple[str, str | None]] = []
    authority = Authority()
    engine, other = (TlsFolder(authority.issue(tmp_path / name, name)) for name in (peers.ENGINES, peers.ROUTER))
    with server(200, asked, engine.server_context()) as url:
        freeze_gc(url, "secret", engine)
    assert asked == [("/freeze_gc", "Bearer secret")]
    assert not caplog.records
    with server(200, asked, other.server_context()) as url, caplog.at_level(logging.WARNING):
        freeze_gc(url, "secret", engine, listens_within=0.1)
    assert len(asked) == 1
    assert "Hostname mismatch" in caplog.text


def test_a_refusal_is_told_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    with server(500, []) as url, caplog.at_level(logging.WARNING):
        freeze_gc(url, "secret")
    assert "not frozen" in caplog.text
    assert "secret" not in caplog.text


def test_a_server_that_does_not_answer_in_time_is_let_be(caplog: pytest.LogCaptureFixture) -> None:
    """As on a machine that is busy with other engines."""
    with socket.create_server(("127.0.0.1", 0)) as silent, caplog.at_level(logging.WARNING):
        freeze_gc(f"http://127.0.0.1:{silent.getsockname()[1]}", "secret", answers_within=0.05)
    assert "not frozen" in caplog.text


def test_a_server_that_never_listens_is_let_be(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as bound, caplog.at_level(logging.WARNING):  # bound, so that nobody else listens there
        bound.bind(("127.0.0.1", 0))
        freeze_gc(f"http://127.0.0.1:{bound.getsockname()[1]}", "secret", listens_within=0.1)
    assert "cannot be reached" in caplog.text
