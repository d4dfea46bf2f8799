"""Write providers/cores/: the keys and versions that each minor version of ONNX Runtime takes.

    pip download --no-deps --platform win_amd64 onnxruntime==1.32.0      # and other systems, and onnxruntime-gpu
    python scripts/core_facts.py write onnxruntime*-1.32.0-*.whl
    python scripts/core_facts.py plugins onnxruntime_qnn-*.whl
    python scripts/core_facts.py check

`write` takes the packages of one minor version, one of which must run here: session config keys are strings of the
libraries, and each system's build has a few of its own; the newest opset and IR version are those of models that load.
A file has the keys that the version before lacks, and in `removed_keys` those that are no longer read.
`plugins` takes packages of execution providers and writes the keys that no known core reads itself. `check` exits with
1 when the installed ONNX Runtime takes anything that the file of its version does not say.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rlx_ort.providers.engine import runtime

FOLDER = Path(__file__).resolve().parents[1] / "providers" / "cores"
KEY = re.compile(rb"(?<=\0)(?:session|optimization|ep|memory|mlas)(?:\.[a-z0-9_]+)+(?=\0)")
NO_SESSION_KEYS = "ep.dynamic."  # options of a session that is open
CHUNK = 16  # GCC and Clang cut long constants into pieces of this size, which may lie beside pieces of others
LIMITS = """
import json, sys
import onnx.parser
import onnxruntime

def loads(ir_version, opset):
    head = '<ir_version: %d, opset_import: ["": %d]>' % (ir_version, opset)
    model = onnx.parser.parse_model(head + "g (float[1] x) => (float[1] y) { y = Identity(x) }").SerializeToString()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception:
        return False
    return True

opset, ir_version = 21, 10
while loads(10, opset + 1):
    opset += 1
while loads(ir_version + 1, 21):
    ir_version += 1
print(json.dumps({"version": onnxruntime.__version__, "opset": opset, "ir_version": ir_version}))
"""


def main() -> int:
    """Write or check the files and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    jobs = parser.add_subparsers(dest="job", required=True)
    for name, what in (("write", "the packages of one minor version"), ("plugins", "packages of execution providers")):
        jobs.add_parser(name, help=f"read {what}").add_argument("wheels", type=Path, nargs="+")
    jobs.add_parser("check", help="compare the installed ONNX Runtime with the file of its version")
    args = parser.parse_args()
    if args.job == "check":
        problems = list(check())
        print("\n".join(problems) or "the file of the installed version is right")
        return int(bool(problems))
    (write if args.job == "write" else write_plugins)(args.wheels)
    return 0


def write(wheels: list[Path]) -> None:
    """Write the file of a minor version from its packages.

    Raises:
        ValueError: the packages are of several minor versions, or none of them runs here.
    """
    minors = {".".join(wheel.name.split("-")[1].split(".")[:2]) for wheel in wheels}
    if len(minors) != 1:
        raise ValueError(f"packages of one minor version are needed, and these are of {sorted(minors)}")
    limits = next((limit for wheel in wheels if (limit := limits_of_wheel(wheel)) is not None), None)
    if limits is None:
        raise ValueError("none of the packages runs here: add the one for this system and Python")
    keys = whole(("-win" in wheel.name, libraries_of_wheel(wheel)) for wheel in wheels)
    facts = known()
    minor = minors.pop()
    limits = {name: limits[name] for name in ("opset", "ir_version")}
    facts[minor] = {"source": source(wheels), **limits, "config_keys": keys}
    before: set[str] = set()
    for version in sorted(facts, key=_numbers):  # the version after this one now differs from it
        text = render(before=before, **facts[version])
        (FOLDER / f"{version}.toml").write_text(text, "utf-8", newline="\n")
        before = facts[version]["config_keys"]
    print(f"{minor}: opset {limits['opset']}, IR version {limits['ir_version']}, {len(keys)} config keys")


def write_plugins(wheels: list[Path]) -> None:
    """Write the file of the keys that only execution providers read."""
    path = FOLDER / "plugins.toml"
    read = {key for facts in known().values() for key in facts["config_keys"]}
    keys = whole(("-win" in wheel.name, libraries_of_wheel(wheel)) for wheel in wheels) - read
    path.write_text(render(source(wheels), keys), "utf-8", newline="\n")
    print(f"{path.name}: {len(keys)} config keys")


