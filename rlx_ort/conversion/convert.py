"""`convert`: reads a model, changes it, checks the result against the source, and writes it."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy.typing as npt

from rlx_ort.conversion.check import ConversionCheck
from rlx_ort.converters.bundle import ModelBundle, bundle_from_graph
from rlx_ort.converters.files import refuse_existing, staging
from rlx_ort.converters.from_onnx.tensor_files import Folders
from rlx_ort.converters.sources import Format, Renames, apply_weights, bake, format_of, open_source, read_weights
from rlx_ort.converters.sources.apply import listed
from rlx_ort.converters.targets import TargetOptions, write_target
from rlx_ort.converters.transforms.cut import cut
from rlx_ort.converters.transforms.dims import free_dims, set_dims
from rlx_ort.converters.transforms.fuse import fused
from rlx_ort.converters.transforms.half_precision import PrecisionKind, to_precision
from rlx_ort.converters.transforms.opset import to_opset
from rlx_ort.converters.transforms.quantize import QuantizeKind, QuantizeOptions, quantize
from rlx_ort.converters.transforms.simplify import simplify
from rlx_ort.device import Device
from rlx_ort.errors import ConversionError, advice
from rlx_ort.ir.serde import load_json
from rlx_ort.parity.compare import Comparison
from rlx_ort.parity.metrics import Tolerance, tolerance_for
from rlx_ort.providers.engine.runtime import quantization, runtime_problem
from rlx_ort.providers.engine.stopping import check_stopped
from rlx_ort.providers.ort_provider import save_optimized

__all__ = ["ConversionReport", "ConvertOptions", "ModelFacts", "ParamsTaken", "Step", "convert", "default_tolerance"]

Step = Callable[[str], None]
"""Called with the step that begins, such as `reading model.onnx`."""

Bytes = Callable[[int, int], None]
"""Called with the bytes of weights written so far, and their total."""


_SPELLINGS = {"fp16": "f16", "float16": "f16", "half": "f16", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """Changes of a conversion besides the format. Everything is off by default but the verification.

    Attributes:
        params: a weight file whose tensors replace the weights of the same name, or become weights in place of inputs.
        cast: whether floats of that file may be converted to the model's float type.
        renames: the names of the file's tensors in the model; None takes their own names.
        inputs: values that become the inputs of the part to keep; empty keeps the model's.
        outputs: values that become its outputs; empty keeps the model's.
        dims: named dim -> size it is fixed at.
        free: name -> places `input[axis]` of fixed dims that become a dim of that name; without places, the first axis
            of every input. The result is run on twice the size as well.
        opset: ai.onnx opset to move to.
        ir_version: IR version to declare.
        simplify: whether to fold constants, remove nodes without effect and infer shapes.
        fuse: whether attention and rotary embeddings become fused operators, which only ONNX Runtime has.
        precision: `f16`, `bf16` or `mixed`; `fp16`, `float16` and `bfloat16` are understood.
        keep: operators and names of nodes that stay in f32; of a quantisation, names of nodes that stay as they are.
        quantize: `int8-dynamic`, `int8-static` or `int4-weights`; `int8` is the first, or the second with calibration.
        calibration: input -> samples, along a new first axis or the batch axis, for `int8-static`.
        external_data: whether weights go to a file of their own; None decides by size.
        detach: name of a safetensors file beside an ONNX target that gets the weights.
        device: the device an optimised target is made for.
        overwrite: whether files that are there may be replaced.
        verify: whether source and result are run on the same inputs and compared before the target appears.
        verify_inputs: name -> array to verify on; random ones by default.
        tolerance: the largest difference; None chooses it by the precision, see `default_tolerance`.
        trusted_links: folders that links of the source's external data may lead into; see `from_onnx`.
    """

    params: Path | None = None
    cast: bool = False
    renames: Renames | None = None
    inputs: Sequence[str] = ()
    outputs: Sequence[str] = ()
    dims: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    free: Mapping[str, Sequence[str]] = field(default_factory=lambda: MappingProxyType({}))
    opset: int | None = None
    ir_version: int | None = None
    simplify: bool = False
    fuse: bool = False
    precision: PrecisionKind | None = None
    keep: Sequence[str] = ()
    quantize: QuantizeKind | None = None
    calibration: Mapping[str, npt.NDArray[Any]] | None = None
    external_data: bool | None = None
    detach: str | None = None
    device: Device | str | None = None
    overwrite: bool = False
    verify: bool = True
    verify_inputs: Mapping[str, npt.NDArray[Any]] | None = None
    tolerance: Tolerance | None = None
    trusted_links: Folders = ()

    def __post_init__(self) -> None:
        precision, kind = str(self.precision), str(self.quantize)
        if "int" in precision:
            wanted = advice(f"quantize={precision!r}", f"--quantize {precision}")
            raise ConversionError(f"{precision!r} is a quantisation, not a precision: {wanted}")
        object.__setattr__(self, "precision", _SPELLINGS.get(precision.lower(), self.precision))
        if kind in ("int8", "int4"):
            way = "weights" if kind == "int4" else "static" if self.calibration else "dynamic"
            object.__setattr__(self, "quantize", f"{kind}-{way}")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A summary of a model: its nodes with those of bodies, bytes of weights by element type, and bytes altogether."""

    nodes: int
    opset: int
    ir_version: int
    weight_bytes: Mapping[str, int]
    nbytes: int


