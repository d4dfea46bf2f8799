"""`memory_need`: the memory that a graph takes on a device, counted before anything is opened.

ONNX Runtime plans the memory of a run when it opens a session, from the nodes that its optimisers leave, in the order
of a search from the outputs (core/framework/allocation_planner.cc). The same is done here with the exported nodes
without those that are folded. What other optimisers fuse counts as written in place; but convolutions on the CPU need
rules, since values are copied into their layout and out of it and have no known shape there.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from rlx_ort.calibration.features import DEFAULT_DIM, workload_of
from rlx_ort.converters.to_onnx.exported import SCORED, ExportedNode
from rlx_ort.converters.to_onnx.exporter import Draft
from rlx_ort.converters.to_onnx.model import ExternalWeight
from rlx_ort.device import Device
from rlx_ort.errors import InputError
from rlx_ort.execution.decoder_interface import CachePair, DecoderInterface
from rlx_ort.execution.resident import opening_bytes
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.types import TensorType, UnknownType, ValueType
from rlx_ort.options.compile_options import CompileOptions, OptimizationLevel, WeightSharing
from rlx_ort.providers.base import Provider
from rlx_ort.providers.registry import memory_limit, provider_of
from rlx_ort.selection.arena import Arena, Pattern
from rlx_ort.selection.folding import folded_nodes, num_elements, static_sizes
from rlx_ort.selection.graph_cache import PerDraft, open_dims
from rlx_ort.selection.predict import workload_on
from rlx_ort.selection.support import draft_for

MARGIN = 1.25
"""How far above the real peak a counted one may be; see docs/results/README.md, cpu-2026-11-26-memory."""

_needs: PerDraft[MemoryNeed] = PerDraft()
_VIEWS = frozenset({"Dropout", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
_CONVOLUTIONS = frozenset({"Conv", "FusedConv"})
_POOLS = frozenset({"AveragePool", "Concat", "GlobalAveragePool", "GlobalMaxPool", "MaxPool"})
_SUMS = frozenset({"Add", "Sum"})
_JOINED = _SUMS | {"Clip", "Elu", "HardSigmoid", "HardSwish", "LeakyRelu", "Relu", "Sigmoid", "Tanh"}
"""Operators that become a part of the convolution whose result they read."""
_CHANNELS = 16  # a convolution over fewer reads them where they are
# Both measured: docs/results/README.md, cpu-2026-11-26-memory.
_RELAID = 0.7  # of the weights of convolutions, which the optimisers hold for a moment beside both layouts
_SCATTERED = 0.2  # of the arena's unused pages: sessions touch them, as small tensors lie elsewhere than here


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """The memory of one node in bytes; nodes are in the order in which ONNX Runtime runs them.

    Attributes:
        name: the exported node, or the value that is copied into the layout of convolutions or out of it.
        weights: constants that it is the first to read.
        packed: copies of constants that its kernel keeps.
        live: activations while it runs, those that wait for later nodes and its work space among them.
        crossing: activations that later nodes read, which a cut behind it has to move.
    """

    name: str
    weights: int
    packed: int
    live: int
    crossing: int


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """The memory that a graph takes on a device, in bytes.

    Attributes:
        device: the device.
        weights: constants; on the CPU those of the process, which sessions share, without mapped ones that are packed.
        packed: copies of weights in the layout of the kernels.
        inputs: a run's inputs but the cache, where the device has copies of them.
        cache: the keys and values of a decoder that a run is given.
        activations: the most that is alive at a time.
        arena: memory of the allocator for activations.
        work_space: memory that the device's libraries may take in runs.
        opening: memory that opening the session takes for a moment, beyond the memory that it keeps.
        runtime: the nodes of the graph and the session.
        process: memory of the device's libraries, once in a process.
        correction: memory that the least opening of the graph kept above the count; 0 if none was measured.
        assumed: the dims that have no size and count as `DEFAULT_DIM`.
        nodes: the nodes.
    """

    device: Device
    weights: int
    packed: int
    inputs: int
    cache: int
    activations: int
    arena: int
    work_space: int
    opening: int
    runtime: int
    process: int
    correction: int
    assumed: tuple[str, ...]
    nodes: tuple[NodeMemory, ...]

    @property
    def session(self) -> int:
        """The peak of the session."""
        return self._kept + max(self.opening, self.inputs + self.cache + self.arena + self.work_space)

    @property
    def least(self) -> int:
        """What a run takes at least: the allocator keeps less where memory is short."""
        return self._kept + self.inputs + self.cache + self.activations

    @property
    def _kept(self) -> int:
        return self.weights + self.packed + self.runtime + self.correction

    @property
    def total(self) -> int:
        """The peak with the memory that the device's libraries take once."""
        return self.session + self.process


