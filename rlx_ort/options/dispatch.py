"""Kernel dispatch: whether an op that has two ONNX forms is written as one fused node or as basic ones.

The *native* form is one fused operator, most of them of `com.microsoft`; the *common* form is made of standard basic
operators. Both give the same numbers within rounding. Native is preferred where the provider lists a kernel for it:
ONNX Runtime finds most normalisations and gated activations in their common form by itself, but not attention, which
takes half the time in its native form (12 heads of 64, batch 8, 128 places, CPU). A provider that compiles whole graphs
lists no kernels and gets the common form, and so does a model that is written to a file.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from rlx_ort import environment
from rlx_ort.errors import ConversionError, near_names

VARIABLE = "RLX_KERNEL_DISPATCH"


class KernelDispatchPolicy(enum.Enum):
    """Which form an op gets that has two."""

    PREFER_NATIVE = "prefer-native"
    """The native form where the provider has a kernel for it, else the common one."""
    FORCE_COMMON = "force-common"
    """The common form."""
    FORCE_NATIVE = "force-native"
    """The native form; a node that cannot have it is an error."""


_SPELLINGS = {
    KernelDispatchPolicy.FORCE_COMMON: ("common", "force_common", "ForceCommon"),
    KernelDispatchPolicy.FORCE_NATIVE: ("native", "force_native", "ForceNative"),
    KernelDispatchPolicy.PREFER_NATIVE: ("prefer_native", "PreferNative"),
}
_TEXTS = {text: policy for policy, texts in _SPELLINGS.items() for text in texts}


@dataclass(frozen=True, slots=True)
class KernelDispatch:
    """The policy, and the kinds of op for which it is overruled.

    Attributes:
        policy: the rule for every kind that is not named.
        force_common_kinds: kinds that get the common form.
        force_native_kinds: kinds that get the native form, even where they are among `force_common_kinds`.

    Raises:
        ConversionError: there is no such kind of op.
    """

    policy: KernelDispatchPolicy = KernelDispatchPolicy.PREFER_NATIVE
    force_common_kinds: frozenset[str] = frozenset()
    force_native_kinds: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name in ("force_common_kinds", "force_native_kinds"):
            given: Iterable[str] = getattr(self, name)
            kinds = frozenset([given] if isinstance(given, str) else given)
            object.__setattr__(self, name, kinds)
            if kinds:
                _check_kinds(name, kinds)

    @classmethod
    def from_env(cls) -> KernelDispatch:
        """Return the policy that `RLX_KERNEL_DISPATCH` names, `PREFER_NATIVE` when it is unset or empty.

        Raises:
            ConversionError: it names none. It is not ignored, because a typo must not change a measurement.
        """
        text = environment.get(VARIABLE)
        if text is None or not text.strip():
            return cls()
        policy = _TEXTS.get(text.strip())
        if policy is None:
            raise ConversionError(f"{VARIABLE} is {text!r}; allowed values, in lower case: {', '.join(_TEXTS)}")
        return cls(policy)

    def decomposes(self, kind: str, *, has_both: bool, claimed: bool) -> bool:
        """Return whether an op gets its common form; the first rule that applies decides.

        An op with one form keeps it. Then `force_native_kinds`, `force_common_kinds` and a policy that forces decide.
        Else the op is decomposed unless its native form is claimed.

        Args:
            kind: the kind of op.
            has_both: whether the op has a native form besides the common one.
            claimed: whether the provider lists a kernel for the native form.
        """
        if not has_both or kind in self.force_native_kinds:
            return False
        if kind in self.force_common_kinds or self.policy is KernelDispatchPolicy.FORCE_COMMON:
            return True
        return self.policy is not KernelDispatchPolicy.FORCE_NATIVE and not claimed

    def forces_native(self, kind: str) -> bool:
        """Return whether an op of that kind must not be decomposed even if its native form is not claimed."""
        return not self.decomposes(kind, has_both=True, claimed=False)


def _check_kinds(field: str, kinds: frozenset[str]) -> None:
    import rlx_ort.ir.graph  # noqa: F401  # loads every op family, so that all kinds are known
    from rlx_ort.ir.op import op_kinds

    known = op_kinds()
    for kind in sorted(kinds.difference(known)):
        raise ConversionError(f"{field} names {kind!r}, which is not an op kind; {near_names(kind, known)}")


@dataclass(frozen=True, slots=True)
class UnsupportedOp:
    """A node of the user's graph, by its id there, that a device does not take, and the reason."""

    index: int
    name: str
    kind: str
    reason: str

    def __str__(self) -> str:
        return f"node {self.index} {self.name!r} ({self.kind}): {self.reason}"