def known() -> dict[str, dict[str, Any]]:
    """Return the facts of the versions that have a file, oldest first, with all their keys and their comment."""
    versions: dict[str, dict[str, Any]] = {}
    keys: set[str] = set()
    for path in sorted(FOLDER.glob("[0-9]*.toml"), key=lambda path: _numbers(path.stem)):
        text = path.read_text("utf-8")
        facts = tomllib.loads(text)
        keys = keys - {*facts.pop("removed_keys", ())} | {*facts["config_keys"]}
        versions[path.stem] = {**facts, "source": text.partition("\n")[0], "config_keys": keys}
    return versions


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def check() -> Iterator[str]:
    """Yield differences between the installed ONNX Runtime and the file of its version."""
    version = ".".join(str(runtime.onnxruntime().__version__).split(".")[:2])
    facts = known().get(version)
    if facts is None:
        yield f"there is no {version}.toml: write it from the packages of {version}"
        return
    limits = limits_of()
    for name in ("opset", "ir_version"):
        if limits[name] != facts[name]:
            yield f"{version}.toml has {name} {facts[name]}, and ONNX Runtime takes {limits[name]}"
    folder = Path(runtime.onnxruntime().__file__).parent
    read = keys_of(library.read_bytes() for library in folder.rglob("*") if is_library(library.name))
    for key in sorted(read - {*facts["config_keys"]}):
        if len(key) % CHUNK:
            yield f"{version}.toml lacks {key}"


def whole(wheels: Iterable[tuple[bool, Iterable[bytes]]]) -> set[str]:
    """Return the keys in the libraries of several wheels; possible pieces count only if a Windows build has them."""
    elsewhere: set[str] = set()
    windows: set[str] = set()
    for for_windows, libraries in wheels:
        (windows if for_windows else elsewhere).update(keys_of(libraries))
    return windows | {key for key in elsewhere if len(key) % CHUNK}


def keys_of(libraries: Iterable[bytes]) -> set[str]:
    """Return the strings of libraries that have the form of a session config key."""
    keys = {key.decode() for library in libraries for key in KEY.findall(library)}
    return {key for key in keys if not key.startswith(NO_SESSION_KEYS)}


def libraries_of_wheel(wheel: Path) -> Iterator[bytes]:
    """Yield the libraries of a wheel, one after the other."""
    with zipfile.ZipFile(wheel) as archive:
        yield from (archive.read(name) for name in archive.namelist() if is_library(name))


def is_library(name: str) -> bool:
    """Return whether a file is a shared library, by its name."""
    return name.endswith((".so", ".dll", ".dylib", ".pyd")) or ".so." in name


def limits_of_wheel(wheel: Path) -> dict[str, Any] | None:
    """Return the newest opset and IR version of a wheel's ONNX Runtime, or None if it does not load here."""
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        try:
            limits = limits_of(folder)
        except subprocess.CalledProcessError:
            return None
    return limits if limits["version"] == wheel.name.split("-")[1] else None


def limits_of(folder: str | None = None) -> dict[str, Any]:
    """Return the version, newest opset and IR version of the ONNX Runtime in a folder, by default of the installed one.

    Raises:
        subprocess.CalledProcessError: it does not load.
    """
    command = [sys.executable, "-P", "-c", LIMITS]
    found = {**os.environ, **({"PYTHONPATH": folder} if folder else {})}
    answer = subprocess.run(command, env=found, cwd=folder, capture_output=True, text=True, check=True).stdout
    limits: dict[str, Any] = json.loads(answer.splitlines()[-1])
    return limits


def source(wheels: Iterable[Path]) -> str:
    """Return the comment that names the packages of a file."""
    names = sorted({" ".join(wheel.name.split("-")[:2]).replace("_", "-") for wheel in wheels})
    systems = sorted({re.split(r"[-.]", wheel.stem)[-1] for wheel in wheels})
    return f"# Written by scripts/core_facts.py from {', '.join(names)} for {', '.join(systems)}."


def render(source: str, config_keys: Iterable[str], before: Iterable[str] = (), **limits: int) -> str:
    """Return the text of a file, with the keys that differ from those of the version before it."""
    keys, older = set(config_keys), set(before)
    lines = [source, *(f"{name} = {value}" for name, value in limits.items())]
    for name, listed in (("removed_keys", older - keys), ("config_keys", keys - older)):
        if listed or name == "config_keys":
            lines += [f"{name} = [", *(f'  "{key}",' for key in sorted(listed)), "]"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
