"""Run examples one after the other in the same processes, as their own commands would: `examples.py OUT LINE...`.

Each line is the file's name and its arguments. Importing Lightning costs more than all of them.
"""

from __future__ import annotations

import json
import os
import pathlib
import runpy
import shlex
import sys

import torch

EXAMPLES = pathlib.Path(__file__).parents[3] / "examples"


def main() -> None:
    """Become each program, and write down that it has ended."""
    out, *lines = sys.argv[1:]
    torch.set_num_threads(1)
    sys.path.insert(0, str(EXAMPLES))
    member = os.environ["LIGHTNING_FT_MEMBER"].replace("/", "-")
    with (pathlib.Path(out) / f"{member}.jsonl").open("a") as log:
        log.write(json.dumps({"event": "start", "pid": os.getpid()}) + "\n")
        for line in lines:
            name, *arguments = shlex.split(line)
            sys.argv = [str(EXAMPLES / name), *arguments]
            runpy.run_path(sys.argv[0], run_name="__main__")
            log.write(json.dumps({"event": "ended", "name": name}) + "\n")
            log.flush()


if __name__ == "__main__":
    main()
