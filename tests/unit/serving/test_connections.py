"""The limit of open connections."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("httptools")

from uvicorn.server import ServerState

from rlx_ort.serving.connections import LimitedServer
from rlx_ort.serving.options import ConnectionLimits


class Transport:
    """A transport whose end is noted by the loop's next turn only, as asyncio's is."""

    def __init__(self) -> None:
        self.closing = False

    def is_closing(self) -> bool:
        """Return whether it was ended."""
        return self.closing

    def abort(self) -> None:
        """End it."""
        self.closing = True

    def set_write_buffer_limits(self, high: int) -> None:
        """Do nothing."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return nothing."""
        return default


def test_each_connection_beyond_the_limit_ends_another_one() -> None:
    """Also where all come within one turn of the event loop, before any has noticed its end."""
    config = LimitedServer(lambda: None, ConnectionLimits(most=5), 1.0).config
    config.load()
    state, transports, clock = ServerState(), [], iter(range(1000))
    made = config.http_protocol_class
    for _ in range(50):
        connection = made(config, state, {}, SimpleNamespace(time=lambda: float(next(clock))))
        transports.append(Transport())
        connection.connection_made(transports[-1])
    assert [transport.closing for transport in transports] == [True] * 45 + [False] * 5
