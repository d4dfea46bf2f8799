"""`BucketedCompileCache`: one compiled graph for each range of lengths, and inputs padded to the longest of the range.

For providers that compile for each shape. Others run the true shape if the graph takes any number of rows. Inputs are
padded only if rows are proved independent (`converters/row_independence`), or with `unproven`.

`LayerKvCache` holds keys and values of the tokens so far, layer by layer, on the host, for decode loops over graphs of
a few fixed lengths: a prefill graph makes the cache, the cache is padded to the length that the next graph was compiled
for, a mask hides the padding, and the graph's outputs become the cache.
"""

from __future__ import annotations

import bisect
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from rlx_ort.device import Device
from rlx_ort.errors import InputError, ParamError
from rlx_ort.execution.session import Session, working_provider
from rlx_ort.execution.weights import WeightStore
from rlx_ort.ir.types import TensorType
from rlx_ort.options.compile_options import CompileOptions

if TYPE_CHECKING:
    from rlx_ort.converters.row_independence import RowIndependence
    from rlx_ort.execution.compiled import CompiledGraph
    from rlx_ort.ir.graph import Graph
    from rlx_ort.ir.tensor import TensorData

HIDDEN_SCORE = -1e9
"""Added by `bucket_decode_mask` to the score of a position without a token."""

Array: TypeAlias = npt.NDArray[Any]
Build: TypeAlias = "Callable[[int], Graph]"
"""Length that a bucket is compiled for -> graph."""


class Bucket(NamedTuple):
    """The lengths from `start` up to, not including, `end`; compiled for the longest of them."""

    start: int
    end: int

    @property
    def upper(self) -> int:
        """The longest length, which the graph is compiled for."""
        return self.end - 1


class _Proved(NamedTuple):
    """A compiled graph, its revision then, and whether rows on axes of its inputs are independent."""

    graph: Graph
    revision: int
    proofs: dict[tuple[tuple[str, int], ...], RowIndependence]


