"""`PrecisionPolicy`: the dtype in which each class of ops computes values declared as f32."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from rlx_ort.errors import ConversionError
from rlx_ort.ir.dtype import DType


class OpClass(enum.Enum):
    """The classes of ops a policy tells apart; ops of no class always stay f32."""

    COMPUTE = "compute"
    """Matrix products, convolutions, attention."""
    REDUCTION = "reduction"
    """Sums, softmax, normalisations, pooling: many numbers become one."""
    ELEMENTWISE = "elementwise"
    """One number in, one out, as activations, arithmetic and comparisons."""
    DATA_MOVEMENT = "data-movement"
    """Reshapes, slices, gathers: numbers change place, not value."""
    BOUNDARY = "boundary"
    """The inputs and outputs of the graph, which the caller sees."""


_DTYPES = frozenset({DType.F32, DType.F16, DType.BF16})


@dataclass(frozen=True, slots=True)
class PrecisionPolicy:
    """Op class -> f32, f16 or bf16. Only tensors that the graph declares as f32 are ever touched.

    Unless `boundary` says otherwise, inputs and outputs keep the dtype the graph declares.

    Raises:
        ConversionError: a class is given another dtype.
    """

    compute: DType = DType.F32
    reduction: DType = DType.F32
    elementwise: DType = DType.F32
    data_movement: DType = DType.F32
    boundary: DType = DType.F32

    def __post_init__(self) -> None:
        for op_class in OpClass:
            dtype = self.of(op_class)
            if dtype not in _DTYPES:
                raise ConversionError(f"a precision policy takes f32, f16 or bf16; {op_class.value} is given {dtype!r}")

    @classmethod
    def always_f32(cls) -> PrecisionPolicy:
        """Return the policy that changes nothing."""
        return cls()

    @classmethod
    def always_f16(cls) -> PrecisionPolicy:
        """Return f16 for every class, inputs and outputs of the graph included."""
        return cls(*(DType.F16,) * len(OpClass))

    @classmethod
    def auto_mixed_conservative(cls) -> PrecisionPolicy:
        """Return f16 for all but reductions and the boundary."""
        return cls(DType.F16, DType.F32, DType.F16, DType.F16)

    @classmethod
    def auto_mixed(cls) -> PrecisionPolicy:
        """Return f16 inside the graph, f32 at its boundary."""
        return cls(*(DType.F16,) * 4)

    @classmethod
    def auto_mixed_bf16(cls) -> PrecisionPolicy:
        """Return bf16 inside the graph, f32 at its boundary."""
        return cls(*(DType.BF16,) * 4)

    @classmethod
    def custom(cls, dtypes: Mapping[OpClass, DType | str]) -> PrecisionPolicy:
        """Return a policy of your own; classes that are left out are f32."""
        return cls(**{item.name.lower(): DType.parse(dtype) for item, dtype in dtypes.items()})

    def of(self, op_class: OpClass) -> DType:
        """Return the dtype of a class."""
        dtype: DType = getattr(self, op_class.name.lower())
        return dtype

    @property
    def is_f32(self) -> bool:
        """Whether the policy changes nothing."""
        return all(self.of(op_class) is DType.F32 for op_class in OpClass)