@dataclass(frozen=True, slots=True)
class ParamsTaken:
    """The result of reading a weight file: how many weights it gave data, and the inputs that became weights.

    `missing` weights are not in the file and stay unchanged. The model has no place for `unused` tensors.
    """

    loaded: int
    became_weights: tuple[str, ...]
    missing: tuple[str, ...]
    unused: tuple[str, ...]


@dataclass(frozen=True, slots=True, repr=False)
class ConversionReport:
    """The result of `convert`.

    Attributes:
        files: the files of the target, the model first.
        file_bytes: the bytes of all files together.
        before: facts of the source, its weights already exchanged.
        after: facts of the result.
        steps: the report of each step that ran, by its name: `precision`, `opset`, `params`...
        comparison: source against result; None if it was not verified.
        unverified: why it was not; empty if it was.
        emulated: how a side was emulated, such as bf16 on the CPU; empty if both ran as they are.
        seconds: step -> time it took.
    """

    source: str
    files: tuple[Path, ...]
    file_bytes: int
    before: ModelFacts
    after: ModelFacts
    steps: Mapping[str, Any]
    comparison: Comparison | None
    unverified: str
    emulated: str
    seconds: Mapping[str, float]

    def __repr__(self) -> str:
        target = self.files[0].name if self.files else "nothing"
        verdict = "not verified" if self.comparison is None else "verified" if self.comparison.ok else "differs"
        return f"<ConversionReport {Path(self.source).name} to {target}, {self.file_bytes} bytes, {verdict}>"


def facts_of(bundle: ModelBundle) -> ModelFacts:
    """Return the facts of a model; reads no weights."""
    sizes: Counter[str] = Counter()
    for data in bundle.weights.values():
        sizes[data.dtype.value] += data.nbytes
    weights = dict(sizes.most_common())
    return ModelFacts(bundle.node_count, bundle.opset, int(bundle.proto.ir_version), weights, bundle.nbytes)


