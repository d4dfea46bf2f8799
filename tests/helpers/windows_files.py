"""Files in use, as Windows treats them: none that this process has open or mapped is deleted, renamed or replaced.

Linux only, since it looks into `/proc`. `refusals` has what was refused, for tests that expect none.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Any

import pytest


class WindowsFiles:
    """Patches `os` so that it refuses what Windows refuses; every way of Python's own library goes through it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refusals: list[str] = []
        self.busy: dict[str, int] = {}  # path -> how often another program, such as a virus scanner, has it open still
        for name in ("unlink", "remove", "rmdir", "rename", "replace"):
            monkeypatch.setattr(os, name, self._refusing(getattr(os, name), renames=name in ("rename", "replace")))

    def _refusing(self, call: Any, renames: bool) -> Any:
        def refusing(path: Any, *arguments: Any, **options: Any) -> None:
            folder = options.get("dir_fd", options.get("src_dir_fd"))
            own = os.fspath(path)
            own = own if folder is None else str(Path(f"/proc/self/fd/{folder}").readlink() / own)
            for each in (own, *map(os.fspath, arguments[:1] if renames else ())):
                full = str(Path(each).resolve()) if not Path(each).is_symlink() else str(Path(each).absolute())
                if self._is_used(full):
                    self.refusals.append(full)
                    raise PermissionError(errno.EACCES, "The process cannot access the file", full)
            return call(path, *arguments, **options)

        return refusing

    def _is_used(self, path: str) -> bool:
        if self.busy.get(path):
            self.busy[path] -= 1
            return True
        maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        used = {line.split(maxsplit=5)[5] for line in maps if "/" in line}
        for handle in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # the one that lists them
                if not handle.is_dir():  # those by which `rmtree` looks into folders
                    used.add(str(handle.readlink()))
        return any(each == path or each.startswith(f"{path}/") for each in used)


@pytest.fixture
def windows_files(monkeypatch: pytest.MonkeyPatch) -> WindowsFiles:
    """Return the refusals so far of what Windows refuses."""
    if not Path("/proc/self/maps").exists():
        pytest.skip("it simulates Windows by /proc")
    return WindowsFiles(monkeypatch)
