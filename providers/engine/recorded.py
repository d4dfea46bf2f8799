"""One recorded run: what may be recorded, the driver's interface, the run over fixed addresses, and its replay."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from rlx_ort.converters.to_onnx.exported import ExportedNode
from rlx_ort.converters.to_onnx.model import ModelNode
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import TensorType, ValueType
from rlx_ort.providers.base import NodeAssignment
from rlx_ort.providers.engine.binding import Arrays
from rlx_ort.providers.engine.values import has_foreign_dtype

if TYPE_CHECKING:
    from rlx_ort.providers.engine.values import OrtTensor

__all__ = [
    "BoundRun",
    "BrokenSessionError",
    "Copy",
    "Key",
    "NotRecordedError",
    "Owner",
    "Recorder",
    "Replay",
    "check_replay",
    "facts",
    "host_work",
    "unrecordable",
]

_log = logging.getLogger(__name__)

Copy: TypeAlias = tuple[int, int, int]
"""Address on the device, address on the host, bytes; within the device, address to write, address to read, bytes."""
Owner: TypeAlias = int | tuple[frozenset[str], frozenset[str]]
"""0 for runs on arrays, a number for slots, (inputs, outputs) on the device for the others."""
Key: TypeAlias = tuple[Owner, tuple[str, ...], tuple[tuple[str, Any, tuple[int, ...]], ...]]

facts = attrgetter("dtype", "shape")

_CONTROL_FLOW = "is control flow, which the host decides"
_UNRECORDABLE: dict[str, str] = {
    **dict.fromkeys(("If", "Loop", "Scan", "SequenceMap"), _CONTROL_FLOW),
    **dict.fromkeys(("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"), "draws random numbers"),
    **dict.fromkeys(("Multinomial", "Bernoulli", "Sampling"), "draws random numbers"),
    **dict.fromkeys(
        ("NonZero", "Compress", "Unique", "NonMaxSuppression", "BeamSearch", "GreedySearch", "WhisperBeamSearch"),
        "has outputs whose shapes depend on values",
    ),
}
_KNOWN_DOMAINS = frozenset({"", "ai.onnx", "com.microsoft", "com.ms.internal.nhwc"})


class Recorder(Protocol):
    """A device's driver for one session: records what is launched on a stream of its own.

    Attributes:
        options: the provider options that make a session launch on the stream.
    """

    options: Mapping[str, str]

    def host_buffer(self, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return an array like another one, in pinned host memory."""

    def record(self, copies_in: Sequence[Copy], run: Callable[[], None], copies_out: Sequence[Copy]) -> Any:
        """Return a recording of the copies to the device, a run, and the copies back, none of which is executed."""

    def player(self, recording: Any) -> Callable[..., None]:
        """Return what replays a recording and waits for its end: `(before, after)`, copies within the device."""

    def move(self, copies: Sequence[Copy]) -> None:
        """Copy within the device and wait."""

    def drop(self, recording: Any) -> None:
        """Free a recording."""

    def wait(self) -> None:
        """Wait for all that was launched on the stream."""

    def close(self) -> None:
        """Free the stream, after the session that used it."""


class NotRecordedError(Exception):
    """Launches cannot be recorded; the message is the reason, for a report or an error."""


class BrokenSessionError(Exception):
    """A session no longer runs after a recording of it failed; the message is ONNX Runtime's."""


