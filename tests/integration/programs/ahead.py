"""Has states that are far too small for it be sent ahead of an admission, in many pieces."""

from __future__ import annotations

from lightning_ft.comm import catch_up, pace, replay


def send_ahead(num_bytes: int) -> None:
    """Have a step send so much at first."""
    catch_up.SMALL_BYTES = 0
    replay.PIECE_ELEMENTS = 128
    pace.LEAST_BYTES = pace._FIRST_BYTES = num_bytes
