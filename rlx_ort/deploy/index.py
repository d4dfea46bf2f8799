"""`rlx.json`: settings of a package, and size and digest of its files. Read strictly, written in one encoding."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rlx_ort import fields
from rlx_ort.deploy.names import INDEX, SIGNATURE, check_names
from rlx_ort.device import Device
from rlx_ort.errors import IntegrityError
from rlx_ort.fields import Fields
from rlx_ort.ir.dtype import DType
from rlx_ort.options.compile_options import Precision
from rlx_ort.selection.policy import Adaptive, Benchmark, CostModel, DevicePickStrategy, DevicePolicy

FORMAT = "rlx_ort package"
"""The `format` entry."""
SCHEMA = 1
"""Version of the index; a reader takes its own and older ones."""
REQUIRABLE = ("rlx_ort", "onnxruntime")
"""What a package may require a lowest version of."""

_DIGEST = re.compile(r"[0-9a-f]{64}")
_PLAIN = ("name", "version", "serial", "graph", "license", "verify_on_first_use")
_KEYS = (
    *("format", "schema", "dims", "buckets", "policy", "requires", "provenance", "golden", "variants", "tensors"),
    *("files", *_PLAIN),
)


class FileEntry(NamedTuple):
    """A file of the package: its size in bytes, SHA-256 and CRC-32. A zip archive repeats the CRC-32."""

    size: int
    sha256: str
    crc32: int


class StoredTensor(NamedTuple):
    """Place, type and digest of a tensor. Offsets count from the beginning of its file."""

    file: str
    offset: int
    size: int
    dtype: DType
    shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True, slots=True)
class Variant:
    """How the model runs on a device.

    `device` is a label or a kind. `rounded` maps a parameter to the stored tensor that holds it in the dtype which this
    precision wants.
    """

    device: str
    precision: Precision
    rounded: Mapping[str, str] = field(default_factory=dict)


class Case(NamedTuple):
    """A golden case: input and output names -> stored tensors."""

    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


@dataclass(frozen=True)
class Settings:
    """The settings of a package, which its maker chooses and its index repeats.

    Attributes:
        name: its name; empty in a `Recipe` takes that of the graph.
        version: its version, free text.
        serial: a number that grows with each release; `open_package(..., min_serial=N)` refuses older ones.
        policy: which devices may run it.
        dims: sizes of named dims.
        buckets: a named dim and half-open ranges of lengths that share a compiled graph, or None.
        tolerances: precision -> largest error of a golden output; see `numerics.relative_error` and
                `golden.TOLERANCES`.
        verify_on_first_use: whether a machine runs the golden cases before it trusts a device.
        license: an SPDX expression, or any text.
        provenance: the origin of the model, as free entries.
        requires: `rlx_ort` or `onnxruntime` -> lowest version.
    """

    name: str = ""
    version: str = ""
    serial: int = 0
    policy: DevicePolicy = field(default_factory=DevicePolicy)
    dims: Mapping[str, int] = field(default_factory=dict)
    buckets: tuple[str, tuple[tuple[int, int], ...]] | None = None
    tolerances: Mapping[str, float] = field(default_factory=dict)
    verify_on_first_use: bool = False
    license: str = ""
    provenance: Mapping[str, str] = field(default_factory=dict)
    requires: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Index(Settings):
    """The contents of `rlx.json`; `docs/package-format.md` explains each entry."""

    graph: str
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, StoredTensor]
    variants: Mapping[str, Variant]
    cases: tuple[Case, ...]

    @property
    def total_bytes(self) -> int:
        """The sizes of all files that the index lists."""
        return sum(entry.size for entry in self.files.values())

    def to_bytes(self) -> bytes:
        """Return the file's bytes; the same index gives the same bytes."""
        document: dict[str, Any] = {
            "format": FORMAT,
            "schema": SCHEMA,
            **{key: getattr(self, key) for key in _PLAIN},
            **{key: dict(getattr(self, key)) for key in ("dims", "requires", "provenance")},
            "policy": _policy_document(self.policy),
            "golden": {
                "cases": [{"inputs": dict(case.inputs), "outputs": dict(case.outputs)} for case in self.cases],
                "tolerances": dict(self.tolerances),
            },
            "variants": {
                name: {"device": item.device, "precision": item.precision.value, "rounded": dict(item.rounded)}
                for name, item in self.variants.items()
            },
            "tensors": {
                name: item._asdict() | {"dtype": item.dtype.value, "shape": list(item.shape)}
                for name, item in self.tensors.items()
            },
            "files": {name: item._asdict() for name, item in self.files.items()},
        }
        if self.buckets is not None:
            document["buckets"] = {"dim": self.buckets[0], "ranges": [list(pair) for pair in self.buckets[1]]}
        return dump(document)

    @classmethod
    def from_bytes(cls, data: bytes) -> Index:
        """Return the index in the bytes of an `rlx.json`.

        Raises:
            IntegrityError: it is broken, or of a newer schema.
        """
        top = parse(data, INDEX)
        if top.text("format", "") != FORMAT:
            raise IntegrityError(f'{INDEX} of the package does not say "format": {FORMAT!r}')
        schema = top.count("schema")
        if not 1 <= schema <= SCHEMA:
            raise IntegrityError(f"{INDEX} has schema {schema}, this version reads up to {SCHEMA}; update rlx_ort")
        top.only(*_KEYS)
        files = {}
        for name, item in top.entries("files").items():
            item.only("size", "sha256", "crc32")
            files[name] = FileEntry(item.count("size"), _digest(item), item.count("crc32"))
        check_names([*files, INDEX, SIGNATURE])
        tensors = {name: _tensor(item, files) for name, item in top.entries("tensors").items()}
        golden = top.fields("golden")
        cases = tuple(_case(item, tensors) for item in golden.objects("cases"))
        variants = {name: _variant(item, tensors) for name, item in top.entries("variants").items()}
        devices = [variant.device for variant in variants.values()]
        if len(set(devices)) != len(devices):
            raise IntegrityError(f"{INDEX} of the package has two variants for one device")
        tolerances = golden.fields("tolerances").each(Fields.number)
        if min(tolerances.values(), default=0) < 0:
            golden.fail("has a negative error", "tolerances")
        graph = top.text("graph")
        if graph not in files:
            raise IntegrityError(f"{INDEX} names {graph!r} as the graph, which is not a file of the package")
        return cls(
            name=top.text("name"),
            graph=graph,
            files=files,
            tensors=tensors,
            variants=variants,
            version=top.text("version", ""),
            serial=top.count("serial", 0),
            policy=_policy(top.fields("policy")),
            dims=top.fields("dims").each(Fields.count),
            buckets=_buckets(top.fields("buckets")) if "buckets" in top.raw else None,
            requires=top.fields("requires").each(Fields.text),
            license=top.text("license", ""),
            provenance=top.fields("provenance").each(Fields.text),
            cases=cases,
            tolerances=tolerances,
            verify_on_first_use=top.flag("verify_on_first_use", default=False),
        )


