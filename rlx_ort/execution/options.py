"""`CompileOptions`: everything that decides how a graph becomes a session, besides the device."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

__all__ = ["CompileOptions", "OptimizationLevel", "PlacementRule", "Precision", "WeightSharing"]


class PlacementRule(enum.Enum):
    """How much of a graph must run on the device that was asked for."""

    STRICT = "strict"
    """Every node, except those ONNX Runtime pins to the CPU by design, such as shape computation."""
    ASSISTED = "assisted"
    """The CPU may take what the device does not; the cost model charges for the copies."""


class WeightSharing(enum.Enum):
    """How sessions share weights in memory."""

    PRIVATE = "private"
    """Each session keeps a prepacked copy of the weights its kernels repack: fastest, one copy a session."""
    RAW = "raw"
    """No prepacking: further sessions cost no memory; matrix products are 1.1 to 2 times slower on CPU."""
    PREPACKED = "prepacked"
    """One prepacked file in the compile cache, mapped by every session and process: fast, and one copy."""


class OptimizationLevel(enum.Enum):
    """ONNX Runtime's graph optimisation levels."""

    OFF = "off"
    BASIC = "basic"
    EXTENDED = "extended"
    LAYOUT = "layout"
    ALL = "all"


class Precision(enum.Enum):
    """The arithmetic asked for; `TF32` lets an accelerator round f32 products to 10 mantissa bits."""

    F32 = "f32"
    TF32 = "tf32"
    F16 = "f16"
    BF16 = "bf16"


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """How to compile a graph. Frozen: `with_` returns a changed copy.

    Attributes:
        precision: the arithmetic asked for.
        placement: the placement rule; None means strict for a device the caller named and assisted for an
            automatic choice.
        sharing: how sessions share weights.
        optimization: ONNX Runtime's graph optimisation level.
        dims: sizes for named dims; a bound dim becomes static, which some providers need and most like.
        intra_op_threads: threads inside one op on the CPU provider; None takes the process's share of the cores.
        spinning: whether idle worker threads spin; None leaves it to the provider.
        provider_options: provider option -> value, on top of what the provider module sets.
        session_config: ONNX Runtime session config entries; unknown keys are refused, since ONNX Runtime takes
            them without a word.
        profile_prefix: write an ONNX Runtime profile to files of this prefix.
    """

    precision: Precision = Precision.F32
    placement: PlacementRule | None = None
    sharing: WeightSharing = WeightSharing.PRIVATE
    optimization: OptimizationLevel = OptimizationLevel.ALL
    dims: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    intra_op_threads: int | None = None
    spinning: bool | None = None
    provider_options: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    session_config: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    profile_prefix: str | None = None

    def with_(self, **changes: object) -> CompileOptions:
        """Return a copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]  # dataclass checks the names
