"""`Channel`: calls between two processes of a server over a socket. Large tensors lie in memory that both have mapped.

What is sent in one turn of the event loop is written as one list, in Python's marshal format: both ends are the same
Python, and it takes a third of the time of pickle.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import marshal
import mmap
import os
import secrets
import struct
import sys
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np

from rlx_ort.deploy.triton import DATATYPES
from rlx_ort.errors import ServingError
from rlx_ort.serving.protocol import Array
from rlx_ort.serving.rest import described

Tensors: TypeAlias = Mapping[str, Array]
Handler: TypeAlias = Callable[[str, Sequence[Any], dict[str, Array]], Coroutine[Any, Any, tuple[Any, Tensors]]]
"""Answers a call: its name, its values and its tensors -> a value and tensors. Values are what marshal writes."""
_Packed: TypeAlias = list[tuple[str, str, tuple[int, ...], Any]]

_SIZE = struct.Struct("<Q")
_SHARED_FROM = 16 << 10  # bytes; smaller tensors are sent over the socket
_ALIGNMENT = 64
_NUMPY = {name: dtype.numpy for dtype, name in DATATYPES.items()}
LABELS: Mapping[np.dtype[Any], str] = {dtype: name for name, dtype in _NUMPY.items()}
"""numpy's type -> the protocol's name."""


def shared_memory(size: int, key: int | str | None = None) -> tuple[mmap.mmap, int | str]:
    """Map zeroed memory that another process can map by the key that is returned, or memory that one has made.

    The key is a name on Windows and a file descriptor elsewhere, which the other process must inherit.
    """
    if sys.platform == "win32":
        name = key or f"rlx_ort-{os.getpid()}-{secrets.token_hex(16)}"
        return mmap.mmap(-1, size, tagname=str(name)), name
    if isinstance(key, int):
        return mmap.mmap(key, size), key
    if hasattr(os, "memfd_create"):  # not below /dev/shm, of which containers have 64 MiB
        made = os.memfd_create("rlx_ort-serve")
    else:
        with tempfile.TemporaryFile() as file:
            made = os.dup(file.fileno())
    os.truncate(made, size)
    return mmap.mmap(made, size), made


class Arena:
    """Gives out pieces of a memory, the first that is large enough; only one process gives out those of a memory."""

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self._free = [(0, len(memory))]
        self._taken: dict[int, int] = {}

    def take(self, size: int) -> int | None:
        """Return where a piece of so many bytes begins, or None if there is no room."""
        size += -size % _ALIGNMENT
        for index, (at, length) in enumerate(self._free):
            if length >= size:
                self._free[index : index + 1] = [(at + size, length - size)] if length > size else []
                self._taken[at] = size
                return at
        return None

    def give_back(self, at: int) -> None:
        """Free a piece."""
        size = self._taken.pop(at)
        index = bisect.bisect(self._free, (at, 0))
        if index < len(self._free) and self._free[index][0] == at + size:
            size += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == at:
            index -= 1
            at, size = self._free[index][0], size + self._free[index][1]
            self._free[index] = (at, size)
        else:
            self._free.insert(index, (at, size))


class Channel(asyncio.Protocol):
    """One end of a connection between two processes of a server.

    Args:
        handler: answers the calls of the other end.
        own: memory that this end writes.
        other: memory that the other end writes.
        on_lost: called when the other end is gone.
    """

    def __init__(
        self, handler: Handler, own: memoryview, other: memoryview, on_lost: Callable[[], object] = lambda: None
    ) -> None:
        self._handler, self._on_lost = handler, on_lost
        self._arena, self._other = Arena(own), other
        self._numbers = itertools.count(1)
        self._asked: dict[int, tuple[asyncio.Future[tuple[Any, dict[str, Array]]], list[int]]] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._told: set[asyncio.Future[Any]] = set()
        self._out: list[tuple[Any, ...]] = []
        self._read: list[int] = []  # where answers lay that have been read
        self._arrived = bytearray()
        self._flushes = False
        self._transport: asyncio.Transport | None = None

    async def ask(self, name: str, *values: Any, tensors: Tensors | None = None) -> tuple[Any, dict[str, Array]]:
        """Return the answer of the other end: a value, and tensors that share no memory with it.

        Cancelling the call cancels it there.

        Raises:
            ServingError: the other end raised it, or is gone.
        """
        if self._transport is None:
            raise ServingError("the server is ending", 503)
        number, regions = next(self._numbers), list[int]()
        answered: asyncio.Future[tuple[Any, dict[str, Array]]] = asyncio.get_running_loop().create_future()
        self._asked[number] = (answered, regions)
        self._send(number, name, values, self._packed(tensors or {}, regions))
        del tensors, values  # the caller may want to free them
        try:
            return await answered
        except asyncio.CancelledError:
            self.tell("cancel", number)
            raise

    def tell(self, name: str, *values: Any) -> None:
        """Send something that has no answer."""
        self._send(0, name, values, [])

    def close(self) -> None:
        """Close the connection once everything is sent."""
        if self._transport is not None:
            self._flush()
            self._transport.close()

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=1 << 62)  # requests that wait are counted by the budget

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail what was asked, and give up what the other end has asked for."""
        self._transport = None
        for answered, _ in self._asked.values():
            if not answered.done():
                answered.set_exception(ServingError("a process of the server has ended; try again", 503, 1.0))
        for task in self._tasks.values():
            task.cancel()
        self._on_lost()

    def data_received(self, data: bytes) -> None:
        """Take the messages that are complete."""
        self._arrived += data
        at, size = 0, len(self._arrived)
        while size - at >= _SIZE.size:
            end = at + _SIZE.size + _SIZE.unpack_from(self._arrived, at)[0]
            if end > size:
                break
            with memoryview(self._arrived) as view:
                messages = marshal.loads(view[at + _SIZE.size : end])  # noqa: S302  # of our own process
            at = end
            for message in messages:
                self._take(*message)
        del self._arrived[:at]

    # --- messages: a number, positive for calls, negative for answers and 0 without an answer; a name or a status

    def _send(self, number: int, name: str | int, values: Any, packed: _Packed) -> None:
        self._out.append((number, name, values, packed))
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._flushes:
            self._flushes = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        out, self._out, self._flushes = self._out, [], False
        if self._read:
            out.append((0, "read", tuple(self._read), []))
            self._read.clear()
        if self._transport is not None and out:
            data = marshal.dumps(out)
            self._transport.write(_SIZE.pack(len(data)) + data)

    def _take(self, number: int, name: Any, values: Any, packed: _Packed) -> None:
        if number > 0:
            self._tasks[number] = asyncio.ensure_future(self._answer(number, name, values, self._unpacked(packed)))
        elif number < 0:
            self._answered(-number, name, values, packed)
        elif name == "read":
            for at in values:
                self._arena.give_back(at)
        elif name == "cancel":
            if (task := self._tasks.get(values[0])) is not None:
                asyncio.get_running_loop().call_soon(task.cancel)  # once it has begun: it is to answer
        else:
            self._told.add(told := asyncio.ensure_future(self._handler(name, values, {})))
            told.add_done_callback(self._told.discard)

    async def _answer(self, number: int, name: str, values: Sequence[Any], tensors: dict[str, Array]) -> None:
        status, packed = 200, _Packed()
        try:
            value, found = await self._handler(name, values, tensors)
            packed = self._packed(found, [])
        except asyncio.CancelledError:
            status, value = 503, ("the request was given up", None)
        except Exception as err:  # whatever it is, it belongs to the request
            status, text = described(err)
            value = (text, err.retry_after_s if isinstance(err, ServingError) else None)
        finally:
            del self._tasks[number]
        self._send(-number, status, value, packed)

    def _answered(self, number: int, status: int, value: Any, packed: _Packed) -> None:
        answered, regions = self._asked.pop(number)
        for at in regions:
            self._arena.give_back(at)
        tensors = {}
        if not answered.done():
            tensors = {name: np.array(array) for name, array in self._unpacked(packed).items()}
        if read := [data for *_, data in packed if type(data) is int]:
            self._read += read
            self._flush_soon()
        if answered.done():
            return
        if status == 200:
            answered.set_result((value, tensors))
        else:
            answered.set_exception(ServingError(value[0], status, value[1]))

    def _packed(self, tensors: Tensors, regions: list[int]) -> _Packed:
        """Return tensors as marshal writes them; large ones are copied to shared memory, where the regions begin."""
        packed: _Packed = []
        for name, array in tensors.items():
            data: Any
            datatype = LABELS[array.dtype]
            if array.dtype == object:
                data = array.ravel().tolist()
            elif array.nbytes < _SHARED_FROM or (data := self._arena.take(array.nbytes)) is None:
                data = array.tobytes()
            else:
                np.ndarray(array.shape, array.dtype, self._arena.memory, data)[...] = array
                regions.append(data)
            packed.append((name, datatype, array.shape, data))
        return packed

    def _unpacked(self, packed: _Packed) -> dict[str, Array]:
        """Return tensors; large ones share memory with the other end."""
        tensors = {}
        for name, datatype, shape, data in packed:
            if type(data) is list:
                flat = np.empty(len(data), object)
                flat[:] = data
                tensors[name] = flat.reshape(shape)
            elif type(data) is int:
                tensors[name] = np.ndarray(shape, _NUMPY[datatype], self._other, data)
            else:
                tensors[name] = np.ndarray(shape, _NUMPY[datatype], data)
        return tensors
