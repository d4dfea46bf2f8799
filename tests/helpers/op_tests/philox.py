"""Philox4x32-10 written plainly from its paper (Salmon et al., SC 2011), one block at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

__all__ = ["block", "stream", "words"]

_WORD = 0xFFFFFFFF


def block(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return the four words of one counter."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = 0xD2511F53 * x0, 0xCD9E8D57 * x2
        x0, x1, x2, x3 = (second >> 32) ^ x1 ^ k0, second & _WORD, (first >> 32) ^ x3 ^ k1, first & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return x0, x1, x2, x3


def words(seed: int) -> Iterator[int]:
    """Yield the words of a seed: counters 0, 1, 2... under the seed as key, its low word first."""
    seed = seed or 0xDEADBEEF
    for index in itertools.count():
        yield from block((index & _WORD, index >> 32, 0, 0), (seed & _WORD, seed >> 32))


def stream(seed: int, count: int) -> list[float]:
    """Return the first numbers of a seed in [0, 1), 24 bits each."""
    return [(word >> 8) * 2.0**-24 for word in itertools.islice(words(seed), count)]
