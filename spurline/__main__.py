"""`python -m spurline` is the `spurline` command."""

import sys

from spurline.cli import main

if __name__ == "__main__":
    sys.exit(main())
