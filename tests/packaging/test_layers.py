"""Dependencies between the layers point one way, and the heavy packages are imported in their one place."""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"][
    "package-dir"
]


@functools.cache
def _modules() -> list[tuple[str, Path]]:
    """Return (installed name, file) of every module."""
    found = []
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found.append((".".join([package, *(part for part in parts if part != "__init__")]), path))
    return found


@functools.cache
def _imports(path: Path) -> list[tuple[str, bool]]:
    """Return (module, whether it is imported at run time) for every import, those in functions too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # `from rlx_ort.providers import runtime` imports the module rlx_ort.providers.engine.runtime
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found += [(name, id(node) not in typing_only) for name in names]
    return found


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
    """The IR needs nothing but numpy, ml_dtypes, the standard library, and the errors, files and IR of this package."""
    allowed = {"numpy", "ml_dtypes", "rlx_ort", *sys.stdlib_module_names}
    foreign = []
    for module, path in _modules():
        if _is_in(module, "rlx_ort.ir"):
            for name, _ in _imports(path):
                own = name.startswith("rlx_ort.") and not name.startswith(
                    ("rlx_ort.ir", "rlx_ort.errors", "rlx_ort.storage")
                )
                if name.split(".")[0] not in allowed or own:
                    foreign.append(f"{module} imports {name}")
    assert foreign == []


def test_onnxruntime_is_imported_in_one_file() -> None:
    """Only engine/runtime.py imports ONNX Runtime, so telemetry and fallback are switched off in one place."""
    importers = {
        module
        for module, path in _modules()
        for name, at_run_time in _imports(path)
        if at_run_time and _is_in(name, "onnxruntime")
    }
    assert importers <= {"rlx_ort.providers.engine.runtime"}


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


FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors", "faults", "environment", "epoch", "device", "storage", "fields", "kept", "numerics", "timing"),
    ("ir", "made_up"),
    ("options",),
    ("converters",),
    ("providers",),
    ("execution",),
    ("calibration",),
    ("selection",),
    ("routes", "device_sessions", "adaptive", "resilience", "tuning", "graph_devices", "compat"),
    ("parity", "genai"),
    ("conversion",),
    ("deploy",),
    ("serving",),
    ("report",),
    ("cli", "__main__", "_pyinstaller"),
)
"""From the ground up: modules and packages of rlx_ort. Each imports from its own floor and from those below."""


def _floor(module: str) -> int | None:
    """Return the floor of a module; None for `rlx_ort` itself, which finds public names when they are asked for."""
    part = module.removeprefix("rlx_ort").removeprefix(".").partition(".")[0]
    return next((at for at, names in enumerate(FLOORS) if part in names), None)


def _run_time_imports(*, typing_too: bool = False) -> dict[str, set[str]]:
    """Return module -> the modules of this package that it imports when it runs, in its functions too.

    With `typing_too`, imports for type checkers count as well.
    """
    known = dict(_modules())
    found: dict[str, set[str]] = {}
    for module, path in known.items():
        found[module] = set()
        for name, at_run_time in _imports(path):
            counts = at_run_time or typing_too
            while counts and name not in known and "." in name:
                name = name.rpartition(".")[0]  # a name in a module is that module
            if counts and name in known and name != module:
                found[module].add(name)
    return found


def test_every_module_is_on_a_floor() -> None:
    """The plan names every module and package."""
    assert [module for module, _ in _modules() if module != "rlx_ort" and _floor(module) is None] == []


@pytest.mark.parametrize("floor", range(len(FLOORS)), ids=lambda at: FLOORS[at][0])
def test_a_floor_imports_nothing_from_above(floor: int) -> None:
    """No module imports one of a higher floor, wherever the import stands."""
    assert [
        f"{module} imports {name}"
        for module, names in _run_time_imports().items()
        if _floor(module) == floor
        for name in sorted(names)
        if (_floor(name) or 0) > floor
    ] == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Modules can be sorted so that each imports only what comes before it."""
    graphlib.TopologicalSorter(_run_time_imports()).prepare()  # raises CycleError, which names the circle


def _circles(imports: dict[str, set[str]]) -> list[frozenset[str]]:
    """Return the largest sets of modules in which each reaches all others."""
    reached: dict[str, set[str]] = {}
    for module in imports:
        found, new = set[str](), [module]
        while new:
            new = [name for name in {each for at in new for each in imports[at]} if name not in found]
            found.update(new)
        reached[module] = found
    circles = {frozenset({name for name in found if at in reached[name]}) for at, found in reached.items()}
    return [circle for circle in circles if len(circle) > 1]


def test_no_modules_name_each_other_in_a_circle() -> None:
    """Imports for type checkers count: who reads one module of a circle has to know all of it."""
    imports = {module: names - {"rlx_ort"} for module, names in _run_time_imports(typing_too=True).items()}
    del imports["rlx_ort"]  # it finds public names when they are asked for
    assert [sorted(circle) for circle in _circles(imports)] == []


def test_selection_opens_no_session() -> None:
    """Where to run is decided without opening the user's graph."""
    assert _breaches("rlx_ort.selection", ("rlx_ort.execution.session",)) == []


def test_imports_are_absolute_and_by_the_installed_name() -> None:
    """No module imports `converters`, `providers` or `calibration` by its folder, which would load it twice."""
    folders = {folder for folder in FOLDERS.values() if folder != "rlx_ort"}
    assert [
        f"{module} imports {name}"
        for module, path in _modules()
        for name, _ in _imports(path)
        if name.split(".")[0] in folders
    ] == []


def test_no_module_imports_a_private_name_of_another() -> None:
    """A leading underscore is all that hides a name, so no module has a list of its other names."""
    assert [
        f"{module} imports {name}"
        for module, path in _modules()
        for name, _ in _imports(path)
        if name.startswith("rlx_ort.") and name.rpartition(".")[2].startswith("_") and not name.endswith("__")
    ] == []


@pytest.mark.parametrize(
    "statement",
    ["import rlx_ort", "import rlx_ort.ir.graph", "import rlx_ort.cli", "import rlx_ort.serving.repository"],
)
def test_importing_the_package_loads_no_engine(statement: str, tmp_path: Path) -> None:
    """A process that only imports the package has loaded no ONNX Runtime, no ONNX and no rich; nor has one that serves.

    A warmed package is served before the modules that open others are loaded.
    """
    heavy = "onnxruntime onnx onnx_ir rich safetensors google.protobuf"
    heavy += " rlx_ort.execution.compiled rlx_ort.execution.session rlx_ort.converters.to_onnx rlx_ort.graph_devices"
    program = f"{statement}\nimport sys\nprint(*(name for name in {heavy.split()!r} if name in sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, encoding="utf-8", check=False
    )
    assert (result.returncode, result.stdout.strip()) == (0, ""), result.stderr