def convert(
    source: str | os.PathLike[str] | ModelBundle,
    target: str | os.PathLike[str],
    options: ConvertOptions | None = None,
    *,
    on_step: Step | None = None,
    on_bytes: Bytes | None = None,
    **changes: Any,
) -> ConversionReport:
    """Convert a model, check the result against the source, and only then put it in place.

    The order is: weights, cut, dims, opset, simplify, precision, fuse, quantise, write. The result is written to a
    hidden folder beside the target and moved when it is right; otherwise the target is unchanged. The source is never
    changed.

    The verification opens a session of the source and one of the written result, one after the other, on the CPU
    (an optimised target: on its device), so it costs two loads and two runs, and the memory of one model at a time.
    Models above 256 MiB run without optimisation, on weights that stay mapped. bf16, for which the CPU has no kernels,
    is computed in f32 and each result rounded. Without ONNX Runtime nothing is verified, which the report records.

    Args:
        source: a file, or a bundle.
        target: the file to write; its suffix decides the format: `.onnx`, `.json` or `.ort`.
        options: the changes to make.
        changes: fields of `ConvertOptions`, as in `precision="f16"`, in place of those of `options`.
        on_step: called when a step begins.
        on_bytes: called with the bytes of weights written, and of how many.

    Raises:
        ConversionError: something cannot be read, changed or written, or the source or the result does not run.
        ParityError: the result differs from the source by more than the tolerance.
    """
    options = replace(options or ConvertOptions(), **changes)
    run = _Run(options, on_step or (lambda text: None), on_bytes or (lambda done, total: None))
    return run.convert(source, Path(target))


def default_tolerance(options: ConvertOptions, before: ModelFacts) -> Tolerance:
    """Return the default tolerance of a conversion, by its precisions and devices; `tolerance_for` has the figures."""
    bits = {None: None, "int4-weights": 4}.get(options.quantize, 8)
    dtypes = {*before.weight_bytes, {"bf16": "bf16", None: "f32"}.get(options.precision, "f16")}
    return tolerance_for(dtypes, other_device=Device(options.device or "cpu") != Device.CPU, bits=bits)


def why_unverified(options: ConvertOptions) -> str:
    """Return why there will be no verification, empty if there will be one.

    Raises:
        ConversionError: one was asked for by a tolerance or inputs, and no ONNX Runtime is installed.
    """
    if not options.verify:
        return "asked for"
    problem = runtime_problem()
    if problem is None:
        return ""
    if options.tolerance is not None or options.verify_inputs is not None:
        raise ConversionError(f"the conversion cannot be verified: {problem.reason}\n  {problem.remedy}")
    return f"{problem.reason}; {problem.remedy}"


