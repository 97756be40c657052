"""A child process that does not outlive its agent.

Imported by a child for `watch_agent()`. Run as a script, `python -I -S child.py AGENT_PID COMMAND...`, it is the
first thing in the child: it ties the process to its agent before anything of the user's runs, then becomes the command.
Nothing but the standard library is imported, so that this costs a few milliseconds.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import stat
import sys
import threading
from typing import NoReturn

AGENT_FD_VARIABLE = "LIGHTNING_FT_AGENT_FD"
"""Names the read end of a pipe whose write end only the agent holds."""

AGENT_PID_VARIABLE = "LIGHTNING_FT_AGENT_PID"

STACKS_FD_VARIABLE = "LIGHTNING_FT_STACKS_FD"
"""Names a file that the process writes its threads' stacks to when it gets `STACKS_SIGNAL`."""

SPOKESMAN_FD_VARIABLE = "LIGHTNING_FT_SPOKESMAN_FD"
"""Names the read end of a pipe with one byte in it: whoever takes that shows what all processes of the node have to."""

STACKS_SIGNAL = signal.SIGRTMIN + 10 if hasattr(signal, "SIGRTMIN") else signal.SIGABRT

ORPHAN_STATUS = 128 + signal.SIGKILL
"""Exit status of a child that ends because its agent did."""

CANNOT_JOIN_STATUS = getattr(os, "EX_CONFIG", 78)
"""Exit status of a child that was started while the job ran and can't join it; another could not either."""

_PR_SET_PDEATHSIG = 1
_LAST_LOOK_S = 1.0

_started = threading.Lock()
_spokesman_fds: list[int] = []


def watch_agent() -> bool:
    """End this process, whatever it does, as soon as its agent is dead; show the agent its stacks if it asks for them.

    Does nothing without an agent.

    Call it early and from any thread; further calls do nothing.

    Returns: Whether a watch was started by this call.
    """
    text = os.environ.get(AGENT_FD_VARIABLE, "")
    if not text.isdigit() or not _started.acquire(blocking=False):
        return False
    # Processes that this one starts don't have the descriptor, or have something else under its number.
    del os.environ[AGENT_FD_VARIABLE]
    fd = int(text)
    if not _is_pipe(fd):
        return False
    os.set_inheritable(fd, False)  # noqa: FBT003  (the standard library's order)
    agent_pid = os.environ.get(AGENT_PID_VARIABLE, "")
    if agent_pid.isdigit() and os.getppid() == int(agent_pid):
        die_with_parent(int(agent_pid))
    threading.Thread(target=_exit_at_hangup, args=(fd,), name="lightning_ft-agent-watch", daemon=True).start()
    _keep_spokesman_pipe()
    _offer_stacks()
    return True


def speaks_for_all() -> bool:
    """Whether this process, of all that one agent has started, is the first to ask. Without an agent it is."""
    return not _spokesman_fds or bool(os.read(_spokesman_fds[0], 1))  # nobody writes: it never waits


def _keep_spokesman_pipe() -> None:
    text = os.environ.pop(SPOKESMAN_FD_VARIABLE, "")
    if text.isdigit() and _is_pipe(int(text)):
        _spokesman_fds.append(int(text))
        os.set_inheritable(int(text), False)  # noqa: FBT003  (the standard library's order)


def _offer_stacks() -> None:
    """Let the agent see where this process hangs; works without the interpreter, so also while a C call holds it up."""
    text = os.environ.pop(STACKS_FD_VARIABLE, "")
    if text.isdigit():
        os.set_inheritable(int(text), False)  # noqa: FBT003  (the standard library's order)
        faulthandler.register(STACKS_SIGNAL, file=int(text), all_threads=True)


def end_at_once(message: str) -> NoReturn:
    """End this process in such a way that its threads run no more Python after a few milliseconds; no exit handlers.

    The agent, if there is one, has a second to take its stacks and to kill it first. Status 1.

    Args:
        message: For standard error.
    """
    import ctypes

    libc = ctypes.PyDLL(None)  # its calls keep the interpreter's lock
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # else one would end the sleep below
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        faulthandler.dump_traceback_later(_LAST_LOOK_S, exit=True, file=null)  # its thread needs no interpreter
    except (OSError, RuntimeError):  # no descriptor or thread is left
        os._exit(1)
    line = f"{message}\n".encode(errors="backslashreplace")
    libc.write(2, line, len(line))
    while True:
        libc.sleep(2**30)


def tied_to_this_process(command: list[str]) -> list[str]:
    """Extend a command so that its process ends with this one, before anything of the user's runs (Linux)."""
    if not sys.platform.startswith("linux"):
        return command
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends (Linux; elsewhere nothing), or now if it has already.

    The request survives exec. The parent's *thread* that started this process counts, so agents start children in their
    main thread.
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the request was made
        os._exit(ORPHAN_STATUS)


def _is_pipe(fd: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(fd).st_mode)
    except OSError:
        return False


def _exit_at_hangup(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, 0)  # POLLHUP is always reported; nothing is ever read
    while not poll.poll():
        continue
    os._exit(ORPHAN_STATUS)


def _become(arguments: list[str]) -> None:
    die_with_parent(int(arguments[0]))
    os.execvp(arguments[1], arguments[1:])  # noqa: S606  (no shell is the point)


if __name__ == "__main__":
    _become(sys.argv[1:])
