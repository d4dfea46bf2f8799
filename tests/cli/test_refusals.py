"""Command lines that make no sense: the exit code, what the message says, and that nothing is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Cli

# name -> the command line, the exit code, and words of the message
REFUSED: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "an unknown command": ("devises", 2, ("devises",)),
    "a model that is not there": ("inspect {absent}.onnx", 2, ("absent.onnx",)),
    "a dim without a size": ("report {model} --dim batch", 2, ("'batch'",)),
    "a dim with an empty size": ("report {model} --dim batch=", 2, ("'batch='",)),
    "a size without a dim": ("report {model} --dim =4", 2, ("'=4'",)),
    "a negative size": ("report {model} --dim batch=-1", 2, ("'batch=-1'",)),
    "a size with a fraction": ("report {model} --dim batch=2.5", 2, ("'batch=2.5'",)),
    "several dims in one option": ("run {model} --dim rows=2,columns=3", 2, ("repeat --dim",)),
    "a device that is nearly one": ("run {model} --device cuuda", 2, ("cuda",)),
    "a size of zero": ("run {model} --dim rows=0", 2, ("rows=0", "1 or more")),
    "two devices where one is taken": ("run {model} --device cpu,webgpu", 2, ("--device takes one", "run --chain")),
    "a device that the policy denies": ("run {model} --device cpu --deny cpu", 3, ("denied",)),
    "a chain of devices that are not here": ("run {model} --chain tpu,mlx", 3, ("tpu:", "mlx:")),
    "a device and a chain": ("run {model} --device cpu --chain cpu", 2, ()),
    "inputs that are not there": ("run {model} --inputs {absent}.npz", 2, ("absent.npz",)),
    "a trace of a chain": ("run {model} --chain cpu --trace {out}.json", 2, ("--trace",)),
    "a trace of a resilient run": ("run {model} --resilient --trace {out}.json", 2, ("--trace",)),
    "sizes without a model": ("calibrate --device cpu --dim rows=400", 2, ("--dim is for a model",)),
    "a shape without sizes": ("bench {model} --shape x", 2, ("--shape",)),
    "a shape of words": ("bench {model} --shape x=a,b", 2, ("--shape",)),
    "a shape without a name": ("bench {model} --shape =2,6", 2, ("--shape",)),
    "a shape of no input": ("bench {model} --devices cpu --shape nobody=2,6", 2, ("nobody", "x")),
    "a shape of another rank": ("bench {model} --devices cpu --shape x=2,6,1", 2, ("'x'",)),
    "a bench without a page to show": ("bench {model} --open", 2, ("--html",)),
    "a comparison without a page to show": ("compare --device cpu {model} --open", 2, ("--html",)),
    "a model beside nothing": ("compare {model}", 2, ("--device",)),
    "a model on one device": ("compare {model} --device cpu", 2, ("--device",)),
    "a model twice on one device": ("compare {model} --device cpu --device cpu", 2, ("--device",)),
    "a model on three devices": ("compare {model} --device cpu --device cpu --device cpu", 2, ("--device",)),
    "a comparison on a device that is not here": ("compare {model} --device cpu --device tpu", 3, ("TPU",)),
    "a suffix that says nothing": ("convert {model} {out}.tflite", 2, (".onnx, .json, .ort",)),
    "names of inputs for files": ("convert {model} {out}.onnx --inputs a,b", 2, ("use --cut-inputs",)),
    "names of outputs for files": ("convert {model} {out}.onnx --outputs a,b", 2, ("--cut-outputs",)),
    "two precisions": (
        "convert {model} {out}.onnx --precision f16 --quantize int8-dynamic",
        2,
        ("exclude each other",),
    ),
    "an unchecked open dim": (
        "convert {model} {out}.onnx --free rows --no-verify",
        2,
        ("--no-verify excludes --free",),
    ),
    "calibration without samples": ("convert {model} {out}.onnx --quantize int8-static", 2, ("needs --calibration",)),
    "new names for no weights": ("convert {model} {out}.onnx --rename a=b", 2, ("--params",)),
    "a cast of no weights": ("convert {model} {out}.onnx --cast", 2, ("--params",)),
    "an unchecked tolerance": ("convert {model} {out}.onnx --no-verify --tolerance 1", 2, ("--no-verify excludes",)),
    "an opset of 0": ("convert {model} {out}.onnx --opset 0", 2, ("--opset",)),
    "a fixed dim without a size": ("convert {model} {out}.onnx --dim rows", 2, ("NAME=SIZE",)),
    "a target device that is none": ("convert {model} {out}.onnx --device toaster", 2, ("toaster",)),
    "a negative tolerance": ("convert {model} {out}.onnx --tolerance -1", 2, ("--tolerance",)),
    "a tolerance that is no number": ("convert {model} {out}.onnx --tolerance nan", 2, ("finite number",)),
    "a number of words": ("convert {model} {out}.onnx --opset many", 2, ("'many' is not a valid whole number",)),
    "a budget that is no time": ("tune {model} --budget 10x", 2, ("'10x' is not a time", "60s", "2min")),
    "a budget below nothing": ("tune {model} --budget -3", 2, ("'-3' is not a time",)),
    "a limit of no time": ("serve {model} --load-limit 0s", 2, ("'0s' is less than 0.001 s",)),
    "a variant without a precision": ("package create {model} -o {out}.ortpackage --variant cpu", 2, ("--variant",)),
    "a variant of no precision": ("package create {model} -o {out}.ortpackage --variant cpu:f99", 2, ("f99",)),
    "a variant of no device": ("package create {model} -o {out}.ortpackage --variant nonsense:f16", 2, ("nonsense",)),
    "a variant without a device": ("package create {model} -o {out}.ortpackage --variant :f16", 2, ("DEVICE",)),
    "a model in place of a package": ("package verify {model}", 7, ("rlx-ort package create add_one.onnx",)),
}


@pytest.mark.parametrize(("line", "code", "words"), REFUSED.values(), ids=REFUSED)
def test_it_is_refused_with_the_reason(
    cli: Cli, add_one: Path, tmp_path: Path, line: str, code: int, words: tuple[str, ...]
) -> None:
    """The message goes to stderr, stdout stays empty, and no file appears."""
    places = {"model": add_one, "absent": tmp_path / "absent", "out": tmp_path / "out"}
    outcome = cli(*(part.format(**places) for part in line.split()))
    assert (outcome.code, outcome.out) == (code, "")
    assert [word for word in words if word not in outcome.err] == []
    assert list(tmp_path.iterdir()) == [add_one]
