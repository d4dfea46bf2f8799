"""Write docs/screens: what seven commands print on a terminal of 80 columns, taken from tmux.

    python scripts/screens.py [COLUMNS]          needs tmux; other widths are printed, not kept

The lines of a table fit; remedies are longer than the terminal and stay whole, so that they can be copied.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCREENS = ROOT / "docs" / "screens"
COMMANDS = {
    "devices": "rlx-ort devices",
    "devices-all": "rlx-ort devices --all",
    "doctor": "rlx-ort doctor",
    "inspect": "rlx-ort inspect model.onnx",
    "report": "rlx-ort report model.onnx",
    "bench": "rlx-ort bench model.onnx --runs 20",
    "run": "rlx-ort run model.onnx",
}
KEPT = 80
LONGEST_S = 300


def main(arguments: list[str]) -> int:
    """Take all screens; return 0."""
    columns = int(arguments[0]) if arguments else KEPT
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "examples/make_text_classifier.py", f"{folder}/model.onnx"], cwd=ROOT, check=True
        )
        for name, command in COMMANDS.items():
            text = f"$ {command}\n{taken(command, Path(folder), columns)}\n"
            if columns == KEPT:
                (SCREENS / f"{name}.txt").write_text(text, encoding="utf-8")
            else:
                sys.stdout.write(text)
    return 0


def taken(command: str, folder: Path, columns: int) -> str:
    """Return what a command prints in a tmux window; lines that are longer than the window come whole."""
    tmux = ["tmux", "-S", str(folder / f"tmux-{time.monotonic_ns()}")]  # a server of its own
    done = folder / "done"
    done.unlink(missing_ok=True)
    shell = f"cd {shlex.quote(str(folder))}; clear; {command}; touch done; sleep {LONGEST_S}"
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    size = ["-x", str(columns), "-y", "200"]
    subprocess.run(
        [*tmux, "-f", os.devnull, "new-session", "-d", *size, "sh", "-c", shell], env=environment, check=True
    )
    try:
        until = time.monotonic() + LONGEST_S
        while not done.exists():
            if time.monotonic() > until:
                raise TimeoutError(f"{command} has not ended after {LONGEST_S} s")
            time.sleep(0.1)
        shown = subprocess.run([*tmux, "capture-pane", "-p", "-J"], capture_output=True, check=True, encoding="utf-8")
    finally:
        subprocess.run([*tmux, "kill-server"], check=False)
    lines = "\n".join(line.rstrip() for line in shown.stdout.splitlines())
    return lines.strip("\n").replace(str(Path.home()), "~")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
