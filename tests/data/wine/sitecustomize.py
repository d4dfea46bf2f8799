"""Refuses symbolic links, as Windows does without a privilege; Wine reports success and makes nothing.

Where the shim of Direct3D is installed, it begins here.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any


def _symlink(src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: int | None = None) -> None:
    raise OSError(22, "A required privilege is not held by the client", os.fspath(src), 1314, os.fspath(dst))


os.symlink = _symlink
with contextlib.suppress(ImportError):
    import direct3d_shim

    direct3d_shim.install()
