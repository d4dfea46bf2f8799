"""A recorder without a GPU: it keeps what is to be replayed and replays it on the host."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from rlx_ort.providers.engine import recordings, replays
from rlx_ort.providers.engine.replays import Copy, NotRecordedError
from rlx_ort.providers.workers import Workers


def record_whatever_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no measured time refuse a recording, since other tests use the machine at the same time."""
    monkeypatch.setattr(recordings, "HOST_BOUND", 0.0)
    monkeypatch.setattr(replays, "WORTH", 1e9)


class FakeRecorder:
    """Records by remembering; replays with memory copies and the run itself.

    Attributes:
        refusal: what recording fails with, if anything.
        failure: what replays fail with, if anything.
        lasting: whether recordings last when kernels are planned anew.
        spoil: added to the first element of the first output of each replay.
        replays: how many there were.
        lent: how many arrays were lent.
        moved: copies within the device.
        sources: the addresses that were copied from just before and after a replay.
        dropped: the recordings that were freed.
        closed: whether the stream was freed.
        entered: how often a run has set the thread's GPU.
        pinned: the address of an array that counts as pinned memory.
        worker: the thread that records.
    """

    options: Mapping[str, str] = {}

    def __init__(self) -> None:
        self.refusal = self.failure = ""
        self.lasting = False
        self.spoil = 0
        self.replays = self.lent = 0
        self.moved = 0
        self.made = 0
        self.dropped: list[int] = []
        self.sources: list[int] = []
        self.closed = False
        self.entered = self.pinned = 0
        self.worker = Workers(1, "fake-record")

    def enter(self) -> None:
        """Count."""
        self.entered += 1

    def host_buffer(self, like: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return an array like another one."""
        return np.empty(like.shape, like.dtype)

    def reads(self, array: np.ndarray[Any, Any]) -> bool:
        """Return whether it is the array that counts as pinned."""
        return array.ctypes.data == self.pinned

    def lend(self, like: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return an array like another one."""
        self.lent += 1
        return np.empty(like.shape, like.dtype)

    def record(self, copies_in: Sequence[Copy], run: Callable[[], None], copies_out: Sequence[Copy]) -> Any:
        """Remember what is to be replayed."""
        if self.refusal:
            raise NotRecordedError(self.refusal)
        self.made += 1
        return self.made, list(copies_in), run, list(copies_out)

    def lasts(self, recording: Any) -> bool:
        """Return `lasting`."""
        return self.lasting

    def player(self, recording: Any) -> Callable[..., None]:
        """Return what replays."""
        _, copies_in, run, copies_out = recording

        def play(before: Sequence[Copy] = (), after: Sequence[Copy] = ()) -> None:
            self.replays += 1
            if self.failure:
                raise RuntimeError(self.failure)
            self.move(before)
            for device, host, size in copies_in:
                ctypes.memmove(device, host, size)
            run()
            for device, host, size in copies_out:
                ctypes.memmove(host, device, size)
            self.move(after)
            if self.spoil:
                ctypes.cast(copies_out[0][1], ctypes.POINTER(ctypes.c_float))[0] += self.spoil

        return play

    def move(self, copies: Sequence[Copy]) -> None:
        """Copy and count the copies."""
        self.moved += len(copies)
        for to, source, size in copies:
            self.sources.append(source)
            ctypes.memmove(to, source, size)

    def drop(self, recording: Any) -> None:
        """Note that a recording was freed."""
        self.dropped.append(recording[0])

    def wait(self) -> None:
        """Nothing runs by itself."""

    def close(self) -> None:
        """Note that the stream was freed, and end the thread."""
        self.closed = True
        self.worker.close()
