"""`CalibrationProfile`: what was measured on one device, as a documented JSON file.

    {"schema": 3, "unit": "ns",
     "key": {"device", "ep", "hardware", "identity", "engine", "ep_version", "driver", "threads"},
     "machine": "...", "measured": "2026-11-01T12:00:00+00:00", "quick": false, "elapsed_s": 6.1, "pace_ns": 12900.0,
     "rows": [{"probe": "gemm", "size": [64, 256, 256], "dtype": "f32", "ns": 5100.0, "spread": 0.03, "repeats": 9}],
     "references": [{"name": "dense 1 x 416", "ns": 81000.0, "spread": 0.02, "terms": {"product": 70100.0, ...}}],
     "corrections": {"product": 1.08}, "errors": {"product": 0.12},
     "skipped": {"attention": "why it was not measured"}, "spent": {"gemm": 0.81}}

A row is the time of one operation in nanoseconds, by the lower quartile of its runs; what `size` counts stands beside
each probe in `rlx_ort.calibration.probes`. `spread` is the distance of the quartiles as a share of the median.
References are small whole graphs: what they took, and what the rows alone predict for them by class of work. From them
come the factor that predictions of a class are multiplied by, and the error that is left. `pace_ns` tells how fast the
undisturbed host was, see `Pace`; files that were written before it was known have none. `spent` is in seconds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from rlx_ort.errors import CalibrationError

__all__ = ["NOISY", "SCHEMA", "CalibrationProfile", "ProfileKey", "Reference", "Sample"]

SCHEMA = 3
"""The version of the file's form and of what the probes measure; another version is measured again."""

NOISY = 0.25
"""A row whose quartiles lie further apart than this share of its median is marked as noisy."""


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """What a profile is valid for; a difference in any of it makes the profile another one's.

    Attributes:
        device: the device's label.
        ep: the execution provider.
        hardware: the device's name as its driver tells it.
        identity: PCI bus id, UUID or LUID where it is known, else empty.
        engine: ONNX Runtime's package and version.
        ep_version: the plugin's version, empty for a built-in provider.
        driver: the driver's version, empty when unknown.
        threads: threads inside one op; 1 on accelerators.
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
        """Return what differs from another key, in words; empty when nothing does."""
        pairs = [(item.name, getattr(self, item.name), getattr(other, item.name)) for item in fields(self)]
        return ", ".join(f"{name} is {mine!r} here, {its!r} there" for name, mine, its in pairs if mine != its)


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured row.

    Attributes:
        probe: what was measured.
        size: the sizes it was measured at; each probe says what they are.
        ns: the time of one operation by the lower quartile of its runs, in nanoseconds.
        dtype: the element type.
        spread: the distance of the quartiles as a share of the median.
        repeats: how many runs the quartile is of.
    """

    probe: str
    size: tuple[int, ...]
    ns: float
    dtype: str = "f32"
    spread: float = 0.0
    repeats: int = 1

    @property
    def noisy(self) -> bool:
        """Whether the runs were too far apart to lean on."""
        return self.spread > NOISY


