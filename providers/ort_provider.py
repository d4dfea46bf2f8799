"""`OrtProvider`: the base of all execution providers of ONNX Runtime, and the probe that proves a device works."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rlx_ort.converters.protos import set_items
from rlx_ort.converters.to_onnx import PROTOBUF_LIMIT, all_weights
from rlx_ort.converters.to_onnx.exported import ExportedModel
from rlx_ort.converters.to_onnx.exporter import export_model
from rlx_ort.device import Device
from rlx_ort.errors import ConversionError, DeviceUnavailableError, RlxError, advice, install_command
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.types import Shape, TensorType
from rlx_ort.numerics import agree
from rlx_ort.options.compile_options import CacheUse, CompileOptions, OptimizationLevel, Precision, WeightSharing
from rlx_ort.providers.base import Availability, CostProfile, EngineSession, KernelClaim, Provider, SessionRequest
from rlx_ort.providers.claims import kernels_of, listed_kernels
from rlx_ort.providers.engine import opening, runtime
from rlx_ort.providers.engine.compiled.models import write_to
from rlx_ort.providers.engine.opening import open_session
from rlx_ort.providers.engine.recipe import Keeps, SessionRecipe
from rlx_ort.providers.engine.runtime import Problem
from rlx_ort.providers.plugins import Plugin, described, plugin_devices, plugin_for, register_plugin
from rlx_ort.providers.registry import default_registry
from rlx_ort.storage import temporary_folder

if TYPE_CHECKING:
    import onnx

# Every provider that computes has a kernel for a matrix product, opset 21 the densest kernels, and some providers take
# static shapes only.
_PROBE = """
<ir_version: 10, opset_import: ["" : 21]>
probe (float[2, 2] x, float[2, 2] w) => (float[2, 2] y) { y = MatMul (x, w) }
"""


_LARGE_BYTES = 1 << 20


def _with_weights_as_inputs(model: bytes) -> bytes:
    """Return a model with inputs in place of large weights, none of which holds sizes."""
    import onnx

    made = onnx.ModelProto.FromString(model)
    kept = []
    for tensor in made.graph.initializer:
        length = next((int(entry.value) for entry in tensor.external_data if entry.key == "length"), 0)
        if length < _LARGE_BYTES:
            kept.append(tensor)
        else:
            made.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    set_items(made.graph.initializer, kept)
    return bytes(made.SerializeToString())


class OrtProvider(Provider):
    """A provider that is an execution provider of ONNX Runtime, built in or a plugin.

    Attributes:
        title: the provider's name in messages, such as `CUDA`.
        extra: the extra of `rlx_ort` that installs it, empty when there is none; `remedy` is the advice then.
        plugin: whether a plugin package brings it; a built-in provider of the same name is used when there is one.
        keeps: the form in which the compile cache can store a session.
        cache_option: the provider option that names the folder to cache compiled models in; empty if there is none.
        profile: the default cost profile, where it does not depend on the device.
    """

    checks_indices: ClassVar[bool] = False
    title: ClassVar[str]
    extra: ClassVar[str] = ""
    remedy: ClassVar[str] = ""
    plugin: ClassVar[bool] = False
    keeps: ClassVar[Keeps] = Keeps.NOTHING
    cache_option: ClassVar[str] = ""
    profile: ClassVar[CostProfile | None] = None
    precisions: ClassVar[Sequence[Precision]] = (Precision.F16,)

    def recipe(self, device: Device, options: CompileOptions) -> SessionRecipe:
        """Return how to open a session on the device with these options.

        Raises:
            DeviceUnavailableError: the index is beyond the devices that are there.
            EngineError: the device cannot compute as the options ask.
        """
        cache_option = self.cache_option
        return SessionRecipe(
            self.ep_name,
            options=self.chosen(device, options),
            option_keys=self.option_keys,
            ep_devices=self.ep_devices(device),
            keeps=self.keeps,
            cache_options=(lambda folder: {cache_option: folder}) if cache_option else None,
        )

    def chosen(self, device: Device, options: CompileOptions) -> dict[str, str]:
        """Return the provider options that `recipe` has; those of the caller come on top."""
        return {}

    def probe(self, device: Device) -> Availability:
        """Return whether a one-node session opens on the device, is assigned to it and runs."""
        try:
            self.require(device)
            facts, precision = self.facts(device), self.probe_precision(device)
        except DeviceUnavailableError as err:
            return Availability(False, err.reason, err.remedy)
        return prove(device, self.ep_name, self._open, facts, precision)

    def open(self, request: SessionRequest) -> EngineSession:
        """Open a session on the device; see `Provider.open`."""
        self.require(request.device)
        return self._open(request)

    def optimized(self, request: SessionRequest, *, whole: bool = False) -> onnx.ModelProto:
        """Return the model after ONNX Runtime's rewrites of level 1 and of the layout; see `Provider.optimized`.

        These precede the assignment of nodes; later rewrites only fuse nodes of one provider. Without `whole` it has
        inputs in place of large weights, since the device may hold them already and not have room for a second copy.
        """
        import onnx

        options = request.options
        if options.optimization is not OptimizationLevel.OFF and not whole:
            options = options.with_(optimization=OptimizationLevel.BASIC)
        recipe = self.recipe(request.device, options)
        if not whole and recipe.rewritten is None:
            recipe = replace(recipe, rewritten=_with_weights_as_inputs)
        with temporary_folder() as folder:
            path = folder / "optimized.onnx"
            session, memory = opening._open(
                recipe,
                replace(request, options=options.with_(profile_prefix=None)),
                prepare=lambda made: write_to(made, path, f"{path.name}.data"),
            )
            del session, memory  # in this order
            return onnx.load(path, load_external_data=False)

    def require(self, device: Device) -> None:
        """Return if nothing is missing, else raise `DeviceUnavailableError` with the remedy."""
        if (problem := self.missing(device)) is not None:
            raise DeviceUnavailableError(device, problem.reason, problem.remedy)

    def default_profile(self, device: Device) -> CostProfile | None:
        """Return `profile`."""
        return self.profile

    def claims(self) -> Sequence[KernelClaim] | None:
        """Return the provider's kernels from ONNX Runtime's registry, else from a shipped list; None if it compiles."""
        return self._judged()[0]

    def judged_by(self) -> str:
        """Return the shipped list that `claims` come from, empty when ONNX Runtime lists the kernels itself."""
        return self._judged()[1]

    def _judged(self) -> tuple[Sequence[KernelClaim] | None, str]:
        if self.compiles:
            return None, ""
        if self.missing(Device(self.kinds[0])) is None and (live := kernels_of(self.ep_name)) is not None:
            return live, ""
        here = runtime.runtime_problem() is None and self.ep_name in runtime.available_eps()
        listed = listed_kernels(self.ep_name, runtime.runtime_version() if here else None)
        if listed is None:
            return None, ""
        return listed.claims, "the kernel list of ONNX Runtime {}.{}".format(*listed.version)

    def question_scope(self, device: Device) -> str | None:
        """Return the execution provider with its version, ONNX Runtime's, and the hardware with its driver."""
        plugin = self._plugin()
        version = runtime.describe_runtime() if plugin is None else f"{runtime.describe_runtime()}, {plugin.version}"
        facts = self.facts(device)
        return "; ".join((self.ep_name, version, sys.platform, facts.hardware, facts.driver))

    def _plugin(self) -> Plugin | None:
        return plugin_for(self.ep_name) if self.plugin else None

    def missing(self, device: Device) -> Problem | None:
        """Return the missing or broken library, without opening a session, or None."""
        problem = runtime.runtime_problem()
        if problem is not None:
            # Where ONNX Runtime is not there at all, the command is that of this provider's flavour.
            own = problem.remedy == install_command("cpu") and self.extra
            return Problem(problem.reason, self.install_remedy()) if own else problem
        if (plugin := self._plugin()) is not None:
            problem = register_plugin(plugin, runtime.onnxruntime(), runtime.engine_exceptions())
            return problem or self.missing_libraries(device)
        if self.ep_name not in runtime.available_eps():
            reason = f"this ONNX Runtime ({runtime.describe_runtime()}) has no {self.title} execution provider"
            return Problem(reason, self.install_remedy())
        return self.missing_libraries(device)

    def missing_libraries(self, device: Device) -> Problem | None:
        """Return the shared libraries or drivers the provider needs and does not find, or None."""
        return None

    def facts(self, device: Device) -> Availability:
        """Return the hardware that ONNX Runtime reports for a plugin, for a successful probe."""
        hardware = identity = ""
        for each in self.ep_devices(device):
            hardware, identity = described(each.device)
        return Availability(False, hardware=hardware, remedy=self.install_remedy(), identity=identity)

    def probe_precision(self, device: Device) -> Precision:
        """Return the arithmetic that the probe allows: f32 unless the device has only less."""
        return Precision.F32

    def install_remedy(self) -> str:
        """Return the command or step that brings the provider to this machine."""
        return install_command(self.extra) if self.extra else self.remedy

    def ep_devices(self, device: Device) -> tuple[Any, ...]:
        """Return ONNX Runtime's device objects for the device, empty for a provider that is built in.

        Raises:
            DeviceUnavailableError: the index is beyond the devices that are there.
        """
        if self._plugin() is None:
            return ()
        devices = sorted(plugin_devices(runtime.onnxruntime(), self.ep_name), key=self.order)
        if not devices:
            reason = f"{self.ep_name} is registered but finds no hardware it can use"
            raise DeviceUnavailableError(device, reason, self.no_hardware_remedy())
        if device.index >= len(devices):
            raise DeviceUnavailableError(device, f"there are {len(devices)} devices of {self.ep_name}, counted from 0")
        return (devices[device.index],)

    def order(self, ep_device: Any) -> int:
        """Return the place of a plugin's device among the provider's indexes; equal ones keep ONNX Runtime's order."""
        return 0

    def no_hardware_remedy(self) -> str:
        """Return the remedy when the provider loads but sees no hardware."""
        return self.remedy or self.install_remedy()

    def _open(self, request: SessionRequest) -> EngineSession:
        return open_session(self.recipe(request.device, request.options), request)


