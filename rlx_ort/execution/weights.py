"""`WeightStore`: the data of a graph's parameters, held once per process and shared by the sessions of every device.

Data is never changed in place, because ONNX Runtime borrows it: a new value is a new buffer, and an open session keeps
the buffers it was opened with. Each change increments `version`, by which sessions detect that they are stale.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rlx_ort.errors import GraphVerifyError, ParamError, advice, near_names
from rlx_ort.execution.inputs import as_array, cast_hint, is_literal
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.tensor import TensorData, narrowed, read_tensors
from rlx_ort.ir.types import TensorType
from rlx_ort.providers.engine.binding import DeviceTensor

if TYPE_CHECKING:
    from rlx_ort.ir.graph import Graph

AS_DECLARED: Mapping[str, DType] = MappingProxyType({})
"""No parameter is stored as another dtype than it is declared with."""


@dataclass(frozen=True)
class LoadReport:
    """The parameters that a file was loaded into.

    Attributes:
        loaded: parameters that got their data from the file.
        missing: parameters that the file does not have.
        unused: tensors of the file that are no parameter, or that `rename` left out.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unused: tuple[str, ...]


class _Settles(Protocol):
    def settle(self) -> None:
        """Wait for the runs that were committed."""


class WeightStore:
    """Parameter name -> data of the declared type. Every method may be called from several threads.

    Attributes:
        version: grows with each change.

    Args:
        types: the declared type of each parameter; each has a static shape.
        values: initial data of some of them.

    Raises:
        ParamError: a value is not of its declared type.
    """

    def __repr__(self) -> str:
        return f"<WeightStore, {len(self._values)} of {len(self._types)} parameters set>"

    def __init__(self, types: Mapping[str, TensorType], values: Mapping[str, TensorData] | None = None) -> None:
        self.version = 0
        self._types = dict(types)
        self._values: dict[str, TensorData] = {}
        self._rounded: dict[tuple[str, DType], tuple[TensorData, TensorData]] = {}  # value, the value rounded
        self._pins: Counter[str] = Counter()
        # Reentrant: the finalizer of a session may call `unpin` during any other call.
        self._lock = threading.RLock()
        self._open_update = _OpenUpdate()
        self._committed: weakref.WeakSet[_Settles] = weakref.WeakSet()
        self._placed: dict[tuple[str, str], tuple[TensorData, weakref.ref[DeviceTensor]]] = {}
        self._placing = threading.Lock()
        for name, value in (values or {}).items():
            self._values[name] = self._checked(name, value)

    @classmethod
    def for_graph(cls, graph: Graph) -> WeightStore:
        """Return the store of a graph's parameters, with the data that the graph has for them.

        Raises:
            GraphVerifyError: it is no graph, but the path of one, say.
        """
        from rlx_ort.ir.graph import require_graph

        require_graph(graph)
        types = {value.name: value.type for value in graph.params if isinstance(value.type, TensorType)}
        return cls(types, {name: data for name, data in graph.weights.items() if name in types})

    def declare_from(self, graph: Graph) -> None:
        """Update the declared parameters to those of a graph; parameters whose type changed lose their data.

        Raises:
            ParamError: the graph's data for one is not of its declared type.
        """
        newer = WeightStore.for_graph(graph)
        with self._lock:
            changed = {name for name, kind in newer._types.items() if self._types.get(name) != kind}
            self._types = newer._types
            kept = {name: data for name, data in self._values.items() if name in newer._types and name not in changed}
            self._values = {name: data for name, data in newer._values.items() if name not in kept} | kept
            self.version += 1

    def declare(self, name: str, kind: TensorType, data: TensorData | None = None) -> None:
        """Add a parameter; a declared one keeps its data.

        Raises:
            ParamError: it is declared with another type, or the data is not of the type.
        """
        with self._lock:
            known = self._types.setdefault(name, kind)
            if known != kind:
                raise ParamError(f"parameter {name!r} is {known} already, and cannot be {kind} as well")
            if data is not None and name not in self._values:
                self._values[name] = self._checked(name, data)
                self.version += 1

    def load_safetensors(
        self, path: str | os.PathLike[str], rename: Callable[[str], str | None] | None = None, *, strict: bool = True
    ) -> LoadReport:
        """Give parameters the tensors of a safetensors file as memory maps, which are read on demand.

        The file must not change while it is in use. All changes are one version; after an error none is made.

        Args:
            path: the file.
            rename: name of a tensor -> name of a parameter, or None to skip the tensor; by default they are equal.
            strict: whether every parameter must be in the file, and every tensor be a parameter.

        Raises:
            ConversionError: the file cannot be read, or is no safetensors file.
            ParamError: a tensor does not fit its parameter, two are one parameter, or, when strict, one is left over.
        """
        path = Path(path)
        tensors, _ = read_tensors(path)
        sources: dict[str, str] = {}
        strangers, left_out = [], []
        for tensor in tensors:
            name = tensor if rename is None else rename(tensor)
            if name is None:
                left_out.append(tensor)
            elif name not in self:
                strangers.append(tensor if name == tensor else f"{tensor} (renamed to {name})")
            elif name in sources:
                raise ParamError(f"{path}: tensors {sources[name]!r} and {tensor!r} are both parameter {name!r}")
            else:
                sources[name] = tensor
        missing = [name for name in self.names if name not in sources]
        if strict and (missing or strangers):
            raise ParamError(_complaint(path, missing, strangers, self.names))
        with self.update():
            for name, tensor in sources.items():
                try:
                    self.set(name, _aligned(tensors[tensor]))
                except ParamError as err:
                    raise ParamError(f"{path}, tensor {tensor!r}: {err}") from err
        return LoadReport(tuple(sources), tuple(missing), (*strangers, *left_out))

    @property
    def names(self) -> tuple[str, ...]:
        """The declared parameters, set or not, in order."""
        return tuple(self._types)

    @property
    def nbytes(self) -> int:
        """The bytes of all data that is set, memory maps included."""
        return sum(value.nbytes for value in self._values.values())

    def __contains__(self, name: object) -> bool:
        return name in self._types

    def is_set(self, name: str) -> bool:
        """Return whether a parameter has data."""
        return name in self._values

    def type_of(self, name: str) -> TensorType:
        """Return the declared type of a parameter.

        Raises:
            ParamError: no parameter has that name; a close one is suggested.
        """
        declared = self._types.get(name)
        if declared is None:
            raise ParamError(f"the graph has no parameter {name!r}; {near_names(name, self._types)}")
        return declared

    def set(self, name: str, value: npt.ArrayLike | TensorData, *, cast: bool = False) -> None:
        """Give a parameter new data; writeable arrays are copied.

        The dtype must be the declared one, or a float type whose values the declared float type all holds, such as f16
        for f32; Python numbers and lists are judged by value. With `cast`, any numeric array is converted, rounding
        floats where the declared type is narrower. `TensorData` and read-only arrays, such as memory maps, are shared.

        Raises:
            ParamError: no such parameter, another shape, or another dtype than declared.
        """
        data = value if isinstance(value, TensorData) else self._from_array(name, value, cast)
        self._put(name, self._checked(name, data))

    def set_typed(
        self, name: str, data: bytes | bytearray | memoryview, dtype: DType | str, *, cast: bool = False
    ) -> None:
        """Give a parameter the elements in raw little-endian bytes; packed types as ONNX packs them.

        The dtype must be the declared one, or a float type that widens to it without loss, such as f16 or bf16 to f32,
        unless `cast` asks for the conversion.

        Raises:
            ParamError: no such parameter, a wrong number of bytes, or another dtype than declared.
        """
        declared = self.type_of(name)
        try:
            given = DType.parse(dtype)
            frozen = data if isinstance(data, bytes) else bytes(data)
            tensor = TensorData(given, _sizes(declared), np.frombuffer(frozen, np.uint8))
        except ValueError as err:
            raise ParamError(f"parameter {name!r} is {declared}: {err}") from err
        if given is declared.dtype:
            self._put(name, tensor)
        else:
            self.set(name, tensor.numpy(), cast=cast)

    def get(self, name: str) -> TensorData | None:
        """Return the data of a parameter, or None while it is not set.

        Raises:
            ParamError: no parameter has that name.
        """
        self.type_of(name)
        return self._values.get(name)

    def missing(self, names: Iterable[str] | None = None) -> list[str]:
        """Return those of the names, or of all parameters, that are not set, in order."""
        return [name for name in (self._types if names is None else names) if name not in self._values]

    def snapshot(
        self, names: Iterable[str], stored_as: Mapping[str, DType] = AS_DECLARED
    ) -> tuple[int, Mapping[str, TensorData]]:
        """Return the version and the data of some parameters, all of that one version.

        Those in `stored_as` come rounded to that dtype. A rounded copy is made once for each value and shared by
        sessions; the value itself is kept too, for sessions of another precision.

        Raises:
            ParamError: some of them are not set; the message names them.
        """
        wanted = list(names)
        with self._lock:
            missing = self.missing(wanted)
            if missing:
                verb = "is" if len(missing) == 1 else "are"
                raise ParamError(f"parameter {_listed(missing)} {verb} not set; call set_param before the run")
            tensors = {name: self._in_dtype(name, stored_as.get(name)) for name in wanted}
            return self.version, MappingProxyType(tensors)

    @contextlib.contextmanager
    def update(self) -> Iterator[None]:
        """Group the changes of this thread in a `with` block into one version.

        They become visible when the block ends; if it raises, none is made. Nested blocks join the outermost one.
        """
        outer = self._open_update.changes
        if outer is not None:
            yield
            return
        changes: dict[str, TensorData] = {}
        self._open_update.changes = changes
        try:
            yield
        finally:
            self._open_update.changes = None
        if changes:
            self._settle()
            with self._lock:
                self._values.update(changes)
                self.version += 1

    def release(self, name: str) -> None:
        """Drop the data of a parameter, which frees its memory unless something else refers to it.

        Raises:
            ParamError: no such parameter, or an open session uses it.
        """
        self.type_of(name)
        with self._lock:
            if self._pins[name]:
                raise ParamError(
                    f"parameter {name!r} is in use by {self._pins[name]} open session(s); close them first"
                )
            if self._values.pop(name, None) is not None:
                self.version += 1
            for key in [key for key in self._rounded if key[0] == name]:
                del self._rounded[key]

    def provide_rounded(self, name: str, data: TensorData) -> None:
        """Give the store a parameter's present value rounded to another dtype, so that it need not compute it.

        Raises:
            ParamError: no such parameter, it is not set, or the data has another shape.
        """
        self.type_of(name)
        with self._lock:
            value = self._values.get(name)
            if value is None or value.shape != data.shape:
                raise ParamError(f"parameter {name!r} has no value of shape {data.shape} to provide a rounded copy of")
            self._rounded[name, data.dtype] = (value, data)

    def on_device(
        self, device: str, name: str, data: TensorData, upload: Callable[[], DeviceTensor], *, again: bool
    ) -> DeviceTensor:
        """Return the copy of mutable data in a device's memory: one for all sessions there, freed with the last.

        Uploads it unless a session holds it already. With `again` it always does: a session must not keep the one it
        replaces alive through the tensors of that one.
        """
        with self._placing:
            known = self._placed.get((device, name))
            tensor = known[1]() if known is not None and known[0] is data and not again else None
            if tensor is None:
                tensor = upload()
                self._placed[device, name] = (data, weakref.ref(tensor))
            return tensor

    def pin(self, names: Iterable[str]) -> None:
        """Note that a session uses these parameters, so that `release` refuses them."""
        with self._lock:
            self._pins.update(tuple(names))  # a mapping would be read as counts

    def unpin(self, names: Iterable[str]) -> None:
        """Undo one `pin` of the same names."""
        with self._lock:
            self._pins.subtract(tuple(names))

    def _in_dtype(self, name: str, dtype: DType | None) -> TensorData:
        """Return the data of a parameter, rounded to a dtype if one is given; the caller holds the lock."""
        data = self._values[name]
        if dtype is None or dtype is data.dtype:
            return data
        source, rounded = self._rounded.get((name, dtype), (None, data))
        if source is not data:
            rounded = narrowed(data, dtype)
            self._rounded[name, dtype] = (data, rounded)
        return rounded

    def settle_before_changes(self, runs: _Settles) -> None:
        """Let every later change of data wait for the committed runs, which read the values of their own time."""
        self._committed.add(runs)

    def _settle(self) -> None:
        for runs in list(self._committed):
            runs.settle()

    def _put(self, name: str, data: TensorData) -> None:
        changes = self._open_update.changes
        if changes is not None:
            changes[name] = data
            return
        self._settle()
        with self._lock:
            self._values[name] = data
            self.version += 1

    def _checked(self, name: str, data: TensorData) -> TensorData:
        declared = self.type_of(name)
        if declared.shape is None or not declared.shape.is_static:
            raise ParamError(f"parameter {name!r} is {declared}; a weight needs a size in every dimension")
        if data.dtype is not declared.dtype:
            raise ParamError(
                f"parameter {name!r} is {declared}, the data is {data.dtype.value}; "
                f"cast it with {cast_hint(declared.dtype)} or pass {advice('cast=True', '--cast')}"
            )
        if data.shape != _sizes(declared):
            raise ParamError(f"parameter {name!r} is {declared}, the data has shape {data.shape}")
        return data

    def _from_array(self, name: str, value: npt.ArrayLike, cast: bool) -> TensorData:
        declared = self.type_of(name)
        dtype = declared.dtype
        try:
            if is_literal(value) or isinstance(value, np.ma.MaskedArray) or dtype is DType.STRING:
                return TensorData.from_array(as_array(value, dtype))
            array = np.asarray(value)
            numeric = array.dtype.kind not in "OSUmM"
            converts = numeric and (cast or _widens(array.dtype, dtype))
            if converts and array.dtype != dtype.numpy:
                return TensorData.from_array(array.astype(dtype.numpy))
            return TensorData.owned(array)
        except (ValueError, TypeError) as err:
            raise ParamError(f"parameter {name!r} is {declared}: {err}") from err


