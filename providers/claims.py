"""Which operators a provider has kernels for: by ONNX Runtime's registry, else by a shipped kernel list.

The registry answers in milliseconds and agrees with the real assignment in 99 of 100 cases. It leaves out attributes
and the ONNX functions that ONNX Runtime expands into kernels; only a session proves a claim.

A shipped list is a text file of `kernel_lists/` for one provider and one minor version of ONNX Runtime, with a line for
the kernels of an operator that take the same types: the oldest whole, each later one as its differences from the list
before it. It stands in for a registry that cannot be read, and judges providers that are not installed.
`scripts/kernel_lists.py` writes and checks the files.
"""

from __future__ import annotations

import functools
import importlib.resources.abc
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from rlx_ort.converters.to_onnx.dispatch import KernelSet, has_choice
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.types import TensorType, ValueType, elements
from rlx_ort.options.compile_options import CompileOptions
from rlx_ort.providers.base import KernelClaim, Provider
from rlx_ort.providers.engine import runtime
from rlx_ort.providers.engine.values import element_dtypes

_Types: TypeAlias = Sequence[ValueType | None]
_OPEN_END = 2147483647  # INT_MAX in KernelDef
_LISTS = 64
_ANSWERS_A_LIST = 4096
# `get_all_opkernel_def` loads the library of every provider of the wheel and ends the process (SIGSEGV) when one does
# not load, as TensorRT's does on most machines with onnxruntime-gpu. These are built into the core.
_LISTS_SAFELY = frozenset({"CPUExecutionProvider", "AzureExecutionProvider", "DmlExecutionProvider"})
_lists: dict[int, _Known] = {}
_lists_lock = threading.Lock()

_FILE_NAME = re.compile(r"(?P<ep>\w+)-(?P<major>\d+)\.(?P<minor>\d+)\.txt")
_WRAPPED = re.compile(r"\w+\((.*)\)")


@functools.cache
def kernels_of(ep_name: str) -> tuple[KernelClaim, ...] | None:
    """Return the kernels of an execution provider, or None when this ONNX Runtime cannot list them."""
    module = runtime.bindings()
    registered = getattr(module, "get_registered_ep_kernel_defs", None)  # since ONNX Runtime 1.25
    if registered is not None:
        try:
            return tuple(_claim(kernel) for kernel in registered(ep_name)) or None
        except runtime.engine_exceptions():
            return None  # the provider has no kernel registry
    if not _LISTS_SAFELY.issuperset(runtime.available_eps()):
        return None
    return tuple(_claim(kernel) for kernel in module.get_all_opkernel_def() if kernel.provider == ep_name) or None


def takes(
    claims: Sequence[KernelClaim], domain: str, op_type: str, version: int, inputs: _Types = (), outputs: _Types = ()
) -> bool:
    """Return whether a kernel takes a node: its operator at the model's opset version and its element types.

    `inputs` and `outputs` are the node's types, None where absent; types that are unknown fit every kernel.
    """
    known = _known_of(claims)
    # Sizes do not matter to a kernel, and a graph has few operators with few element types.
    asked = (domain, op_type, version, tuple(map(_look, inputs)), tuple(map(_look, outputs)))
    answer = known.answers.get(asked)
    if answer is None:
        since = schema_version(domain, op_type, version)
        dtypes = _constrained(domain, op_type, since, inputs, outputs)
        candidates = known.by_operator.get((domain, op_type), ())
        answer = any(_fits(claim, since, dtypes) for claim in candidates)
        if len(known.answers) < _ANSWERS_A_LIST:
            known.answers[asked] = answer
    return answer


def kernel_set(provider: Provider, graph: Graph, options: CompileOptions | None = None) -> KernelSet | None:
    """Return the kernels that the model of a graph may count on; None if they cannot be listed, or do not matter."""
    fused = options is not None and options.fusion
    claims = provider.claims() if fused or has_choice(graph) else None
    if claims is None:
        return None

    def trusted(domain: str, op_type: str, version: int, inputs: _Types, outputs: _Types) -> bool:
        if (domain, op_type) in provider.distrusted_kernels:
            return False
        return takes(claims, domain, op_type, version, inputs, outputs)

    return KernelSet(provider.ep_name or provider.name, _known_of(claims), trusted, provider.slow_kernels)


@functools.cache
def schema_version(domain: str, op_type: str, opset: int) -> int:
    """Return the version an operator was last changed in, up to an opset; the opset itself for unknown operators."""
    known = [version for version in _schemas().get((domain, op_type), {}) if version <= opset]
    return max(known, default=opset)


def _fits(claim: KernelClaim, since: int, dtypes: Sequence[tuple[frozenset[str], frozenset[DType]]]) -> bool:
    # https://github.com/microsoft/onnxruntime/blob/main/onnxruntime/core/framework/kernel_registry.cc (IsKernelDef...)
    # A kernel with an open end takes only the version it starts at: a later one may change anything.
    if claim.first_version != since and not claim.first_version <= since <= (claim.last_version or 0):
        return False
    return all(wanted <= claim.dtypes[name] for names, wanted in dtypes for name in names & claim.dtypes.keys())


