"""Make a virtual environment, install the project in it, and run the demo or the tests.

Needs Python 3.11 or later and a network for pip; nothing else, on Linux, macOS and Windows:

    python scripts/start.py demo
    python scripts/start.py test [pytest arguments]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = "cpu,webgpu"
TESTED_CORE = "onnxruntime==1.31.*"
"""The core that the tests' lists of known engine failures are for; the package itself takes any from 1.24 on."""


def main() -> int:
    """Run the job that the command line names and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=("demo", "test"))
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="the environment to make or use")
    options, rest = parser.parse_known_args()
    python = environment(options.venv)
    if options.job == "demo":
        if rest:
            parser.error(f"demo takes no further arguments, got {' '.join(rest)}")
        install(python, [])
        return demo(python)
    # pip before 25.1 cannot read the group by itself
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    install(python, [*project["dependency-groups"]["dev"], TESTED_CORE])
    # -P keeps the checkout off the import path: its rlx_ort/ lacks the folders that are mapped into it
    return run(python, "-P", "-m", "pytest", *rest)


def environment(folder: Path) -> Path:
    """Make a virtual environment unless it is there, and return its Python."""
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        print(f"making {folder}", flush=True)
        venv.create(folder, with_pip=False)
    return python


def install(python: Path, requirements: Sequence[str]) -> None:
    """Install the project and some requirements, with the pip that runs this script.

    That pip installs into the other environment, so it works where the system's Python has pip but no ensurepip.
    """
    print(f"installing rlx_ort with {EXTRAS}{' and the needs of the tests' if requirements else ''}", flush=True)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, "--editable", f"{ROOT}[{EXTRAS}]", *requirements], check=True)


def demo(python: Path) -> int:
    """Make a small text classifier as an ONNX file, report on the devices, and run it on the best one."""
    (ROOT / "out").mkdir(exist_ok=True)
    model = "out/text_classifier.onnx"
    cli = ("-P", "-m", "rlx_ort.cli")
    steps = [
        ("examples/make_text_classifier.py", model),
        (*cli, "devices"),
        (*cli, "inspect", model),
        (*cli, "report", model, "--dim", "batch=2", "--dim", "tokens=16"),
        (*cli, "run", model, "--dim", "batch=2", "--dim", "tokens=16", "--outputs", "out/outputs.npz"),
    ]
    return next(filter(None, (run(python, *step) for step in steps)), 0)  # ends at the first failure


def run(python: Path, *arguments: str) -> int:
    """Run the environment's Python in the checkout, show the command, and return its exit code."""
    print(f"\n$ {python.name} {' '.join(arguments)}", flush=True)
    return subprocess.run([str(python), *arguments], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