class BucketedCompileCache:
    """Compiled graphs for ranges of lengths on one device, each compiled at the first length of its range.

    The graphs share the data of their parameters, which is set once. Ranges may leave gaps. Methods may be called from
    several threads.

    Args:
        buckets: half-open ranges `(start, end)`; sorted here.
        device: where the graphs run.
        options: how they are compiled.
        pad: whether `run_padded` pads; None pads if the provider compiles for each shape, or the graph of a bucket
            takes only the longest length.
        unproven: whether graphs are padded too whose rows are not proved independent, such as those that mask the
            padding by an input.

    Raises:
        InputError: there is no range, one is empty, or two overlap.
        DeviceUnavailableError: the device does not work here.
    """

    def __init__(
        self,
        buckets: Iterable[tuple[int, int] | range],
        device: Device | str = "cpu",
        options: CompileOptions | None = None,
        *,
        pad: bool | None = None,
        unproven: bool = False,
    ) -> None:
        self._buckets = _checked(buckets)
        self._starts = [bucket.start for bucket in self._buckets]
        self._session = Session(device, options)
        self._pad = working_provider(self._session.device).compiles_per_shape or None if pad is None else pad
        self._may_run_unpadded = pad is None
        self._unproven = unproven
        self._proved: dict[Bucket, _Proved] = {}
        self._compiled: dict[Bucket, CompiledGraph] = {}
        self._store: WeightStore | None = None
        self._initial: dict[str, TensorData] = {}  # weights of graphs, while the store has the same
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        opened = f"{self.compiled_count} of {self.total_buckets} buckets compiled"
        return f"<BucketedCompileCache on {self._session.device.label}, {opened}>"

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The ranges, in order."""
        return self._buckets

    @property
    def total_buckets(self) -> int:
        """The number of ranges."""
        return len(self._buckets)

    @property
    def compiled_count(self) -> int:
        """The number of compiled graphs."""
        return len(self._compiled)

    @property
    def weights(self) -> WeightStore | None:
        """The parameters' data, which all graphs share; None before the first is compiled."""
        return self._store

    def bucket_for(self, key: int) -> Bucket | None:
        """Return the range a length is in, or None when it is in a gap."""
        place = bisect.bisect_right(self._starts, key) - 1
        bucket = self._buckets[place] if place >= 0 else None
        return bucket if bucket is not None and key < bucket.end else None

    def get_or_compile(self, key: int, build: Build) -> tuple[int, CompiledGraph] | None:
        """Return the longest length of the key's range and its graph, or None if the key is in no range.

        Raises:
            GraphVerifyError: the graph is wrong.
            ParamError: it has a parameter of another type, or with other data, than the graph of another range.
            EngineError: the engine refused the model.
        """
        bucket = self.bucket_for(key)
        if bucket is None:
            return None
        with self._lock:
            compiled = self._compiled.get(bucket)
            if compiled is None or compiled.closed:
                graph = build(bucket.upper)
                self._proved[bucket] = _Proved(graph, graph.revision, {})
                compiled = self._compiled[bucket] = self._session.compile(graph, self._shared_weights(graph))
            return bucket.upper, compiled

    def ensure_graph_with_params(
        self, key: int, build: Build, params: Mapping[str, npt.ArrayLike | TensorData]
    ) -> tuple[int, CompiledGraph] | None:
        """Return the same as `get_or_compile`; sets the parameters if the graph is compiled by this call.

        Raises:
            ParamError: a parameter is unknown or does not fit.
        """
        with self._lock:
            is_new = self.bucket_for(key) not in self._compiled
            compiled = self.get_or_compile(key, build)
            if is_new and compiled is not None:
                with compiled[1].update_params():
                    for name, value in params.items():
                        compiled[1].set_param(name, value)
            return compiled

    def run_padded(
        self,
        key: int,
        actual_rows: int,
        build: Build,
        inputs: Iterable[tuple[str, npt.ArrayLike, int | None]],
        output_inners: Sequence[int] = (),
    ) -> tuple[int, list[Array]] | None:
        """Run the graph of the key's range with inputs padded by rows of zeros, and cut the padding off the outputs.

        A graph that takes any number of rows runs without padding if the provider does not compile for each shape, or
        if rows are not proved independent. `run_padded_mixed` is the same.

        Args:
            key: the length that selects the range.
            actual_rows: the number of rows.
            build: makes the graph of a range.
            inputs: name, data of `actual_rows` rows, and the elements of a row; with None the data passes unchanged.
            output_inners: elements of a row of each output; an output with 0, or without an entry, is not cut.

        Returns:
            The longest length of the range and the outputs, or None if the key is in no range.

        Raises:
            InputError: an input does not have that many rows, or more than fit; or the graph of the range takes only
                the longest length and its rows are not proved independent, so that padding may change them.
        """
        graph = self.get_or_compile(key, build)
        if graph is None:
            return None
        upper, compiled = graph
        given = [(name, np.asarray(data), inner) for name, data, inner in inputs]
        for name, data, inner in given:
            if inner is not None and _row_count(data, inner) != actual_rows:
                raise InputError(f"input {name!r} has {data.size // inner} rows of {inner} elements, not {actual_rows}")
        fixed = any(_is_fixed(compiled, name) for name, _, inner in given if inner)
        pads = self._pad if self._pad is not None else fixed
        feeds = _padded(compiled, given, upper if pads else actual_rows)
        proof = None
        if pads and actual_rows < upper and not self._unproven:
            axes = {name: _axis_of_rows(feeds[name].shape, inner, upper) for name, _, inner in given if inner}
            proof = self._proof(key, axes)
            if not proof and self._may_run_unpadded and not fixed:
                pads, feeds = False, _padded(compiled, given, actual_rows)
            elif not proof:
                raise InputError(
                    f"{actual_rows} rows were to be padded to {upper}, but rows are not proved independent: {proof}. "
                    "Leave the dim of the rows open, give this length a range of its own, or make the cache with "
                    "unproven=True if the graph masks the padding"
                )
        # No active extent is set: it would make a graph that takes any number of rows run the true shape.
        outputs = compiled.run(feeds)
        if not pads:
            return upper, outputs
        inners = [*output_inners, *[0] * len(outputs)]
        for place, (axis, output, inner) in enumerate(zip(proof.axes if proof else (), outputs, inners, strict=False)):
            if inner and axis is not None and _axis_of_rows(output.shape, inner, upper) != axis:
                raise InputError(
                    f"output {place} of shape {output.shape} has its rows on axis {axis}, not rows of {inner} elements "
                    "one behind the other; pass 0 for it to get it with the padding"
                )
        return upper, [
            slice_rows(out, inner, actual_rows) if inner else out for out, inner in zip(outputs, inners, strict=False)
        ]

    run_padded_mixed = run_padded

    def close(self) -> None:
        """Close every graph; the data of the parameters is kept."""
        with self._lock:
            for compiled in self._compiled.values():
                compiled.close()
            self._compiled.clear()
            self._proved.clear()

    def _proof(self, key: int, axes: Mapping[str, int | None]) -> RowIndependence:
        """Return whether padding changes no row of the graph of a key's range, cached."""
        from rlx_ort.converters.row_independence import RowIndependence, padding_independence

        bucket = self.bucket_for(key)
        assert bucket is not None  # noqa: S101  # its graph is compiled
        if split := [name for name, axis in axes.items() if axis is None]:
            return RowIndependence(False, reason=f"the rows of input {split[0]!r} lie on several axes")
        with self._lock:
            graph, revision, proofs = self._proved[bucket]
            if graph.revision != revision:
                return RowIndependence(False, reason=f"graph {graph.name!r} was changed since it was compiled")
            on = {name: axis for name, axis in axes.items() if axis is not None}
            known = tuple(sorted(on.items()))
            if known not in proofs:
                options = self._session.options.on(self._session.device)
                proofs[known] = padding_independence(graph, on, bucket.upper, options)
            return proofs[known]

    def _shared_weights(self, graph: Graph) -> WeightStore:
        if self._store is None:
            self._store = store = WeightStore.for_graph(graph)
        else:
            store = self._store
            try:
                for value in graph.params:
                    if isinstance(value.type, TensorType):
                        store.declare(value.name, value.type, graph.weights.get(value.name))
                for name, data in self._initial.items():
                    other = graph.weights.get(name)
                    if other is not None and other is not data and store.get(name) is data and other != data:
                        raise ParamError(f"parameter {name!r} has other data than in the graph of another range")
            except ParamError as err:
                raise ParamError(f"{err}; the graphs of all ranges share their parameters") from err
        known = {**graph.weights, **self._initial}  # those that were set since are dropped
        self._initial = {name: data for name, data in known.items() if name in store and store.get(name) is data}
        return store


