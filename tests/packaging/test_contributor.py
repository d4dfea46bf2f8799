"""A contributor's walks: the examples of CONTRIBUTING.md, added to copies of the checkout by the page's commands."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from checkout_copies import ROOT, copy_checkout, minutes_of
from doc_pages import BLOCK

SHOWN = 3000  # characters of the output of a command that fails

pytestmark = [pytest.mark.slow, pytest.mark.webgpu]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the checkout."""
    return copy_checkout(tmp_path_factory.mktemp("contributor"))


def _section(title: str) -> list[tuple[str, str]]:
    """Return the language and the text of each block under a heading of the page."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = page.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]
    return [(match[2], textwrap.dedent(match[3])) for match in BLOCK.finditer(section)]


def _texts(blocks: list[tuple[str, str]], language: str) -> list[str]:
    return [text for name, text in blocks if name == language]


def _put(file: Path, before: str, text: str) -> None:
    """Insert a text before the only place of another one, or at the end of the file."""
    content = file.read_text(encoding="utf-8")
    assert not before or content.count(before) == 1, f"{before!r} is in {file.name} {content.count(before)} times"
    content = content.replace(before, text + before) if before else f"{content}\n\n{text}"
    file.write_text(content, encoding="utf-8", newline="\n")


def _run(command: str, checkout: Path) -> None:
    """Run a command of the page in the copy; `.venv/bin/` stands for the environment that runs the tests."""
    words = shlex.split(command)
    python, *rest = [sys.executable, "-P", "-m", "rlx_ort.cli"] if words[0] == ".venv/bin/rlx-ort" else [sys.executable]
    assert rest or words[0] == ".venv/bin/python", command
    done = subprocess.run(
        [python, *rest, *words[1:], *(["-p", "no:cacheprovider"] if "pytest" in words else [])],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": str(checkout)},  # comes before the installed package
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-SHOWN:]}\n{done.stderr[-SHOWN:]}"


def _run_all(blocks: list[tuple[str, str]], checkout: Path) -> None:
    commands = [line for text in _texts(blocks, "") for line in text.splitlines()]
    assert len(commands) >= 2
    for command in commands:
        _run(command, checkout)


def test_an_op_is_added_by_the_page(checkout: Path, record_property: Callable[[str, object], None]) -> None:
    """Its class, lowering, reference and case go where the page says; every command of the page then passes."""
    blocks = _section("Add an op")
    op, lowering, reference = _texts(blocks, "python")
    [case] = _texts(blocks, "text")
    with minutes_of("contributor, an op", record_property):
        _put(checkout / "rlx_ort/ir/ops/elementwise.py", "add_builders(", f"{op}\n\n")
        for folder, text in (("converters/to_onnx", lowering), ("tests/helpers/interpreter", reference)):
            _put(checkout / folder / "elementwise.py", "StopGradient, Where\n", "Hypot, ")
            _put(checkout / folder / "elementwise.py", "", text)
        _put(
            checkout / "tests/helpers/op_tests/cases.py", '        Case("fma",', textwrap.indent(case.lstrip(), " " * 8)
        )
        _run_all(blocks, checkout)
    assert "def hypot(" in (checkout / "rlx_ort/ir/builders.pyi").read_text(encoding="utf-8")


def test_a_provider_is_added_by_the_page(checkout: Path, record_property: Callable[[str, object], None]) -> None:
    """Its file, bounds and rows go where the page says; every command of the page then passes, on the new device."""
    blocks = _section("Add a provider")
    [provider], [bounds] = _texts(blocks, "python"), _texts(blocks, "toml")
    with minutes_of("contributor, a provider", record_property):
        (checkout / "providers/toy.py").write_text(provider, encoding="utf-8")
        (checkout / "tests/data/devices/toy.toml").write_text(bounds, encoding="utf-8")
        _put(checkout / "providers/registry.py", ")\n\n\nclass ProviderRegistry", '    ("toy", "ToyProvider"),\n')
        _put(checkout / "rlx_ort/device.py", ")\n\n# Platform priority", '    DeviceKind("toy", "Toy"),\n')
        _put(checkout / "rlx_ort/device.py", '    "cpu",\n)', '    "toy",\n')
        _put(checkout / "docs/devices.md", "| `tpu`, `opengl` |", "| `toy` | CPU | every flavour | by this walk |\n")
        _put(checkout / "docs/choosing.md", "| `amdgpu` | ONNX Runtime's list", "| `toy` | index 0 only |\n")
        _run_all(blocks, checkout)


def test_a_way_to_run_is_added_by_the_page(checkout: Path, record_property: Callable[[str, object], None]) -> None:
    """Its goal, rule and method go into three files; its test and those of the other ways then pass."""
    blocks = _section("Add a way to run")
    (goal, rule, method), [test] = _texts(blocks, "text"), _texts(blocks, "python")
    with minutes_of("contributor, a way to run", record_property):
        _put(checkout / "rlx_ort/routes.py", "HINT, TRY = ", goal)
        _put(checkout / "rlx_ort/device_sessions.py", "Key, Moment, Pick", "PREFERRED, ")
        _put(checkout / "rlx_ort/device_sessions.py", "        if goal is FASTEST:\n", textwrap.indent(rule, " " * 8))
        _put(checkout / "rlx_ort/graph_devices.py", "    RESOLVED,\n", "    PREFERRED,\n")
        _put(checkout / "rlx_ort/graph_devices.py", "    def run_fastest(", textwrap.indent(method + "\n", " " * 4))
        (checkout / "tests/unit/execution/test_run_preferred.py").write_text(test, encoding="utf-8")
        _run_all(blocks, checkout)


def test_an_option_of_the_server_is_added_by_the_page(
    checkout: Path, record_property: Callable[[str, object], None]
) -> None:
    """Its field, check and parameter go into three files; a server of it then refuses larger requests."""
    blocks = _section("Add an option of the server")
    (field, check, parameter), [test] = _texts(blocks, "text"), _texts(blocks, "python")
    with minutes_of("contributor, an option of the server", record_property):
        after = "\n    def batches_unproven("
        _put(checkout / "rlx_ort/serving/options.py", after, textwrap.indent(field, " " * 4))
        after = "\n\ndef device_lines("
        _put(checkout / "rlx_ort/serving/models.py", after, textwrap.indent(check, " " * 8))
        _put(checkout / "rlx_ort/cli/serve.py", "    precision: str = ", textwrap.indent(parameter, " " * 4))
        _put(
            checkout / "rlx_ort/cli/serve.py",
            "        most_held_bytes=most_held_bytes,\n",
            "        most_rows=most_rows,\n",
        )
        (checkout / "tests/backend/serving/test_most_rows.py").write_text(test, encoding="utf-8")
        _run_all(blocks, checkout)