def memory_need(
    graph: Graph,
    device: Device | str,
    options: CompileOptions | None = None,
    dims: Mapping[str, int] | None = None,
    types: Mapping[str, ValueType] | None = None,
) -> MemoryNeed | None:
    """Return the memory that a graph takes on a device, None where the device gets no model. Opens no session of it.

    `dims` are sizes of named dims, as `dims_of` reads them from the inputs; they come before those of the options. A
    section of a graph gets the types of its values within that, where sizes are known that it is fed.
    """
    device, options = Device(device), options or CompileOptions()
    provider, sizes, options = provider_of(device), {**options.dims, **(dims or {})}, options.on(device)
    draft = None if provider is None else draft_for(provider, graph, options)
    if provider is None or draft is None:
        return None
    if types is not None:
        return _Plan(graph, device, provider, options, draft, sizes, types).need()
    key = (device, options.key, tuple(sorted(sizes.items())), opening_bytes(graph, device))
    return _needs.get(draft, key, lambda: _Plan(graph, device, provider, options, draft, sizes).need())


def memory_shortage(
    graph: Graph, device: Device, options: CompileOptions, dims: Mapping[str, int] | None = None
) -> str | None:
    """Return why a device cannot hold a graph, with the figures, or None where it can or that is not known.

    It cannot if it has less than the weights alone, or than the least need divided by `MARGIN`. Dims without a size
    count as 1.
    """
    limit = memory_limit(device, options)
    sizes = {**dict.fromkeys(open_dims(graph), 1), **options.dims, **(dims or {})}
    workload = None if limit is None or not graph.nodes else workload_on(graph, device, options, sizes)
    if limit is None or workload is None:
        return None
    params = sum(value.dtype.nbytes(value.shape.num_elements or 0) for value in graph.params)
    need = None  # fits in whatever order and layout
    if 4 * (params + sum(workload.nbytes.values())) >= limit:
        need = memory_need(graph, device, options, sizes)
    if need is None or (need.weights <= limit and need.least <= limit * MARGIN):
        return None
    return (
        f"{device.display} has {limit:,} bytes for a session and cannot hold graph {graph.name!r}, which needs at "
        f"least {need.least:,}: weights {need.weights:,}, packed copies {need.packed:,}, inputs {need.inputs:,}, cache "
        f"{need.cache:,}, activations {need.activations:,}"
    )