@dataclass
class _Run:
    """One conversion."""

    _options: ConvertOptions
    _on_step: Step
    _on_bytes: Bytes
    _reports: dict[str, Any] = field(default_factory=dict)
    _seconds: dict[str, float] = field(default_factory=dict)

    def convert(self, source: str | os.PathLike[str] | ModelBundle, target: Path) -> ConversionReport:
        options = self._options
        # a graph file keeps its large tensors in a file beside it; refused before the work begins
        beside = [target.with_suffix(".safetensors")] if target.suffix.lower() == ".json" else []
        beside += [target.with_name(options.detach)] if options.detach else []
        refuse_existing([target, *beside], overwrite=options.overwrite)
        bundle = self._opened(source)
        before = facts_of(bundle)
        unverified = why_unverified(options)
        if unverified and options.free:
            raise ConversionError(
                f"opening a dim must be verified by running two sizes, and verification is off: {unverified}"
            )
        check = None
        if not unverified:  # first, so that a source that does not run costs no conversion
            with self._step("run source", "running the source"):
                tolerance = options.tolerance or default_tolerance(options, before)
                device = None if options.device is None else Device(options.device)
                check = ConversionCheck(bundle, tolerance, device, options.verify_inputs, options.dims)
        for name, text, transform, arguments in self._transforms(bundle):
            with self._step(name, text):
                bundle, self._reports[name] = transform(bundle, *arguments)
        after = facts_of(bundle)
        with staging(target) as stage:
            with self._step("write", f"writing {target}"):
                files = self._written(bundle, stage.path)
            origin = bundle.origin
            del bundle  # unmaps the source, unless the caller holds it
            comparison = None
            if check is not None:
                with self._step("verify", "running the result"):
                    comparison = check.run_result(stage.path)
                    for name, places in self._reports.get("free", {}).items():
                        check.run_freed(stage.path, name, places)
            size = sum(file.stat().st_size for file in files)
            placed = stage.publish(files, overwrite=options.overwrite)
        emulated = "" if check is None else check.emulated
        steps, seconds = MappingProxyType(self._reports), MappingProxyType(self._seconds)
        facts = (origin, tuple(placed), size, before, after)
        return ConversionReport(*facts, steps, comparison, unverified, emulated, seconds)

    def _opened(self, source: str | os.PathLike[str] | ModelBundle) -> ModelBundle:
        options = self._options
        if options.params is not None:
            model = source if isinstance(source, ModelBundle) else Path(source)
            bundle = self._with_params(model, options.params)
        elif isinstance(source, ModelBundle):
            bundle = source
        else:
            with self._step("read", f"reading {os.fspath(source)}"):
                bundle = self._read(Path(source))
        if options.inputs or options.outputs:
            with self._step("cut", "cutting"):
                bundle, self._reports["cut"] = cut(bundle, options.inputs, options.outputs)
        return bundle

    def _read(self, source: Path) -> ModelBundle:
        return open_source(source, opset=self._options.opset, trusted_links=self._options.trusted_links)

    def _with_params(self, source: Path | ModelBundle, params: Path) -> ModelBundle:
        """Return a model with the weights of a file; a graph file's parameters may have no data before."""
        renames, cast = self._options.renames, self._options.cast
        with self._step("params", f"taking weights from {params}"):
            weights = read_weights(params)
            if isinstance(source, Path) and format_of(source)[0] is Format.IR_JSON:
                of_graph = apply_weights(load_json(source), weights, renames, cast=cast)
                self._reports["params"] = ParamsTaken(len(of_graph.loaded), (), of_graph.missing, of_graph.unused)
                return bundle_from_graph(of_graph.model, origin=str(source))
            bundle = self._read(source) if isinstance(source, Path) else source
            report = apply_weights(bundle, weights, renames, cast=cast)
            inputs = {name: weights[name] for name in report.unused if name in bundle.input_types()}
            if not report.loaded and not inputs:
                raise ConversionError(
                    f"{params} has no tensor that is a weight or input of {bundle.origin}: it has "
                    f"{listed(report.unused, 5) or 'none'}, the model {listed(report.missing, 5) or 'none'}; renames "
                    "map names"
                )
            unused = tuple(name for name in report.unused if name not in inputs)
            self._reports["params"] = ParamsTaken(len(report.loaded), tuple(inputs), report.missing, unused)
            return bake(report.model, inputs)[0] if inputs else report.model

    def _transforms(self, bundle: ModelBundle) -> Iterator[tuple[str, str, Callable[..., Any], tuple[Any, ...]]]:
        """Yield the name of each step that the options ask for, its text, its function and arguments, in order."""
        options = self._options
        if options.dims:
            yield "dims", "fixing dims", set_dims, (options.dims,)
        if options.free:
            yield "free", "opening dims", free_dims, (options.free,)
        if options.opset is not None or options.ir_version is not None:
            opset = bundle.opset if options.opset is None else options.opset
            yield "opset", "moving to another opset", to_opset, (opset, options.ir_version)
        if options.simplify:
            yield "simplify", "simplifying", simplify, ()
        if options.precision is not None:
            text = f"changing the precision to {options.precision}"
            yield "precision", text, to_precision, (options.precision, options.keep)
        if options.fuse:
            yield "fuse", "fusing attention and rotary embeddings", fused, ()
        if options.quantize is not None:
            how = QuantizeOptions(exclude=tuple(options.keep))
            arguments = (options.quantize, quantization(), how, options.calibration)
            yield "quantize", f"quantising to {options.quantize}", quantize, arguments

    def _written(self, bundle: ModelBundle, path: Path) -> list[Path]:
        options = self._options
        total, done = sum(data.nbytes for data in bundle.weights.values()), 0

        def progress(count: int) -> None:
            nonlocal done
            done += count
            self._on_bytes(done, total)

        how = TargetOptions(external_data=options.external_data, params=options.detach, device=options.device)
        return write_target(bundle, path, replace(how, saver=save_optimized, progress=progress))

    @contextmanager
    def _step(self, name: str, text: str) -> Iterator[None]:
        check_stopped()
        self._on_step(text)
        start = time.perf_counter()
        yield
        self._seconds[name] = time.perf_counter() - start
