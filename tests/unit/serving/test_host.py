"""What the event loop of a server logs, and what ends a server."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from typing import Any

import pytest

from rlx_ort.serving.host import SeldomLogged, _on_signals
from rlx_ort.serving.options import ENDING


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


@pytest.mark.parametrize("number", ENDING)
@pytest.mark.parametrize("windows", [False, True], ids=["as here", "a loop of Windows"])
def test_a_signal_ends_a_server(number: int, windows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops of Windows take no handlers; afterwards the signal means what it meant before."""
    started_with = signal.getsignal(number)  # to ignore it, for one, in a process that a shell started beside itself
    before = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    signal.signal(number, before)

    async def ended() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        if windows:
            monkeypatch.setattr(loop, "add_signal_handler", _not_there, raising=False)
        with _on_signals(stop):
            signal.raise_signal(number)
            await asyncio.wait_for(stop.wait(), 10)

    try:
        asyncio.run(ended())
        assert signal.getsignal(number) == before
    finally:
        signal.signal(number, started_with)


def _not_there(*_: object) -> None:
    raise NotImplementedError


class Kernel32:
    """The one function of `kernel32.dll` that is used."""

    def __init__(self) -> None:
        self.routines: list[Any] = []

    def SetConsoleCtrlHandler(self, routine: Any, add: bool) -> int:  # noqa: N802  # Windows' name
        """Add or remove a routine."""
        self.routines.append(routine) if add else self.routines.remove(routine)
        return 1


@pytest.mark.parametrize("event", [2, 5, 6], ids=["close", "log off", "shut down"])
def test_closing_the_console_drains_a_server(event: int) -> None:
    """The system ends the process as soon as the routine returns, so it returns once the server has drained."""
    kernel = Kernel32()
    found: list[int] = []

    async def ended() -> None:
        stop = asyncio.Event()
        with _on_signals(stop, kernel):
            [routine] = kernel.routines
            assert routine(0) == 0  # Ctrl-C, which is a signal
            thread = threading.Thread(target=lambda: found.append(routine(event)), daemon=True)
            thread.start()
            await asyncio.wait_for(stop.wait(), 10)
            await asyncio.sleep(0.05)
            assert found == []
        thread.join(10)

    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(ended())
    assert found == [1]
    assert kernel.routines == []
