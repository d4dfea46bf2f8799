"""The package that is built holds what the checkout holds."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
FOLDERS: dict[str, str] = SETUPTOOLS["package-dir"]
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def _installed_names(pattern: str) -> dict[str, Path]:
    """Return installed path -> file for the package's files on disk that match a pattern."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob(pattern):
            if "__pycache__" not in path.parts:
                found["/".join([*package.split("."), *path.relative_to(ROOT / folder).parts])] = path
    return found


def _build(kind: str, source: Path, target: Path) -> Path:
    """Call the build backend in a process of its own, as installers do, and return what it built."""
    target.mkdir()
    command = [sys.executable, "-W", "ignore", "-c", BUILD, kind, str(target)]
    result = subprocess.run(command, cwd=source, capture_output=True, text=True, encoding="utf-8", check=False)
    assert result.returncode == 0, result.stderr
    return target / result.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build the sdist from a copy of the checkout, and the wheel from the unpacked sdist."""
    base = tmp_path_factory.mktemp("build")
    checkout = base / "checkout"
    checkout.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout / name)
    for folder in FOLDERS.values():
        shutil.copytree(ROOT / folder, checkout / folder, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    sdist = _build("build_sdist", checkout, base / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(base / "unpacked", filter="data")
    unpacked = next((base / "unpacked").iterdir())
    return sdist, _build("build_wheel", unpacked, base / "wheel")


def test_every_package_on_disk_is_declared() -> None:
    """A folder with an __init__.py is a package that pyproject.toml names, and the other way round."""
    found = {name.removesuffix("/__init__.py").replace("/", ".") for name in _installed_names("__init__.py")}
    assert found == set(SETUPTOOLS["packages"])


def test_every_module_lies_in_a_package() -> None:
    """No module stands in a folder that has no __init__.py, where setuptools would not find it."""
    assert [str(path) for path in _installed_names("*.py").values() if not (path.parent / "__init__.py").exists()] == []


def test_the_wheel_built_from_the_sdist_holds_every_file(archives: tuple[Path, Path]) -> None:
    """Modules and data files all arrive, through the sdist, under their installed names."""
    with zipfile.ZipFile(archives[1]) as wheel:
        packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    on_disk = {name for name, path in _installed_names("*").items() if path.is_file()}
    assert packed == on_disk


def test_the_wheel_says_that_it_is_typed_and_licensed(archives: tuple[Path, Path]) -> None:
    """The type marker, the licence text and the console script are in the wheel."""
    with zipfile.ZipFile(archives[1]) as wheel:
        names = wheel.namelist()
        scripts = wheel.read(next(name for name in names if name.endswith("entry_points.txt"))).decode("utf-8")
    assert "rlx_ort/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "rlx-ort = rlx_ort.cli:main" in scripts


@pytest.mark.parametrize(
    ("folder", "known"), [("kernel_lists", "CUDAExecutionProvider-1.31.txt"), ("cores", "1.31.toml")]
)
def test_the_sdist_and_the_wheel_hold_the_tables(archives: tuple[Path, Path], folder: str, known: str) -> None:
    """Capability and config keys are judged by these files where ONNX Runtime cannot be asked."""
    tables = {path.name for path in (ROOT / "providers" / folder).iterdir()}
    with tarfile.open(archives[0]) as sdist, zipfile.ZipFile(archives[1]) as wheel:
        for names in (sdist.getnames(), wheel.namelist()):
            assert {name.rpartition("/")[2] for name in names if f"providers/{folder}/" in name} == tables
    assert known in tables


def test_the_wheel_asks_for_no_flavour_of_onnx_runtime(archives: tuple[Path, Path]) -> None:
    """ONNX Runtime comes by an extra only, because its flavours exclude each other."""
    with zipfile.ZipFile(archives[1]) as wheel:
        metadata = wheel.read(next(name for name in wheel.namelist() if name.endswith("METADATA"))).decode("utf-8")
    needed = [line for line in metadata.splitlines() if line.startswith("Requires-Dist: onnxruntime")]
    assert needed
    assert [line for line in needed if "extra ==" not in line] == []


def test_only_containers_install_the_package_by_its_name() -> None:
    """Help, docs and examples name an extra, and `install_command` has the one way to install it."""
    places = [
        ROOT / "README.md",
        *(path for name in ("docs", "examples", "scripts") for path in (ROOT / name).rglob("*")),
    ]
    places += _installed_names("*.py").values()
    texts = [path for path in places if path.suffix in (".md", ".py", ".txt", ".toml", ".yml")]
    assert len(texts) > 200
    assert [path for path in texts if re.search(r"rlx[_-]ort\[", path.read_text(encoding="utf-8"))] == []
