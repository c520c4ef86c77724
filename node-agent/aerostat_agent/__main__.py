"""`python -m aerostat_agent`."""

from aerostat_agent.main import main

if __name__ == "__main__":
    raise SystemExit(main())
