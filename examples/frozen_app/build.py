"""Freeze `app.py` and a model package to one folder with PyInstaller.

    pip install ".[cpu]" pyinstaller  # in a checkout of rlx_ort
    python build.py model.ortpackage --out dist

rlx_ort must be installed from a wheel: of a checkout that is installed editable, PyInstaller does not see the folders
that are mapped into the package.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

NAME = "frozen_app"
# What onnx, numpy and others can use where it is installed and a program that runs models does not need. Frozen in an
# environment that has torch, the folder would be gigabytes larger and take ten minutes.
WITHOUT = "torch onnxscript onnx_ir sympy scipy pandas matplotlib tkinter IPython pytest hypothesis"


def build(package: Path, out: Path) -> Path:
    """Return the program's path; the package, a folder or a file, lies beside it."""
    with tempfile.TemporaryDirectory() as work:
        command = [sys.executable, "-m", "PyInstaller", "--noconfirm", "--log-level", "WARN", "--onedir"]
        command += ["--name", NAME, "--distpath", str(out), "--workpath", work, "--specpath", work]
        command += [f"--exclude-module={name}" for name in WITHOUT.split()]
        program = str(Path(__file__).with_name("app.py"))
        subprocess.run([*command, program], check=True)  # noqa: S603 - our own words and two paths
    folder = out / NAME
    target = folder / "model.ortpackage"
    if package.is_dir():
        shutil.copytree(package, target, dirs_exist_ok=True)
    else:
        shutil.copy(package, target)
    return folder / (f"{NAME}.exe" if sys.platform == "win32" else NAME)


def main() -> None:
    """Build what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path, help="the model package")
    parser.add_argument("--out", type=Path, default=Path("dist"), help="where the program's folder goes")
    options = parser.parse_args()
    print(build(options.package, options.out))


if __name__ == "__main__":
    main()
