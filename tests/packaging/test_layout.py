"""The package that is built holds what the checkout holds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes, policy
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT, SETUPTOOLS = SETTINGS["project"], SETTINGS["tool"]["setuptools"]
FOLDERS: dict[str, str] = SETUPTOOLS["package-dir"]
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
CONTAINER = ROOT / "examples" / "serving" / "Dockerfile"
ADDRESS = "https://git.example.org/owner/rlx_ort"


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
    result = subprocess.run(
        command,
        cwd=source,
        env=os.environ | {"REPOSITORY_URL": ADDRESS},
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return target / result.stdout.splitlines()[-1]


def _copied_by_the_container() -> list[str]:
    """Return the files and folders that examples/serving/Dockerfile copies from the root of the repository."""
    lines = CONTAINER.read_text(encoding="utf-8").splitlines()
    copies = [line.split()[1:] for line in lines if line.startswith("COPY ")]
    return [name for *names, _ in copies for name in names]


def _metadata(archives: tuple[Path, Path]) -> Message:
    """Return the metadata of the wheel."""
    with zipfile.ZipFile(archives[1]) as wheel:
        data = wheel.read(next(name for name in wheel.namelist() if name.endswith("METADATA")))
    return message_from_bytes(data, policy=policy.compat32)


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build the sdist from the files that the container copies, and the wheel from the unpacked sdist."""
    base = tmp_path_factory.mktemp("build")
    checkout = base / "checkout"
    checkout.mkdir()
    for name in _copied_by_the_container():
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, checkout / name)
        else:
            shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    sdist = _build("build_sdist", checkout, base / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python before 3.11.4 has none
        archive.extractall(base / "unpacked")  # we have made it
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
    needed = [line for line in _metadata(archives).get_all("Requires-Dist") or [] if line.startswith("onnxruntime")]
    assert needed
    assert [line for line in needed if "extra ==" not in line] == []


def test_the_metadata_leads_to_the_repository(archives: tuple[Path, Path]) -> None:
    """Addresses, authors and keywords are there, and no link of the description depends on where it is shown."""
    metadata = _metadata(archives)
    addresses = dict(line.split(", ", 1) for line in metadata.get_all("Project-URL") or [])
    assert set(addresses) == {"Changelog", "Documentation", "Issues", "Repository", "Security"}
    assert [each for each in addresses.values() if not each.startswith(ADDRESS)] == []
    assert metadata["Author"]
    assert "onnxruntime" in metadata["Keywords"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    description = str(metadata.get_payload())
    targets = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```", "", description, flags=re.MULTILINE | re.DOTALL))
    assert len(targets) > 20
    assert [target for target in targets if not target.startswith("https://")] == []
    assert f"]({ADDRESS}/raw/v{PROJECT['version']}/docs/pictures/overview.svg)" in description


def test_the_recipe_for_conda_agrees_with_the_project() -> None:
    """The version, Python and the dependencies of conda/recipe.yaml are those of pyproject.toml."""
    recipe = (ROOT / "conda" / "recipe.yaml").read_text(encoding="utf-8")
    assert re.findall(r'^  version: "(.+)"', recipe, re.MULTILINE) == [PROJECT["version"]]
    needed = recipe.split("\n  run:\n", 1)[1].split("\n  run_constraints:\n", 1)[0]
    listed = [line.strip(" -").replace(" ", "") for line in needed.splitlines()]
    assert sorted(listed) == sorted([f"python{PROJECT['requires-python']}", *PROJECT["dependencies"]])


def test_nothing_installs_the_package_by_its_name() -> None:
    """It is on no index yet, and whoever takes the name there would be installed instead."""
    places = [path for name in ("docs", "examples", "scripts") for path in (ROOT / name).rglob("*") if path.is_file()]
    places += [*ROOT.glob("*.md"), *_installed_names("*.py").values()]
    texts = [
        path for path in places if path.suffix in (".md", ".py", ".txt", ".toml", ".yml", ".yaml", ".Dockerfile", "")
    ]
    assert CONTAINER in texts
    assert len(texts) > 200
    by_name = re.compile(r"rlx[_-]ort\[|(?:pip|uv|conda) (?:pip )?install (?:-\S+ )*[\"']?rlx[_-]ort\b")
    assert [path for path in texts if by_name.search(path.read_text(encoding="utf-8"))] == []


def test_the_container_may_see_what_it_copies() -> None:
    """.dockerignore lets the files through that the Dockerfile copies, and no others."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert sorted(line[1:] for line in lines if line.startswith("!")) == sorted(_copied_by_the_container())
    assert "*" in lines