@functools.cache
def _probe_model() -> ExportedModel:
    import onnx.parser

    proto = onnx.parser.parse_model(_PROBE)
    proto.graph.node[0].name = "probe"
    square = TensorType(DType.F32, Shape((2, 2)))
    return ExportedModel(proto, (), (), {}, {"x": square, "w": square}, {"y": square})


def prove(
    device: Device,
    ep_name: str,
    open_on: Callable[[SessionRequest], EngineSession],
    facts: Availability,
    precision: Precision = Precision.F32,
) -> Availability:
    """Return `facts` when the probe runs on the device with the right result, else an answer with the reason.

    Opens a session, runs it once and closes it: milliseconds on the CPU, up to a second on a GPU.
    """
    options = CompileOptions(precision, optimization=OptimizationLevel.OFF, intra_op_threads=1, cache=CacheUse.OFF)
    left = np.array([[1, 2], [3, 4]], np.float32)
    right = np.array([[5, 6], [7, 8]], np.float32)
    try:
        with contextlib.closing(open_on(SessionRequest(device, _probe_model(), {}, options))) as session:
            assigned = {node.provider for node in session.assignments}
            (result,) = session.run(["y"], {"x": left, "w": right})
    except DeviceUnavailableError as err:
        return Availability(False, err.reason, err.remedy or facts.remedy)
    except RlxError as err:
        return Availability(False, str(err), facts.remedy)
    if assigned != {ep_name}:
        places = ", ".join(sorted(assigned)) or "no provider that ONNX Runtime names"
        return Availability(False, f"{ep_name} left a matrix product to {places}", facts.remedy)
    if not agree(result, left @ right, 1e-2):
        return Availability(False, f"{ep_name} computes a matrix product wrongly: {result.tolist()}", facts.remedy)
    return replace(facts, available=True, reason="", remedy="")


