"""Recover without a name server: it may be what the job has just been cut off from.

A TCPStore's client asks for the name of its server's address, for a message that is never shown (seen in torch 2.13.0's
`socket.cpp`), and waits for the answer: by glibc's defaults for ten seconds if none comes.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

_IS_INITIALISED = 1
"""`RES_INIT` of resolv.h."""


class _ResolverState(ctypes.Structure):
    """How `struct __res_state` begins (resolv.h, glibc)."""

    _fields_ = [
        ("retrans", ctypes.c_int),
        ("retry", ctypes.c_int),
        ("options", ctypes.c_ulong),
        ("nscount", ctypes.c_int),
    ]


def resolver_state() -> _ResolverState | None:
    """Return this thread's own state of the resolver; None if the C library keeps none."""
    libc: Any = ctypes.CDLL(None)
    try:
        find, initialise = libc.__res_state, libc.__res_ninit
    except AttributeError:  # not glibc
        return None
    find.restype = ctypes.POINTER(_ResolverState)
    state = find()
    found: _ResolverState = state.contents
    if not found.options & _IS_INITIALISED and initialise(state) != 0:
        return None
    return found


@contextlib.contextmanager
def no_name_server() -> Iterator[None]:
    """Have this thread, and no other, find names without asking a name server."""
    state = resolver_state()
    if state is None:
        yield
        return
    num_servers, state.nscount = state.nscount, 0
    try:
        yield
    finally:
        state.nscount = num_servers
