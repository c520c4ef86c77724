"""What a build takes from this machine: where it installs from, and what was downloaded already. None of it gets into an image."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from aerostat_core.ids import Seconds

_LIMIT: Final[Seconds] = 60.0
_BUNDLE: Final = "/etc/ssl/certs/ca-certificates.crt"
_SETTINGS: Final = "/etc/xdg"  # pip and uv both read what is below
_UV_CACHE: Final = "/mnt"
_SETTING: Final = re.compile(r"^(?:global|install|:env:)\.([\w-]+)='(.*)'$")


def apt_mirror(codename: str) -> str | None:
    """The archive that apt is set up with."""
    command = ["apt-get", "indextargets", "--format=$(CODENAME) $(REPO_URI)", "Created-By: Packages", "Component: main"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_LIMIT).stdout
    return next((line.split()[1] for line in listed.splitlines() if line.split()[0] == codename), None)


def installer_mounts(folder: Path) -> list[str]:
    """What to mount so that pip and uv install there as they do here; their settings are written into the folder."""
    pip = _pip_settings()
    index = os.environ.get("UV_DEFAULT_INDEX") or os.environ.get("UV_INDEX_URL") or pip.get("index-url")
    hosts = pip.get("trusted-host", "").split()
    (folder / "pip").mkdir(parents=True, exist_ok=True)
    (folder / "uv").mkdir(exist_ok=True)
    kept = {key: pip[key] for key in ("index-url", "extra-index-url", "trusted-host", "timeout", "default-timeout") if key in pip}
    lines = [f"{key} = {value}" for key, value in ({"cert": _BUNDLE} | kept).items()]
    (folder / "pip/pip.conf").write_text("\n".join(["[global]", *lines, ""]))
    uv = ["system-certs = true", f'cache-dir = "{_UV_CACHE}"']
    uv += [f'index-url = "{index}"'] if index else []
    uv += [f"extra-index-url = {pip['extra-index-url'].split()}"] if "extra-index-url" in pip else []
    uv += [f"allow-insecure-host = {hosts}"] if hosts else []
    (folder / "uv/uv.toml").write_text("\n".join([*uv, ""]))
    mounts = [f"{folder}:{_SETTINGS}:ro", f"{_uv_cache()}:{_UV_CACHE}"]
    bundle = pip.get("cert") or os.environ.get("SSL_CERT_FILE") or _BUNDLE
    return [*mounts, f"{bundle}:{_BUNDLE}:ro"] if Path(bundle).is_file() else mounts


def _pip_settings() -> dict[str, str]:
    """Those of its environment come last, and win."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_LIMIT).stdout
    lines = sorted(listed.splitlines(), key=lambda line: line.startswith(":env:"))
    return {match[1]: match[2] for line in lines if (match := _SETTING.match(line))}


def _uv_cache() -> Path:
    """uv's own, which `make setup` filled."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get("UV_CACHE_DIR") or caches / "uv")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
