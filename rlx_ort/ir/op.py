"""The base of ops, and the checks that ops share. Families live in `rlx_ort.ir.ops`.

To add an op: write its class in a family file, with its builder, and one lowering in `rlx_ort.converters.to_onnx`.

The checks of `Op` raise `GraphVerifyError` with the op's kind, the wanted and the given.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, ClassVar, TypeAlias, dataclass_transform

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import Dim, Shape, TensorType, ValueType, broadcast_shapes

OpTypes: TypeAlias = Sequence["ValueType | None"]
"""Types of an op's inputs; None stands for an optional input that is absent."""

_classes: dict[str, type[Op]] = {}


def named(what: str, known: Iterable[str], *, default: Any = MISSING, aliases: Mapping[str, str] | None = None) -> Any:
    """Return a field of an op that holds one of the known names, written as `known_name` accepts it, or None."""
    return field(default=default, metadata={"named": (what, tuple(known), aliases or {})})


@dataclass_transform(frozen_default=True, field_specifiers=(field, named))
class _OpType(type):
    """Makes each op class a frozen dataclass with slots."""

    def __new__(cls, name: str, bases: tuple[type, ...], members: dict[str, Any], **keywords: str) -> Any:
        """Return the class; `dataclass` makes a second one through this method, in order to add the slots."""
        made: Any = super().__new__(cls, name, bases, members, **keywords)
        if "__slots__" in members:
            return made
        made = dataclass(frozen=True, slots=True)(made)
        made._named = tuple((item.name, *item.metadata["named"]) for item in fields(made) if "named" in item.metadata)
        return made


