"""Which variant of a language model runs on which device: every pair is judged at the sizes of a text, and ranked."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlx_ort.converters.files import load_graph
from rlx_ort.converters.from_onnx.tensor_files import Folders, trusted_folders
from rlx_ort.device import Device, priority_rank
from rlx_ort.errors import ConversionError, InputError, NoViableDeviceError, RlxError, cpu_help
from rlx_ort.genai.config import CONFIG, GenaiConfig, read_config
from rlx_ort.genai.package import why_not
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.types import TensorType
from rlx_ort.options.compile_options import CompileOptions
from rlx_ort.providers.registry import provider_of
from rlx_ort.selection.candidates import CLOSE, Candidates, automatic
from rlx_ort.selection.policy import DevicePolicy, device_from_env
from rlx_ort.selection.support import support_of

ENGINES = ("auto", "genai", "rlx_ort")
_PROMPT, _NEW = 256, 128


@dataclass(frozen=True, slots=True)
class TextSizes:
    """The text that devices are ranked for: `prompt` tokens are read, then `new` tokens are written."""

    prompt: int
    new: int

    @property
    def past(self) -> int:
        """The tokens before a new one, on average."""
        return self.prompt + self.new // 2

    @classmethod
    def within(cls, context: int, prompt: int | None = None, new: int | None = None) -> TextSizes:
        """Return these sizes; for one that is None the default, or less where the context of a model is short.

        Raises:
            InputError: they are too large for it.
        """
        if new is None:
            new = max(min(_NEW, context - prompt if prompt else context // 3), 1)
        if prompt is None:
            prompt = max(min(_PROMPT, context - new), 1)
        if prompt < 1 or new < 1 or prompt + new > context:
            raise InputError(
                f"{prompt} tokens of prompt and {new} new ones: each must be at least 1, and together at most "
                f"{context}, the context of the model"
            )
        return cls(prompt, new)


@dataclass(frozen=True, slots=True)
class Variant:
    """One folder with a decoder; `name` is empty where it is the only one."""

    name: str
    config: GenaiConfig
    graph: Graph
    options: CompileOptions

    def is_made_for(self, device: Device) -> bool:
        """Return whether the config names the device's execution provider, or none, which means the CPU."""
        provider = provider_of(device)
        named = [name for name, _ in self.config.providers] or ["cpu"]
        return provider is not None and provider.genai_name.lower() in named


@dataclass(frozen=True, slots=True)
class GenaiCandidate:
    """A variant on a device.

    Attributes:
        variant: the name of the variant's folder, empty where there is one.
        device: the device.
        available: whether the device works here.
        blocker: why the pair cannot be chosen, or None.
        prefill_ns: the predicted time of the prompt in ns, None where nothing can be predicted.
        step_ns: the predicted time of a token after it, in ns.
        total_ns: that of prompt and new tokens together.
        nodes: how many nodes the model has.
        cpu_nodes: how many of them the CPU would take.
        cpu_compute: the names of those of them that compute with floats: products, attention, norms.
        engines: those that can, the preferred one first: `genai` for onnxruntime-genai, `rlx_ort` for the decode loop.
        not_genai: why onnxruntime-genai cannot.
        profile_source: the source of the figures of the prediction.
        cache_bytes: the bytes of the cache of one token.
    """

    variant: str
    device: Device
    available: bool
    blocker: str | None = None
    prefill_ns: float | None = None
    step_ns: float | None = None
    total_ns: float | None = None
    nodes: int = 0
    cpu_nodes: int = 0
    cpu_compute: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()
    not_genai: str = ""
    profile_source: str = ""
    cache_bytes: int = 0

    @property
    def tokens_per_s(self) -> float | None:
        """The predicted speed of decoding."""
        return None if not self.step_ns else 1e9 / self.step_ns


@dataclass(frozen=True, slots=True)
class Choice:
    """The ranking of a folder.

    Attributes:
        candidates: the pairs that may be chosen, the best first, then the blocked ones.
        variants: the variants that could be read, by name.
        unreadable: the name of each variant that could not, and why.
        sizes: the text they were ranked for.
        named: whether the caller named the device.
    """

    candidates: tuple[GenaiCandidate, ...]
    variants: dict[str, Variant]
    unreadable: tuple[tuple[str, str], ...]
    sizes: TextSizes
    named: bool = False

    @property
    def ranked(self) -> list[GenaiCandidate]:
        """The pairs that may be chosen, the best first."""
        return [row for row in self.candidates if row.blocker is None]

    @property
    def notes(self) -> list[str]:
        """Settings in the configs that have no effect."""
        return [note for variant in self.variants.values() for note in variant.config.notes]

    def best(self) -> GenaiCandidate:
        """Return the first of the ranking.

        Raises:
            NoViableDeviceError: there is none; it lists the reasons.
        """
        if not self.ranked:
            rows = [
                (row.device, f"{row.variant + ': ' if row.variant else ''}{row.blocker}") for row in self.candidates
            ]
            raise NoViableDeviceError("no allowed device can run the model: widen the policy, or add a device.", rows)
        return self.ranked[0]


