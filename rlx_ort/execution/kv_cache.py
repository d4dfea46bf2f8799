"""`LayerKvCache`: keys and values of the tokens so far, layer by layer, on the host.

For decode loops over graphs of a few fixed lengths: a prefill graph makes the cache, the cache is padded to the length
that the next graph was compiled for, a mask hides the padding, and the graph's outputs become the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx_ort.errors import InputError

__all__ = ["HIDDEN_SCORE", "LayerKvCache", "bucket_decode_mask"]

HIDDEN_SCORE = -1e9
"""Added by `bucket_decode_mask` to the score of a position without a token."""

Array = npt.NDArray[Any]


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
        padded = []
        for pair in zip(self.keys, self.values, strict=True):
            for array in pair:
                wide = np.zeros((self.batch, upper, self.kv_dim), array.dtype)
                wide[:, : self.past_seq] = array
                padded.append(wide)
        return padded

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