class Op(metaclass=_OpType):
    """Base of every op. A subclass is made a frozen dataclass, without the decorator; its fields are the attributes.

    `kind` is the op's name in reports, JSON and claim sets. It defaults to the class name; a class whose name begins
    with an underscore is a base and no op. An op is registered when its class is defined. Its type rule is declared in
    one of two ways:

    - An op whose inputs are all tensors, with one result, names its inputs in the class line and defines `_result`::

          class Gather(Op, operands="table indices:indices"):
              def _result(self, table: TensorType, indices: TensorType) -> TensorType: ...

      A name may have a rule for the dtype, checked by the methods below: `x:float`, `x:number`, `x:indices`, or a
      dtype as in `x:i8`; `own` and `cast` are for the builder. A `?` at the end marks an input that may be left out.
      `_result` checks the types of the inputs and returns that of the result, None for the type of the first input.
    - Any other op sets `arity` and defines `infer`.

    With `builder` in the class line, graphs get a method that adds the op; see `rlx_ort.ir.building`.
    """

    kind: ClassVar[str] = ""
    arity: ClassVar[tuple[int, int | None]] = (0, None)
    """Smallest and largest number of inputs; None for no limit."""
    operands: ClassVar[tuple[str, ...]] = ()
    """Names of the inputs, as messages print them."""
    builders: ClassVar[str] = ""
    """The builders of the op, as the class line declares them."""
    promotes: ClassVar[bool] = False
    """Whether its builder casts both operands to the dtype that `promote` names."""
    is_leaf: ClassVar[bool] = False
    """Whether the op only names data: inputs, parameters, constants and captures cost nothing."""
    _rules: ClassVar[tuple[tuple[int, str], ...]] = ()
    _named: ClassVar[tuple[tuple[str, str, tuple[str, ...], Mapping[str, str]], ...]] = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __init_subclass__(cls, operands: str = "", builder: str = "") -> None:
        """Register the op by its kind. A second class replaces the first, since dataclass slots make a new class."""
        if "kind" not in cls.__dict__:
            cls.kind = "" if cls.__name__.startswith("_") else cls.__name__
        if operands:
            names = operands.split()
            pairs = [name.rstrip("?").partition(":") for name in names]
            cls.operands = tuple(name for name, _, _ in pairs)
            cls._rules = tuple((place, rule) for place, (_, _, rule) in enumerate(pairs) if rule)
            cls.arity = (sum(not name.endswith("?") for name in names), len(names))
        if builder:
            cls.builders = builder
        if cls.kind:  # bases have none
            _classes[cls.kind] = cls

    def __post_init__(self) -> None:
        for attribute, what, known, aliases in self._named:
            name = getattr(self, attribute)
            if name is not None:
                object.__setattr__(self, attribute, known_name(what, aliases.get(name, name), known))

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the types of the results, one per output.

        Raises:
            GraphVerifyError: the inputs do not fit the op; the message has the input and the reason.
        """
        if not self.operands:
            raise NotImplementedError(f"{type(self).__name__} does not infer its result")
        tensors = self._tensors(inputs)
        return (self._result(*tensors) or tensors[0],)

    def _tensors(self, inputs: OpTypes) -> list[TensorType]:
        """Return the types of the operands, which must have the number and the dtypes that the class line declares."""
        tensors = [value for value in inputs if isinstance(value, TensorType)]
        if not self.arity[0] <= len(tensors) == len(inputs) <= len(self.operands):
            for place, name in enumerate(self.operands[: max(len(inputs), self.arity[0])]):
                tensor_input(self, inputs, place, name)  # raises for an input that is absent or no tensor
            raise GraphVerifyError(f"{self.kind} takes {self.arity_text()} inputs, got {len(inputs)}")
        for place, rule in self._rules:
            if place < len(tensors):
                self._expect(tensors[place], self.operands[place], rule)
        return tensors

    def _expect(self, value: TensorType, name: str, rule: str) -> None:
        """Check an input by the rule that the class line has for it."""
        if rule == "float":
            self.expect_float(value, name)
        elif rule == "number":
            self.expect_number(value, name if len(self.operands) > 1 else "the input")
        elif rule == "indices":
            if not (value.dtype.is_float or value.dtype.is_integer):  # the fraction of a float is dropped
                raise GraphVerifyError(f"{self.kind} needs integers as {name}, got {value.dtype.value}")
        elif rule not in ("own", "cast", value.dtype.value):
            raise GraphVerifyError(f"{self.kind} needs {name} as {rule}, got {value.dtype.value}; cast it first")

    def _result(self, *operands: Any, **options: Any) -> TensorType | None:
        """Check the types of the operands and return that of the result; None stands for that of the first operand."""
        return None

    def bodies(self) -> tuple[Any, ...]:
        """Return the subgraphs the op carries, in the order of its fields."""
        return ()

    def describe(self) -> str:
        """Return the op with its attributes, as messages and reports print it."""
        return repr(self)

    @classmethod
    def arity_text(cls) -> str:
        """Return the number of inputs the op takes, as messages print it."""
        least, most = cls.arity
        return f"at least {least}" if most is None else str(least) if least == most else f"{least} to {most}"

    def normal_axis(self, axis: int, rank: int) -> int:
        """Return `axis` counted from the front."""
        if not -rank <= axis < rank:
            raise GraphVerifyError(f"{self.kind} has axis {axis}, but its input has rank {rank}")
        return axis % rank

    def axis_tuple(self, axes: Iterable[int], rank: int) -> tuple[int, ...]:
        """Return axes counted from the front, in order."""
        normal = tuple(self.normal_axis(axis, rank) for axis in axes)
        if len(set(normal)) != len(normal):
            raise GraphVerifyError(f"{self.kind} names an axis twice: {tuple(axes)}")
        return normal

    def same_dtype(self, *operands: TensorType, names: Sequence[str] = ()) -> DType:
        """Return the dtype that operands share; `names` are those of the op unless given."""
        if any(value.dtype is not operands[0].dtype for value in operands):
            dtypes = ", ".join(
                f"{name} {value.dtype.value}" for name, value in zip(names or self.operands, operands, strict=False)
            )
            raise GraphVerifyError(f"{self.kind} needs inputs of one dtype, got {dtypes}; cast them first")
        return operands[0].dtype

    def expect_float(self, value: TensorType, name: str) -> None:
        """Check that a tensor holds real floating-point numbers."""
        if not value.dtype.is_float:
            raise GraphVerifyError(
                f"{self.describe()} needs floating-point numbers, {name} is {value.dtype.value}; cast it"
            )

    def expect_number(self, value: TensorType, name: str = "the input") -> None:
        """Check that a tensor holds integers or real floating-point numbers."""
        if not (value.dtype.is_float or value.dtype.is_integer):
            raise GraphVerifyError(f"{self.kind} takes numbers, not {value.dtype.value}; cast {name} first")

    def expect_rank(self, value: TensorType, ranks: Sequence[int], name: str) -> Shape:
        """Return the shape of a tensor that must have one of the given ranks."""
        if value.shape is None or value.shape.rank not in ranks:
            wanted = " or ".join(map(str, ranks))
            raise GraphVerifyError(f"{self.kind} needs its input {name} with rank {wanted}, got {value}")
        return value.shape

    def expect_dim(self, dim: Dim, wanted: Dim, what: str) -> None:
        """Check that two dimensions can be equal; a symbol fits any size."""
        if isinstance(dim, int) and isinstance(wanted, int) and dim != wanted:
            raise GraphVerifyError(f"{self.kind} needs {what} to be {wanted}, got {dim}")

    def expect_dims(self, dims: Sequence[Dim], wanted: Sequence[Dim], name: str) -> None:
        """Check the dimensions of an input of the right rank one by one; see `expect_dim`."""
        for place, (dim, other) in enumerate(zip(dims, wanted, strict=True)):
            self.expect_dim(dim, other, f"dimension {place} of {name}")

    def broadcast(self, shapes: Sequence[Shape | None]) -> Shape | None:
        """Return the broadcast shape, None when a rank is unknown."""
        known = [shape for shape in shapes if shape is not None]
        try:
            result = broadcast_shapes(known)
        except ValueError as err:
            raise GraphVerifyError(f"{self.kind}: {err}") from err
        return result if len(known) == len(shapes) else None


def op_class(kind: str) -> type[Op]:
    """Return the op class of a kind; KeyError if no op has it."""
    return _classes[kind]


def op_kinds() -> tuple[str, ...]:
    """Return every kind that has an op class, sorted; `rlx_ort.ir.graph` brings the classes of this package."""
    return tuple(sorted(_classes))


def tensor_input(op: Op, inputs: OpTypes, index: int, name: str) -> TensorType:
    """Return input `index` as a tensor type."""
    value = inputs[index] if index < len(inputs) else None
    if not isinstance(value, TensorType):
        raise GraphVerifyError(f"{op.kind} needs a tensor as input {index} ({name}), got {value or 'nothing'}")
    return value


def known_shape(op: Op, value: TensorType, name: str) -> Shape:
    """Return the shape of a tensor type."""
    if value.shape is None:
        raise GraphVerifyError(f"{op.kind} needs the rank of its input {name}; give the value a shape first")
    return value.shape


def known_name(what: str, name: str, known: Sequence[str]) -> str:
    """Return the entry of `known` that matches a name; case, hyphens and underscores are ignored."""
    plain = name.strip().lower().replace("-", "_")
    for candidate in known:
        if candidate.replace("_", "") == plain.replace("_", ""):
            return candidate
    close = difflib.get_close_matches(plain, known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise GraphVerifyError(f"unknown {what} {name!r}; {hint}known: {', '.join(known)}")


Sizes: TypeAlias = int | Sequence[int]
"""An attribute of windows: one number for all axes, or one for each axis."""


def counts(what: str, value: Sizes, rank: int, least: int = 0) -> tuple[int, ...]:
    """Return an attribute as one number for each of `rank` axes; one number given stands for all of them."""
    numbers = (value,) * rank if isinstance(value, int) else tuple(int(number) for number in value)
    if len(numbers) != rank or min(numbers, default=least) < least:
        raise GraphVerifyError(f"{what} must be one or {rank} whole numbers of at least {least}, got {value}")
    return numbers


def join_dims(dims: Iterable[Dim]) -> Dim:
    """Return the one dimension that equal dimensions share: a size if one is known, else a name if all agree."""
    distinct = list(dict.fromkeys(dims))
    sizes = [dim for dim in distinct if isinstance(dim, int)]
    if sizes:
        return sizes[0]
    return distinct[0] if len(distinct) == 1 else None


def reshaped(op: Op, source: Shape | None, target: Sequence[Dim]) -> Shape:
    """Return the shape of a reshape to `target`, in which one dimension may be -1 or None and is computed.

    Symbols on both sides cancel, so `("batch", 12)` to `("batch", -1, 4)` gives 3 for the open dimension.
    """
    open_places = [place for place, dim in enumerate(target) if dim is None or dim == -1]
    if len(open_places) > 1:
        raise GraphVerifyError(f"{op.kind} to {list(target)}: at most one dimension may be -1")
    dims = [dim for place, dim in enumerate(target) if place not in open_places]
    if any(isinstance(dim, int) and dim < 0 for dim in dims):
        raise GraphVerifyError(f"{op.kind} to {list(target)}: a dimension is a size, a symbol or -1")
    open_dim = None if source is None else _left_over(op, source, dims, bool(open_places))
    return Shape(open_dim if place in open_places else dim for place, dim in enumerate(target))


def _left_over(op: Op, source: Shape, dims: Sequence[Dim], is_open: bool) -> Dim:
    """Return `source` divided by `dims`, None when the quotient is unknown."""
    if not is_open and source == tuple(dims):
        return None
    before = Counter(dim for dim in source if not isinstance(dim, int))
    after = Counter(dim for dim in dims if not isinstance(dim, int))
    only_before, only_after = before - after, after - before
    size = math.prod(dim for dim in source if isinstance(dim, int))
    divisor = math.prod(dim for dim in dims if isinstance(dim, int))
    if None in before or only_after or sum(only_before.values()) > 1:
        return None
    if only_before:
        return next(iter(only_before)) if is_open and size == divisor else None
    fits = (divisor != 0 and size % divisor == 0) if is_open else size == divisor
    if not fits:
        hint = "; -1 cannot be inferred for an empty tensor, give its size" if is_open and size == divisor == 0 else ""
        raise GraphVerifyError(
            f"{op.kind} cannot turn {source} into {Shape(dims)}{' with -1' if is_open else ''}{hint}"
        )
    return size // divisor if is_open else None
