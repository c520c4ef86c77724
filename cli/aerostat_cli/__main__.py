"""`python -m aerostat_cli` is `aerostat`."""

from aerostat_cli.main import main

main()
