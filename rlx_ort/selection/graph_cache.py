"""What selection remembers of a graph and its drafts, such as rankings, and devices that refused it at opening.

A cache belongs to one revision of a graph and one state of the provider registry; a change of either starts a new one.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

from rlx_ort import epoch
from rlx_ort.device import Device
from rlx_ort.faults import NO_ROOM, fault_of, is_device_failure
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.types import Shape, TensorType
from rlx_ort.options.compile_options import CompileOptions, PlacementRule
from rlx_ort.options.dispatch import UnsupportedOp
from rlx_ort.providers import registry
from rlx_ort.selection.policy import DevicePolicy

if TYPE_CHECKING:
    from rlx_ort.converters.to_onnx.exporter import Draft
    from rlx_ort.providers.base import Provider

K = TypeVar("K")
V = TypeVar("V")

_MOST_KEPT = 64
_NO_ROOM_S = 30.0  # after which a device that had no memory for a graph is tried again

Sizes: TypeAlias = tuple[tuple[str, int], ...]
"""The sizes of named dims, in order."""
Predict: TypeAlias = Callable[[int], float | None]


class PerDraft(Generic[V]):
    """Values that are made once for a draft and a key, and kept while the draft lives; none may refer to the draft."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Draft, dict[Hashable, V]] = weakref.WeakKeyDictionary()

    def get(self, draft: Draft, key: Hashable, make: Callable[[], V]) -> V:
        """Return the value of a key, made where there is none."""
        with _lock:
            known = self._known.setdefault(draft, {})
        value = known.get(key)
        return remember(known, key, make()) if value is None else value


def remember(known: dict[K, V], key: K, value: V, most: int = _MOST_KEPT) -> V:
    """Add a value and return it; at the limit, the others are forgotten."""
    if len(known) >= most:
        known.clear()
    return known.setdefault(key, value)


@dataclass(eq=False)
class Rankings:
    """The rankings under a policy and options, as of one state of the calibrations and refusals.

    `by_sizes` maps the sizes of the named dims to the devices, the automatic choice first; `last` is the newest entry.
    `curves` has the ranked devices, each with the function that predicts its time in ns for a size of one dim, by that
    dim and the sizes of the others.
    """

    policy: DevicePolicy
    options: CompileOptions
    state: object
    by_sizes: dict[Sizes, Sequence[Device]] = field(default_factory=dict)
    last: tuple[Sizes, Sequence[Device]] = ((), ())
    curves: dict[tuple[str, Sizes], list[tuple[Device, Predict]]] = field(default_factory=dict)

    def keep(self, sizes: Sizes, ranking: Sequence[Device]) -> Sequence[Device]:
        """Remember a ranking and return it."""
        self.last = (sizes, remember(self.by_sizes, sizes, ranking))
        return ranking


class GraphCache:
    """What is remembered of one revision of a graph. Nothing here may refer to the graph, or it would never be freed.

    `refused` has the reasons of devices that refused the graph, by device and options, and when they stop to count on
    the monotonic clock. `open_dims` is the result of `named_dims`, and `unwritable` the nodes that have no ONNX form;
    both are None until they are computed.
    """

    def __init__(self, state: tuple[object, ...]) -> None:
        self.state = state
        self.drafts: deque[tuple[Provider, CompileOptions, Draft]] = deque(maxlen=16)
        self.rankings: deque[Rankings] = deque(maxlen=8)
        self.refused: list[tuple[Device, CompileOptions, str, float]] = []
        self.open_dims: list[tuple[str, Shape]] | None = None
        self.unwritable: tuple[UnsupportedOp, ...] | None = None


_caches: weakref.WeakKeyDictionary[Graph, GraphCache] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def cache_of(graph: Graph) -> GraphCache:
    """Return the cache of a graph in its present revision."""
    providers = registry.default_registry()
    state = (graph.revision, providers, providers.generation)
    with _lock:
        cache = _caches.get(graph)
        if cache is None or cache.state != state:
            cache = _caches[graph] = GraphCache(state)
    return cache


def named_dims(graph: Graph) -> list[tuple[str, Shape]]:
    """Return the inputs that have dims without a size, with their shapes; looked for once, as a graph may be large.

    A dim without a name is called by its place, `input[axis]`.
    """
    cache = cache_of(graph)
    if cache.open_dims is None:
        dims = []
        for value in graph.inputs:
            shape = value.type.shape if isinstance(value.type, TensorType) else None
            if shape is not None and not shape.is_static:
                names = [f"{value.name}[{axis}]" if dim is None else dim for axis, dim in enumerate(shape)]
                dims.append((value.name, Shape(names)))
        cache.open_dims = dims
    return cache.open_dims


def open_dims(graph: Graph, given: Collection[str] = ()) -> tuple[str, ...]:
    """Return the dims of the inputs without a size, each once by its name or place, but those that are `given`."""
    dims = dict.fromkeys(dim for _, shape in named_dims(graph) for dim in shape.symbols)
    return tuple(dim for dim in dims if dim not in given)


@contextmanager
def remembered(graph: Graph, device: Device, options: CompileOptions) -> Iterator[None]:
    """Remember an error of the block as the device's refusal, unless every device would fail so; success forgets it.

    Where the device had no memory for the graph, that is remembered for half a minute, since others may free theirs.
    """
    try:
        yield
    except Exception as err:
        if is_device_failure(err):
            until_s = time.monotonic() + _NO_ROOM_S if fault_of(err)[1] in NO_ROOM else math.inf
            _set_refusal(graph, device, options, str(err) or type(err).__name__, until_s)
        raise
    if cache_of(graph).refused:
        _set_refusal(graph, device, options, None)


def refusals(graph: Graph, options: CompileOptions) -> dict[Device, str]:
    """Return each device that refused the graph under these options, with the reason.

    A device that refuses under the assisted rule also refuses under the strict one.
    """
    known = _caches.get(graph)
    if known is None or not known.refused:  # the usual case, in every run
        return {}
    rules, now_s = (options, options.with_(placement=PlacementRule.ASSISTED)), time.monotonic()
    entries = cache_of(graph).refused
    return {device: reason for device, under, reason, until_s in entries if under in rules and now_s < until_s}


def refusals_end_s(graph: Graph) -> float | None:
    """Return when the next refusal stops to count on the monotonic clock; None if none does."""
    known = _caches.get(graph)
    now_s = time.monotonic()
    ends = () if known is None else (until_s for *_, until_s in known.refused if now_s < until_s < math.inf)
    return min(ends, default=None)


def forget(graph: Graph) -> None:
    """Forget every refusal of a graph, so that its devices are tried again."""
    cache_of(graph).refused = []
    epoch.advance()


def _set_refusal(
    graph: Graph, device: Device, options: CompileOptions, reason: str | None, until_s: float = math.inf
) -> None:
    cache = cache_of(graph)
    with _lock:
        others = [entry for entry in cache.refused if entry[:2] != (device, options)]
        if reason is not None:
            others.append((device, options, reason, until_s))
        if others != cache.refused:
            cache.refused = others
            epoch.advance()
