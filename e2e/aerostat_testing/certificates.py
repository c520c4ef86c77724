"""Certificates as the operator issues them, and folders of them as a kubelet mounts and renews a Secret."""

import itertools
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import trustme

from aerostat_runtime.tls import AUTHORITIES, CERTIFICATE, KEY

EXPIRED: Final = datetime.now(UTC) - timedelta(hours=1)
_DATA: Final = "..data"
_numbers: Final = itertools.count()


class Authority:
    """One CA. What it issues is for both sides of a connection."""

    def __init__(self) -> None:
        self._ca = trustme.CA()

    @property
    def certificate(self) -> bytes:
        return self._ca.cert_pem.bytes()

    def issue(self, folder: Path, peer: str, *, until: datetime | None = None, also_trusts: Sequence["Authority"] = ()) -> Path:
        """A certificate of that peer into the folder, in place of the one that is there. Returns the folder."""
        leaf = self._ca.issue_cert(peer, not_before=EXPIRED - timedelta(hours=1) if until else None, not_after=until)
        chain = b"".join(blob.bytes() for blob in leaf.cert_chain_pems)
        trusted = b"".join(authority.certificate for authority in (self, *also_trusts))
        put_secret(folder, {CERTIFICATE: chain, KEY: leaf.private_key_pem.bytes(), AUTHORITIES: trusted})
        return folder


def put_secret(folder: Path, files: dict[str, bytes]) -> None:
    """All of them at once, by the swap of a link, as a kubelet does it."""
    folder.mkdir(exist_ok=True)
    version = folder / f"..{next(_numbers)}"
    version.mkdir()
    for name, content in files.items():
        (version / name).write_bytes(content)
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"{_DATA}/{name}")
    link = folder / f"{_DATA}_tmp"
    link.symlink_to(version.name)
    os.replace(link, folder / _DATA)
