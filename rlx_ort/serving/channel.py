"""`Channel`: calls between two processes of a server over a socket. Large tensors lie in memory that both have mapped.

What is sent in one turn of the event loop is written as one list, in Python's marshal format: both ends are the same
Python, and it takes a third of the time of pickle.
"""

from __future__ import annotations

import asyncio
import bisect
import functools
import itertools
import marshal
import mmap
import os
import secrets
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import numpy as np

from rlx_ort.deploy.triton import DATATYPES
from rlx_ort.errors import ServingError
from rlx_ort.serving.protocol import Array
from rlx_ort.serving.rest import ALIGNMENT, described

if TYPE_CHECKING:
    from rlx_ort.serving.lanes import Place
    from rlx_ort.serving.pending import Pending

Tensors: TypeAlias = Mapping[str, Array]
Begin: TypeAlias = Callable[[Sequence[Any], dict[str, Array], "Place", "Answered"], "Pending"]
"""Begins to answer a call with its values and tensors, see `Scheduler.accept`."""
Answered: TypeAlias = Callable[[tuple[Any, Tensors] | BaseException], object]
Handler: TypeAlias = Callable[[str, Sequence[Any], dict[str, Array]], Coroutine[Any, Any, tuple[Any, Tensors]]]
"""Answers a call: its name, its values and its tensors -> a value and tensors. Values have types that marshal knows."""
_Packed: TypeAlias = list[tuple[str, str, tuple[int, ...], Any]]

_SIZE = struct.Struct("<Q")
_SHARED_FROM = 16 << 10  # bytes; smaller tensors are sent over the socket
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
    """Gives out pieces of a memory, the first that is large enough, to any thread of one process."""

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self._begins = _address(np.frombuffer(memory, np.uint8))
        self._lock = threading.Lock()
        self._free = [(0, len(memory))]
        self._taken: dict[int, int] = {}

    def take(self, size: int) -> int | None:
        """Return where a piece of so many bytes begins, or None if there is no room."""
        begins = self.take_all([size])
        return None if begins is None else begins[0]

    def take_all(self, sizes: Sequence[int]) -> list[int] | None:
        """Return where pieces of so many bytes begin, one behind the other, or None if there is no room."""
        whole = [size + -size % ALIGNMENT for size in sizes]
        total = sum(whole)
        with self._lock:
            for index, (at, length) in enumerate(self._free):
                if length >= total:
                    self._free[index : index + 1] = [(at + total, length - total)] if length > total else []
                    begins = [*itertools.accumulate(whole[:-1], initial=at)]
                    self._taken.update(zip(begins, whole, strict=True))
                    return begins
        return None

    def give_back(self, at: int) -> None:
        """Free a piece."""
        with self._lock:
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

    def place(self, *arrays: Array) -> list[tuple[Array, int]] | None:
        """Return copies of arrays in pieces, and where those begin; None if there is no room.

        Arrays that lie one behind the other are copied at once: after each copy a thread waits for Python's lock again.
        """
        if (begins := self.take_all([array.nbytes for array in arrays])) is None:
            return None
        placed = [
            np.ndarray(array.shape, array.dtype, self.memory, at) for array, at in zip(arrays, begins, strict=True)
        ]
        whole = _in_a_row(arrays)
        if whole is not None:
            np.ndarray(whole.shape, whole.dtype, self.memory, begins[0])[...] = whole
        else:
            for to, array in zip(placed, arrays, strict=True):
                to[...] = array
        return list(zip(placed, begins, strict=True))

    def place_of(self, array: Array) -> int | None:
        """Return where an array lies in this memory, or None if it does not."""
        at = _address(array) - self._begins
        return at if 0 <= at < len(self.memory) and array.flags.c_contiguous else None


