"""Free ports for engines. One may be taken before its engine binds it: the start fails, the next gets another port."""

import socket


def free_port(host: str = "127.0.0.1") -> int:
    """At that IP address; the kernel hands out others before it repeats one. Raises OSError when this machine has not that address."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.bind((host, 0))
        port: int = sock.getsockname()[1]
        return port
