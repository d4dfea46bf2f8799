"""`WeightSharing.PREPACKED`: weights in the layout the CPU kernels want, in one file that every process maps.

A session packs its weights once and ONNX Runtime saves the optimised model with them; later sessions, in this process
and in others, open that file and share its pages. The folder's name holds everything the packing depends on.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

from rlx_ort.providers.hardware import cpu_name
from rlx_ort.providers.injection import cache_folder

__all__ = ["CPU_EP", "prepacked_model"]

CPU_EP = "CPUExecutionProvider"
_MODEL = "model.onnx"
_WEIGHTS = "weights.bin"
_KEEP_UNUSED_DAYS = 7


def prepacked_model(
    payload: bytes, buffers: Sequence[npt.NDArray[Any]], traits: Mapping[str, str], build: Callable[[Any], None]
) -> Path:
    """Return the path of the optimised model with packed weights, made by `build` where it is not in the cache.

    `build` is called with a function that makes session options save what they optimise, and opens the session.
    """
    import filelock

    folder = cache_folder("prepacked")
    home = folder / _key(payload, buffers, traits)
    with filelock.FileLock(f"{home}.lock"):
        if (home / _MODEL).is_file():
            os.utime(home)
            return home / _MODEL
        _remove_unused(folder)
        part = Path(tempfile.mkdtemp(prefix="part-", dir=folder))
        try:
            build(lambda options: _save_to(options, part))
            shutil.rmtree(home, ignore_errors=True)
            part.replace(home)  # both files appear at once
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return home / _MODEL


def _save_to(options: Any, folder: Path) -> None:
    options.optimized_model_filepath = str(folder / _MODEL)
    for key, value in (
        ("session.save_external_prepacked_constant_initializers", "1"),
        ("session.optimized_model_external_initializers_file_name", _WEIGHTS),
        ("session.optimized_model_external_initializers_min_size_in_bytes", "1024"),
    ):
        options.add_session_config_entry(key, value)


def _key(payload: bytes, buffers: Sequence[npt.NDArray[Any]], traits: Mapping[str, str]) -> str:
    import hashlib  # loads OpenSSL, which most processes do not need

    digest = hashlib.sha256(payload)
    for buffer in buffers:
        digest.update(buffer.nbytes.to_bytes(8, "little"))
        digest.update(buffer.data)
    # Kernels choose their layout by the instructions the processor has.
    for name, value in sorted({**traits, "cpu": cpu_name()}.items()):
        digest.update(f"{name}\0{value}\0".encode())
    return digest.hexdigest()


def _remove_unused(folder: Path) -> None:
    """Delete what no session opened lately, and what a crash left behind."""
    oldest = time.time() - _KEEP_UNUSED_DAYS * 24 * 3600
    for path in folder.iterdir():
        if path.is_dir() and path.stat().st_mtime < oldest:
            shutil.rmtree(path, ignore_errors=True)
