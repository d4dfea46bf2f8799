"""What the event loop of a server logs."""

from __future__ import annotations

import asyncio

import pytest

from rlx_ort.serving.host import SeldomLogged


def test_events_of_the_loop_are_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    """A server without descriptors reports each connection that it cannot accept; another event is still seen."""
    loop, handler = asyncio.new_event_loop(), SeldomLogged()
    for _ in range(1000):
        handler(loop, {"message": "socket.accept() out of system resource"})
    handler(loop, {"message": "another event"})
    loop.close()
    assert [record.getMessage().strip() for record in caplog.records] == [
        "socket.accept() out of system resource",
        "another event",
    ]
