"""The interface of a runner: descriptions of its inputs and outputs, and outputs that have names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeAlias

from rlx_ort.errors import InputError, near_names

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import numpy.typing as npt

    from rlx_ort.device import Device
    from rlx_ort.execution.placement import Placement
    from rlx_ort.execution.weights import WeightStore
    from rlx_ort.ir.dtype import DType
    from rlx_ort.ir.tensor import TensorData
    from rlx_ort.ir.types import Dim, ValueType


Inputs: TypeAlias = Mapping[str, Any]
"""Input name -> array, or any object with `__dlpack__`, such as a tensor of PyTorch."""

_SHOWN_VALUES = 6  # in a notebook


class ValueInfo(NamedTuple):
    """An input or output: its name, dtype, and dims, of which a number is fixed, a name free, and None unknown.

    `dtype` and `dims` are None for sequences and maps, and `dims` for tensors of unknown rank.
    """

    name: str
    dtype: DType | None
    dims: tuple[Dim, ...] | None


class Outputs(list[Any]):
    """The outputs of a run: a list in the order of the graph's outputs, also addressed by name, `outputs["y"]`.

    `dict(outputs)` has them by name. Slices and sums are plain lists.

    Attributes:
        device: the device that made them.
        placement: where each node ran; None in another process, and for runs of a warmed package that has not read its
            graph yet.
    """

    __slots__ = ()
    _places: Mapping[str, int] = {}
    device: ClassVar[Device]  # of the class, which is that of one session, so that a run spends no time on it
    placement: ClassVar[Placement | None] = None

    def __getitem__(self, key: Any) -> Any:
        """Return an output by its place or its name.

        Raises:
            InputError: no output has that name.
        """
        if key.__class__ is not str:
            return list.__getitem__(self, key)
        place = self._places.get(key)
        if place is None:
            raise InputError(f"the graph has no output {key!r}; {near_names(key, self._places)}")
        return list.__getitem__(self, place)

    def _repr_html_(self) -> str:
        """Show names, dtypes, shapes and first values in a notebook."""
        from rlx_ort.ir.notebook import html_table

        rows = [(name, *_shown(value)) for name, value in zip(self._places, self, strict=True)]
        return html_table("outputs", ("output", "dtype", "shape", "first values"), rows)

    def keys(self) -> list[str]:
        """Return the names, in order."""
        return list(self._places)

    def items(self) -> list[tuple[str, Any]]:
        """Return each name with its output, in order."""
        return list(zip(self._places, self, strict=True))

    def __repr__(self) -> str:
        named = ", ".join(f"{name}={value!r}" for name, value in self.items())
        return f"Outputs({named}, device={self.device.label!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by names, values and device, so that outputs cross a process pool."""
        return _restored, (self.keys(), self.device, list(self))


def outputs_class(names: Iterable[str], device: Device) -> type[Outputs]:
    """Return the class of outputs with these names on a device; making a list of it takes 0.1 us."""
    places = {name: place for place, name in enumerate(names)}
    return type("Outputs", (Outputs,), {"__slots__": (), "__module__": __name__, "_places": places, "device": device})


def inputs_by_name(
    names: Iterable[str], given: Sequence[Any], named: Mapping[str, Any], call: str = "runner"
) -> dict[str, Any]:
    """Return the inputs of a call: those given by place, or one mapping of them, and those given by name.

    Raises:
        InputError: some are missing, or more than the graph has, or one is given twice.
    """
    if len(given) == 1 and isinstance(given[0], Mapping):
        return {**given[0], **named}
    names = list(names)
    placed = dict(zip(names, given, strict=False))
    if len(given) > len(names) or placed.keys() & named.keys() or not {*names} <= {*placed, *named}:
        wanted = ", ".join(f"{name}=..." for name in names)
        raise InputError(f"the inputs, in order or by name, are {call}({wanted}); got {len(given)} in order")
    return {**placed, **named}


def _shown(value: Any) -> tuple[object, object, object]:
    """Return dtype, shape and first values of an output; type and length of a sequence, a map or a tensor elsewhere."""
    if hasattr(value, "ravel"):
        return value.dtype, list(value.shape), value.ravel()[:_SHOWN_VALUES]
    return type(value).__name__, getattr(value, "shape", None) or len(value), ""


class ParamSetter:
    """Runs a graph with the parameters of a store, which may be set at any time; the end of a `with` block closes it.

    `weights` and `close` are those of the subclass.
    """

    @property
    def weights(self) -> WeightStore:
        """The parameters' data."""
        raise NotImplementedError

    def set_param(self, name: str, array: npt.ArrayLike | TensorData, *, cast: bool = False) -> None:
        """Give a parameter new data on every device; see `WeightStore.set`.

        Raises:
            ParamError: no such parameter, another shape, or another dtype than declared.
        """
        self.weights.set(name, array, cast=cast)

    def set_param_typed(
        self, name: str, data: bytes | bytearray | memoryview, dtype: DType | str, *, cast: bool = False
    ) -> None:
        """Give a parameter the elements in raw little-endian bytes; see `WeightStore.set_typed`.

        Raises:
            ParamError: no such parameter, a wrong number of bytes, or another dtype than declared.
        """
        self.weights.set_typed(name, data, dtype, cast=cast)

    def close(self) -> None:
        """Close every session."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def update_params(self) -> AbstractContextManager[None]:
        """Return a `with` block whose `set_param` calls take effect together, when it ends without an error."""
        return self.weights.update()


def _restored(names: list[str], device: Device, values: list[Any]) -> Outputs:
    return outputs_class(names, device)(values)


def described(types: Mapping[str, ValueType]) -> list[ValueInfo]:
    """Return a description of each input or output, in order."""
    return [ValueInfo(name, getattr(kind, "dtype", None), _dims(kind)) for name, kind in types.items()]


def _dims(kind: ValueType) -> tuple[Dim, ...] | None:
    shape = getattr(kind, "shape", None)  # only tensors have one
    return None if shape is None else tuple(shape)
