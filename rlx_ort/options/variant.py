"""`Variant`: another way to run a graph on a device, which keeps the graph's meaning within rounding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from rlx_ort.options.compile_options import CompileOptions, Precision
from rlx_ort.options.dispatch import KernelDispatch, KernelDispatchPolicy

ALLOWED: Mapping[Precision, Sequence[Precision]] = {
    Precision.F32: (),
    Precision.TF32: (Precision.TF32,),
    Precision.F16: (Precision.TF32, Precision.F16),
    Precision.BF16: (Precision.TF32, Precision.BF16),
}
"""The precision of options -> those below f32 that a variant of them may compute in."""
TOLERANCES: Mapping[Precision, float] = {
    Precision.F32: 1e-4,
    Precision.TF32: 2e-3,
    Precision.F16: 5e-3,
    Precision.BF16: 2e-2,
}
"""The largest error of an output, over its largest value, in each precision that the caller allows."""
_USUAL = CompileOptions(kernel_dispatch=KernelDispatch())


@dataclass(frozen=True, slots=True)
class Variant:
    """Changes of `CompileOptions` as JSON values, by the name of the field.

    A mapping adds its entries to those of the caller. What the caller has set stays as it is; only the precision is
    always changed.

    Attributes:
        changes: field of `CompileOptions` -> its value; nothing for the options as they are.
        operators: the ONNX operators of which a graph must have one for the changes to matter; empty for any graph.
    """

    changes: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    operators: frozenset[str] = frozenset()

    def of(self, options: CompileOptions) -> CompileOptions:
        """Return the options with the changes.

        Raises:
            InputError: an option of an enum has no such value.
        """
        new: dict[str, Any] = {}
        for name, value in self.changes.items():
            given = getattr(options, name)
            if isinstance(value, Mapping):
                new[name] = MappingProxyType({**value, **given})
            elif name == "precision":
                new |= {name: Precision(value), "precision_policy": None}
            elif given == getattr(_USUAL, name):
                new[name] = KernelDispatch(KernelDispatchPolicy(value)) if name == "kernel_dispatch" else value
        return options.with_(**new)

    @property
    def entries(self) -> set[tuple[str, str, object]]:
        """Each single change: field, key within it, value."""
        mappings = {name: value for name, value in self.changes.items() if isinstance(value, Mapping)}
        nested = {(name, key, each) for name, value in mappings.items() for key, each in value.items()}
        return nested | {(name, "", value) for name, value in self.changes.items() if name not in mappings}

    def joined(self, other: Variant) -> Variant:
        """Return a variant with the changes of both, the other's where they differ."""
        mine = dict(self.changes)
        for name, value in other.changes.items():
            mine[name] = {**mine.get(name, {}), **value} if isinstance(value, Mapping) else value
        return Variant(MappingProxyType(mine))

    def __str__(self) -> str:
        return ", ".join(f"{key or name}={value}" for name, key, value in sorted(self.entries)) or "as usual"


def variants_of(name: str, values: Sequence[object], operators: Sequence[str] = ()) -> tuple[Variant, ...]:
    """Return a variant for each value of an option, `provider_options.NAME` and `session_config.KEY` among them."""
    mapping, dot, key = name.partition(".")
    return tuple(
        Variant(MappingProxyType({mapping: {key: value} if dot else value}), frozenset(operators)) for value in values
    )
