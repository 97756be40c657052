"""A connection's outbox: in order, never waiting, and no patience with a peer that doesn't read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from lightning_ft.coordinator.channel import MAX_WAITING_FRAMES, Outbox

DEADLINE_S = 20


class FakeSocket:
    """A WebSocket whose peer reads only while `gate` is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.sent: list[str] = []
        self.error: Exception | None = None

    async def send_str(self, data: str) -> None:
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        self.sent.append(data)

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default


def run(story: Callable[[FakeSocket, Outbox], object]) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S):
            websocket = FakeSocket()
            await story(websocket, Outbox(websocket, "peer"))  # type: ignore[misc]

    asyncio.run(main())


def test_frames_are_sent_in_order() -> None:
    """Flush waits for all of them."""

    async def story(websocket: FakeSocket, outbox: Outbox) -> None:
        websocket.gate.set()
        for number in range(100):
            assert outbox.put(str(number))
        assert await outbox.flush()
        assert websocket.sent == [str(number) for number in range(100)]

    run(story)


def test_stuck_peer_is_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    """A full box ends the connection instead of growing, and says so."""

    async def story(_: FakeSocket, outbox: Outbox) -> None:
        for number in range(MAX_WAITING_FRAMES):
            assert outbox.put(str(number))
        assert not outbox.put("one more")
        await asyncio.sleep(0)  # the cancelled sender ends
        assert not outbox.put("and another")
        assert not await outbox.flush()

    run(story)
    assert "peer does not read its messages" in caplog.text


def test_broken_connection_ends_the_flush() -> None:
    """Nobody waits for what can't be sent any more."""

    async def story(websocket: FakeSocket, outbox: Outbox) -> None:
        websocket.error = ConnectionResetError("gone")
        assert outbox.put("x")
        websocket.gate.set()
        assert not await outbox.flush()
        assert not outbox.put("y")

    run(story)