@dataclass(frozen=True, slots=True)
class Reference:
    """A small whole graph that was measured, to see how well the rows predict it.

    Attributes:
        name: what it is.
        ns: the time of a run, the lower quartile of many, in nanoseconds.
        spread: the distance of the quartiles as a share of the median.
        terms: class of work -> what the rows alone predict for it, in nanoseconds.
    """

    name: str
    ns: float
    spread: float = 0.0
    terms: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CalibrationProfile:
    """What was measured on one device.

    Attributes:
        key: what it is valid for.
        rows: the measurements.
        machine: operating system, processor and host the measurement ran on, for people.
        measured: when, in UTC, ISO 8601; for people, nothing expires by it.
        quick: whether the short form was measured.
        elapsed_s: how long it took, in seconds.
        skipped: probe -> why it has no row or not all of them.
        references: small whole graphs, measured and predicted.
        corrections: class of work -> what predictions are multiplied by.
        errors: class of work -> the error to expect of a prediction, as a share.
        spent: probe -> seconds that it took.
        pace_ns: what the loop of `Pace` took on the undisturbed host; 0 where it is not known.
    """

    key: ProfileKey
    rows: tuple[Sample, ...]
    machine: str = ""
    measured: str = ""
    quick: bool = False
    elapsed_s: float = 0.0
    skipped: Mapping[str, str] = field(default_factory=dict)
    references: tuple[Reference, ...] = ()
    corrections: Mapping[str, float] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
    spent: Mapping[str, float] = field(default_factory=dict)
    pace_ns: float = 0.0

    @property
    def noisy_rows(self) -> tuple[Sample, ...]:
        """The rows that are marked as noisy."""
        return tuple(row for row in self.rows if row.noisy)

    @property
    def source(self) -> str:
        """What reports show as the origin of a prediction."""
        kind = "quick calibration" if self.quick else "calibration"
        return f"{kind} of {self.measured[:10]}: {self.key.hardware or self.key.ep}, {self.key.engine}"

    def to_json(self) -> str:
        """Return the profile as JSON text."""
        document: dict[str, Any] = {"schema": SCHEMA, "unit": "ns", "key": asdict(self.key)}
        document |= {name: getattr(self, name) for name in ("machine", "measured", "quick", "elapsed_s", "pace_ns")}
        document["rows"] = [asdict(row) | {"noisy": row.noisy} for row in self.rows]
        document["references"] = [asdict(reference) for reference in self.references]
        document |= {name: dict(getattr(self, name)) for name in ("corrections", "errors", "skipped", "spent")}
        return json.dumps(document, indent=1)

    @classmethod
    def from_json(cls, text: str) -> CalibrationProfile:
        """Return the profile in a JSON text.

        Raises:
            CalibrationError: it is no profile, or one of another schema.
        """
        try:
            document = json.loads(text)
            if document["schema"] != SCHEMA:
                raise CalibrationError(f"the profile has schema {document['schema']}, this version reads {SCHEMA}")
            rows = tuple(_row(row) for row in document["rows"])
            return cls(
                key=ProfileKey(**document["key"]),
                rows=rows,
                machine=str(document["machine"]),
                measured=str(document["measured"]),
                quick=bool(document["quick"]),
                elapsed_s=float(document["elapsed_s"]),
                skipped={str(name): str(reason) for name, reason in document["skipped"].items()},
                references=tuple(_reference(entry) for entry in document["references"]),
                corrections=_positive(document["corrections"]),
                errors=_positive(document["errors"]),
                spent={str(name): float(seconds) for name, seconds in document["spent"].items()},
                pace_ns=_time(document.get("pace_ns", 0.0), "the host's pace"),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as err:
            raise CalibrationError(f"the text is no calibration profile: {err!r}") from err


def _row(row: Mapping[str, Any]) -> Sample:
    ns = _time(row["ns"], str(row["probe"]))
    size = tuple(int(number) for number in row["size"])
    return Sample(str(row["probe"]), size, ns, str(row["dtype"]), float(row["spread"]), int(row["repeats"]))


def _time(number: Any, name: str) -> float:
    ns = float(number)
    if not 0 <= ns < float("inf"):
        raise ValueError(f"{name} has the time {ns}")
    return ns


def _reference(entry: Mapping[str, Any]) -> Reference:
    terms = {str(name): float(ns) for name, ns in entry["terms"].items()}
    return Reference(str(entry["name"]), float(entry["ns"]), float(entry["spread"]), terms)


def _positive(entries: Mapping[str, Any]) -> dict[str, float]:
    found = {str(name): float(number) for name, number in entries.items()}
    if not all(0 < number < float("inf") for number in found.values()):
        raise ValueError(f"no factors or errors: {found}")
    return found
