"""How a conversion is verified: source and result run on the same inputs, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlx_ort.conversion.options import verdict
from rlx_ort.errors import ConversionError, ParityError

if TYPE_CHECKING:
    from rlx_ort.conversion.options import ConvertOptions, ModelFacts
    from rlx_ort.converters.bundle import ModelBundle
    from rlx_ort.options.compile_options import CompileOptions
    from rlx_ort.parity.compare import Comparison
    from rlx_ort.parity.metrics import Tolerance
    from rlx_ort.parity.opening import OrtFormatFile

__all__ = ["LEAN_ABOVE_BYTES", "ConversionCheck", "default_tolerance", "why_unverified"]

LEAN_ABOVE_BYTES = 256 << 20
"""Models with more bytes of weights than this are run without optimisation, because folded and packed weights would be
in memory beside those of the file."""


def default_tolerance(options: ConvertOptions, before: ModelFacts) -> Tolerance:
    """Return the default tolerance of a conversion; see `tolerance_for` for the reasons.

    f32 on the CPU: relative L2 of 1e-5. f16 and mixed, or a source that holds f16: 5e-3. bf16: 4e-2. Quantised to 8
    bits: a cosine of 0.99, to 4 bits of 0.98. A target for another device than the CPU: 1e-3 at least.
    """
    from rlx_ort.device import Device
    from rlx_ort.parity.metrics import tolerance_for

    bits = {None: None, "int4-weights": 4}.get(options.quantize, 8)
    dtypes = {*before.weight_bytes, {"bf16": "bf16", None: "f32"}.get(options.precision, "f16")}
    return tolerance_for(dtypes, other_device=Device(options.device or "cpu") != Device.CPU, bits=bits)


def why_unverified(options: ConvertOptions) -> str:
    """Return why there will be no verification, empty if there will be one.

    Raises:
        ConversionError: one was asked for by a tolerance or inputs, and no ONNX Runtime is installed.
    """
    from rlx_ort.providers.engine.runtime import runtime_problem

    if not options.verify:
        return "asked for"
    problem = runtime_problem()
    if problem is None:
        return ""
    if options.tolerance is not None or options.verify_inputs is not None:
        raise ConversionError(f"the conversion cannot be verified: {problem.reason}\n  {problem.remedy}")
    return f"{problem.reason}; {problem.remedy}"


class ConversionCheck:
    """The verification of one conversion: runs the source, and holds its answer while the result is made.

    Attributes:
        emulated: how one side was emulated; empty if both ran as they are.

    Args:
        options: those of the conversion.
        source: the model, of which nothing is kept.
        before: its facts.
        drawn: its operators that draw random numbers.

    Raises:
        InputError: the inputs do not fit, or none can be made up.
        EngineError: the source does not run.
    """

    def __init__(self, options: ConvertOptions, source: ModelBundle, before: ModelFacts, drawn: Sequence[str]) -> None:
        from rlx_ort.parity.compare import reference_run

        self._options, self._before, self._drawn = options, before, drawn
        self._lean = sum(before.weight_bytes.values()) > LEAN_ABOVE_BYTES
        self.emulated = ""
        model, how = self._runnable(source, on_cpu=True)
        self._reference = reference_run(model, inputs=options.verify_inputs, dims=options.dims, options=how)

    def run_result(self, path: Path) -> Comparison:
        """Run the written file on its device and return the difference of each output.

        Raises:
            ParityError: it is more than the tolerance.
            EngineError: the result does not run.
        """
        from rlx_ort.device import Device
        from rlx_ort.parity.compare import compare_to
        from rlx_ort.parity.opening import as_model

        device = Device(self._options.device or "cpu")
        tolerance = self._options.tolerance or default_tolerance(self._options, self._before)
        optimized = self._options.device is not None
        model, how = self._runnable(as_model(path), on_cpu=device == Device.CPU, optimized=optimized)
        comparison = compare_to(self._reference, model, device, tolerance=tolerance, options=how)
        if not comparison.ok:
            raise ParityError(verdict(comparison, self._drawn), comparison)
        return comparison

    def _runnable(
        self, model: ModelBundle | OrtFormatFile, *, on_cpu: bool, optimized: bool = False
    ) -> tuple[ModelBundle | OrtFormatFile, CompileOptions]:
        """Return a model as it can run here, and how to open it: as users do, unless that takes too much memory."""
        from rlx_ort.converters.bundle import ModelBundle
        from rlx_ort.options.compile_options import CompileOptions, OptimizationLevel, PlacementRule
        from rlx_ort.parity.emulated import holds_bf16, with_f32_kernels

        plain = optimized or self._lean  # what is optimised already is not optimised again
        if on_cpu and isinstance(model, ModelBundle) and holds_bf16(model):
            # Optimising could take out the casts, and with them the rounding.
            model, plain = with_f32_kernels(model), True
            self.emulated = "bf16 was computed in f32 and each result rounded: the CPU has no kernels for it"
        level = OptimizationLevel.OFF if plain else OptimizationLevel.ALL
        how = CompileOptions(placement=PlacementRule.ASSISTED, optimization=level, low_memory=self._lean)
        return model, how
