"""`python -m aerostat_operator`."""

import sys

from aerostat_operator.main import main

if __name__ == "__main__":
    sys.exit(main())
