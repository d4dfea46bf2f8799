"""Shipped kernel lists: what a built-in provider has kernels for, where ONNX Runtime cannot list them itself.

A list is a text file of `kernel_lists/`, one kernel a line, for one provider and one minor version of ONNX Runtime. It
also judges a provider that is not installed here. `scripts/kernel_lists.py` writes and checks the files.
"""

from __future__ import annotations

import functools
import importlib.resources.abc
import re
from collections.abc import Iterator
from dataclasses import dataclass

from rlx_ort.ir.dtype import DType
from rlx_ort.providers.base import KernelClaim

__all__ = ["KernelList", "listed_kernels", "parse_list"]

_FILE_NAME = re.compile(r"(?P<ep>\w+)-(?P<major>\d+)\.(?P<minor>\d+)\.txt")
_WRAPPED = re.compile(r"\w+\((.*)\)")


@dataclass(frozen=True, slots=True, eq=False)
class KernelList:
    """The kernels of one execution provider in one minor version of ONNX Runtime.

    Attributes:
        version: major and minor version of ONNX Runtime.
        claims: the kernels.
    """

    version: tuple[int, int]
    claims: tuple[KernelClaim, ...]

    @property
    def title(self) -> str:
        """How messages name the list."""
        return f"the kernel list of ONNX Runtime {self.version[0]}.{self.version[1]}"


def listed_kernels(ep_name: str, version: tuple[int, ...] | None) -> KernelList | None:
    """Return the newest shipped list that is not newer than a version, else the oldest; None where there is none.

    Without a version, for a provider that is not installed, the newest list counts.
    """
    versions = _versions(ep_name)
    if not versions:
        return None
    known = [found for found in versions if version is None or found <= version[:2]]
    return _read(ep_name, max(known) if known else min(versions))


@functools.cache
def _versions(ep_name: str) -> tuple[tuple[int, int], ...]:
    names = [entry.name for entry in _folder().iterdir()] if _folder().is_dir() else []
    found = [match for match in map(_FILE_NAME.fullmatch, names) if match and match["ep"] == ep_name]
    return tuple(sorted((int(match["major"]), int(match["minor"])) for match in found))


@functools.cache
def _read(ep_name: str, version: tuple[int, int]) -> KernelList:
    text = (_folder() / f"{ep_name}-{version[0]}.{version[1]}.txt").read_text(encoding="utf-8")
    return KernelList(version, tuple(parse_list(text)))


def parse_list(text: str) -> Iterator[KernelClaim]:
    """Yield the kernels of a list: `ai.onnx Abs 6-12 T=f32,f64`, one a line; `#` starts a comment line.

    Raises:
        ValueError: a line is not of this form.
    """
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        domain, op_type, versions, *constraints = line.split()
        first, _, last = versions.removesuffix("+").partition("-")
        end = None if versions.endswith("+") else int(last or first)
        dtypes = {}
        for constraint in constraints:
            name, _, types = constraint.partition("=")
            dtypes[name] = frozenset(_dtype(code) for code in types.split(","))
        yield KernelClaim("" if domain == "ai.onnx" else domain, op_type, int(first), end, dtypes)


def _dtype(code: str) -> DType:
    wrapped = _WRAPPED.fullmatch(code)
    return _dtype(wrapped[1]) if wrapped else DType(code)


def _folder() -> importlib.resources.abc.Traversable:
    return importlib.resources.files("rlx_ort.providers") / "kernel_lists"
