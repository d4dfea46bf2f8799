"""Every code block of every page runs, page by page, as a reader would run it."""

from __future__ import annotations

import doctest
import importlib.util
import inspect
import re
from pathlib import Path

import pytest
from doc_pages import MADE_BY_THE_READER, Step, run_page, steps

import rlx_ort
from rlx_ort import environment

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(page.relative_to(ROOT).as_posix() for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))

OF_THEIR_OWN = {"docs/serving.md": "tests/backend/serving/test_page.py"}
"""Pages whose examples another test runs."""

NOT_RUN = {
    r"pip install ": "changes the environment",
    r"(python3|python|\.venv/bin/(python|pytest|nox)|\.ci/run)\b|\.venv/bin/rlx-ort": "in a checkout, by CI",
    r"openssl ": "makes the keys that are there already",
    r"git clone |cd rlx_ort": "in a checkout, by CI",
    r"rlx-ort serve ": "a server; tests/backend/serving",
    r"rlx-ort calibrate": "takes seconds a device; tests/cli/test_calibration.py",
    r"rlx-ort compare \S+ --device cpu --device webgpu": "needs WebGPU",
    r"RLX_DEVICE_MEMORY=.* or ": "no command",
}
"""Commands that do not run here, with the reason."""

MODULES = {"import torch": "torch", "from ray ": "ray"}
"""Blocks that begin so run where the module is installed."""

DOUBLE = """
import numpy as np, onnx, onnx.parser
onnx.save(onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 18]>
double (float[batch, 4] x) => (float[batch, 4] y) { y = Add (x, x) }'''), "model.onnx")
"""
CLASSIFIER = f"""
import sys
sys.path.insert(0, {str(ROOT / "examples")!r})
from make_text_classifier import main as make
sys.argv[1:] = ["classifier.onnx"]
make()
"""
GRAPH = """
import numpy as np
from rlx_ort import Graph
graph = Graph("double")
x = graph.input("x", ["batch", 4])
graph.outputs = [x + x]
x = np.ones((2, 4), np.float32)
inputs = {"x": x}
"""
HELPERS = f"import sys; sys.path.insert(0, {str(ROOT / 'tests' / 'helpers')!r})\n"
PACKAGE = "from rlx_ort.deploy.create import create_package; create_package(graph, 'model.ortpackage')\n"
BEFORE = {
    "CONTRIBUTING.md": f"""{HELPERS}
from interpreter import elementwise as reference
from rlx_ort.converters.to_onnx import elementwise as lowerings
from rlx_ort.ir.ops import elementwise as ops
for module in (reference, lowerings, ops):
    globals().update({{name: item for name, item in vars(module).items() if not name.startswith("__")}})
""",
    "README.md": DOUBLE + "np.savez('x.npz', x=np.ones((1, 4), np.float32))",
    "docs/choosing.md": CLASSIFIER,
    "docs/command-line.md": DOUBLE + "np.savez('x.npz', x=np.ones((1, 4), np.float32))",
    "docs/converting.md": f"""{CLASSIFIER}{DOUBLE}
import importlib.util, json, pathlib, safetensors.numpy
model = onnx.load("classifier.onnx")
changed = next(item for item in model.graph.initializer if item.name == "class_w")
array = onnx.numpy_helper.to_array(changed).copy()
array.flat[5] += 0.01
changed.CopyFrom(onnx.numpy_helper.from_array(array, "class_w"))
onnx.save(model, "edited.onnx")
safetensors.numpy.save_file(
    {{item.name: onnx.numpy_helper.to_array(item) for item in model.graph.initializer}}, "weights.safetensors"
)
onnx.save(onnx.load("classifier.onnx"), "model.onnx")
index = {{"weight_map": {{item.name: "weights.safetensors" for item in model.graph.initializer}}}}
pathlib.Path("model.safetensors.index.json").write_text(json.dumps(index))
pathlib.Path("renames.toml").write_text("")
module = __import__("torch").nn.Conv2d(3, 4, 1) if importlib.util.find_spec("torch") else None
""",
    "docs/environment.md": DOUBLE,
    "docs/errors.md": DOUBLE
    + """
open("cut-short.ortpackage", "wb").write(b"PK")
changed = onnx.load("model.onnx")
changed.graph.node[0].op_type = "Mul"
onnx.save(changed, "edited.onnx")
""",
    "docs/from-onnxruntime.md": DOUBLE,
    "docs/language-models.md": HELPERS
    + "from pathlib import Path\nfrom genai_folders import write_folder\nwrite_folder(Path('my-model'))\n"
    "write_folder(Path('hub/models--NAME/snapshots/main'))\nPath('hub/models--NAME/blobs').mkdir()",
    "docs/package-format.md": f"""{GRAPH}{HELPERS}{PACKAGE}
from pathlib import Path
from click.testing import CliRunner
from rlx_ort.cli import main
from sample_packages.keys import write_keys
private, public = write_keys(Path.cwd(), "publisher")
result = CliRunner().invoke(main, ["package", "sign", "model.ortpackage", "--key", str(private)])
assert result.exit_code == 0, result.output
""",
    "docs/packaging.md": f"""{HELPERS}
from pathlib import Path
from sample_packages.keys import write_keys
write_keys(Path.cwd(), "publisher")
""",
    "docs/report.md": DOUBLE + 'onnx.save(onnx.load("model.onnx"), "other.onnx")',
    "docs/resilience.md": f"""{GRAPH}{DOUBLE}
from rlx_ort.conversion.convert import ConvertOptions, convert
options = ConvertOptions(precision="f16")
""",
    "docs/splitting.md": DOUBLE,
    "docs/triton.md": GRAPH + PACKAGE,
    "docs/tuning.md": DOUBLE,
}
"""What the first block of a page expects to be there."""

