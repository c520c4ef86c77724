"""`python -m aerostat_agent.keeper`."""

from aerostat_agent.keeper.main import main

if __name__ == "__main__":
    raise SystemExit(main())
