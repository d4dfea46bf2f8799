#!/usr/bin/env python3
"""Prepare a software GPU for WebGPU on Debian, so that a second real provider can be tested without hardware.

Prints `export` lines for a shell to evaluate; everything else goes to stderr:

    eval "$(python scripts/software_gpu.py)"

SwiftShader comes out of Debian's Chromium packages, unpacked without installing a browser; `libvulkan1` is installed
where the Vulkan loader is missing, which needs root. Running it again does nothing but print.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# The driver moved from `chromium` to `chromium-common` in the course of Debian 12.
PACKAGES = ("chromium-common", "chromium")
DRIVER = "libvk_swiftshader.so"
DESCRIPTION = "vk_swiftshader_icd.json"


class SetupError(Exception):
    """Something cannot be set up here; the message is one line with the reason and a remedy."""


def main() -> int:
    """Prepare the driver, print the variables to export, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlx_ort" / "software-gpu"
    parser.add_argument("--out", type=Path, default=default, help="folder for the driver (default: %(default)s)")
    folder = parser.parse_args().out.resolve()
    try:
        install_loader()
        install_driver(folder)
    except SetupError as err:
        print(f"software_gpu: {err}", file=sys.stderr)
        return 1
    variables = {
        "VK_DRIVER_FILES": str(folder / DESCRIPTION),
        "XDG_RUNTIME_DIR": os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir(),
        "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER": "1",
    }
    for name, value in variables.items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


def install_loader() -> None:
    """Install the Vulkan loader unless it loads already."""
    if loader_works():
        return
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        raise SetupError("libvulkan.so.1 is missing; install it as root: apt-get install libvulkan1")
    update_lists()
    run(["apt-get", "install", "-y", "--no-install-recommends", "libvulkan1"])
    if not loader_works():
        raise SetupError("libvulkan1 is installed but libvulkan.so.1 does not load; run ldconfig as root")


def install_driver(folder: Path) -> None:
    """Put the driver and the file by which the Vulkan loader finds it into a folder, once."""
    driver, description = folder / DRIVER, folder / DESCRIPTION
    if description.is_file() and driver.is_file():
        return
    for tool in ("apt-get", "dpkg"):
        if shutil.which(tool) is None:
            raise SetupError(f"{tool} is missing: this script is for Debian and its relatives")
    update_lists()
    for package in PACKAGES:
        with tempfile.TemporaryDirectory() as work:
            # The sandbox's user may not write here; a package that is not in the archives is tried under the next name.
            run(["apt-get", "download", "-o", "APT::Sandbox::User=root", package], work, check=False)
            for archive in Path(work).glob("*.deb"):
                run(["dpkg", "-x", str(archive), f"{work}/tree"])
            for source in Path(work).rglob(DRIVER):
                folder.mkdir(parents=True, exist_ok=True)
                write(driver, source.read_bytes())
                icd = {"file_format_version": "1.0.0", "ICD": {"library_path": str(driver), "api_version": "1.1.0"}}
                write(description, (json.dumps(icd, indent=2) + "\n").encode())
                return
    raise SetupError(f"none of the packages {', '.join(PACKAGES)} holds {DRIVER}; look for it with apt-file")


def write(target: Path, data: bytes) -> None:
    """Write a file so that it appears whole or not at all."""
    part = target.with_suffix(".part")
    part.write_bytes(data)
    part.replace(target)


def update_lists() -> None:
    """Fetch the package lists where there are none, as on a bare container image."""
    if not any(Path("/var/lib/apt/lists").glob("*_Packages*")):
        if os.geteuid() != 0:
            raise SetupError("the package lists are missing; run as root: apt-get update")
        run(["apt-get", "update"])


def loader_works() -> bool:
    """Return whether the Vulkan loader loads."""
    try:
        ctypes.CDLL("libvulkan.so.1")
    except OSError:
        return False
    return True


def run(command: list[str], folder: str | None = None, *, check: bool = True) -> None:
    """Run a command with its output on stderr."""
    done = subprocess.run(command, stdout=sys.stderr, cwd=folder, check=False)
    if check and done.returncode != 0:
        raise SetupError(f"{' '.join(command)} failed with exit code {done.returncode}")


if __name__ == "__main__":
    sys.exit(main())
