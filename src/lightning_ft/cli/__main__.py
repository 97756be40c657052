"""`python -m lightning_ft.cli`."""

import sys

from lightning_ft.cli import main

if __name__ == "__main__":
    sys.exit(main())