class _Plan:
    """The plan of one graph's memory on one device."""

    def __init__(
        self,
        graph: Graph,
        device: Device,
        provider: Provider,
        options: CompileOptions,
        draft: Draft,
        sizes: dict[str, int],
        types: Mapping[str, ValueType] | None = None,
    ) -> None:
        self.graph, self.device, self.provider, self.options = graph, device, provider, options
        outline = draft.outline if types is None else draft.outline.with_types(types)
        workload = workload_on(graph, device, options, sizes) if types is None else workload_of(outline, sizes)
        assert workload is not None  # noqa: S101  # there is a draft
        self.workload = workload
        self.sizes = {**sizes, **dict.fromkeys(self.workload.assumed, DEFAULT_DIM)}
        self.facts = provider.session_memory
        self.nbytes = {**self.workload.inputs, **self.workload.nbytes}
        # The session knows no sizes but those that its options bind: by them it folds nodes and shares memory.
        self.types, self.outputs = {**draft.outline.known_types()}, outline.output_types.keys()
        self.scores = {
            name
            for node in draft.outline.nodes
            if node.op_type in SCORED
            for name in (*node.input_names, *node.output_names)
        }
        self.cache = _cache_of(draft, outline.input_types)
        folded = folded_nodes(draft.outline, options)
        nodes = [node for node in self.workload.nodes if node.name not in folded]
        self.relaid: set[str] = set()  # values in the layout of convolutions
        if self.facts.reorders and options.optimization is OptimizationLevel.ALL:
            nodes = self._relay(nodes)
        self.nodes = [nodes[at] for at in _order(nodes)]
        self.made = {name: at for at, node in enumerate(self.nodes) for name in node.output_names if name}
        self.readers: dict[str, list[ExportedNode]] = defaultdict(list)
        for node in self.nodes:
            for name in node.input_names:
                self.readers[name].append(node)
        self.constants = {
            name: data.type.dtype.nbytes(num_elements(data.type)) if isinstance(data, ExternalWeight) else data.nbytes
            for name, data in outline.constants.items()
        }
        self.owned = {name: self.nbytes.get(name, 0) for node in folded.values() for name in node.output_names if name}
        self.repacked: set[str] = set()
        self.packed = [self._packed(node) for node in self.nodes]
        self.in_gelu = self._gelus()  # value -> the argument of the function of which it is a part
        self.buffer: dict[str, str] = {}  # value -> the one whose memory it has
        self.first: dict[str, int] = {}  # the nodes between which a memory is taken
        self.last: dict[str, int] = {}
        self._assign({*outline.input_types, *self.constants, *self.owned})

    def need(self) -> MemoryNeed:
        """Return the memory."""
        facts, workload = self.facts, self.workload
        lives, arena = self._runs()
        weights = self._weights()
        held, packed = sum(weights), sum(self.packed)
        if facts.on_host:
            mapped = {name for name, data in self.graph.weights.items() if data.source is not None}
            held += sum(size for name, size in self.constants.items() if name not in self.readers)
            held -= sum(self.constants.get(name, 0) for name in mapped & self.repacked)
        relaid = sum(n for n, node in zip(self.packed, self.nodes, strict=True) if node.op_type in _CONVOLUTIONS)
        pasts = {pair.past for pair in self.cache}
        cache = sum(n for name, n in workload.inputs.items() if name in pasts)
        runtime = facts.session_bytes + facts.node_bytes * len(workload.nodes)
        kept = packed + runtime + (0 if facts.on_host else held)
        opened = opening_bytes(self.graph, self.device)
        parts = zip(self.nodes, weights, self.packed, lives, self._crossings(), strict=True)
        return MemoryNeed(
            device=self.device,
            weights=held,
            packed=packed,
            inputs=0 if facts.on_host else sum(workload.inputs.values()) - cache,
            cache=cache,
            activations=max(lives, default=0),
            arena=arena,
            work_space=self.provider.work_space_bytes,
            opening=max(sum(self.owned.values()) - packed, 0) + int(_RELAID * relaid if facts.reorders else 0),
            runtime=runtime,
            process=facts.process_bytes,
            correction=0 if opened is None else opened - kept,
            assumed=workload.assumed,
            nodes=tuple(NodeMemory(node.name, *figures) for node, *figures in parts),
        )

    # --- constants

    def _packed(self, node: ExportedNode) -> int:
        """Return the bytes of copies that a kernel keeps of constants; one that others have packed is shared."""
        if self.options.sharing is WeightSharing.RAW or self.options.low_memory:
            return 0
        total = 0
        for place, (name, kind) in enumerate(zip(node.input_names, node.inputs, strict=False)):
            size, shape = self.constants.get(name) or self.owned.get(name), static_sizes(kind, self.sizes)
            if size and shape and name not in self.repacked:
                copy = self.provider.packed_bytes(node.op_type, place, shape, size // max(math.prod(shape), 1))
                total += copy
                self.repacked.update([name] if copy else [])
        return total

    def _weights(self) -> list[int]:
        """Return the bytes of constants that each node is the first to read; packed ones of folding are gone.

        On a device they take whole pages; small ones share theirs with the next ones.
        """
        seen: set[str] = set()
        weights, page, room = [], self.facts.page_bytes, 0
        for node in self.nodes:
            total = 0
            for name in dict.fromkeys(node.input_names):
                if name in seen:
                    continue
                seen.add(name)
                size = self.constants.get(name, 0) + (0 if name in self.repacked else self.owned.get(name, 0))
                taken = size + -size % page
                if size < page // 2:
                    taken = 0 if size <= room else page
                    room += taken - size
                total += taken
            weights.append(total)
        return weights

    # --- the plan of buffers

    def _assign(self, given: set[str]) -> None:
        """Find the value whose memory each value has, and the nodes at which each memory is taken and given back."""
        uses = Counter(name for node in self.nodes for name in (*node.input_names, *node.output_names) if name)
        uses.update([*self.outputs, *given])
        shared = {pair.present: pair.past for pair in self.cache if pair.in_place}
        free: list[str] = []
        for at, node in enumerate(self.nodes):
            for place, name in enumerate(node.output_names):
                if not name:
                    continue
                taken = shared.get(name)
                if taken is None and name not in self.outputs:
                    taken = self._joined(node, name, uses) or self._reused(node, place, name, uses, free)
                if taken is None:
                    self.first[name] = self.last[name] = at
                else:
                    self.buffer[name] = taken = self.buffer.get(taken, taken)
                    uses[taken] += uses[name]
            for name in filter(None, (*node.input_names, *node.output_names)):
                root = self.buffer.get(name, name)
                uses[root] -= 1
                self.last[root] = at
                if not uses[root] and root in self.made:
                    free.insert(0, root)
        self.last.update((self.buffer.get(name, name), len(self.nodes)) for name in self.outputs)

    def _relay(self, nodes: Sequence[ExportedNode]) -> list[ExportedNode]:
        """Return the nodes with those that copy values into the layout of convolutions, and out of it."""
        result: list[ExportedNode] = []
        made: dict[str, ExportedNode] = {}
        for node in nodes:
            names, into = [*filter(None, node.input_names)], node.op_type in _CONVOLUTIONS
            swish = node.op_type == "Mul" and any(_is_gate(made.get(each), names) for each in names)
            joins = swish or node.op_type in _POOLS | _JOINED
            follows = into or (joins and {*names} <= self.relaid)
            copies = {}
            for name, kind in zip(node.input_names[: 1 if into else None], node.inputs, strict=False):
                shape = static_sizes(kind, self.sizes) or ()
                wrong = (
                    name not in self.relaid and len(shape) == 4 and shape[1] >= _CHANNELS
                    if into
                    else name in self.relaid
                )
                transposed = "Transpose" in (node.op_type, made[name].op_type if name in made else "")
                if wrong and (into or not follows) and not transposed:
                    copies[name] = copy = f"{name}/{'blocks' if into else 'plain'}"
                    if copy not in self.nbytes:
                        self.nbytes[copy] = self.nbytes.get(name, 0)
                        self.types[copy] = self.types.get(name, UnknownType())
                        self.relaid.update([copy] if into else [])
                        result.append(ExportedNode.of(copy, "", "Reorder", 1, 0, (kind,), (kind,), (name,), (copy,)))
            node = node._replace(input_names=tuple(copies.get(name, name) for name in node.input_names))
            self.relaid.update(node.output_names[:1] if follows else ())
            made.update((name, node) for name in node.output_names)
            result.append(node)
        return result

    def _joined(self, node: ExportedNode, name: str, uses: Mapping[str, int]) -> str | None:
        """Return the value whose memory a result takes since its node becomes a part of another one.

        An activation becomes a part of the convolution before it, and so does a sum, which writes over its other input.
        """
        if name in self.in_gelu:
            return self.in_gelu[name]
        readers = self.readers[name]
        if len(readers) == 1 and readers[0].op_type == "Mul" and _is_gate(node, readers[0].input_names):
            return node.input_names[0]
        if name not in self.relaid:
            return None
        if node.op_type in _JOINED:
            made = [each for each in node.input_names if each in self.relaid and len(self.readers[each]) == 1]
            return next((each for each in reversed(made) if self.nodes[self.made[each]].op_type not in _POOLS), None)
        if node.op_type in _CONVOLUTIONS and len(readers) == 1 and readers[0].op_type in _SUMS:
            for each in readers[0].input_names:
                root = self.buffer.get(each, each)
                if each != name and each in self.relaid and root in self.first and uses[root] == 1:
                    return each
        return None

    def _reused(
        self, node: ExportedNode, place: int, name: str, uses: Mapping[str, int], free: list[str]
    ) -> str | None:
        """Return the value whose memory a result takes: one that it is a view of, that it overwrites, or a free one."""
        if place == 0 and node.op_type in _VIEWS and node.input_names[0]:
            return node.input_names[0]
        size = self._size(name)
        if size is None:
            return None
        if place == 0 and node.op_type in self.facts.in_place:
            for each in node.input_names[:1]:
                root = self.buffer.get(each, each)
                if uses[root] == 1 and root in self.made and self._size(each) == size:
                    return each
        found = next((each for each in free if size[1] and self._size(each) == size), None)
        if found is not None:
            free.remove(found)
        return found

    def _gelus(self) -> dict[str, str]:
        """Return the values within each Gelu that is written with Erf, with its argument: it becomes one node."""
        within: dict[str, str] = {}
        for erf in (node for node in self.nodes if node.op_type == "Erf"):
            scaled = self.nodes[self.made[erf.input_names[0]]] if erf.input_names[0] in self.made else None
            argument = next((name for name in scaled.input_names if name in self.made), None) if scaled else None
            if scaled is None or argument is None:
                continue
            steps = [scaled, erf]
            while len(readers := self.readers[steps[-1].output_names[0]]) == 1 and readers[0].op_type in ("Add", "Mul"):
                steps.append(readers[0])
            if [step.op_type for step in steps[2:4]] == ["Add", "Mul"]:
                within.update((step.output_names[0], argument) for step in steps[:3])
        return within

    def _size(self, name: str) -> tuple[int, tuple[int | str, ...]] | None:
        """Return the size of a value as the session knows it when it is opened, None if it does not."""
        kind = self.types.get(name)
        if name in self.relaid or not isinstance(kind, TensorType) or kind.shape is None:
            return None
        shape = kind.shape.bind(self.options.dims)
        dims = tuple(dim for dim in shape if dim is not None)
        known = len(dims) == len(shape) and (shape.is_static or name in self.scores)
        return (kind.dtype.nbytes(1), dims) if known else None

    # --- the runs

    def _runs(self) -> tuple[list[int], int]:
        """Return the bytes that are alive at each node, and those that the allocator takes over two runs."""
        begins, ends = defaultdict(list), defaultdict(list)
        for name, at in self.first.items():
            begins[at].append(name)
            ends[self.last[name]].append(name)
        arena, pattern = Arena(exact=self.options.device_memory_limit_bytes is not None), Pattern()
        places, planned, lives = {}, {}, []
        alive, most = 0, 0
        for at, node in enumerate(self.nodes):
            for name in begins[at]:
                size = self.nbytes.get(name, 0)
                alive += size
                places[name] = arena.take(size)
                if name not in self.outputs:
                    planned[name] = pattern.take(size)
            shapes = [shape for kind in node.inputs if (shape := static_sizes(kind, self.sizes)) is not None]
            work = self.provider.node_work_bytes(node.op_type, shapes)
            arena.give_back(arena.take(work))
            lives.append(alive + work)
            most = max(most, work)
            for name in ends[at]:
                alive -= self.nbytes.get(name, 0)
                arena.give_back(places.pop(name))
                if name in planned:
                    pattern.give_back(planned.pop(name))
        if not self.facts.arena:
            return lives, max(lives, default=0)
        for place in places.values():  # the outputs are gone before the second run
            arena.give_back(place)
        for size in (pattern.peak, *(self.nbytes.get(name, 0) for name in places), most):
            arena.take(size)
        if not self.facts.on_host:
            return lives, arena.reserved
        return lives, arena.touched + int(_SCATTERED * (arena.reserved - arena.touched))

    def _crossings(self) -> list[int]:
        """Return the bytes that nodes behind each node read of values made up to it."""
        last = {name: at for at, node in enumerate(self.nodes) for name in node.input_names}
        last.update(dict.fromkeys(self.outputs, len(self.nodes)))
        steps = [0] * (len(self.nodes) + 1)
        for name, at in self.made.items():
            steps[at] += self.nbytes.get(name, 0)
            steps[last.get(name, at)] -= self.nbytes.get(name, 0)
        return list(accumulate(steps))[:-1]


def _is_gate(node: ExportedNode | None, factors: Collection[str]) -> bool:
    """Return whether a node is `sigmoid(x)` for one of the factors x, and so becomes one node with the product."""
    return node is not None and node.op_type == "Sigmoid" and node.input_names[0] in factors


def _order(nodes: Sequence[ExportedNode]) -> list[int]:
    """Return the places of nodes in the order in which ONNX Runtime runs them (core/graph/graph.cc, ReverseDFSFrom)."""
    made = {name: at for at, node in enumerate(nodes) for name in node.output_names if name}
    parents = [sorted({made[name] for name in node.input_names if name in made}) for node in nodes]
    read = {parent for each in parents for parent in each}
    stack = [(at, False) for at in range(len(nodes)) if at not in read]
    order: list[int] = []
    seen: set[int] = set()
    while stack:
        at, done = stack.pop()
        if done:
            order.append(at)
        elif at not in seen:
            seen.add(at)
            stack += [(at, True), *((parent, False) for parent in parents[at] if parent not in seen)]
    return order


def _cache_of(draft: Draft, inputs: Mapping[str, ValueType]) -> tuple[CachePair, ...]:
    """Return the cache of a decoder, nothing for another graph."""
    if all(not isinstance(kind, TensorType) or len(kind.shape or ()) < 3 for kind in inputs.values()):
        return ()
    try:
        return DecoderInterface.of(draft.finished(), inputs).cache
    except InputError:
        return ()
