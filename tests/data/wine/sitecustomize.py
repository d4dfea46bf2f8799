"""Refuses symbolic links, as Windows does without a privilege; Wine reports success and makes nothing.

A process may use AMX, as on Windows. Where the shim of Direct3D is installed, it begins here.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Any

# push rdi; push rsi; eax = arch_prctl; edi = ARCH_REQ_XCOMP_PERM; esi = XTILEDATA; syscall; pop rsi; pop rdi; ret
_ASK_FOR_TILES = bytes.fromhex("5756 b89e000000 bf23100000 be12000000 0f05 5e5f c3")


def _symlink(src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: int | None = None) -> None:
    raise OSError(22, "A required privilege is not held by the client", os.fspath(src), 1314, os.fspath(dst))


def _allow_tiles() -> None:
    """Ask Linux for what Windows gives unasked; a processor without AMX refuses, which changes nothing."""
    allocate = ctypes.WinDLL("kernel32").VirtualAlloc
    allocate.restype = ctypes.c_void_p
    allocate.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_ulong, ctypes.c_ulong)
    place = allocate(None, len(_ASK_FOR_TILES), 0x3000, 0x40)  # committed, may be written and executed
    ctypes.memmove(place, _ASK_FOR_TILES, len(_ASK_FOR_TILES))
    ctypes.CFUNCTYPE(None)(place)()


os.symlink = _symlink
_allow_tiles()
with contextlib.suppress(ImportError):
    import direct3d_shim

    direct3d_shim.install()
