"""The hash of a model's weights. What is mapped from files is read once; the answer is remembered by the files' stamps.

A stamp is device, file id, size and time of change, the same by which a changed weights file is noticed elsewhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rlx_ort.storage import write_atomic

if TYPE_CHECKING:
    from rlx_ort.ir.tensor import TensorData

__all__ = ["weights_digest"]

_FOLDER = "digests"
_HEXADECIMAL = re.compile(r"[0-9a-f]{64}")


def weights_digest(weights: Mapping[str, TensorData], root: Path) -> str:
    """Return the SHA-256 of all tensors: names, dtypes, shapes, and bytes or what stands for them.

    Tensors of a package stand for themselves by the digests that they must have. All others are read, at about
    1.5 GB/s; those of unchanged files once a machine, as `root` remembers them.
    """
    whole = hashlib.sha256()
    by_file: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, tensor in sorted(weights.items()):
        whole.update(f"{name}\0{tensor.dtype.value}{list(tensor.shape)}\0".encode())
        promised = getattr(tensor, "sha256", None)  # nobody gets bytes of such a tensor that have another digest
        if isinstance(promised, str):
            whole.update(promised.encode())
            continue
        source = tensor.source
        if source is None or not source.unchanged:
            whole.update(_bytes_of(tensor))
        else:
            by_file.setdefault((source.path, source.stamp), []).append(name)
    for (_, stamp), names in sorted(by_file.items()):
        whole.update(_remembered(stamp, names, weights, root).encode())
    return whole.hexdigest()


def _remembered(stamp: tuple[int, ...], names: list[str], weights: Mapping[str, TensorData], root: Path) -> str:
    ranges = [(source.offset, weights[name].nbytes) for name in names if (source := weights[name].source) is not None]
    memo = root / _FOLDER / hashlib.sha256(repr((stamp, ranges)).encode()).hexdigest()[:32]
    with contextlib.suppress(OSError):
        known = memo.read_text(encoding="ascii")
        if _HEXADECIMAL.fullmatch(known):
            return known
    found = hashlib.sha256()
    for name in names:
        found.update(_bytes_of(weights[name]))
    digest = found.hexdigest()
    with contextlib.suppress(OSError):  # a cache that cannot be written to costs the reading again
        memo.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(memo, digest.encode())
    return digest


def _bytes_of(tensor: TensorData) -> bytes | memoryview:
    if tensor.buffer.dtype == object:
        return "\0".join(str(item) for item in tensor.buffer).encode()
    return tensor.buffer.data
