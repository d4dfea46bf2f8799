"""Whether heat slows this machine down, as far as the system tells without special rights."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["is_throttled"]

_seen: dict[str, int] = {}


def is_throttled() -> bool:
    """Return whether the processor is throttled now; False where the system does not tell.

    macOS tells a speed limit, Linux how often cores were throttled so far: there, more often than at the last question.
    """
    if sys.platform == "darwin":
        return _limited_by(_pmset())
    return sys.platform.startswith("linux") and _more_than_before(Path("/sys/devices/system/cpu"))


def _limited_by(report: str) -> bool:
    """Return whether the lines of `pmset -g therm` tell a speed limit below 100."""
    for line in report.splitlines():
        name, _, value = line.partition("=")
        if name.strip() == "CPU_Speed_Limit" and value.strip().isdigit():
            return int(value) < 100
    return False


def _pmset() -> str:
    tool = shutil.which("pmset")
    if tool is None:
        return ""
    try:
        done = subprocess.run([tool, "-g", "therm"], capture_output=True, text=True, timeout=5, check=False)  # noqa: S603 - fixed words
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _more_than_before(cores: Path) -> bool:
    """Return whether a core's throttle counter grew since the last call; the first call only remembers."""
    counts = {}
    for path in cores.glob("cpu[0-9]*/thermal_throttle/core_throttle_count"):
        try:
            counts[str(path)] = int(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
    grew = any(count > _seen.get(name, count) for name, count in counts.items())
    _seen.update(counts)
    return grew
