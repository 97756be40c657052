"""Run another program of this directory, with a cheaper start: `start.py PROGRAM [ARGUMENT]...`.

Importing torch makes some hundred thousand objects that stay. Python's garbage collector looks through them again and
again while they are made, and once more when the process ends: two fifths of what a rank costs that trains little.
"""

from __future__ import annotations

import gc
import importlib
import pathlib
import runpy
import sys

WITHOUT_DDP = ("collectives.py", "endings.py", "hangs.py")
"""The others' first DDP or optimizer imports torch's compiler, which has as many objects again."""


def main() -> None:
    """Import torch, and become the program."""
    sys.argv = sys.argv[1:]
    gc.disable()
    importlib.import_module("torch" if pathlib.Path(sys.argv[0]).name in WITHOUT_DDP else "torch._dynamo")
    gc.freeze()
    gc.enable()
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
