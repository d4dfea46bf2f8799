"""`CompileOptions`: everything that decides how a graph becomes a session, besides the device."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from rlx_ort.device import Device, DeviceEntry, DeviceLike, is_pair, with_options
from rlx_ort.errors import InputError, near_names
from rlx_ort.options.dispatch import KernelDispatch
from rlx_ort.options.precision import PrecisionPolicy

if TYPE_CHECKING:
    from rlx_ort.options.split_plan import SplitPlan

_Enum = TypeVar("_Enum", bound=enum.Enum)


class PlacementRule(enum.Enum):
    """How much of a graph must run on the device that was asked for."""

    STRICT = "strict"
    """Every node, except those ONNX Runtime pins to the CPU by design, such as shape computation."""
    ASSISTED = "assisted"
    """The CPU may take the nodes that the device does not; the cost model charges for the copies."""


class WeightSharing(enum.Enum):
    """How sessions share weights in memory."""

    PRIVATE = "private"
    """Each session keeps a prepacked copy of the weights its kernels repack: fastest, one copy a session."""
    RAW = "raw"
    """No prepacking: further sessions cost no memory; matrix products are 1.1 to 2 times slower on CPU."""
    PREPACKED = "prepacked"
    """One prepacked file in the compile cache, mapped by every session and process: fast, and one copy."""


class CacheUse(enum.Enum):
    """How a session uses the compile cache on disk, which `rlx-ort cache` shows and clears."""

    OFF = "off"
    """Not at all."""
    FOUND = "found"
    """Use existing cache entries; add one only if a provider takes seconds or more to compile."""
    ON = "on"
    """Missing entries are added: the optimised model with its weights, up to twice as large as the model."""


class OptimizationLevel(enum.Enum):
    """ONNX Runtime's graph optimisation levels."""

    OFF = "off"
    BASIC = "basic"
    EXTENDED = "extended"
    LAYOUT = "layout"
    ALL = "all"


class Precision(enum.Enum):
    """The arithmetic asked for; inputs and outputs keep their dtypes in all of them.

    `TF32` lets an accelerator round f32 products to 10 mantissa bits. `F16` and `BF16` compute values declared as
    f32 in that dtype; a `PrecisionPolicy` says it class by class.
    """

    F32 = "f32"
    TF32 = "tf32"
    F16 = "f16"
    BF16 = "bf16"

    @classmethod
    def _missing_(cls, value: object) -> Precision | None:
        """Return the member of another name of it, such as `fp16` and `float16`."""
        return PRECISION_NAMES.get(str(value).strip().lower())


PRECISION_NAMES = {
    **dict.fromkeys(("f32", "fp32", "float32", "single"), Precision.F32),
    **dict.fromkeys(("f16", "fp16", "float16", "half"), Precision.F16),
    **dict.fromkeys(("bf16", "bfloat16"), Precision.BF16),
    "tf32": Precision.TF32,
}
PrecisionName: TypeAlias = Literal["f32", "tf32", "f16", "bf16", "fp32", "float32", "fp16", "float16", "bfloat16"]