def _in_a_row(arrays: Sequence[Array]) -> Array | None:
    """Return the bytes of arrays that lie one behind the other, without gaps where they are copied; None if not."""
    begin = end = _address(arrays[0])
    for array in arrays:
        if _address(array) != end or not array.flags.c_contiguous or array.nbytes % ALIGNMENT:
            return None
        end += array.nbytes
    return np.lib.stride_tricks.as_strided(arrays[0].reshape(-1).view(np.uint8), (end - begin,), (1,), writeable=False)


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


class _Outbox:
    """Where the large outputs of a call are sent from: pieces of memory that the other end reads; see `Place`."""

    __slots__ = ("begins", "memory")

    def __init__(self, memory: Arena) -> None:
        self.memory, self.begins = memory, list[int]()

    def __call__(self, arrays: Sequence[Array], places: Sequence[_Outbox]) -> list[Array]:
        is_shared = all(array.nbytes >= _SHARED_FROM and array.dtype != object for array in arrays)
        found = self.memory.place(*arrays) if is_shared else None
        if found is None:
            if len(arrays) == 1:
                return [*arrays]
            return [place([array], [place])[0] for array, place in zip(arrays, places, strict=True)]
        for place, (_, at) in zip(places, found, strict=True):
            place.begins.append(at)
        return [placed for placed, _ in found]


class _Asked(NamedTuple):
    """A call that waits for its answer: its pieces of our memory, and where those of the answer are noted."""

    answered: asyncio.Future[tuple[Any, dict[str, Array]]]
    regions: list[int]
    shared: list[int] | None