def save_optimized(
    graph: Graph,
    path: Path,
    device: Device | str = "cpu",
    *,
    ort_format: bool,
    external_data: bool,
    portable: bool,
    exported: ExportedModel | None = None,
) -> None:
    """Open a session of a graph and make ONNX Runtime write the optimised model; the file must not exist.

    Every parameter of the graph needs data. Nodes that the device's execution provider takes are written in its form.
    ONNX Runtime's format has the weights inside; in ONNX, external data goes to `<file name>.data` beside the file. A
    `portable` model leaves out forms that depend on this machine's processor, such as blocked layouts. `exported` is
    the graph as it was exported with other options than the default ones.

    Raises:
        ConversionError: no execution provider of ONNX Runtime serves the device, or the model is too large.
        DeviceUnavailableError: the device does not work here.
        EngineError: ONNX Runtime refused the model or could not write it.
    """
    device = Device(device)
    provider = default_registry().for_device(device)
    if not isinstance(provider, OrtProvider):
        raise ConversionError(f"{device.display} is not an ONNX Runtime device, so no model can be optimised for it")
    provider.require(device)
    level = OptimizationLevel.EXTENDED if portable else OptimizationLevel.ALL
    # RAW: the weights are passed in memory, so the file has them and no references to the source's files.
    options = CompileOptions(optimization=level, sharing=WeightSharing.RAW)
    exported = exported or export_model(graph, options)
    weights = all_weights(graph, exported)
    total = sum(data.nbytes for data in weights.values())
    if total > PROTOBUF_LIMIT and not external_data:
        external = advice("external_data=True", "--external-data")
        raise ConversionError(
            f"{path.name} would hold {total} bytes of weights, above the 2 GB of one file; "
            + ("ONNX Runtime's format has no data files: write .onnx" if ort_format else f"pass {external}")
        )

    def prepare(made: Any) -> None:
        made.add_session_config_entry("session.save_model_format", "ORT" if ort_format else "ONNX")
        write_to(made, path, f"{path.name}.data" if external_data and not ort_format else "")

    request = SessionRequest(device, exported, weights, options)
    # Not through the compile cache: the session has to optimise, and to write the model.
    session, memory = opening._open(provider.recipe(device, options), request, prepare=prepare)
    del session, memory  # in this order