def power_of_two_ladder(least: int, most: int) -> tuple[Bucket, ...]:
    """Return ranges whose longest lengths are the powers of two from at least `least` to at least `most`.

    The first range begins at 1: `power_of_two_ladder(8, 256)` is 1..9, 9..17, 17..33 and so on to 129..257.

    Raises:
        InputError: `least` is below 1, or above `most`.
    """
    if least < 1 or most < least:
        raise InputError(f"a ladder needs 1 <= least <= most, got {least} and {most}")
    extent = 1 << (least - 1).bit_length()
    ladder = [Bucket(1, extent + 1)]
    while extent < most:
        ladder.append(Bucket(extent + 1, 2 * extent + 1))
        extent *= 2
    return tuple(ladder)


def pad_rows(data: npt.ArrayLike, row_inner: int, upper: int) -> Array:
    """Return data of rows of `row_inner` elements padded with rows of zeros to `upper` rows.

    Data whose first axis is the rows keeps its axes; other data is returned flat.

    Raises:
        InputError: rows have no elements, the data is not a whole number of rows, or has more than `upper`.
    """
    array = np.asarray(data)
    rows = _row_count(array, row_inner)
    if rows > upper:
        raise InputError(f"{rows} rows do not fit in {upper}")
    has_rows_first = array.ndim > 1 and array.shape[0] == rows
    if rows == upper:
        return array if has_rows_first else array.reshape(-1)
    padded = np.zeros((upper, *array.shape[1:]) if has_rows_first else (upper * row_inner,), array.dtype)
    padded.reshape(-1)[: array.size] = array.reshape(-1)
    return padded


