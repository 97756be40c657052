"""Run another program of this directory, with a cheaper start: `start.py PROGRAM [ARGUMENT]...`.

DDP, the first optimizer and Lightning import torch's compiler, which nothing in these programs calls: a third of what a
rank costs that trains little. Jobs that are started as a user starts them (`jobs.running_script`, the command line, the
examples) have it.
"""

from __future__ import annotations

import gc
import runpy
import sys
import types
from typing import Any

import torch


def main() -> None:
    """Become the program."""
    _leave_the_compiler_out()
    gc.freeze()  # what torch has made stays; nothing looks through it when the process ends
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


def _leave_the_compiler_out() -> None:
    """Put in place of `torch._dynamo` what is asked of it where nothing is compiled; anything else raises."""
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