class Channel(asyncio.Protocol):
    """One end of a connection between two processes of a server.

    Args:
        handler: answers the calls of the other end.
        own: memory that this end writes.
        other: memory that the other end writes.
        on_lost: called when the other end is gone.
        begin: begins to answer the calls with the name "infer", without a task for each.
    """

    def __init__(
        self,
        handler: Handler,
        own: memoryview,
        other: memoryview,
        on_lost: Callable[[], object] = lambda: None,
        begin: Begin | None = None,
    ) -> None:
        self._handler, self._on_lost, self._begin = handler, on_lost, begin
        self.arena, self._other = Arena(own), other
        self._numbers = itertools.count(1)
        self._asked: dict[int, _Asked] = {}
        self._tasks: dict[int, Pending] = {}
        self._told: set[asyncio.Future[Any]] = set()
        self._out: list[tuple[Any, ...]] = []
        self._read: list[int] = []  # where answers lay that have been read
        self._arrived = bytearray()
        self._flushes = False
        self._transport: asyncio.Transport | None = None

    async def ask(
        self,
        name: str,
        *values: Any,
        tensors: Tensors | None = None,
        held: Sequence[int] = (),
        shared: list[int] | None = None,
    ) -> tuple[Any, dict[str, Array]]:
        """Return the answer of the other end: a value, and tensors.

        Cancelling the call cancels it there.

        Args:
            name: that of the call.
            values: of types that marshal knows.
            tensors: those in `arena` are not copied.
            held: pieces of `arena` that the call takes over; they are given back once the other end reads them no more.
            shared: if given, large tensors of the answer are not copied; their places are added, even if the call is
                cancelled, and `give_back` takes them once nobody reads the tensors any more.

        Raises:
            ServingError: the other end raised it, or is gone.
        """
        number, regions = next(self._numbers), list(held)
        answered: asyncio.Future[tuple[Any, dict[str, Array]]] = asyncio.get_running_loop().create_future()
        if self._transport is None:
            raise ServingError("the server is shutting down", 503)
        self._asked[number] = _Asked(answered, regions, shared)
        self._send(number, name, values, self._packed(tensors or {}, regions))
        del tensors, values  # the caller may want to free them
        try:
            return await answered
        except asyncio.CancelledError:
            self.tell("cancel", number)
            raise

    def give_back(self, shared: list[int]) -> None:
        """Let the other end use the memory of an answer again, see `ask`."""
        if shared:
            self._read += shared
            shared.clear()
            self._flush_soon()

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
        """Fail this end's calls, and give up those of the other end."""
        self._transport = None
        for asked in self._asked.values():
            if not asked.answered.done():
                asked.answered.set_exception(ServingError("a process of the server has ended; try again", 503, 1.0))
        for task in list(self._tasks.values()):
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
        if number > 0 and name == "infer" and self._begin is not None:
            self._infer(self._begin, number, values, self._unpacked(packed))
        elif number > 0:
            self._tasks[number] = asyncio.ensure_future(self._answer(number, name, values, self._unpacked(packed)))
        elif number < 0:
            self._answered(-number, name, values, packed)
        elif name == "read":
            for at in values:
                self.arena.give_back(at)
        elif name == "cancel":
            if (task := self._tasks.get(values[0])) is not None:
                asyncio.get_running_loop().call_soon(task.cancel)  # once it has begun: it is to answer
        else:
            self._told.add(told := asyncio.ensure_future(self._handler(name, values, {})))
            told.add_done_callback(self._told.discard)

    def _infer(self, begin: Begin, number: int, values: Sequence[Any], tensors: dict[str, Array]) -> None:
        """Begin to answer a call; it is answered once nothing reads its tensors or writes to our memory for it."""
        outbox = _Outbox(self.arena)
        ended = functools.partial(self._reply, number, placed=outbox.begins)
        try:
            self._tasks[number] = begin(values, tensors, outbox, ended)
        except Exception as err:  # whatever it is, it belongs to the request
            ended(err)

    async def _answer(self, number: int, name: str, values: Sequence[Any], tensors: dict[str, Array]) -> None:
        try:
            result = await self._handler(name, values, tensors)
        except (asyncio.CancelledError, Exception) as err:  # whatever it is, it belongs to the request
            self._reply(number, err)
        else:
            self._reply(number, result)

    def _reply(self, number: int, result: tuple[Any, Tensors] | BaseException, placed: Sequence[int] = ()) -> None:
        """Answer a call, and free the pieces of our memory that were taken for its answer and are not in it."""
        self._tasks.pop(number, None)
        unused, packed = set(placed), _Packed()
        try:
            if isinstance(result, BaseException):
                raise result
            packed = self._packed(result[1], [])
        except BaseException as err:  # whatever it is, it belongs to the request
            status, value = _failure(err)
        else:
            status, value = 200, result[0]
            unused.difference_update([data for *_, data in packed if type(data) is int])
        self._send(-number, status, value, packed)
        for at in unused:  # of an answer that nobody waits for, or of a batch that ran again
            self.arena.give_back(at)

    def _answered(self, number: int, status: int, value: Any, packed: _Packed) -> None:
        answered, regions, shared = self._asked.pop(number)
        for at in regions:
            self.arena.give_back(at)
        read, waits = [data for *_, data in packed if type(data) is int], not answered.done()
        tensors = self._unpacked(packed) if waits else {}
        if waits and shared is not None:
            shared += read
        else:
            tensors = {name: np.array(array) for name, array in tensors.items()}
            self.give_back(read)
        if waits and status == 200:
            answered.set_result((value, tensors))
        elif waits:
            answered.set_exception(ServingError(value[0], status, value[1]))

    def _packed(self, tensors: Tensors, regions: list[int]) -> _Packed:
        """Return tensors as marshal writes them; large ones are copied to shared memory, where the regions begin."""
        packed: _Packed = []
        for name, array in tensors.items():
            data: Any
            datatype = LABELS[array.dtype]
            if array.dtype == object:
                data = array.ravel().tolist()
            elif (data := self.arena.place_of(array)) is not None:
                pass
            elif array.nbytes < _SHARED_FROM or (found := self.arena.place(array)) is None:
                data = array.tobytes()
            else:
                ((_, data),) = found
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


def _failure(error: BaseException) -> tuple[int, tuple[str, float | None]]:
    """Return the status and the values of an answer to a call that failed."""
    if not isinstance(error, Exception):
        return 503, ("the request was abandoned", None)
    status, text = described(error)
    return status, (text, error.retry_after_s if isinstance(error, ServingError) else None)
