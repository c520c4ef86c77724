"""Which instance's agent settles where a model is opened: the first healthy one in rendezvous order.

Every router computes the same order from what is declared, so that two of them never open two instances for one need.
"""

import hashlib
from collections.abc import Iterable

from aerostat_core.ids import NamespacedName


def _weight(model: NamespacedName, instance: NamespacedName) -> bytes:
    return hashlib.blake2b(f"{model}|{instance}".encode(), digest_size=16).digest()


def wake_order(model: NamespacedName, instances: Iterable[NamespacedName]) -> tuple[NamespacedName, ...]:
    """Owners in the order in which to ask. Losing an instance changes nothing for the others (highest random weight)."""
    return tuple(sorted(set(instances), key=lambda instance: (_weight(model, instance), instance), reverse=True))
