"""`python -m mooncake` is the `mooncake` command."""

import sys

from mooncake.cli import main

if __name__ == "__main__":
    sys.exit(main())
