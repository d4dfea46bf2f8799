"""`OrtLoop`: the same run again and again over one IOBinding, and what binds single values.

A loop over handles costs its Python once more in every step, a fifth of a step of a small decoder. So what stays the
same from step to step stays bound: small arrays are copied into memory that is bound already, and tensors that did not
change are left as they are. Outputs are bound anew each time, or the run would write into those of the last.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlx_ort.errors import EngineError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import TensorType
from rlx_ort.providers.engine.binding import Loop
from rlx_ort.providers.engine.device_tensor import DeviceTensor
from rlx_ort.providers.engine.exceptions import running_error
from rlx_ort.providers.engine.ort_slots import COPY_AT_MOST_BYTES, binding_call
from rlx_ort.providers.engine.ort_tensor import OrtTensor
from rlx_ort.providers.engine.recipe import HOST_MEMORY, nothing_to_hold
from rlx_ort.providers.engine.values import has_foreign_dtype, is_tensor_like, to_ort_value

if TYPE_CHECKING:
    from rlx_ort.providers.engine.session import OrtEngineSession, SessionCore

__all__ = ["OrtLoop", "Place", "bind_input", "bind_output", "run_binding"]


class Place:
    """A memory that outputs may be left in."""

    def __init__(self, engine: Any, memory: str, index: int) -> None:
        self.names = (memory, index)
        make = getattr(getattr(engine, "OrtDevice", None), "make", None)
        inner = None if make is None else getattr(make(memory, index), "_get_c_device", None)
        self.inner = None if inner is None else inner()


class OrtLoop(Loop):
    """A loop over one binding, by the engine's inner objects: their public wrappers take half the time of a binding.

    Args:
        session: the session to run; its guard is held while the loop is made.
        places: the device's memory, and the host's.
        inputs: the names of the inputs, in the order in which values come.
        outputs: the names of the outputs.
        resident: the outputs that stay on the device.
    """

    def __init__(
        self,
        session: OrtEngineSession,
        places: tuple[Place, Place],
        inputs: Sequence[str],
        outputs: Sequence[str],
        resident: Collection[str],
    ) -> None:
        core = session.open_core()
        recipe = session.recipe
        here, host = places
        self._session = session
        self._io = core.session.io_binding()
        self._call, self._binding = binding_call(core.session, self._io)
        self._core = core
        self._unguarded = recipe.run_lock is nothing_to_hold and recipe.before_run is None and not session.takes_turns
        self._keeps_on_host = recipe.memory == HOST_MEMORY
        self._inputs = list(inputs)
        self._bound: list[Any] = [None] * len(inputs)  # a tensor, or (array, value) of fixed memory
        self._outputs = [(name, (here if name in resident else host).inner) for name in outputs]
        self._stays = [name in resident for name in outputs]
        self._order = sorted(range(len(inputs)), key=inputs.__getitem__)  # one signature, whoever runs
        self._names = list(outputs)
        self._resident = frozenset(resident)

    @staticmethod
    def possible(
        session: OrtEngineSession, places: tuple[Place, Place], inputs: Sequence[str], outputs: Sequence[str]
    ) -> bool:
        """Return whether the engine has the inner objects, and all values are tensors that numpy can hold."""
        kinds = [session.input_type(name) for name in inputs] + [session.output_type(name) for name in outputs]
        return (
            not session.recipe.device_graph
            and all(place.inner is not None for place in places)
            and hasattr(session.open_core().session, "_sess")
            and hasattr(session.engine.OrtValue.ortvalue_from_numpy(np.zeros(1)), "_ortvalue")
            and all(isinstance(kind, TensorType) and kind.dtype is not DType.STRING for kind in kinds)
            and not any(has_foreign_dtype(session.output_type(name)) for name in outputs)
        )

    def run(self, values: Sequence[Any]) -> list[Any]:
        """Bind what changed, run, and return the outputs; see `Loop.run`."""
        session = self._session
        if not self._unguarded:
            with session.guarded():
                feeds = {self._inputs[place]: values[place] for place in self._order}
                return session.run_values(self._core, self._names, feeds, self._resident, lambda: self._run(values))
        try:
            return self._run(values)
        except session.errors as err:
            raise running_error(err, session.device) from err

    def _run(self, values: Sequence[Any]) -> list[Any]:
        session, core, inner, bound = self._session, self._core, self._binding, self._bound
        session.open_core()
        bind = inner.bind_ortvalue_input
        kept = []
        for index, value in enumerate(values):
            last = bound[index]
            if value is last:
                continue
            if value.__class__ is OrtTensor:
                if value.core is not core and value.core is not None:
                    kept.append(value.value_for(core))
                bind(self._inputs[index], value.inner)
                bound[index] = value
            elif last.__class__ is not tuple or not self._written(last, value):
                bound[index] = self._fixed(self._inputs[index], value)
        bind = inner.bind_output
        for name, place in self._outputs:
            bind(name, place)
        self._call(inner, core.options)
        del kept
        vector = inner.get_outputs()
        on_host = self._keeps_on_host
        return [
            OrtTensor(session, vector[index], core, None, on_host) if stays else vector[index].numpy()
            for index, stays in enumerate(self._stays)
        ]

    def _fixed(self, name: str, value: Any) -> Any:
        """Bind an array, in memory that later arrays of its shape can be copied into where that is cheaper."""
        kind = self._session.input_type(name)
        plain = value.__class__ is np.ndarray and not has_foreign_dtype(kind)
        memory = self._session.bound_memory(name)
        if not plain or memory is None or (memory == HOST_MEMORY and value.nbytes > COPY_AT_MOST_BYTES):
            # Kept until the next run, which binds anew: its owner may give the array other memory meanwhile.
            return [bind_input(self._session, self._core, self._io, name, value)]
        own = np.array(value, order="C")
        found = self._session.engine.OrtValue.ortvalue_from_numpy(own, *memory)
        self._io.bind_ortvalue_input(name, found)
        return own, found, memory == HOST_MEMORY

    def _written(self, fixed: tuple[npt.NDArray[Any], Any, bool], value: Any) -> bool:
        """Copy an array into bound memory, if it is one of the same shape and dtype."""
        own, found, on_host = fixed
        if value.__class__ is not np.ndarray or value.shape != own.shape or value.dtype != own.dtype:
            return False
        if on_host:
            own[...] = value
        else:
            found.update_inplace(np.ascontiguousarray(value).reshape(value.shape))
        return True


def bind_input(session: OrtEngineSession, core: SessionCore, io: Any, name: str, value: Any) -> Any:
    """Bind one input and return what must live until the run has ended; the session's guard is held.

    Raises:
        EngineError: the value is a list, a map or of strings.
    """
    if isinstance(value, OrtTensor):
        bound, before = value.value_for(core)
        io.bind_ortvalue_input(name, bound)
        return bound, before
    kind = session.input_type(name)
    if isinstance(value, DeviceTensor):
        value = value.numpy()
    if not isinstance(value, np.ndarray) or not is_tensor_like(kind):
        raise EngineError(f"input {name!r} is {kind}, which cannot be bound; only tensors of numbers go with handles")
    bound, memory = to_ort_value(session.engine, name, value, kind)
    io.bind_ortvalue_input(name, bound)
    return bound, memory


def bind_output(io: Any, name: str, place: Place) -> None:
    """Have an output left somewhere; the public call makes the same object for the place each time."""
    inner = getattr(io, "_iobinding", None)
    if inner is None or place.inner is None:
        io.bind_output(name, *place.names)
    else:
        inner.bind_output(name, place.inner)


def run_binding(session: Any, io: Any, options: Any) -> None:
    """Run a binding once."""
    call, binding = binding_call(session, io)
    call(binding, options)