@dataclass(frozen=True, slots=True, repr=False)
class CompileOptions:
    """How to compile a graph. Frozen: `with_` returns a changed copy.

    Fields that hold a member of an enum take its value as well, such as `precision="tf32"`.

    Attributes:
        precision: the arithmetic asked for.
        precisions: device label or kind -> the arithmetic on that device, where it is not `precision`; a label such as
            `cuda:1` comes before its kind. Any name of a device is taken, and any value of `Precision`, such as "f16".
        placement: the placement rule; None means strict for a device the caller named and assisted for an
            automatic choice.
        sharing: how sessions share weights.
        optimization: ONNX Runtime's graph optimisation level.
        dims: sizes for named dims; a bound dim becomes static, which some providers need and most like.
        intra_op_threads: threads inside one op on the CPU provider; None takes as many as other sessions have left
            of the process's share of the cores. Not used with `RLX_SHARED_POOL=1`.
        spinning: whether idle worker threads spin; None leaves it to the provider.
        provider_options: device label or kind -> its provider options, as in `{"cuda": {"use_tf32": "1"}}`, on top of
            those that the provider module sets. A list as ONNX Runtime takes providers is taken as well,
            `[("CUDAExecutionProvider", {...}), "CPUExecutionProvider"]`. An option without a device is one of every
            device, and a device that has no such option is not used.
        session_config: ONNX Runtime session config entries; unknown keys are refused, since ONNX Runtime takes
            them without a word.
        device_graph: record the launches of a run once and replay them, which needs every node on the device. "auto"
            records on CUDA, per input signature, after some plain runs, where a replay is right and faster;
            `CompiledGraph.device_graph_report` gives the reason where not. True records after as many plain runs, even
            where a replay is not faster, and a run that cannot be recorded raises then; it also uses WebGPU's graph
            capture, whose shapes must be static. False never records. Runs of a recorded graph take turns. Devices
            without it ignore it.
        sized_sessions: the most sessions with fixed input sizes that one on CUDA may have beside it, for sizes that
            come back. Each takes the device's memory for weights, work space and handles once more, all together a 16th
            of it at most, and is kept only where it is faster. 0 for none.
        device_memory_limit_bytes: the most memory a session takes on a CUDA device; a run that needs more is an
            `EngineError`, after which the session is usable.
        custom_op_libraries: absolute paths of custom-op libraries that the graph's `Custom` ops need. A library is
            native code that runs in this process: name only those you trust.
        profile_prefix: write an ONNX Runtime profile to files of this prefix.
        kernel_dispatch: which form ops get that have a fused and a basic one; by default what
            `RLX_KERNEL_DISPATCH` says at the moment the options are made.
        precision_policy: the dtype each class of ops computes in; None goes by `precision`.
        cache: whether the session is opened through the compile cache; None goes by `RLX_CACHE`, which is off.
        low_memory: hold few copies of weights at a time, for a session that runs once or twice: kernels keep no packed
            ones, and each node runs right before the one that needs it, so that f16 weights which the CPU casts to f32
            are cast one after the other. Runs are slower. Casts are folded into f32 weights unless optimisation is off.
        fusion: whether attention, rotary embeddings and norms that an imported model has in basic operators, and ONNX's
            `Attention` and `GroupNormalization`, run in fused kernels, on devices that have them. Weights of one
            element, those of bools, and scales of InstanceNormalization that are all one then count as constants.
        tuned: whether the fastest variant that `tune` found for the graph on the device, with these options, is taken.
        split: cuts the graph into stages on several devices, for runs whose device is not named: by a plan, or its JSON
            values, or "auto", which plans where no device that is faster holds the graph; see docs/splitting.md.
        opset: the ai.onnx opset of the exported model; None takes the lowest that expresses the graph, 21 at best.

    Raises:
        DeviceParseError: `precisions` or `provider_options` names no known device.
        InputError: a field of an enum, or an entry of `precisions`, has a value that the enum lacks.
    """

    precision: Precision = Precision.F32
    precisions: Mapping[str, Precision] = field(default_factory=lambda: MappingProxyType({}))
    placement: PlacementRule | None = None
    sharing: WeightSharing = WeightSharing.PRIVATE
    optimization: OptimizationLevel = OptimizationLevel.ALL
    dims: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    intra_op_threads: int | None = None
    spinning: bool | None = None
    provider_options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    session_config: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    device_graph: bool | Literal["auto"] = "auto"
    sized_sessions: int = 32
    device_memory_limit_bytes: int | None = None
    custom_op_libraries: tuple[str, ...] = ()
    profile_prefix: str | None = None
    kernel_dispatch: KernelDispatch = field(default_factory=KernelDispatch.from_env)
    precision_policy: PrecisionPolicy | None = None
    cache: CacheUse | None = None
    low_memory: bool = False
    fusion: bool = False
    tuned: bool = True
    split: SplitPlan | Literal["auto"] | None = None
    opset: int | None = None

    if TYPE_CHECKING:  # fields hold members, and are given by value as well

        def __init__(
            self,
            precision: Precision | PrecisionName = ...,
            precisions: Mapping[str, Precision | PrecisionName] = ...,
            placement: PlacementRule | Literal["strict", "assisted"] | None = ...,
            sharing: WeightSharing | Literal["private", "raw", "prepacked"] = ...,
            optimization: OptimizationLevel | Literal["off", "basic", "extended", "layout", "all"] = ...,
            dims: Mapping[str, int] = ...,
            intra_op_threads: int | None = ...,
            spinning: bool | None = ...,
            provider_options: Mapping[str, Any] | Sequence[DeviceEntry] = ...,
            session_config: Mapping[str, str] = ...,
            device_graph: bool | Literal["auto"] = ...,
            sized_sessions: int = ...,
            device_memory_limit_bytes: int | None = ...,
            custom_op_libraries: tuple[str, ...] = ...,
            profile_prefix: str | None = ...,
            kernel_dispatch: KernelDispatch = ...,
            precision_policy: PrecisionPolicy | None = ...,
            cache: CacheUse | Literal["off", "found", "on"] | None = ...,
            low_memory: bool = ...,
            fusion: bool = ...,
            tuned: bool = ...,
            split: SplitPlan | Mapping[str, Any] | Literal["auto"] | None = ...,
            opset: int | None = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        for name, kind in _ENUMS.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                object.__setattr__(self, name, _member(kind, value, name))
        if self.precisions:
            given = {
                Device(name).label: _member(Precision, value, f"precisions[{name!r}]")
                for name, value in self.precisions.items()
            }
            object.__setattr__(self, "precisions", MappingProxyType(given))
        if self.provider_options:
            object.__setattr__(self, "provider_options", MappingProxyType(_by_device(self.provider_options)))
        if self.split is not None and self.split != "auto":
            from rlx_ort.options.split_plan import SplitPlan  # not needed by a start from the compile cache

            if isinstance(self.split, Mapping):
                object.__setattr__(self, "split", SplitPlan.read(self.split, "CompileOptions(split=...)"))
            elif not isinstance(self.split, SplitPlan):
                raise InputError(f"CompileOptions: split is 'auto' or a plan, not {self.split!r:.60}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by the fields, with mappings as dicts: a read-only view of a dict cannot be pickled."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        views = [name for name, value in values.items() if isinstance(value, MappingProxyType)]
        return _restored, ({**values, **{name: dict(values[name]) for name in views}}, views)

    def __repr__(self) -> str:
        import reprlib  # not needed by a start from the compile cache

        changed = []
        for each in fields(self):
            value = getattr(self, each.name)
            if value != _USUAL.get(each.name, each.default):
                shown = dict(value) if isinstance(value, Mapping) else value
                text = str(shown) if isinstance(shown, enum.Enum) else reprlib.repr(shown)
                changed.append(f"{each.name}={text if len(text) <= _LONG else f'{text[:_LONG]}...'}")
        return f"CompileOptions({', '.join(changed)})"

    @property
    def effective_precision(self) -> PrecisionPolicy:
        """The policy in force: `precision_policy`, else the one that `precision` stands for."""
        if self.precision_policy is not None:
            return self.precision_policy
        return _POLICIES.get(self.precision, PrecisionPolicy())

    def on(self, device: Device) -> CompileOptions:
        """Return the options for one device, with its entries of `precisions` and `provider_options` alone."""
        changes: dict[str, Any] = {}
        given = self.provider_options
        if any(isinstance(value, Mapping) for value in given.values()):
            plain = {name: value for name, value in given.items() if not isinstance(value, Mapping)}
            own = given.get(device.label, given.get(device.kind, {}))
            changes["provider_options"] = MappingProxyType({**plain, **own})
        if self.precisions:
            changes["precisions"] = MappingProxyType({})
            precision = self.precisions.get(device.label, self.precisions.get(device.kind))
            if precision is not None:
                changes |= {"precision": precision, "precision_policy": None}
        return replace(self, **changes) if changes else self

    def with_provider_options(self, device: Device, given: Mapping[str, str]) -> CompileOptions:
        """Return the options with further provider options of a device; the same ones if it has these already."""
        known = self.on(device).provider_options
        if all(name in known and str(known[name]) == value for name, value in given.items()):
            return self
        all_known = self.provider_options
        own = all_known.get(device.label, all_known.get(device.kind, {}))
        return replace(self, provider_options={**all_known, device.label: {**own, **given}})

    @property
    def key(self) -> str:
        """A text that equal options share: mappings are not hashable, and their order does not matter."""
        values = [(name, getattr(self, name)) for name in sorted(self.__dataclass_fields__)]
        return repr([(name, sorted(value.items()) if isinstance(value, Mapping) else value) for name, value in values])

    def with_(self, **changes: object) -> CompileOptions:
        """Return a copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]  # dataclass checks the names


def _restored(values: Mapping[str, Any], views: Sequence[str]) -> CompileOptions:
    return CompileOptions(**{**values, **{name: MappingProxyType(values[name]) for name in views}})


def _by_device(given: Mapping[str, Any] | Sequence[DeviceLike]) -> dict[str, Any]:
    """Return provider options with those of a device under its label, from a mapping or ONNX Runtime's list."""
    pairs: Sequence[DeviceLike]
    if isinstance(given, Mapping):
        named = [(name, value) for name, value in given.items() if isinstance(value, Mapping)]
        pairs, found = [*named], {name: value for name, value in given.items() if not isinstance(value, Mapping)}
        if indexed := [name for name, value in named if with_options((name, value))[0] != Device(name)]:
            raise InputError(
                f"CompileOptions: the device_id of {indexed[0]!r} in provider_options names another device; name that "
                "one, as in {'cuda:1': {...}}"
            )
    else:
        pairs, found = ([given] if is_pair(given) else [*given]), {}
    for pair in pairs:
        device, options = with_options(pair)
        if options:
            found[device.label] = dict(sorted({**found.get(device.label, {}), **options}.items()))
    return found


def _member(kind: type[_Enum], value: object, field_name: str) -> _Enum:
    try:
        return kind(value)
    except ValueError as err:
        hint = near_names(str(value), [str(known.value) for known in kind])
        if kind is Precision and "int" in str(value):
            hint = "integers are a quantisation of the model: rlx-ort convert --quantize int8-dynamic"
        raise InputError(f"CompileOptions: {field_name} is {value!r}, which does not exist; {hint}") from err


_ENUMS: dict[str, type[enum.Enum]] = {
    "precision": Precision,
    "placement": PlacementRule,
    "sharing": WeightSharing,
    "optimization": OptimizationLevel,
    "cache": CacheUse,
}
_LONG = 80  # characters
_MAPPINGS = ("precisions", "dims", "provider_options", "session_config")
_USUAL: dict[str, object] = {"kernel_dispatch": KernelDispatch(), **dict.fromkeys(_MAPPINGS, MappingProxyType({}))}
"""The defaults that `repr` leaves out, of fields whose default is made by a function."""
_POLICIES = {Precision.F16: PrecisionPolicy.auto_mixed(), Precision.BF16: PrecisionPolicy.auto_mixed_bf16()}