class BoundRun:
    """A run over tensors at fixed addresses on the device, outside of the session's arena.

    Inputs that are tensors are bound as they are; for arrays there are tensors of their own. `options` are the
    RunOptions of runs that wait for the device and of those that do not.
    """

    def __init__(
        self,
        engine: Any,
        session: Any,
        memory: tuple[str, int],
        options: tuple[Any, Any],
        errors: tuple[type[Exception], ...],
        inputs: Mapping[str, npt.NDArray[Any] | OrtTensor],
        outputs: Arrays,
    ) -> None:
        self._io = session.io_binding()
        self._session = session
        self._options, self._quiet = options
        self._errors = errors
        make = engine.OrtValue.ortvalue_from_shape_and_type
        self._inputs = [
            make(list(given.shape), given.dtype, *memory) if isinstance(given, np.ndarray) else given.value
            for given in inputs.values()
        ]
        self._outputs = [make(list(array.shape), array.dtype, *memory) for array in outputs.values()]
        for name, value in zip(inputs, self._inputs, strict=True):
            self._io.bind_ortvalue_input(name, value)
        for name, value in zip(outputs, self._outputs, strict=True):
            self._io.bind_ortvalue_output(name, value)
        for value, given in zip(self._inputs, inputs.values(), strict=True):
            if isinstance(given, np.ndarray):
                value.update_inplace(np.zeros(given.shape, given.dtype))

    @property
    def addresses(self) -> tuple[list[int], list[int]]:
        """The addresses of the inputs and of the outputs."""
        return [value.data_ptr() for value in self._inputs], [value.data_ptr() for value in self._outputs]

    def warm_up(self) -> None:
        """Run on zeros until everything that a run allocates or tunes once exists."""
        for _ in range(2):
            self._session.run_with_iobinding(self._io, self._options)

    def launch(self) -> None:
        """Run without waiting for the device."""
        self._session.run_with_iobinding(self._io, self._quiet)

    def settle(self) -> None:
        """Run and wait. Frees the host buffers that `launch` left, and shows that the session still works.

        The next run may report what failed inside a capture; this makes sure that it is not the caller's. Raises
        `BrokenSessionError` if the session does not work any more.
        """
        for attempt in (1, 2):
            try:
                self._session.run_with_iobinding(self._io, self._options)
                break
            except self._errors as err:
                _log.info("run %d after a recording failed: %s", attempt, err)
                if attempt == 2:
                    raise BrokenSessionError(f"after a recording, {type(err).__name__}: {err}") from err
        for value in self._outputs:  # so that a replay that writes nothing is noticed
            value.update_inplace(np.full(value.shape(), 1, value.numpy().dtype))


class Replay:
    """One recorded signature.

    `ins` are arrays for what is given on the host or copied on the device, and the tensors that are read where they
    are; `outs` are arrays like the outputs.
    """

    def __init__(
        self, driver: Recorder, bound: BoundRun, key: Key, ins: Mapping[str, npt.NDArray[Any] | OrtTensor], outs: Arrays
    ) -> None:
        self.driver = driver
        self.bound = bound
        self.key = key
        self.outputs = list(outs)
        self._names = list(ins)
        self._facts = [facts(given) for given in ins.values()]
        on_device, resident = (frozenset[str](), frozenset[str]()) if isinstance(key[0], int) else key[0]
        arrays = {name: given for name, given in ins.items() if isinstance(given, np.ndarray)}
        # The engine's values of these are bound; the tensors themselves would keep the session alive.
        self._held = {name: weakref.ref(given) for name, given in ins.items() if name not in arrays}
        to, back = (dict(zip(names, at, strict=True)) for names, at in zip((ins, outs), bound.addresses, strict=True))
        self._moved = [(name, to[name], arrays[name].nbytes) for name in arrays if name in on_device]
        self._stays = {name: (back[name], outs[name]) for name in outs if name in resident}
        self._given = [(name, driver.host_buffer(arrays[name])) for name in arrays if name not in on_device]
        self.inside = [here for _, here in self._given]
        self.views = [driver.host_buffer(array) for name, array in outs.items() if name not in resident]
        for view in self.views:
            view[...] = 1
        read = [name for name in outs if name not in resident]
        bound.warm_up()
        try:
            self.handle = driver.record(
                [(to[name], here.ctypes.data, here.nbytes) for name, here in self._given],
                bound.launch,
                [(back[name], here.ctypes.data, here.nbytes) for name, here in zip(read, self.views, strict=True)],
            )
        finally:
            bound.settle()
        self._play = driver.player(self.handle)

    @property
    def nbytes(self) -> int:
        """The bytes of its buffers on the device; those for arrays are pinned on the host as well."""
        on_device = sum(size for _, _, size in self._moved) + sum(like.nbytes for _, like in self._stays.values())
        return on_device + sum(array.nbytes for array in (*self.inside, *self.views))

    def fits(self, owner: Owner, names: Sequence[str], feeds: Mapping[str, Any]) -> bool:
        """Return whether a run has this signature."""
        return (
            owner == self.key[0]
            and names == self.outputs
            and list(feeds) == self._names
            and list(map(facts, feeds.values())) == self._facts
        )

    def changed(self, feeds: Mapping[str, Any]) -> list[str]:
        """Return the inputs that are recorded in place and are other tensors in this run."""
        return [name for name, tensor in self._held.items() if feeds[name] is not tensor()]

    def run(self, feeds: Mapping[str, Any]) -> list[npt.NDArray[Any]]:
        """Replay on arrays and return the output buffers, which the next replay overwrites."""
        for place, array in zip(self.inside, feeds.values(), strict=True):
            place[...] = array
        self._play()
        return self.views

    def run_values(self, feeds: Mapping[str, Any], fresh: Callable[[npt.NDArray[Any]], OrtTensor]) -> list[Any]:
        """Replay on arrays and tensors and return new arrays and tensors."""
        for name, place in self._given:
            place[...] = feeds[name]
        made = {name: fresh(like) for name, (_, like) in self._stays.items()}
        self._play(
            [(at, feeds[name].address, size) for name, at, size in self._moved],
            [(made[name].address, at, like.nbytes) for name, (at, like) in self._stays.items()],
        )
        views = iter(self.views)
        return [made[name] if name in made else next(views).copy() for name in self.outputs]

    def close(self) -> None:
        """Free the recording; the buffers live as long as any view of them."""
        self.driver.drop(self.handle)


