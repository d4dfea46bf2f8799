"""Finds the lowerings of an op: they stand in the file here that has the name of the op's family in `rlx_ort.ir.ops`.

A family is imported when a graph first has an op of it, so a model pays, in time and memory, for the ops it uses.
"""

from __future__ import annotations

import functools
import importlib

from rlx_ort.ir.op import Op

__all__ = ["load_family"]

_OPS = "rlx_ort.ir.ops."
_WITHOUT = frozenset({"leaf", "onnx", "refused"})
"""Families that are written by the emitter itself, or never."""
_MORE = {"control": "custom", "conv": "volume", "linalg": "solve"}
"""Families with lowerings in a second file."""


def load_family(op: type[Op]) -> None:
    """Import the lowerings, common and native, of the family an op belongs to; ops from outside bring their own."""
    _load(op.__module__)


@functools.cache
def _load(module: str) -> None:
    family = module.removeprefix(_OPS)
    if family == module or family in _WITHOUT:
        return
    here = __name__.rpartition(".")[0]
    for name in (family, _MORE.get(family, family), "native"):
        importlib.import_module(f"{here}.{name}")
