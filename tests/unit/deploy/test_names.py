"""Names of a package's files: what could lead out, mean two files or be code is refused."""

from __future__ import annotations

import pytest

from rlx_ort.deploy.names import check_name, check_names
from rlx_ort.errors import IntegrityError

BAD = {
    "absolute": "/etc/passwd.json",
    "parent": "../a.json",
    "inner parent": "a/../../b.json",
    "dot": "./a.json",
    "empty part": "a//b.json",
    "folder": "a/",
    "empty": "",
    "drive": "C:a.json",
    "drive path": "C:/a.json",
    "stream": "a.json:hidden.json",
    "backslash": "a\\b.json",
    "share": "\\\\server\\share\\a.json",
    "share with slashes": "//server/share/a.json",
    "nul": "a\0.json",
    "newline": "a\n.json",
    "reserved": "con.json",
    "reserved folder": "AUX/a.json",
    "reserved with two suffixes": "nul.txt.json",
    "port": "com1.bin",
    "trailing dot": "a.json.",
    "trailing space": "a.json ",
    "leading dot": ".hidden.json",
    "not ascii": "ä.json",
    "right to left": "a\u202enosj.json",
    "too long": "a" * 300 + ".json",
    "too deep": "/".join("abcdefghijk") + ".json",
    "library": "custom_ops.so",
    "versioned library": "libops.so.1",
    "windows library": "ops.dll",
    "mac library": "ops.dylib",
    "python": "hook.py",
    "pickle": "weights.pkl",
    "torch": "weights.pt",
    "shell": "run.sh",
    "no suffix": "Makefile",
}


@pytest.mark.parametrize("name", BAD.values(), ids=BAD)
def test_a_dangerous_name_is_refused(name: str) -> None:
    """Each is an error that quotes the name."""
    with pytest.raises(IntegrityError) as caught:
        check_name(name)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("name", ["rlx.json", "cpu-f32/model.onnx", "shared_assets/sha256-00ff/weights.bin", "a+b.txt"])
def test_a_plain_name_is_taken(name: str) -> None:
    """Letters, digits, `.`, `_`, `+` and `-` in a few folders are fine."""
    check_name(name)


@pytest.mark.parametrize(
    "names",
    [["a.json", "A.json"], ["a/b.json", "A/c.json"], ["a.json", "a.json/b.json"], ["a.json", "a.json"]],
    ids=["case", "folder case", "file and folder", "twice"],
)
def test_names_that_collide_are_refused(names: list[str]) -> None:
    """Two names that are one file on some system are an error."""
    with pytest.raises(IntegrityError):
        check_names(names)


def test_too_many_files_are_refused() -> None:
    """The number of files has a limit."""
    with pytest.raises(IntegrityError, match="more than"):
        check_names(f"f{number}.json" for number in range(5000))
