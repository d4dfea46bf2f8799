"""Checks on the built wheel, so that a module that is not packaged fails here and not at a user's."""

import json
import os
import shutil
import tomllib
import zipfile
from pathlib import Path

import nox
from filelock import FileLock

nox.options.default_venv_backend = "uv|virtualenv"
nox.options.sessions = ["lint", "types", "pyright", "tests"]
nox.options.reuse_existing_virtualenvs = True

ROOT = Path(__file__).resolve().parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DEV = PROJECT["dependency-groups"]["dev"]

# The oldest core that is supported; it is also the one that DirectML's wheel carries.
OLDEST_ONNXRUNTIME = "1.24.4"

# Tests of what differs on an older core: how weights reach a session, and what can be read from it.
OLD_CORE_TESTS = (
    *("tests/backend/providers", "tests/backend/execution", "tests/backend/test_examples.py"),
    "tests/backend/onnx_suite/test_emptied.py",
)


# The newest core that is known; the whole suite runs on the one before, whose plugins and providers are complete.
NEWEST_ONNXRUNTIME = "1.32.0"

# Tests of what differs on a newer core: what it takes, what it computes, and its own reader of model packages.
NEW_CORE_TESTS = (
    "tests/backend/onnx_suite",
    "tests/backend/deploy/test_model_package.py",
    "tests/backend/execution/test_optimizer_faults.py",
    "tests/backend/providers/test_claims.py",
    "tests/backend/providers/test_core_facts.py",
    "tests/backend/providers/test_injection.py",
    "tests/backend/providers/test_sessions.py",
)

# Tests of what a device computes; those that name it in their id are run.
DEVICE_TESTS = (
    *("tests/backend/ops", "tests/backend/execution", "tests/backend/parity"),
    "tests/backend/onnx_suite/test_emptied.py",
)


def build_wheel(session: nox.Session) -> str:
    """Return the wheel that BUILT_WHEEL names; else build it through the sdist, as a release does.

    Sessions that run beside each other build one after the other: setuptools writes into the checkout.
    """
    if built := os.environ.get("BUILT_WHEEL"):
        return built
    folder = Path(session.create_tmp()) / "dist"
    for old in folder.glob("*"):
        old.unlink()
    with FileLock(folder.parents[2] / "build.lock"):
        session.run_install("uv", "build", "--quiet", "--out-dir", str(folder), str(ROOT), external=True)
    return str(next(folder.glob("*.whl")))


def run_pytest(session: nox.Session, *paths: str) -> None:
    """Run pytest on the paths of the command line, else on these, with the checkout off the import path."""
    session.run("python", "-P", "-m", "pytest", *(session.posargs or paths))


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting."""
    session.install(*(requirement for requirement in DEV if requirement.startswith("ruff")))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Type-check the installed package for three systems, then the examples and scripts against it."""
    session.install(f"{build_wheel(session)}[cpu]", *DEV)
    config = ("--config-file", str(ROOT / "pyproject.toml"))
    with session.chdir(session.create_tmp()):  # away from the checkout, whose rlx_ort/ lacks the mapped folders
        for platform in ("win32", "darwin", "linux"):
            session.run("mypy", *config, "--platform", platform, "-p", "rlx_ort")
        # for Linux too, from the cache of the run before: mypy keeps one for the last platform
        session.run("mypy", *config, *map(str, [*ROOT.glob("examples/*.py"), *ROOT.glob("scripts/*.py")]))


