"""What may be recorded: judged by nodes, types and memories before a run is, and by its outputs after it was."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import TensorType, ValueType
from rlx_ort.providers.base import NodeAssignment
from rlx_ort.providers.engine.values import has_foreign_dtype

__all__ = ["NotRecordedError", "check_replay", "host_work", "unrecordable"]

_CONTROL_FLOW = frozenset({"If", "Loop", "Scan", "SequenceMap"})
_RANDOM = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli", "Sampling"}
)
_SIZED_BY_DATA = frozenset(
    {"NonZero", "Compress", "Unique", "NonMaxSuppression", "BeamSearch", "GreedySearch", "WhisperBeamSearch"}
)
_KNOWN_DOMAINS = frozenset({"", "ai.onnx", "com.microsoft", "com.ms.internal.nhwc"})


class NotRecordedError(Exception):
    """Launches cannot be recorded; the message is the reason, for a report or an error."""


def host_work(ep_name: str, memory: str, assignments: Iterable[NodeAssignment], session: Any) -> str:
    """Return why the host takes part in a session's runs beyond launching kernels, or an empty string.

    Args:
        ep_name: the provider that all nodes must be on.
        memory: the name of the provider's memory.
        assignments: where the nodes are.
        session: ONNX Runtime's session.
    """
    for node in assignments:
        if node.provider != ep_name:
            return f"node {node.name or node.op_type!r} ({node.op_type}) runs on {node.provider}"
        if node.op_type in _CONTROL_FLOW:
            return f"node {node.name or node.op_type!r} is control flow ({node.op_type}), which the host decides"
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


class _Node(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def domain(self) -> str: ...
    @property
    def op_type(self) -> str: ...


def unrecordable(nodes: Iterable[_Node], types: Mapping[str, ValueType]) -> str:
    """Return why no run of a model can be recorded, judged by its nodes and inputs and outputs, or an empty string."""
    for node in nodes:
        what = (
            "is control flow, which the host decides"
            if node.op_type in _CONTROL_FLOW
            else "draws random numbers"
            if node.op_type in _RANDOM
            else "has outputs whose shapes depend on values"
            if node.op_type in _SIZED_BY_DATA
            else f"is of the domain {node.domain}"
            if node.domain not in _KNOWN_DOMAINS
            else ""
        )
        if what:
            return f"node {node.name or node.op_type!r} ({node.op_type}) {what}"
    for name, kind in types.items():
        if not isinstance(kind, TensorType) or kind.dtype is DType.STRING or has_foreign_dtype(kind):
            return f"{name!r} is {kind}, and only tensors of types that numpy has can be recorded"
    return ""


def check_replay(names: Sequence[str], wanted: Sequence[npt.NDArray[Any]], found: Sequence[npt.NDArray[Any]]) -> None:
    """Compare a replay's outputs with a plain run's: exactly, or to 32 roundings of the largest element for floats.

    Raises:
        NotRecordedError: they differ.
    """
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
