"""`python -m aerostat_router`."""

import sys

from aerostat_router.main import main

if __name__ == "__main__":
    sys.exit(main())
