"""The names in certificates between parts. Pods' addresses change, so a client verifies these names, never an address."""

from typing import Final

ROUTER: Final = "router.aerostat.internal"
AGENT: Final = "agent.aerostat.internal"
ENGINES: Final = "engines.aerostat.internal"
