"""Which names a file of a package may have, by one rule for both forms and for every system, and which key signs it.

Packages are portable, so a name is refused everywhere if any system interprets it differently.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path

from rlx_ort import environment
from rlx_ort.errors import IntegrityError, PackageError
from rlx_ort.storage import open_regular

INDEX = "rlx.json"
"""The file that lists all others with their digests."""
MANIFEST = "manifest.json"
"""The file by which ONNX Runtime recognises a model package."""
SIGNATURE = "signature.json"
"""The Sigstore bundle of a signed package; the one file that the index does not list."""
TUNINGS = "tunings.json"
"""The records of `tune`, by their keys."""
SPLIT = "split.json"
"""The plan that cuts the graph into stages over several devices."""

LARGEST_INDEX_BYTES = 64 << 20
MOST_FILES = 4096
_LONGEST_NAME = 240  # below Windows' 260 characters when the package lies near the root of a drive
_DEEPEST = 8
_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,99}")
# https://learn.microsoft.com/windows/win32/fileio/naming-a-file: reserved with any suffix
_RESERVED = frozenset(
    {"con", "prn", "aux", "nul", *(f"com{digit}" for digit in "0123456789"), *(f"lpt{digit}" for digit in "0123456789")}
)
# The file names of a package: nothing that an interpreter, a loader or an unpickler accepts.
_SUFFIXES = (".json", ".onnx", ".bin", ".safetensors", ".txt", ".md")


def required_key(given: str | os.PathLike[str] | None) -> str | os.PathLike[str] | None:
    """Return the public key that must have signed a package: the given one, else `RLX_PACKAGE_KEY`; None if neither is.

    Raises:
        PackageError: it is an empty text, as an unset variable of a script expands to; that never means no key.
    """
    key = environment.get("PACKAGE_KEY") if given is None else given
    if key is not None and not os.fspath(key):
        source = "RLX_PACKAGE_KEY" if given is None else "require_signature"
        raise PackageError(f"{source} is empty; give the path of a public key, or unset it to take unsigned packages")
    return key


def check_name(name: str) -> None:
    """Refuse a name that could lead out of the package, mean two files, or be code.

    Raises:
        IntegrityError: the name is refused; the message has the reason.
    """
    problem = _problem(name)
    if problem:
        raise IntegrityError(f"the package names a file {name!r}, which {problem}; do not use this package")


def check_model_name(name: str) -> None:
    """Refuse a name for a model that cannot be that of one file or folder on every system.

    The name comes from the package, which must not decide where a file is written.

    Raises:
        PackageError: it has other characters than letters, digits, '.', '_', '+' and '-', or is reserved on Windows.
    """
    if "/" in name or _problem(f"{name}.onnx") or name.endswith("."):
        raise PackageError(
            f"{name!r} cannot be the name of an exported model: letters, digits, '.', '_', '+' and '-' only, at most "
            "95 of them, and no name that Windows reserves; give another one with --name"
        )


def check_names(names: Iterable[str]) -> None:
    """Check every name, and that no two are one file where letters have no case or a file is also a folder.

    Raises:
        IntegrityError: a name is not allowed, two collide, or there are too many.
    """
    seen: dict[str, str] = {}
    folders: dict[str, str] = {}
    for name in names:
        check_name(name)
        folded = name.lower()
        if folded in seen:
            raise IntegrityError(f"the package has {seen[folded]!r} and {name!r}, which are one file on some systems")
        seen[folded] = name
        if len(seen) > MOST_FILES:
            raise IntegrityError(f"the package has more than {MOST_FILES} files")
        parts = name.split("/")
        for count in range(1, len(parts)):
            folder = "/".join(parts[:count])
            known = folders.setdefault(folder.lower(), folder)
            if known != folder:
                raise IntegrityError(f"the package has folders {known!r} and {folder!r}, one folder on some systems")
    for folded in folders:
        if folded in seen:
            raise IntegrityError(f"the package has {seen[folded]!r} as a file and as a folder")


def _problem(name: str) -> str:
    """Return the problem of a name, or an empty text."""
    if not name or len(name) > _LONGEST_NAME:
        return f"is empty or longer than {_LONGEST_NAME} characters"
    if "\\" in name or ":" in name or "\0" in name or name.startswith("/"):
        return "is absolute, or has a backslash, a drive, a stream or a NUL in it"
    parts = name.split("/")
    if ".." in parts or "." in parts or "" in parts:
        return "has a part that is empty, '.' or '..'"
    if len(parts) > _DEEPEST:
        return f"has more than {_DEEPEST} parts"
    for part in parts:
        if not _SEGMENT.fullmatch(part):
            return "has characters that are not the same on every system (allowed: A-Z a-z 0-9 . _ + -)"
        if part.endswith(".") or part.split(".")[0].lower() in _RESERVED:
            return "is reserved on Windows"
    if not name.lower().endswith(_SUFFIXES):
        return (
            f"has a suffix that packages do not allow; they hold data, not code or libraries ({', '.join(_SUFFIXES)})"
        )
    return ""


def is_package(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is that of a package, in a folder or in a file, intact or not."""
    file = Path(path)
    try:
        if file.is_dir():
            return (file / INDEX).is_file()
        with open_regular(file) as stream, zipfile.ZipFile(stream) as archive:
            return INDEX in archive.namelist()
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile):
        return False
