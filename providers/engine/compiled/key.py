"""`CacheKey`: everything a compiled model depends on, by name, and which of it explains a miss."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rlx_ort.providers.engine.compiled.entry import Entry

__all__ = [
    "CacheKey",
    "Difference",
    "Explanation",
    "SCHEMA",
    "cpu_facts",
    "differences",
    "explain_entry",
    "explain_key",
    "read_cpu_facts",
]

SCHEMA = "1"
"""Part of every key; grows when the layout of an entry or the meaning of a part changes."""

# The instructions by which the CPU kernels of ONNX Runtime choose how weights are laid out (core/mlas/lib/platform.cpp
# and core/common/cpuid_info.cc); others are left out, since a new kernel lists them anew without changing a layout.
_INSTRUCTIONS = """
    sse4_1 avx avx2 fma f16c avx_vnni avx512f avx512vl avx512bw avx512dq avx512_vnni avx512_bf16 avx512_fp16
    amx_tile amx_int8 amx_bf16 asimd asimddp i8mm svei8mm bf16 sve sve2 sme fphp asimdhp
"""


class CacheKey(NamedTuple):
    """The parts of a key: name -> text. Two keys are the same entry exactly when all their parts are equal."""

    parts: Mapping[str, str]

    @property
    def digest(self) -> str:
        """The entry's name: 32 hexadecimal digits of a SHA-256 over all parts."""
        found = hashlib.sha256(f"schema\0{SCHEMA}\0".encode())
        for name, value in sorted(self.parts.items()):
            found.update(f"{len(name)}:{name}{len(value)}:{value}".encode())
        return found.hexdigest()[:32]


class Difference(NamedTuple):
    """One part in which two keys differ; a part that a key does not have is empty."""

    part: str
    before: str
    after: str


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[Difference, ...]:
    """Return the parts in which two keys differ, in the order of their names."""
    names = sorted(before.keys() | after.keys())
    pairs = [(name, before.get(name, ""), after.get(name, "")) for name in names]
    return tuple(Difference(name, old, new) for name, old, new in pairs if old != new)


class Explanation(NamedTuple):
    """Whether a key has an entry, and how it differs from earlier ones.

    Attributes:
        digest: the key's digest.
        entry: the entry of that key, None when it has to be compiled.
        nearest: the earlier entry with the most parts in common, None if no entry has the same model or weights.
        changed: the parts in which they differ.
    """

    digest: str
    entry: Entry | None
    nearest: Entry | None
    changed: tuple[Difference, ...]


def explain_entry(entry: Entry, entries: Sequence[Entry]) -> Explanation:
    """Return why an entry was made although others existed."""
    older = [other for other in entries if other.created_s < entry.created_s]
    return _explained(entry.digest, entry.parts, entry, older)


def explain_key(key: CacheKey, entries: Sequence[Entry]) -> Explanation:
    """Return whether a key has an entry, and if not, what changed."""
    found = next((entry for entry in entries if entry.digest == key.digest), None)
    if found is not None:
        return explain_entry(found, entries)
    return _explained(key.digest, key.parts, None, entries)


def _explained(digest: str, parts: Mapping[str, str], entry: Entry | None, others: Sequence[Entry]) -> Explanation:
    """Find the nearest of the other entries: of the same model or weights, with the fewest parts that differ."""
    same = [(name, parts[name]) for name in ("model", "weights") if parts.get(name)]
    related = [other for other in others if any(other.parts.get(name) == value for name, value in same)]
    if not related:
        return Explanation(digest, entry, None, ())
    nearest = min(related, key=lambda other: (len(differences(other.parts, parts)), -other.created_s))
    return Explanation(digest, entry, nearest, differences(nearest.parts, parts))


@functools.cache
def cpu_facts() -> dict[str, str]:
    """Return the parts of a key that describe the processor: its name, and the instructions it has."""
    return read_cpu_facts(Path("/proc/cpuinfo"))


def read_cpu_facts(table: Path) -> dict[str, str]:
    """Return name, instructions and system by the first processor of a file such as `/proc/cpuinfo`.

    Without one, as on Windows and macOS, the system's name for the processor, which holds family, model and stepping,
    stands for both.
    """
    found: dict[str, str] = {}
    try:
        with table.open(encoding="utf-8", errors="replace") as stream:
            for line in stream:
                name, _, value = line.partition(":")
                if not name.strip() and found:
                    break  # the first processor's block is over
                found.setdefault(name.strip().lower(), value.strip())
    except OSError:
        pass
    words = set(found.get("flags", found.get("features", "")).split())
    name = found.get("model name", found.get("model", "")) or platform.processor() or platform.machine()
    isa = (
        " ".join(sorted(words.intersection(_INSTRUCTIONS.split())))
        or os.environ.get("PROCESSOR_IDENTIFIER", "")
        or name
    )
    return {"cpu": name, "cpu_instructions": isa, "system": f"{sys.platform} {platform.machine()}"}
