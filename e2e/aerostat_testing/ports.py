"""Ports of this machine for servers under test."""

import socket


def free_port() -> int:
    """A TCP port on 127.0.0.1 that nobody listens on now. The kernel gives out others before it repeats one."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