def read_variants(
    folder: str | os.PathLike[str], options: CompileOptions, trusted: Sequence[Path] = ()
) -> tuple[dict[str, Variant], tuple[tuple[str, str], ...]]:
    """Return the decoder of a folder, or of each folder in it that has a config, and why others could not be read.

    Raises:
        ConversionError: there is no config, or none could be read.
    """
    base = Path(folder)
    if not base.is_dir():
        raise ConversionError(f"{base} is not a folder; give one with a {CONFIG}, or one of several such folders")
    names = [""] if (base / CONFIG).exists() else sorted(path.parent.name for path in base.glob(f"*/{CONFIG}"))
    variants: dict[str, Variant] = {}
    failures: list[tuple[str, RlxError]] = []
    for name in names or [""]:
        try:
            config = read_config(base / name, trusted)
            graph = load_graph(config.model, trusted_links=trusted)
            bound = options.with_(dims={**config.dims(graph), **options.dims})
            variants[name] = Variant(name, config, graph, bound)
        except RlxError as err:
            failures.append((name, err))
    if not variants:
        try:
            raise failures[0][1]
        finally:
            failures.clear()  # they have this frame, and would keep files mapped until garbage is collected
    return variants, tuple((name, str(err)) for name, err in failures)


def rank(
    folder: str | os.PathLike[str],
    policy: DevicePolicy | None = None,
    options: CompileOptions | None = None,
    *,
    device: Device | str | None = None,
    engine: str = "auto",
    prompt_tokens: int | None = None,
    new_tokens: int | None = None,
    trusted_links: Folders = (),
) -> Choice:
    """Return the ranking that `open` chooses from, without a session of the model; see there for the arguments.

    Raises:
        ConversionError: a config or model cannot be read.
        InputError: the sizes or the engine are wrong.
        NoViableDeviceError: the policy refuses the device.
    """
    if engine not in ENGINES:
        raise InputError(f"there is no engine {engine!r}; known are {', '.join(ENGINES)}")
    policy = DevicePolicy.from_env() if policy is None else policy
    device = device_from_env() if device is None else device
    trusted = trusted_folders(trusted_links)
    named = None if device is None else Device(device)
    if named is not None:
        refusal = policy.refusal(named)
        if refusal is not None:
            raise NoViableDeviceError(f"{named.display} may not run the model: it is {refusal}")
        policy = replace(policy, allow=(named,))
    variants, unreadable = read_variants(folder, options or CompileOptions(), trusted)
    context = min(variant.config.context_length for variant in variants.values())
    sizes = TextSizes.within(context, prompt_tokens, new_tokens)
    rows = [row for variant in variants.values() for row in _judged(variant, policy, engine, sizes, named is not None)]
    return Choice(tuple(_in_order(rows, variants, policy)), variants, unreadable, sizes, named is not None)


def _judged(variant: Variant, policy: DevicePolicy, engine: str, sizes: TextSizes, named: bool) -> list[GenaiCandidate]:
    """Return a variant on each device that the policy allows."""
    config, graph = variant.config, variant.graph
    options = automatic(variant.options)
    prompt, step = (
        {row.device: row for row in Candidates(graph, policy, options, config.feeds(graph, new, past)).rank()}
        for new, past in ((sizes.prompt, 0), (1, sizes.past))
    )
    strict = named and variant.options.placement is None
    rows = []
    for device, support in step.items():
        before, each = prompt[device].predicted_ns, support.predicted_ns
        row = GenaiCandidate(
            variant=variant.name,
            device=device,
            available=support.available,
            blocker=support.blocker,
            prefill_ns=before,
            step_ns=each,
            total_ns=None if before is None or each is None else before + sizes.new * each,
            nodes=sum(not node.op.is_leaf for node in graph.nodes),
            cpu_nodes=support.cpu_nodes,
            profile_source=support.profile_source or "",
            cache_bytes=config.cache_bytes(graph, 1),
        )
        if row.blocker is None:
            reason = why_not(device, variant.options)
            usable = ("rlx_ort",) if reason else ("genai", "rlx_ort")
            engines = tuple(name for name in usable if engine in ("auto", name))
            blocker = None if engines else reason
            compute = _compute(graph, support_of(device, graph, options).cpu_nodes)
            if compute and strict:
                blocker = (
                    f"would leave {len(compute)} nodes that compute with floats to the CPU, such as {compute[0]!r}; "
                    f"{cpu_help()}, or take another device"
                )
            row = replace(row, engines=engines, not_genai=reason, cpu_compute=compute, blocker=blocker)
        rows.append(row)
    return rows


def _compute(graph: Graph, nodes: frozenset[int]) -> tuple[str, ...]:
    """Return the names of those nodes that compute with floats; the others compute masks, positions and shapes."""
    names = []
    for at in sorted(nodes):
        node = graph.nodes[at]
        if any(isinstance(kind, TensorType) and kind.dtype.is_float for kind in node.types):
            names.append(node.name)
    return tuple(names)


def _in_order(
    rows: Sequence[GenaiCandidate], variants: dict[str, Variant], policy: DevicePolicy
) -> list[GenaiCandidate]:
    """Return the rows by predicted time; where two are close, by preference, then those made for their device."""
    times = [row.total_ns for row in rows if row.blocker is None and row.total_ns is not None]
    limit = min(times, default=math.inf) * CLOSE

    def place(row: GenaiCandidate) -> tuple[float, ...]:
        preference, priority = policy.prefer_rank(row.device), priority_rank(row.device)
        foreign = not variants[row.variant].is_made_for(row.device)
        if row.blocker is not None:
            return (3, preference, priority)
        if row.total_ns is None:
            return (2, preference, priority, foreign)
        if row.total_ns <= limit:
            return (0, preference, foreign, row.total_ns, priority)
        return (1, row.total_ns, foreign, priority)

    return sorted(rows, key=place)
