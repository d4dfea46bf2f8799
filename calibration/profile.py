"""`CalibrationProfile`: the measurements of one device, as a JSON file.

    {"schema": 4, "unit": "ns",
     "key": {"device", "ep", "hardware", "identity", "engine", "ep_version", "driver", "threads"},
     "machine": "...", "measured": "2026-11-01T12:00:00+00:00", "quick": false, "elapsed_s": 6.1,
     "rows": [["MatMul", [64, 65536], 5100.0, "f32", 0.03, 9], ...],
     "skipped": {"Attention": "why it was not measured"}}

A row is [kernel, size, ns, dtype, spread, repeats]: the time of one node by the lower quartile of its runs, in
nanoseconds. The meaning of `size` is in `rlx_ort.calibration.kernels`. `spread` is the distance of the quartiles as
a share of the median, and at least the relative difference of two visits.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, field, fields
from typing import Any, TypeVar

from rlx_ort.errors import CalibrationError
from rlx_ort.storage import parse_json

T = TypeVar("T")

_LARGEST_SIZE = 1 << 63
SCHEMA = 5
"""The version of the file's form and of the kernels' measurements; files of other versions are measured again."""

NOISY = 0.25
"""A row with a larger spread is marked as noisy."""

REQUIRED = ("run", "launch", "MatMul", "Add")
"""The kernels without which nothing can be predicted."""


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """The conditions under which a profile is valid; it does not apply if any of them differs.

    `hardware` is the device's name by its driver, `identity` its PCI bus id, UUID or LUID, and `engine` ONNX Runtime's
    package and version. `ep_version` is empty for a built-in provider, and unknown entries are empty. `threads` is the
    number of threads inside one op; 1 on accelerators.
    """

    device: str
    ep: str
    hardware: str
    identity: str = ""
    engine: str = ""
    ep_version: str = ""
    driver: str = ""
    threads: int = 1

    @property
    def file_name(self) -> str:
        """The name of the file that holds the profile: readable, and one for each key and schema."""
        digest = hashlib.sha256(repr((SCHEMA, self)).encode()).hexdigest()[:16]
        label = "".join(letter if letter.isalnum() else "-" for letter in self.device)
        return f"{label}-{digest}.json"

    def difference(self, other: ProfileKey) -> str:
        """Return the differences from another key, in words; empty when nothing does."""
        pairs = [(item.name, getattr(self, item.name), getattr(other, item.name)) for item in fields(self)]
        return ", ".join(f"{name} is {mine!r} here and {its!r} there" for name, mine, its in pairs if mine != its)


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement.

    Names of kernels that begin with `?` are nodes that were measured on demand. `ns` is the time of one node by the
    lower quartile of `repeats` runs. `spread` is the distance of the quartiles as a share of the median, at least the
    difference of two visits.
    """

    kernel: str
    size: tuple[int, ...]
    ns: float
    dtype: str = "f32"
    spread: float = 0.0
    repeats: int = 1

    @property
    def noisy(self) -> bool:
        """Whether the runs were too far apart to rely on."""
        return self.spread > NOISY


@dataclass(frozen=True, slots=True)
class CalibrationProfile:
    """The measurements of one device.

    Attributes:
        key: the hardware and versions that it is valid for.
        rows: the measurements, those of nodes that were measured on demand included.
        machine: operating system and processor, for people.
        measured: when, in UTC, ISO 8601; for people, nothing expires by it.
        quick: whether the short form was measured.
        elapsed_s: how long it took, in seconds.
        skipped: kernel -> why it has no row or not all of them.
    """

    key: ProfileKey
    rows: tuple[Row, ...]
    machine: str = ""
    measured: str = ""
    quick: bool = False
    elapsed_s: float = 0.0
    skipped: Mapping[str, str] = field(default_factory=dict)

    @property
    def noisy_rows(self) -> tuple[Row, ...]:
        """The rows that are marked as noisy."""
        return tuple(row for row in self.rows if row.noisy)

    @property
    def source(self) -> str:
        """The origin of a prediction, as reports show it."""
        kind = "quick calibration" if self.quick else "calibration"
        return f"{kind} of {self.measured[:10]}: {self.key.hardware or self.key.ep}, {self.key.engine}"

    def to_json(self) -> str:
        """Return the profile as JSON text, one row a line."""
        document: dict[str, Any] = {"schema": SCHEMA, "unit": "ns", "key": asdict(self.key)}
        document |= {name: getattr(self, name) for name in ("machine", "measured", "quick", "elapsed_s")}
        document["skipped"] = dict(self.skipped)
        rows = ",\n".join(json.dumps(astuple(row)) for row in self.rows)
        return f'{json.dumps(document, indent=1)[:-2]},\n "rows": [\n{rows}\n]}}\n'

    @classmethod
    def from_json(cls, text: str) -> CalibrationProfile:
        """Return the profile in a JSON text.

        Raises:
            CalibrationError: it is no profile, or one of another schema.
        """
        try:
            document = parse_json(text)
            if document["schema"] != SCHEMA:
                raise CalibrationError(f"the profile has schema {document['schema']}, this version reads {SCHEMA}")
            key = ProfileKey(**document["key"])
            texts = [value for name, value in asdict(key).items() if name != "threads"]
            if type(key.threads) is not int or not all(isinstance(text, str) for text in texts):
                raise CalibrationError(f"the profile has the key {key}, whose entries are texts and a number")
            return cls(
                key=key,
                rows=tuple(_row(*row) for row in document["rows"]),
                machine=_of(document["machine"], str),
                measured=_of(document["measured"], str),
                quick=_of(document["quick"], bool),
                elapsed_s=_measure(document["elapsed_s"]),
                skipped={name: _of(reason, str) for name, reason in document["skipped"].items()},
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as err:
            raise CalibrationError(f"the text is not a calibration profile: {err!r}") from err


def _row(kernel: str, size: list[int], ns: float, dtype: str, spread: float, repeats: int) -> Row:
    if not type(kernel) is type(dtype) is str or type(size) is not list or type(repeats) is not int or repeats < 1:
        raise ValueError(f"a row of {kernel!r:.60} has size {size!r:.60}, dtype {dtype!r:.60}, {repeats!r:.60} repeats")
    for number in size:
        if type(number) is not int or not 0 <= number < _LARGEST_SIZE:
            raise ValueError(f"a row of {kernel} has size {size!r:.60}")
    return Row(kernel, tuple(size), _measure(ns), dtype, _measure(spread), repeats)


def _of(value: Any, kind: type[T]) -> T:
    if type(value) is not kind:
        raise TypeError(f"{value!r:.60} is not of type {kind.__name__}")
    return value


def _measure(value: Any) -> float:
    """Return a finite number from 0."""
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r:.60} is not a finite number of at least 0")
    return float(value)