def slice_rows(data: npt.ArrayLike, row_inner: int, actual: int) -> Array:
    """Return the first `actual` rows of `row_inner` elements.

    The axes are kept if one of them is the rows and those before it are 1; else the result is flat.

    Raises:
        InputError: rows have no elements, the data is not a whole number of rows, or has fewer than `actual`.
    """
    array = np.asarray(data)
    rows = _row_count(array, row_inner)
    if actual > rows:
        raise InputError(f"{actual} rows were asked for, there are {rows}")
    for axis, size in enumerate(array.shape):
        if size == rows and math.prod(array.shape[axis + 1 :]) == row_inner:
            cut: Array = array[(slice(None),) * axis + (slice(actual),)]
            return cut
    return array.reshape(-1)[: actual * row_inner]


def _checked(buckets: Iterable[tuple[int, int] | range]) -> tuple[Bucket, ...]:
    pairs = [(item.start, item.stop) if isinstance(item, range) else item for item in buckets]
    ordered = sorted(Bucket(*pair) for pair in pairs)
    if not ordered:
        raise InputError("a bucketed cache needs at least one range of lengths")
    for bucket in ordered:
        if bucket.start < 0 or bucket.end <= bucket.start:
            raise InputError(f"the range {bucket.start}..{bucket.end} holds no length")
    for before, after in itertools.pairwise(ordered):
        if after.start < before.end:
            raise InputError(
                f"the ranges {before.start}..{before.end} and {after.start}..{after.end} overlap; ends are exclusive"
            )
    return tuple(ordered)


def _row_count(array: Array, row_inner: int) -> int:
    if row_inner < 1:
        raise InputError(f"a row needs at least 1 element, got {row_inner}")
    if array.size % row_inner:
        raise InputError(f"{array.size} elements are not a whole number of rows of {row_inner}")
    return array.size // row_inner


def _is_fixed(compiled: CompiledGraph, name: str) -> bool:
    """Return whether an input takes one size only; the run refuses unknown names."""
    kind = compiled.input_specs.get(name)
    return isinstance(kind, TensorType) and kind.shape is not None and kind.shape.is_static


def _padded(compiled: CompiledGraph, given: Iterable[tuple[str, Array, int | None]], rows: int) -> dict[str, Array]:
    """Return the inputs of a run with so many rows, those without row sizes as they are."""
    feeds = {}
    for name, data, inner in given:
        if inner is None:
            feeds[name] = data
            continue
        padded = pad_rows(data, inner, rows)
        feeds[name] = padded if padded.ndim > 1 else _shaped(compiled, name, padded)
    return feeds


def _axis_of_rows(shape: Sequence[int], inner: int, rows: int) -> int | None:
    """Return the axis whose elements, one part of equal size behind the other, are the rows; None if there is none."""
    for axis, size in enumerate(shape):
        if size != 1 or rows == 1:
            return axis if size % rows == 0 and math.prod(shape[axis:]) == rows * inner else None
    return None


def _shaped(compiled: CompiledGraph, name: str, flat: Array) -> Array:
    """Return flat data in the declared shape, in which at most one dim is open."""
    kind = compiled.input_specs.get(name)
    if not isinstance(kind, TensorType) or kind.shape is None:
        return flat
    dims = [dim if isinstance(dim, int) else -1 for dim in kind.shape]
    if dims.count(-1) > 1:
        raise InputError(f"input {name!r} is {kind}: its dims do not follow from flat data; give the array its shape")
    try:
        return flat.reshape(dims)
    except ValueError as err:
        raise InputError(f"input {name!r} is {kind}: {flat.size} elements do not fill it") from err


