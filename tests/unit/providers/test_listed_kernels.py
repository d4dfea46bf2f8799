"""Shipped kernel lists: how a line is read, which version counts, and what the shipped files hold."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from developer_scripts import load_script

from rlx_ort.ir.dtype import DType
from rlx_ort.providers import claims as module
from rlx_ort.providers.base import KernelClaim
from rlx_ort.providers.claims import list_text, listed_kernels, parse_list, whole_list

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted((ROOT / "providers" / "kernel_lists").iterdir())
CUDA = [path for path in FILES if path.name.startswith("CUDA")]
# The first digits of the SHA-256 of each whole list, as it was when it was a file of its own.
WHOLE = {
    "CUDAExecutionProvider-1.24": "f1c05ea0d67d9b9b",
    "CUDAExecutionProvider-1.25": "258f18cadf6cef96",
    "CUDAExecutionProvider-1.26": "17e7713484dc573b",
    "CUDAExecutionProvider-1.27": "7f4abea23ea4ce68",
    "CUDAExecutionProvider-1.28": "cc1cda14d3eb5826",
    "CUDAExecutionProvider-1.29": "771967056997fc2b",
    "CUDAExecutionProvider-1.30": "a8c06f5378b32b59",
    "CUDAExecutionProvider-1.31": "628a434c0cfcf44f",
    "DmlExecutionProvider-1.24": "4fa5c81bd1d84682",
    "WebGpuExecutionProvider-1.31": "1403287f952a9342",
}
F32, F64, I64 = DType.F32, DType.F64, DType.I64


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Read lists from an empty folder instead of the shipped ones."""
    monkeypatch.setattr(module, "_folder", lambda: tmp_path)
    module._versions.cache_clear()
    module._read.cache_clear()
    yield tmp_path
    module._versions.cache_clear()
    module._read.cache_clear()


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """Load the script that writes the lists."""
    return load_script("kernel_lists")


def whole(name: str) -> str:
    """Return the whole text of a shipped list."""
    ep_name, _, version = name.rpartition("-")
    major, minor = map(int, version.split("."))
    return list_text(ep_name, (major, minor))


def operators(name: str) -> dict[str, list[KernelClaim]]:
    """Return the kernels of a shipped list's ai.onnx operators by name."""
    found: dict[str, list[KernelClaim]] = {}
    for claim in parse_list(whole(name)):
        if claim.domain == "":
            found.setdefault(claim.op_type, []).append(claim)
    return found


# --- the form of a line


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("ai.onnx Abs 6-12 T=f32,f64", KernelClaim("", "Abs", 6, 12, {"T": frozenset({F32, F64})})),
        ("ai.onnx Abs 13+ T=f32", KernelClaim("", "Abs", 13, None, {"T": frozenset({F32})})),
        ("ai.onnx Add 13 T=f32", KernelClaim("", "Add", 13, 13, {"T": frozenset({F32})})),
        ("com.microsoft Gelu 1+", KernelClaim("com.microsoft", "Gelu", 1, None, {})),
        (
            "ai.onnx Cast 9-12 T1=f32 T2=i64,string",
            KernelClaim("", "Cast", 9, 12, {"T1": frozenset({F32}), "T2": frozenset({I64, DType.STRING})}),
        ),
        (
            "ai.onnx Identity 16+ V=f4e2m1,opt(seq(i64)),seq(f32)",
            KernelClaim("", "Identity", 16, None, {"V": frozenset({DType.F4E2M1, I64, F32})}),
        ),
    ],
)
def test_a_line_is_a_kernel(line: str, wanted: KernelClaim) -> None:
    """Domain, operator, versions and element types become a claim."""
    assert list(parse_list(line)) == [wanted]


@pytest.mark.parametrize(
    "line", ["ai.onnx Abs", "ai.onnx Abs six T=f32", "ai.onnx Abs 13+ T=float", "ai.onnx Abs 13+ T="]
)
def test_a_line_of_another_form_is_an_error(line: str) -> None:
    """A damaged list is not read as one with fewer kernels."""
    with pytest.raises(ValueError, match=r".+"):
        list(parse_list(line))


# --- the choice of a version


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ((1, 24, 4), (1, 24)),
        ((1, 26), (1, 24)),
        ((1, 27, 1), (1, 27)),
        ((1, 40, 0), (1, 31)),
        ((2, 0, 0), (1, 31)),
        ((1, 8, 0), (1, 9)),
        (None, (1, 31)),
    ],
)
def test_the_newest_list_that_is_not_newer_counts(
    folder: Path, asked: tuple[int, ...] | None, wanted: tuple[int, int]
) -> None:
    """Versions compare as numbers; before the oldest list the oldest counts, and without a version the newest."""
    for minor in (9, 24, 27, 31):
        (folder / f"SomeProvider-1.{minor}.txt").write_text(f"ai.onnx Abs {minor}+ T=f32\n", encoding="utf-8")
    found = listed_kernels("SomeProvider", asked)
    assert found is not None
    assert found.version == wanted
    assert [claim.first_version for claim in found.claims] == [wanted[1]]


def test_a_provider_without_a_list_has_none(folder: Path) -> None:
    """Lists of other providers, and other files, do not count."""
    (folder / "OtherProvider-1.31.txt").write_text("ai.onnx Abs 13+ T=f32\n", encoding="utf-8")
    (folder / "SomeProvider.txt").write_text("ai.onnx Abs 13+ T=f32\n", encoding="utf-8")
    assert listed_kernels("SomeProvider", None) is None


# --- the shipped lists


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_shipped_list_is_found_by_its_name_and_holds_a_provider(path: Path) -> None:
    """Each file parses, is the one for its version, and has more than 100 kernels."""
    ep_name, _, version = path.stem.rpartition("-")
    wanted = tuple(map(int, version.split(".")))
    found = listed_kernels(ep_name, wanted)
    assert found is not None
    assert found.version == wanted
    assert len(found.claims) > 100


@pytest.mark.parametrize("name", WHOLE)
def test_a_list_read_through_the_ones_before_it_is_the_one_that_was_recorded(name: str) -> None:
    """Differences add up to the kernel registry of each version, comments and order included."""
    assert hashlib.sha256(whole(name).encode()).hexdigest()[:16] == WHOLE[name]


# --- the script


def test_versions_that_take_the_same_types_share_a_line(script: ModuleType) -> None:
    """Reading gives each a line of its own again, in order of the versions."""
    lines = ["ai.onnx A 1-6 T=f32", "ai.onnx A 7 T=f64", "ai.onnx A 13+ T=f32"]
    joined = script.one_line_each(lines)
    assert joined == ["ai.onnx A 1-6,13+ T=f32", "ai.onnx A 7 T=f64"]
    assert whole_list("\n".join(joined), "").splitlines() == lines


def test_a_list_that_removes_what_the_one_before_lacks_is_refused() -> None:
    """A damaged list is not read as another one."""
    with pytest.raises(ValueError, match=r"removes 'ai\.onnx B 7\+'"):
        whole_list("- ai.onnx B 7+\n", "ai.onnx A 7+\n")