def _constrained(
    domain: str, op_type: str, since: int, inputs: _Types, outputs: _Types
) -> list[tuple[frozenset[str], frozenset[DType]]]:
    """Pair the names a kernel may constrain a value by (type parameter or formal name) with its element types."""
    schema = _schemas().get((domain, op_type), {}).get(since)
    if schema is None:
        return []
    pairs = []
    for formals, kinds in ((schema.inputs, inputs), (schema.outputs, outputs)):
        for position, kind in enumerate(kinds):
            dtypes = elements(kind)
            if dtypes and formals:
                formal = formals[min(position, len(formals) - 1)]  # the last one may be variadic
                pairs.append((frozenset((formal.typeStr, formal.name)), dtypes))
    return pairs


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """A list of claims, indexed by operator, with remembered answers. Holding the list keeps its id from reuse."""

    claims: Sequence[KernelClaim]
    by_operator: Mapping[tuple[str, str], Sequence[KernelClaim]]
    answers: dict[object, bool]


def _known_of(claims: Sequence[KernelClaim]) -> _Known:
    """Return the index of a list of claims, found by the list's identity: hashing its thousands of claims is slow."""
    known = _lists.get(id(claims))
    if known is not None:
        return known
    grouped: dict[tuple[str, str], list[KernelClaim]] = {}
    for claim in claims:
        grouped.setdefault((claim.domain, claim.op_type), []).append(claim)
    with _lists_lock:
        known = _lists[id(claims)] = _Known(claims, grouped, {})
        while len(_lists) > _LISTS:
            _lists.pop(next(iter(_lists)))
    return known


def _look(kind: ValueType | None) -> object:
    """Return the part of a type that kernels constrain: a tensor's element type, all of any other."""
    return kind.dtype if type(kind) is TensorType else kind


@functools.cache
def _schemas() -> dict[tuple[str, str], dict[int, Any]]:
    """Return every operator schema of this ONNX Runtime by (domain, operator) and version."""
    schemas: dict[tuple[str, str], dict[int, Any]] = {}
    for schema in runtime.bindings().get_all_operator_schema():
        domain = "" if schema.domain == "ai.onnx" else schema.domain
        schemas.setdefault((domain, schema.name), {})[schema.since_version] = schema
    return schemas


def _claim(kernel: Any) -> KernelClaim:
    first, last = kernel.version_range
    domain = "" if kernel.domain == "ai.onnx" else kernel.domain
    dtypes = {name: element_dtypes(types) for name, types in kernel.type_constraints.items()}
    return KernelClaim(domain, kernel.op_name, first, None if last == _OPEN_END else last, dtypes)


class KernelList(NamedTuple):
    """The kernels of one execution provider in one minor version of ONNX Runtime."""

    version: tuple[int, int]
    claims: tuple[KernelClaim, ...]


def listed_kernels(ep_name: str, version: tuple[int, ...] | None) -> KernelList | None:
    """Return the newest shipped list that is not newer than a version, else the oldest; None where there is none.

    Without a version, for a provider that is not installed, the newest list counts.
    """
    versions = _versions(ep_name)
    if not versions:
        return None
    known = [minor for minor in versions if version is None or minor <= version[:2]]
    return _read(ep_name, max(known) if known else min(versions))


@functools.cache
def _versions(ep_name: str) -> tuple[tuple[int, int], ...]:
    names = [entry.name for entry in _folder().iterdir()] if _folder().is_dir() else []
    matches = [match for match in map(_FILE_NAME.fullmatch, names) if match and match["ep"] == ep_name]
    return tuple(sorted((int(match["major"]), int(match["minor"])) for match in matches))


@functools.cache
def _read(ep_name: str, version: tuple[int, int]) -> KernelList:
    return KernelList(version, tuple(parse_list(list_text(ep_name, version))))


def list_text(ep_name: str, version: tuple[int, int]) -> str:
    """Return the whole text of a shipped list."""
    text = ""
    for major, minor in _versions(ep_name):
        if (major, minor) <= version:
            text = whole_list((_folder() / f"{ep_name}-{major}.{minor}.txt").read_text(encoding="utf-8"), text)
    return text


def whole_list(stored: str, before: str) -> str:
    """Return the whole text of a list from what is stored of it and the whole list before it.

    Raises:
        ValueError: the list removes a line that the one before it lacks.
    """
    lines = stored.splitlines()
    comments = [line for line in lines if line.startswith("#")]
    removed, added = (
        {kernel for line in lines if line.startswith(sign) for kernel in _kernels_of_line(line[2:])} for sign in "-+"
    )
    kernels = {kernel for line in lines if not line.startswith(("#", "-", "+")) for kernel in _kernels_of_line(line)}
    if removed or added:
        kernels |= {line for line in before.splitlines() if not line.startswith("#")}
        if not removed <= kernels:
            raise ValueError(f"a kernel list removes {min(removed - kernels)!r}, which the list before it lacks")
        kernels = kernels - removed | added
    return "\n".join([*comments, *sorted(kernels, key=_line_order)]) + "\n"


def _kernels_of_line(line: str) -> Iterator[str]:
    """Yield a line of its own for each range of versions: `ai.onnx Abs 6-12,13+ T=f32` has two."""
    domain, op_type, versions, *types = line.split()
    for version in versions.split(","):
        yield " ".join([domain, op_type, version, *types])


def _line_order(line: str) -> tuple[str, str, int, int, str]:
    """Return the key that sorts the lines of a list: domain, operator, versions as numbers, the rest as text."""
    domain, op_type, versions = line.split()[:3]
    first, _, last = versions.removesuffix("+").partition("-")
    return domain, op_type, int(first), _OPEN_END if versions.endswith("+") else int(last or first), line


def parse_list(text: str) -> Iterator[KernelClaim]:
    """Yield the kernels of a list: `ai.onnx Abs 6-12 T=f32,f64`, one a line; `#` starts a comment line."""
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