@dataclass(frozen=True)
class LayerKvCache:
    """Keys and values `(batch, past_seq, kv_dim)`, one array a layer; a step makes a new cache."""

    keys: tuple[Array, ...]
    values: tuple[Array, ...]

    def __post_init__(self) -> None:
        arrays = [*self.keys, *self.values]
        if not self.keys or len(self.keys) != len(self.values):
            raise InputError(f"a cache needs keys and values of each layer, got {len(self.keys)}, {len(self.values)}")
        shapes = {array.shape for array in arrays}
        if len(shapes) != 1 or arrays[0].ndim != 3:
            raise InputError(f"a cache needs arrays of one shape (batch, past_seq, kv_dim), got {sorted(shapes)}")

    @classmethod
    def from_layer_outputs(
        cls, num_layers: int, batch: int, past_seq: int, kv_dim: int, outputs: Sequence[npt.ArrayLike]
    ) -> LayerKvCache:
        """Return the cache of a prefill's outputs: `k0, v0, k1, v1, ...`, each of `batch * past_seq * kv_dim` elements.

        Arrays are shared, not copied, and may be flat.

        Raises:
            InputError: the number of outputs or the size of one is wrong.
        """
        if len(outputs) != 2 * num_layers:
            raise InputError(f"{num_layers} layers have {2 * num_layers} keys and values, got {len(outputs)} outputs")
        shape = (batch, past_seq, kv_dim)
        arrays = []
        for place, output in enumerate(outputs):
            array = np.asarray(output)
            if array.size != batch * past_seq * kv_dim:
                name = f"{'v' if place % 2 else 'k'}{place // 2}"
                raise InputError(f"{name} needs {batch * past_seq * kv_dim} elements for {shape}, got {array.size}")
            arrays.append(array.reshape(shape))
        return cls(tuple(arrays[0::2]), tuple(arrays[1::2]))

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.keys)

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return int(self.keys[0].shape[0])

    @property
    def past_seq(self) -> int:
        """The number of tokens of each sequence."""
        return int(self.keys[0].shape[1])

    @property
    def kv_dim(self) -> int:
        """The width of the keys of one token, all heads together."""
        return int(self.keys[0].shape[2])

    def pad_layers_to_upper(self, upper: int) -> list[Array]:
        """Return `k0, v0, k1, v1, ...` as `(batch, upper, kv_dim)`, with zeros after the tokens of each sequence.

        Raises:
            InputError: the cache has more than `upper` tokens.
        """
        if self.past_seq > upper:
            raise InputError(f"{self.past_seq} tokens do not fit in {upper} places")
        places = ((0, 0), (0, upper - self.past_seq), (0, 0))
        return [np.pad(array, places) for pair in zip(self.keys, self.values, strict=True) for array in pair]

    def advance_from_decode_outputs(self, outputs: Sequence[npt.ArrayLike]) -> tuple[Array, LayerKvCache]:
        """Return the logits and the cache with one more token, from a step's `logits, k0, v0, k1, v1, ...`.

        Keys and values of a padded step, `(batch, places, kv_dim)`, are cut to the first `past_seq + 1` places.

        Raises:
            InputError: the number of outputs is wrong, or one has no place for another token.
        """
        if len(outputs) != 1 + 2 * self.num_layers:
            raise InputError(
                f"a step of {self.num_layers} layers gives logits and {2 * self.num_layers} keys and values, "
                f"got {len(outputs)} outputs"
            )
        tokens = self.past_seq + 1
        arrays = []
        for place, output in enumerate(outputs[1:]):
            array = np.asarray(output)
            row = self.batch * self.kv_dim
            if array.size % row or array.size // row < tokens:
                name = f"{'v' if place % 2 else 'k'}{place // 2}"
                raise InputError(
                    f"{name} needs places for {tokens} tokens of {self.batch} sequences, {row} elements each; "
                    f"got {array.size} elements"
                )
            arrays.append(array.reshape(self.batch, -1, self.kv_dim)[:, :tokens])
        return np.asarray(outputs[0]), LayerKvCache(tuple(arrays[0::2]), tuple(arrays[1::2]))


def bucket_decode_mask(past_seq: int, upper: int, batch: int | None = None) -> npt.NDArray[np.float32]:
    """Return the mask to add to the scores of a step: 0 up to position `past_seq`, the new token's, -1e9 beyond.

    The shape is `(upper,)`, or `(batch, upper)` if a batch is given.

    Raises:
        InputError: the new token does not fit in `upper` positions.
    """
    if not 0 <= past_seq < upper:
        raise InputError(f"token {past_seq} has no place in {upper} places")
    mask = np.where(np.arange(upper) <= past_seq, 0.0, HIDDEN_SCORE).astype(np.float32)
    return mask if batch is None else np.repeat(mask[None], batch, axis=0)
