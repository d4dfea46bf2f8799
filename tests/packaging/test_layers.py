"""Dependencies between the layers point one way, and the heavy packages are imported in their one place."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"][
    "package-dir"
]


def _modules() -> Iterator[tuple[str, Path]]:
    """Yield (installed name, file) of every module."""
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            yield ".".join([package, *(part for part in parts if part != "__init__")]), path


def _imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield (module, whether it is imported at run time) for every import, those in functions too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # `from rlx_ort.providers import runtime` imports the module rlx_ort.providers.runtime
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            yield name, id(node) not in typing_only


def _is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def _breaches(layer: str, forbidden: tuple[str, ...]) -> list[str]:
    return [
        f"{module} imports {name}"
        for module, path in _modules()
        if _is_in(module, layer)
        for name, at_run_time in _imports(path)
        if at_run_time and any(_is_in(name, package) for package in forbidden)
    ]


def test_the_ir_imports_only_numpy_and_ml_dtypes() -> None:
    """The IR needs nothing but numpy, ml_dtypes, the standard library, and the errors and IR of this package."""
    allowed = {"numpy", "ml_dtypes", "rlx_ort", *sys.stdlib_module_names}
    foreign = []
    for module, path in _modules():
        if _is_in(module, "rlx_ort.ir"):
            for name, _ in _imports(path):
                own = name.startswith("rlx_ort.") and not name.startswith(("rlx_ort.ir", "rlx_ort.errors"))
                if name.split(".")[0] not in allowed or own:
                    foreign.append(f"{module} imports {name}")
    assert foreign == []


def test_onnxruntime_is_imported_in_one_file() -> None:
    """Only providers/runtime.py imports ONNX Runtime, so telemetry and fallback are switched off in one place."""
    importers = {
        module
        for module, path in _modules()
        for name, at_run_time in _imports(path)
        if at_run_time and _is_in(name, "onnxruntime")
    }
    assert importers <= {"rlx_ort.providers.runtime"}


def _single_providers() -> set[str]:
    """Return the modules that are one provider: those with a class that says which device kinds it serves."""
    found = set()
    for module, path in _modules():
        if _is_in(module, "rlx_ort.providers"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "kinds" and node.value is not None:
                    found.add(module)
    return found


def test_the_core_names_no_single_provider() -> None:
    """Outside rlx_ort.providers, nothing imports the module of one provider; the registry finds them."""
    providers = _single_providers()
    assert "rlx_ort.providers.cpu" in providers
    breaches = [
        f"{module} imports {name}"
        for module, path in _modules()
        if not _is_in(module, "rlx_ort.providers")
        for name, _ in _imports(path)
        if any(_is_in(name, provider) for provider in providers)
    ]
    assert breaches == []


@pytest.mark.parametrize(
    ("layer", "forbidden"),
    [
        ("rlx_ort.converters", ("rlx_ort.selection", "rlx_ort.providers", "rlx_ort.graph_devices", "rlx_ort.cli")),
        ("rlx_ort.providers", ("rlx_ort.selection", "rlx_ort.graph_devices", "rlx_ort.cli")),
        ("rlx_ort.selection", ("rlx_ort.graph_devices", "rlx_ort.cli", "rlx_ort.execution.session")),
        (
            "rlx_ort.execution",
            ("rlx_ort.selection", "rlx_ort.graph_devices", "rlx_ort.parity", "rlx_ort.conversion", "rlx_ort.cli"),
        ),
        ("rlx_ort.parity", ("rlx_ort.selection", "rlx_ort.graph_devices", "rlx_ort.conversion", "rlx_ort.cli")),
        ("rlx_ort.conversion", ("rlx_ort.selection", "rlx_ort.graph_devices", "rlx_ort.cli")),
        ("rlx_ort.graph_devices", ("rlx_ort.cli",)),
    ],
)
def test_layers_point_one_way(layer: str, forbidden: tuple[str, ...]) -> None:
    """A layer imports nothing of the layers above it, nor of the one beside it that it must not know."""
    assert _breaches(layer, forbidden) == []


def test_imports_are_absolute_and_by_the_installed_name() -> None:
    """No module imports `converters`, `providers` or `calibration` by its folder, which would load it twice."""
    folders = {folder for folder in FOLDERS.values() if folder != "rlx_ort"}
    assert [
        f"{module} imports {name}"
        for module, path in _modules()
        for name, _ in _imports(path)
        if name.split(".")[0] in folders
    ] == []


@pytest.mark.parametrize("statement", ["import rlx_ort", "import rlx_ort.ir.graph", "import rlx_ort.cli"])
def test_importing_the_package_loads_no_engine(statement: str, tmp_path: Path) -> None:
    """A process that only imports the package has loaded no ONNX Runtime, no ONNX and no rich."""
    heavy = "onnxruntime onnx onnx_ir rich safetensors google.protobuf"
    program = f"{statement}\nimport sys\nprint(*(name for name in {heavy.split()!r} if name in sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, encoding="utf-8", check=False
    )
    assert (result.returncode, result.stdout.strip()) == (0, ""), result.stderr
