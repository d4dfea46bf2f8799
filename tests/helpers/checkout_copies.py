"""A copy of the checkout, as a fresh clone has it, for walks that change it or make an environment in it."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["ROOT", "copy_checkout", "minutes_of"]

ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = ("calibration", "converters", "docs", "examples", "providers", "rlx_ort", "scripts", "tests")


def copy_checkout(folder: Path) -> Path:
    """Copy the files of the repository to a folder and return it; what builds and runs left behind stays out."""
    for name in _FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for file in (path for path in ROOT.iterdir() if path.is_file()):
        shutil.copy(file, folder)
    return folder


@contextmanager
def minutes_of(walk: str, record: Callable[[str, object], None]) -> Iterator[None]:
    """Report how many minutes the block took, as a property of the test and on stderr."""
    begun = time.monotonic()
    yield
    minutes = (time.monotonic() - begun) / 60
    record("minutes", round(minutes, 2))
    sys.stderr.write(f"{walk}: {minutes:.1f} minutes\n")