def host_work(ep_name: str, memory: str, assignments: Iterable[NodeAssignment], session: Any) -> str:
    """Return why the host takes part in a session's runs beyond launching kernels, or an empty string.

    All nodes must be on the provider, and all inputs and outputs in its memory.
    """
    for node in assignments:
        if node.provider != ep_name:
            return f"node {node.name or node.op_type!r} ({node.op_type}) runs on {node.provider}"
        if _UNRECORDABLE.get(node.op_type) == _CONTROL_FLOW:
            return f"node {node.name or node.op_type!r} ({node.op_type}) {_CONTROL_FLOW}"
    if memory == "cpu":
        return ""
    for side in ("input", "output"):
        ask = getattr(session, f"get_{side}_memory_infos", None)
        if ask is None:
            return f"this ONNX Runtime does not report where {side}s are; 1.23 or newer does"
        values = session.get_inputs() if side == "input" else session.get_outputs()
        for value, info in zip(values, ask(), strict=True):
            # The device's own memory has no name, or the provider's, and the default type.
            if info.name.lower() == "cpu" or int(info.device_mem_type) != 0:
                return f"{side} {value.name!r} is in host memory"
    return ""


def unrecordable(nodes: Iterable[NodeAssignment | ExportedNode | ModelNode], types: Mapping[str, ValueType]) -> str:
    """Return why no run of a model can be recorded, judged by its nodes and inputs and outputs, or an empty string."""
    for node in nodes:
        what = _UNRECORDABLE.get(node.op_type, "")
        if not what and node.domain not in _KNOWN_DOMAINS:
            what = f"is of the domain {node.domain}"
        if what:
            return f"node {node.name or node.op_type!r} ({node.op_type}) {what}"
    for name, kind in types.items():
        if not isinstance(kind, TensorType) or kind.dtype is DType.STRING or has_foreign_dtype(kind):
            return f"{name!r} is {kind}, and only tensors of types that numpy has can be recorded"
    return ""


def check_replay(names: Sequence[str], wanted: Sequence[npt.NDArray[Any]], found: Sequence[npt.NDArray[Any]]) -> None:
    """Compare a replay's outputs with a plain run's: exactly, or to 32 roundings of the largest element for floats."""
    for name, want, got in zip(names, wanted, found, strict=True):
        if want.shape != got.shape or want.dtype != got.dtype:
            raise NotRecordedError(f"a replay gave output {name!r} as {got.dtype}{got.shape}")
        if np.array_equal(want, got, equal_nan=want.dtype.kind in "fc"):
            continue
        if want.dtype.kind not in "fc":
            raise NotRecordedError(f"a replay gave another output {name!r} than a plain run")
        with np.errstate(all="ignore"):
            error = np.abs(got.astype(np.complex128 if want.dtype.kind == "c" else np.float64) - want)
            scale = float(np.abs(want[np.isfinite(want)]).max(initial=0.0))
        same = (want == got) | (np.isnan(want) & np.isnan(got)) | (error <= 32 * np.finfo(want.dtype).eps * scale)
        if not same.all():
            raise NotRecordedError(f"a replay gave output {name!r} with an error of {float(np.nanmax(error)):.1e}")
