"""`rlx.json`: settings of a package, and size and digest of its files. Read strictly, written in one encoding.

JSON of a package has one meaning for every reader: no duplicate keys (readers differ in which one counts), no NaN, no
numbers that only some readers keep exact, and no nesting that ends a recursive reader. Errors name their place.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, TypeVar

from rlx_ort.deploy.names import INDEX, SIGNATURE, check_names
from rlx_ort.device import Device
from rlx_ort.errors import DeviceParseError, IntegrityError
from rlx_ort.ir.dtype import DType
from rlx_ort.options.compile_options import Precision
from rlx_ort.selection.policy import Adaptive, Benchmark, CostModel, DevicePickStrategy, DevicePolicy
from rlx_ort.storage import parse_json

T = TypeVar("T")

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
    """A file of the package: its size in bytes, SHA-256 and CRC-32. The last is what a zip archive repeats."""

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
        cases = tuple(_case(Fields(item, f"{golden.where}.cases"), tensors) for item in golden.items("cases"))
        variants = {name: _variant(item, tensors) for name, item in top.entries("variants").items()}
        devices = [variant.device for variant in variants.values()]
        if len(set(devices)) != len(devices):
            raise IntegrityError(f"{INDEX} of the package has two variants for one device, and could mean either")
        tolerances = golden.fields("tolerances").each(Fields.number)
        if min(tolerances.values(), default=0) < 0:
            raise IntegrityError(f"{golden.where}.tolerances of the package has an error below 0, which none is")
        graph = top.text("graph")
        if graph not in files:
            raise IntegrityError(f"{INDEX} names {graph!r} as the graph, which is no file of the package")
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
    found = StoredTensor(item.text("file"), item.count("offset"), item.count("size"), dtype, shape, _digest(item))
    home = files.get(found.file)
    if len(shape) != len(item.items("shape")) or len(shape) > 64 or dtype is DType.STRING:
        raise IntegrityError(f"{item.where} of the package: {item.raw!r:.80} is no tensor")
    if home is None or found.offset + found.size > home.size or dtype.nbytes(math.prod(shape)) != found.size:
        raise IntegrityError(f"{item.where} of the package is not inside {found.file!r} with the size of its shape")
    return found


def _variant(item: Fields, tensors: Mapping[str, StoredTensor]) -> Variant:
    item.only("device", "precision", "rounded")
    device, precision = item.parsed("device", Device).label, item.parsed("precision", Precision)
    return Variant(device, precision, _references(item.fields("rounded"), tensors))


def _case(item: Fields, tensors: Mapping[str, StoredTensor]) -> Case:
    item.only("inputs", "outputs")
    case = Case(_references(item.fields("inputs"), tensors), _references(item.fields("outputs"), tensors))
    if not case.outputs:
        raise IntegrityError(f"{item.where} of the package has a golden case without outputs, which any device passes")
    return case


def _references(item: Fields, tensors: Mapping[str, StoredTensor]) -> dict[str, str]:
    found = item.each(Fields.text)
    for name, tensor in found.items():
        if tensor not in tensors:
            raise IntegrityError(f"{item.where}.{name} of the package names {tensor!r}, which is no tensor of it")
    return found


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
        raise IntegrityError(f"{pick.where} of the package has strategy {strategy!r}; known are {', '.join(how)}")
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
            raise IntegrityError(f"{item.where} of the package: {pair!r:.60} is no range of two whole numbers")
        ranges.append((pair[0], pair[1]))
    return item.text("dim"), tuple(ranges)


def _digest(item: Fields) -> str:
    if not _DIGEST.fullmatch(text := item.text("sha256")):
        raise IntegrityError(f"{item.where}.sha256 of the package is no SHA-256 in hexadecimal")
    return text


def parse(data: bytes, name: str) -> Fields:
    """Return the JSON object in a file of the package.

    Raises:
        IntegrityError: the bytes are no strict JSON object.
    """
    try:
        # one pass over the text; a duplicate key, a constant such as NaN or a number beyond float raises ValueError
        document = parse_json(data, object_pairs_hook=_unique, parse_constant=_refused, parse_float=_finite)
    except ValueError as err:
        raise IntegrityError(f"{name} of the package is no JSON that every reader takes alike: {err}") from err
    return Fields(document, name)


def dump(document: Any) -> bytes:
    """Return the one encoding of a document that this library writes: ASCII, sorted keys, one line feed at the end."""
    return (json.dumps(document, allow_nan=False, sort_keys=True, indent=1) + "\n").encode("ascii")


class Fields:
    """A JSON object whose entries are taken out with their type checked; `where` is its place in messages.

    Raises:
        IntegrityError: it is no object.
    """

    def __init__(self, item: Any, where: str) -> None:
        self.where = where
        self.raw: Mapping[str, Any] = item if isinstance(item, dict) else self._fail(f"an object, not {item!r:.60}")

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        return self._get(key, str, default)

    def parsed(self, key: str, convert: Callable[[str], T], item: object = None) -> T:
        """Return what a string, or one item of a list of them, stands for."""
        text = self.raw.get(key) if item is None else item
        if not isinstance(text, str):
            self._fail(f"str as {key!r}, not {text!r:.60}")
        try:
            return convert(text)
        except (DeviceParseError, ValueError) as err:
            raise IntegrityError(f"{self.where} of the package: {err}") from err

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number of either kind as a float."""
        value = self.raw.get(key, default)
        # Whole numbers have no end in JSON; this comparison is exact, where `float` of a larger one overflows.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > sys.float_info.max:
            self._fail(f"a number as {key!r}, not {value!r:.60}")
        return float(value)

    def count(self, key: str, default: int | None = None) -> int:
        """Return a whole number from 0 up to what a signed 64-bit integer holds."""
        value = self._get(key, int, default)
        if isinstance(value, bool) or not 0 <= value < 1 << 63:
            self._fail(f"a whole number from 0 as {key!r}, not {value!r:.60}")
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Return true or false."""
        return self._get(key, bool, default)

    def items(self, key: str) -> list[Any]:
        """Return a list, empty when there is none."""
        return self._get(key, list, [])

    def fields(self, key: str) -> Fields:
        """Return an object, empty when there is none."""
        return Fields(self._get(key, dict, {}), f"{self.where}.{key}")

    def entries(self, key: str) -> dict[str, Fields]:
        """Return an object of objects."""
        inner = self.fields(key)
        return {name: Fields(item, f"{inner.where}.{name}") for name, item in inner.raw.items()}

    def each(self, read: Callable[[Fields, str], T]) -> dict[str, T]:
        """Return every entry, taken out by one of the methods above."""
        return {key: read(self, key) for key in self.raw}

    def only(self, *known: str) -> None:
        """Refuse keys that are not known, which a newer or forged writer left."""
        strangers = sorted(set(self.raw).difference(known))
        if strangers:
            self._fail(f"no key {strangers[0]!r}; known are {', '.join(sorted(known))}")

    def _get(self, key: str, kind: type[T], default: T | None) -> T:
        value = self.raw.get(key, default)
        if not isinstance(value, kind):
            self._fail(f"{kind.__name__} as {key!r}, not {value!r:.60}")
        return value

    def _fail(self, wanted: str) -> NoReturn:
        raise IntegrityError(f"{self.where} of the package should have {wanted}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return found


def _refused(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is beyond the range of numbers")
    return value
