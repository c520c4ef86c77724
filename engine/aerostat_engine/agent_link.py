"""The engine's end of its Unix socket to the agent: one thread that connects, says who we are, sends reports and fills a mailbox.

The scheduler's thread only appends to the outbox and takes from the mailbox; neither ever waits. What the agent says wakes an idle
scheduler by an event descriptor. Without a link the newest reports are kept, the oldest go; a new link begins with all sessions anyway.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from google.protobuf.message import DecodeError

from aerostat_core.ids import Seconds
from aerostat_engine.reports import Report, Unhealthy
from aerostat_engine.wire import FromAgent, Identity, Welcome, Word, read_agent_frame, report_frame
from aerostat_runtime.framing import FrameDecoder, FramingError, encode

RECONNECT: Seconds = 0.2
CHECK_EVERY: Seconds = 5.0
_SEND_TIMEOUT: Seconds = 5.0
_MAX_OUTBOX = 1024
_MAX_MAILBOX = 256
_READ_BYTES = 256 << 10

_log = logging.getLogger(__name__)


class AgentLink:
    """`hello` makes the first frame of each connection; `refused` is called, on this thread, with the agent's reason to refuse us.

    `trouble` says what is wrong with the scheduler, None while all is well; asked every `check_every` seconds, told once a link.
    """

    def __init__(
        self,
        path: str,
        identity: Identity,
        hello: Callable[[], bytes],
        refused: Callable[[str], None],
        trouble: Callable[[], str | None],
        check_every: Seconds = CHECK_EVERY,
    ) -> None:
        self._path = path
        self._identity = identity
        self._hello = hello
        self._refused = refused
        self._trouble = trouble
        self._check_every = check_every
        self._outbox: deque[Report] = deque(maxlen=_MAX_OUTBOX)
        self._mailbox: deque[Word] = deque(maxlen=_MAX_MAILBOX)
        self._agent_epoch = 0
        self._has_reports = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._has_mail = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="aerostat-agent-link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def mail_fd(self) -> int:
        """Readable when there is mail."""
        return self._has_mail

    def send(self, report: Report) -> None:
        self._outbox.append(report)
        os.eventfd_write(self._has_reports, 1)

    def take(self) -> list[Word]:
        """All mail that is there."""
        _clear(self._has_mail)
        words = []
        while self._mailbox:
            words.append(self._mailbox.popleft())
        return words

    def close(self, timeout: Seconds = 2.0) -> None:
        """End the thread; reports that are not sent yet are dropped."""
        self._is_closing = True
        os.eventfd_write(self._has_reports, 1)
        self._thread.join(timeout)
        os.close(self._has_reports)
        os.close(self._has_mail)

    def _run(self) -> None:
        is_lost = False
        while not self._is_closing:
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                    sock.settimeout(_SEND_TIMEOUT)
                    sock.connect(self._path)
                    sock.sendall(encode(self._hello()))
                    _log.info("linked to the agent at %s", self._path)
                    is_lost = False
                    self._talk(sock)
            except (OSError, FramingError, DecodeError) as error:
                if not is_lost:
                    _log.warning("no link to the agent at %s, trying again every %.1f s: %s", self._path, RECONNECT, error)
                is_lost = True
            if not self._is_closing:
                time.sleep(RECONNECT)

    def _talk(self, sock: socket.socket) -> None:
        """Both ways until the link breaks (OSError), the peer says nonsense (FramingError, DecodeError) or we close."""
        decoder = FrameDecoder()
        poller = select.poll()
        poller.register(sock, select.POLLIN)
        poller.register(self._has_reports, select.POLLIN)
        self._flush(sock)
        is_told = False
        while not self._is_closing:
            for fd, _ in poller.poll(self._check_every * 1000):
                if fd == self._has_reports:
                    self._flush(sock)
                else:
                    data = sock.recv(_READ_BYTES)
                    if not data:
                        raise ConnectionResetError("the agent closed the link")
                    for payload in decoder.feed(data):
                        self._receive(read_agent_frame(payload))
            if not is_told and (why := self._trouble()) is not None:
                sock.sendall(encode(report_frame(self._identity, Unhealthy(why=why))))
                is_told = True

    def _flush(self, sock: socket.socket) -> None:
        _clear(self._has_reports)
        while self._outbox and not self._is_closing:
            sock.sendall(encode(report_frame(self._identity, self._outbox.popleft())))

    def _receive(self, frame: FromAgent) -> None:
        if frame.engine_epoch != self._identity.engine_epoch or frame.agent_epoch < self._agent_epoch:
            return
        self._agent_epoch = frame.agent_epoch
        match frame.body:
            case Welcome(accepted=False, reason=reason):
                self._refused(reason)
            case Word() as word:
                self._mailbox.append(word)
                os.eventfd_write(self._has_mail, 1)


def _clear(event_fd: int) -> None:
    try:
        os.eventfd_read(event_fd)
    except BlockingIOError:
        return