def _tensor(item: Fields, files: Mapping[str, FileEntry]) -> StoredTensor:
    item.only("file", "offset", "size", "dtype", "shape", "sha256")
    dtype = item.parsed("dtype", DType)
    shape = tuple(size for size in item.items("shape") if type(size) is int and 0 <= size < 1 << 40)
    stored = StoredTensor(item.text("file"), item.count("offset"), item.count("size"), dtype, shape, _digest(item))
    home = files.get(stored.file)
    if len(shape) != len(item.items("shape")) or len(shape) > 64 or dtype is DType.STRING:
        item.fail(f"is not a tensor: {item.raw!r:.80}")
    if home is None or stored.offset + stored.size > home.size or dtype.nbytes(math.prod(shape)) != stored.size:
        item.fail(f"is not inside {stored.file!r} with the size of its shape")
    return stored


def _variant(item: Fields, tensors: Mapping[str, StoredTensor]) -> Variant:
    item.only("device", "precision", "rounded")
    device, precision = item.parsed("device", Device).label, item.parsed("precision", Precision)
    return Variant(device, precision, _references(item.fields("rounded"), tensors))


def _case(item: Fields, tensors: Mapping[str, StoredTensor]) -> Case:
    item.only("inputs", "outputs")
    case = Case(_references(item.fields("inputs"), tensors), _references(item.fields("outputs"), tensors))
    if not case.outputs:
        item.fail("has a golden case without outputs, so it checks nothing")
    return case


def _references(item: Fields, tensors: Mapping[str, StoredTensor]) -> dict[str, str]:
    references = item.each(Fields.text)
    for name, tensor in references.items():
        if tensor not in tensors:
            item.fail(f"names {tensor!r}, which is not a tensor of the package", name)
    return references


def _policy_document(policy: DevicePolicy) -> dict[str, Any]:
    pick = policy.pick_strategy()
    how: dict[str, Any] = {"strategy": "cost-model"}
    if isinstance(pick, (Benchmark, Adaptive)):
        how = {"strategy": "benchmark" if isinstance(pick, Benchmark) else "adaptive", "runs": pick.runs}
    return {
        "allow": None if policy.allow is None else [device.label for device in policy.allow],
        "deny": [device.label for device in policy.deny],
        "prefer": [device.label for device in policy.prefer],
        "pick": how,
    }


def _policy(item: Fields) -> DevicePolicy:
    item.only("allow", "deny", "prefer", "pick")
    pick = item.fields("pick")
    pick.only("strategy", "runs")
    strategy = pick.text("strategy", "cost-model")
    how: dict[str, DevicePickStrategy] = {
        "cost-model": CostModel(),
        "benchmark": Benchmark(pick.count("runs", 1)),
        "adaptive": Adaptive(pick.count("runs", 5)),
    }
    if strategy not in how:
        pick.fail(f"is {strategy!r}; known are {', '.join(how)}", "strategy")
    allow, deny, prefer = (
        None if item.raw.get(key) is None else tuple(item.parsed(key, Device, text) for text in item.items(key))
        for key in ("allow", "deny", "prefer")
    )
    return DevicePolicy(allow, deny or (), prefer or (), how[strategy])


def _buckets(item: Fields) -> tuple[str, tuple[tuple[int, int], ...]]:
    item.only("dim", "ranges")
    ranges = []
    for pair in item.items("ranges"):
        if not (isinstance(pair, list) and len(pair) == 2 and all(type(end) is int for end in pair)):
            item.fail(f"has {pair!r:.60}, which is not a range of two whole numbers", "ranges")
        ranges.append((pair[0], pair[1]))
    return item.text("dim"), tuple(ranges)


def _digest(item: Fields) -> str:
    if not _DIGEST.fullmatch(text := item.text("sha256")):
        item.fail("is not a SHA-256 digest in hexadecimal", "sha256")
    return text


def parse(data: bytes, name: str) -> Fields:
    """Return the JSON object in a file of the package.

    Raises:
        IntegrityError: the bytes are no strict JSON object.
    """
    return fields.parse(data, f"{name} of the package", IntegrityError)


def dump(document: Any) -> bytes:
    """Return the one encoding of a document that this library writes: ASCII, sorted keys, one line feed at the end."""
    return (json.dumps(document, allow_nan=False, sort_keys=True, indent=1) + "\n").encode("ascii")
