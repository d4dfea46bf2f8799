"""The PyInstaller hook of the package, found by its entry point `pyinstaller40: hook-dirs`.

PyInstaller calls `get_hook_dirs` when it freezes a program; nothing else imports this.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["get_hook_dirs"]


def get_hook_dirs() -> list[str]:
    """Return the folder of `hook-rlx_ort.py`."""
    return [str(Path(__file__).parent)]
