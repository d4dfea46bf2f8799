"""What is installed: which ONNX Runtime package, whether it is whole, and the command that repairs it.

Nothing here imports ONNX Runtime. All its packages share one folder, so the one installed last wins and removing
any of them breaks the rest.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import importlib.metadata

__all__ = [
    "MINIMUM_VERSION",
    "PLUGIN_VERSION",
    "Problem",
    "find_problem",
    "install_command",
    "parse_version",
    "reinstall_command",
    "runtime_packages",
]

MINIMUM_VERSION = (1, 24)
"""The oldest ONNX Runtime with assignment records and with OrtValues of any element type."""
PLUGIN_VERSION = (1, 31)
"""The oldest one for plugins: 1.24 to 1.30 do not record the nodes that a plugin runs, so a fallback goes unseen."""

_FLAVOURS = {
    "onnxruntime": "cpu",
    "onnxruntime-gpu": "cuda",
    "onnxruntime-directml": "directml",
}


class Problem(NamedTuple):
    """Something that keeps ONNX Runtime from being used, and the command that repairs it."""

    reason: str
    remedy: str


def install_command(extra: str) -> str:
    """Return the command that installs `rlx_ort` with a flavour of ONNX Runtime."""
    return f"pip install 'rlx_ort[{extra}]'"


def runtime_packages() -> dict[str, str]:
    """Return the installed packages that own the imported folder `onnxruntime`, with their versions.

    A package further down the path is hidden and does no harm.
    """
    import importlib.metadata  # takes 30 ms to load and is needed after failures only

    owners: dict[Path, dict[str, str]] = {}
    for dist in importlib.metadata.distributions():
        name = _normal(dist.metadata["Name"] or "")
        if name.startswith(("onnxruntime", "ort-nightly")) and _owns_core(dist):
            owners.setdefault(Path(str(dist.locate_file(""))).resolve(), {}).setdefault(name, dist.version)
    first = next(iter(owners.values()), {})  # distributions come in the order of the path
    return dict(sorted(first.items()))


def find_problem() -> Problem | None:
    """Return why `import onnxruntime` cannot work, found without importing it, or None."""
    spec = importlib.util.find_spec("onnxruntime")
    packages = runtime_packages()
    if spec is None and not packages:
        return Problem("ONNX Runtime is not installed", install_command("cpu"))
    if spec is None or spec.origin is None:
        # A folder without __init__.py imports as an empty namespace; that is what uninstalling one of two leaves.
        owners = ", ".join(f"{name} {version}" for name, version in packages.items()) or "no package"
        return Problem(
            f"the onnxruntime folder is incomplete ({owners} is installed); removing one ONNX Runtime package "
            "deletes files that another one needs",
            reinstall_command(packages),
        )
    return None


def reinstall_command(packages: dict[str, str]) -> str:
    """Return the command that writes the files of the installed ONNX Runtime packages again."""
    if not packages:
        return install_command("cpu")
    # With several installed, the one with an accelerator was probably meant.
    name = next((name for name in packages if name != "onnxruntime"), "onnxruntime")
    return f"pip uninstall -y {' '.join(packages)} && pip install --force-reinstall {name}=={packages[name]}"


def parse_version(text: str) -> tuple[int, ...]:
    """Return the numbers of a version: `1.31.1` and `1.31.1.dev2` are both (1, 31, 1)."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def _owns_core(dist: importlib.metadata.Distribution) -> bool:
    files = dist.files
    if files is None:
        return _normal(dist.metadata["Name"] or "") in _FLAVOURS
    return any(file.parts[:2] == ("onnxruntime", "__init__.py") for file in files)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
