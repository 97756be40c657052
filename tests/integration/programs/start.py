"""Run another program of this directory, with a cheaper start: `start.py PROGRAM [ARGUMENT]...`.

Two things are more than half of what a rank costs that trains little, and are left out here. Jobs that are started as
a user starts them (`jobs.running_script`, the command line, the examples) have both.

- Importing torch makes some hundred thousand objects that stay. Python's garbage collector looks through them again and
  again while they are made, and once more when the process ends.
- DDP, the first optimizer and Lightning import torch's compiler, which nothing in these programs calls.
"""

from __future__ import annotations

import gc
import importlib
import runpy
import sys
import types
from typing import Any


def main() -> None:
    """Import torch, and become the program."""
    sys.argv = sys.argv[1:]
    gc.disable()
    importlib.import_module("torch")
    _leave_the_compiler_out()
    gc.freeze()
    gc.enable()
    runpy.run_path(sys.argv[0], run_name="__main__")


def _leave_the_compiler_out() -> None:
    """Put in place of `torch._dynamo` what is asked of it where nothing is compiled; anything else raises."""
    import torch

    ignored: list[Any] = []
    torch._dynamo = _module(  # type: ignore[assignment]
        "torch._dynamo",
        OptimizedModule=type("OptimizedModule", (torch.nn.Module,), {}),  # Lightning: is this a compiled module?
        disable=lambda function, *_args, **_kwargs: function,
        graph_break=lambda: None,
        utils=_module("torch._dynamo.utils", get_optimize_ddp_mode=lambda: "ddp_optimizer"),  # DDP: the default
        trace_rules=_module("torch._dynamo.trace_rules", clear_lru_cache=lambda: None),  # init_process_group
        callback=_module(
            "torch._dynamo.callback",
            callback_handler=types.SimpleNamespace(
                start_callbacks=ignored, register_start_callback=ignored.append, register_end_callback=ignored.append
            ),
        ),
    )


def _module(name: str, **contents: Any) -> types.ModuleType:
    module = sys.modules[name] = types.ModuleType(name)
    vars(module).update(contents)
    return module


if __name__ == "__main__":
    main()
