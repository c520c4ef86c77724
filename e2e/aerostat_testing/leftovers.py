"""What a run may leave on a machine besides processes."""

from pathlib import Path


def shared_memory() -> set[str]:
    """Names of the shared-memory segments that exist now."""
    return {path.name for path in Path("/dev/shm").iterdir()}