PLACEHOLDERS = {"SRC DST": "model.onnx converted.onnx", "A B": "model.onnx model.onnx", "MODEL": "model.onnx"}
"""What stands for names in capitals in a synopsis; words after two spaces describe a command."""


def _steps(page: str) -> list[Step]:
    found = list(steps((ROOT / page).read_text(encoding="utf-8")))
    return [] if page in OF_THEIR_OWN else [step for step in found if _runs(step)]


def _runs(step: Step) -> bool:
    if step.kind == "python":
        needed = next((module for start, module in MODULES.items() if step.text.startswith(start)), None)
        return needed is None or importlib.util.find_spec(needed) is not None
    return not any(_matches(pattern, step.text) for pattern in NOT_RUN)


def _matches(pattern: str, command: str) -> bool:
    """Return whether a command begins so, after the variables that are set for it alone."""
    return re.match(rf"(?:[A-Z_]+=\S* )*(?:{pattern})", command) is not None


def _filled(page: str, step: Step) -> Step:
    if page not in ("README.md", "docs/command-line.md") or step.kind != "command":
        return step
    text = re.split(r"\s{2,}", step.text)[0]
    for name, meant in PLACEHOLDERS.items():
        text = re.sub(rf"\b{name}\b", meant, text)
    return Step(step.line, step.kind, text, step.code)


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run(page: str, tmp_path: Path) -> None:
    """In order, in one process, in a folder of their own; a block of an unknown kind fails."""
    found = _steps(page)
    folder = tmp_path / "page"
    folder.mkdir()
    if found:
        run_page(page, [_filled(page, step) for step in found], folder, BEFORE.get(page, ""))


def test_the_steps_of_a_page_are_its_blocks() -> None:
    """Python as it is, a command with the lines it goes on in, and the exit code that a dialogue states."""
    blocks = (
        "```python\na = 1\n```",
        "```\nrlx-ort run m.onnx \\\n  --device cpu\n```",
        "```console\n$ rlx-ort run\nError\n$ echo $?\n2\n```",
    )
    page = "\n\n".join(blocks)
    assert list(steps(page)) == [
        Step(1, "python", "a = 1\n"),
        Step(5, "command", "rlx-ort run m.onnx --device cpu"),
        Step(10, "command", "rlx-ort run", 2),
    ]


@pytest.mark.parametrize(
    "page",
    [
        "```ruby\n1\n```\n",
        "```text\n$ rlx-ort run\n```\n",
        "```text\nimport numpy\n```\n",
        "```json\n{\n```\n",
        "```toml\na\n```\n",
        "Text:\n\n    rlx-ort run\n",
    ],
)
def test_a_block_that_would_not_run_is_an_error(page: str) -> None:
    """An unknown language, a command in a block of text, data that does not parse, and code without a fence."""
    with pytest.raises(ValueError, match=r".+"):
        list(steps(page))


def test_the_examples_of_docstrings_run() -> None:
    """Those that the reference shows, and that of `environment.RlxEnv`."""
    public = {name: getattr(rlx_ort, name) for name in rlx_ort.__all__}
    described = {name: item for name, item in public.items() if isinstance(item, type) or inspect.isroutine(item)}
    finder, runner = doctest.DocTestFinder(exclude_empty=True), doctest.DocTestRunner(verbose=False)
    for name, item in {"RlxEnv": environment.RlxEnv, **described}.items():
        for example in finder.find(item, name):
            runner.run(example)
    failed, attempted = runner.summarize(verbose=False)
    assert attempted >= 5
    assert failed == 0


def test_pages_with_a_test_of_their_own_have_one() -> None:
    """The test names the page."""
    tests = {page: (ROOT / test).read_text(encoding="utf-8") for page, test in OF_THEIR_OWN.items()}
    assert [page for page, test in tests.items() if Path(page).name not in test] == []


def test_every_exception_is_of_a_command_that_is_there() -> None:
    """And no page has a command that is neither one of them nor `rlx-ort`, or of a file that was moved."""
    commands = {
        step.text
        for page in PAGES
        if page not in OF_THEIR_OWN
        for step in steps((ROOT / page).read_text(encoding="utf-8"))
        if step.kind == "command"
    }
    assert [pattern for pattern in NOT_RUN if not any(_matches(pattern, text) for text in commands)] == []
    known = [*NOT_RUN, "rlx-ort ", r"export \w+="]
    assert [text for text in commands if not any(_matches(pattern, text) for pattern in known)] == []
    files = {file for text in commands for file in re.findall(r"\b(?:tests|scripts|examples)/[\w/.]+", text)}
    assert [file for file in files - MADE_BY_THE_READER if not (ROOT / file).exists()] == []