class Experts(NamedTuple):
    """Some experts of the user's parameter `param`, in order."""

    param: str
    experts: tuple[int, ...]


class ExpertWeights:
    """A view of a store with the parameters of a split graph; a `WeightSource` that several threads may use."""

    def __init__(self, store: WeightStore, experts: Mapping[str, Experts]) -> None:
        self._store = store
        self._experts = dict(experts)
        self._made: dict[tuple[str, DType | None], tuple[TensorData, TensorData]] = {}
        self._lock = threading.Lock()

    @property
    def version(self) -> int:
        """The store's version."""
        return self._store.version

    def snapshot(
        self, names: Iterable[str], stored_as: Mapping[str, DType] = AS_DECLARED
    ) -> tuple[int, Mapping[str, TensorData]]:
        """Return the version and the data of some parameters; see `WeightStore.snapshot`."""
        wanted = list(names)
        plain = {name: dtype for name, dtype in stored_as.items() if name not in self._experts}
        version, tensors = self._store.snapshot(self._sources(wanted), plain)
        with self._lock:
            return version, {
                name: self._part(name, tensors[self._experts[name].param], stored_as.get(name))
                if name in self._experts
                else tensors[name]
                for name in wanted
            }

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return those parameters of the store that are needed and not set."""
        return self._store.missing(self._sources(names))

    def pin(self, names: Iterable[str]) -> None:
        """Note that a session uses these parameters."""
        self._store.pin(self._sources(names))

    def unpin(self, names: Iterable[str]) -> None:
        """Undo one `pin` of the same names."""
        self._store.unpin(self._sources(names))

    def _sources(self, names: Iterable[str]) -> list[str]:
        return list(dict.fromkeys(self._experts[name].param if name in self._experts else name for name in names))

    def _part(self, name: str, data: TensorData, dtype: DType | None) -> TensorData:
        """Return some experts of the data, made once for each value of it."""
        source, made = self._made.get((name, dtype), (None, data))
        if source is not data:
            made = taken_rows(data, self._experts[name].experts)
            if dtype is not None and dtype is not made.dtype:
                made = narrowed(made, dtype)
            self._made[name, dtype] = (data, made)
        return made


def taken_rows(data: TensorData, experts: Sequence[int]) -> TensorData:
    """Return the data of some experts, which are the first axis; a contiguous range shares the memory."""
    count = data.shape[0]
    size, rest = divmod(data.buffer.nbytes, max(count, 1))
    if rest:
        raise GraphVerifyError(f"an expert of {data.dtype.value}{list(data.shape)} is not a whole number of bytes")
    shape = (len(experts), *data.shape[1:])
    first, last = experts[0], experts[-1] + 1
    if list(experts) == list(range(first, last)):
        return TensorData(data.dtype, shape, data.buffer[first * size : last * size])
    rows = data.buffer.reshape(count, size)[list(experts)]
    return TensorData(data.dtype, shape, rows.reshape(-1))


class _OpenUpdate(threading.local):
    """The changes of the `update` block that the current thread is in, or None outside of one."""

    changes: dict[str, TensorData] | None = None


def _widens(source: np.dtype[Any], declared: DType) -> bool:
    """Return whether both are floats, and the declared type holds every value of the source."""
    return declared.is_float and DType.from_numpy(source).is_float and np.can_cast(source, declared.numpy, "safe")


def _sizes(kind: TensorType) -> tuple[int, ...]:
    return () if kind.shape is None else kind.shape.static()


def _listed(names: Iterable[str], most: int = 8) -> str:
    quoted = [repr(name) for name in names]
    more = f" and {len(quoted) - most} more" if len(quoted) > most else ""
    return (", ".join(quoted[:most]) or "none") + more


def _aligned(data: TensorData) -> TensorData:
    """Return data aligned to its elements; copies it where the file's header misaligns it."""
    step = 1 if data.dtype.is_packed else data.dtype.numpy.alignment
    if data.buffer.ctypes.data % max(step, 1) == 0:
        return data
    return TensorData(data.dtype, data.shape, np.array(data.buffer))


def _complaint(path: Path, missing: list[str], strangers: list[str], names: Iterable[str]) -> str:
    parts = []
    if missing:
        parts.append(f"it has no tensors for the parameters {_listed(missing)}")
    if strangers:
        parts.append(f"its tensors {_listed(strangers)} match no parameter")
        close = difflib.get_close_matches(strangers[0], list(names), n=1)
        if close:
            parts.append(f"did you mean {close[0]!r} by {strangers[0]!r}? `rename` maps names")
    return f"{path}: {'; '.join(parts)}. strict=False loads the rest"