@nox.session
def pyright(session: nox.Session) -> None:
    """Type-check the built wheel with a second checker; its settings are in pyproject.toml."""
    wheel = build_wheel(session)
    session.install(f"{wheel}[cpu]", *DEV, "pyright[nodejs]==1.1.414")
    folder = Path(session.create_tmp()) / "unpacked"
    shutil.rmtree(folder, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    (folder / "pyrightconfig.json").write_text(json.dumps(PROJECT["tool"]["pyright"]), encoding="utf-8")
    python = shutil.which("python", path=session.bin)
    session.run("pyright", "--project", str(folder), "--pythonpath", str(python))


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into the folder out/site; warnings, broken links and missing names fail.

    The wheel and the sdist are checked as well, of which an index shows the README.
    """
    session.install(*PROJECT["dependency-groups"]["docs"], "twine>=6.1")
    wheel = Path(build_wheel(session))
    session.run("twine", "check", "--strict", *map(str, wheel.parent.glob("rlx_ort-*")))
    session.run("python", "scripts/docs_site.py", "--out", *(session.posargs or ["out/site"]))


@nox.session
def tests(session: nox.Session) -> None:
    """Run the whole suite on the installed wheel."""
    session.install(f"{build_wheel(session)}[cpu,webgpu]", *DEV)
    run_pytest(session)


@nox.session
def coverage(session: nox.Session) -> None:
    """Report which lines of the package the suite runs; a figure to read, and no condition of a change."""
    session.install(f"{build_wheel(session)}[cpu,webgpu]", *DEV, "coverage[toml]>=7.10")
    data = Path(session.create_tmp()) / "coverage"
    settings = ("--rcfile", str(ROOT / "pyproject.toml"), "--data-file", str(data))
    session.run("python", "-P", "-m", "coverage", "run", *settings, "-m", "pytest", *session.posargs)
    session.run("python", "-P", "-m", "coverage", "report", *settings)


@nox.session
def next_core(session: nox.Session) -> None:
    """Run the suite on the newest ONNX Runtime, pre-releases included."""
    session.install(f"{build_wheel(session)}[cpu]", *DEV)
    session.run("uv", "pip", "install", "--prerelease=allow", "--upgrade", "onnxruntime", external=True)
    run_pytest(session)


@nox.session
def newest_core(session: nox.Session) -> None:
    """Run what depends on the core's version on the newest released ONNX Runtime."""
    session.install(f"{build_wheel(session)}[cpu]", f"onnxruntime=={NEWEST_ONNXRUNTIME}", *DEV)
    run_pytest(session, *NEW_CORE_TESTS)


@nox.session
def oldest_core(session: nox.Session) -> None:
    """Run what depends on the core's version on the oldest supported ONNX Runtime."""
    session.install(f"{build_wheel(session)}[cpu]", f"onnxruntime=={OLDEST_ONNXRUNTIME}", *DEV)
    run_pytest(session, *OLD_CORE_TESTS)


@nox.session
def openvino(session: nox.Session) -> None:
    """Run operators, execution and parity on OpenVINO, in Intel's own build: any x86 CPU will do."""
    session.install(build_wheel(session), "onnxruntime-openvino==1.24.1", *DEV)
    own = ("tests/backend/providers/test_openvino.py", "tests/generated")
    run_pytest(session, "--device=openvino", "-k", "openvino", *DEVICE_TESTS, *own)


@nox.session
def qnn(session: nox.Session) -> None:
    """Run operators, execution and parity on the NPU that QNN's wheel for Linux x64 simulates."""
    session.install(f"{build_wheel(session)}[cpu]", "onnxruntime==1.31.1", "onnxruntime-qnn==2.7.0", *DEV)
    run_pytest(session, "--device=qnn", "-k", "qnn", *DEVICE_TESTS, "tests/generated")


@nox.session
def genai(session: nox.Session) -> None:
    """Run language models in onnxruntime-genai, with text through its tokenizer."""
    session.install(f"{build_wheel(session)}[cpu,genai,webgpu]", "tokenizers", *DEV)
    run_pytest(session, "tests/unit/genai", "tests/backend/genai", "tests/cli/test_genai.py")


@nox.session
def ray(session: nox.Session) -> None:
    """Serve with two replicas on a Ray cluster of this machine."""
    newer = "grpcio-reflection<1.83"  # later ones want a protobuf that tritonclient does not take
    session.install(f"{build_wheel(session)}[cpu,ray,serve]", newer, *DEV)
    run_pytest(session, "tests/backend/serving_ray")


@nox.session
def frozen(session: nox.Session) -> None:
    """Freeze the example program with PyInstaller, from the wheel, and run what comes out."""
    session.install(f"{build_wheel(session)}[cpu]", "pyinstaller", "pytest", "hypothesis")
    run_pytest(session, "tests/packaging/test_frozen.py")


@nox.session
def wine(session: nox.Session) -> None:
    """Run what every change must pass under a Windows build of Python, in Wine; other parts are named: `-- directx`."""
    session.install("pip", "pytest", "uv")
    session.run("python", "scripts/windows_under_wine.py", "test", *session.posargs)
