"""`Sample`, which draws tokens from logits, and its random numbers."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.core import Value
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.op import Op
from rlx_ort.ir.ops.leaf import LeafBuilders, Operand
from rlx_ort.ir.shape import Dim, Shape
from rlx_ort.ir.types import TensorType

__all__ = ["PHILOX_FACTORS", "PHILOX_ROUNDS", "Sample", "SampleBuilders", "round_keys", "uniforms"]

PHILOX_FACTORS = (0xD2511F53, 0xCD9E8D57)
"""Multipliers of Philox4x32: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011."""
PHILOX_ROUNDS = 10
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_DEFAULT_SEED = 0xDEADBEEF
_RESULT_DTYPES = (DType.I32, DType.I64, DType.U32, DType.F32)


class Sample(Op, operands="logits:float"):
    """One token of each row of logits `(B, V)` or `(V,)`, drawn by the seed: the same seed gives the same tokens.

    The logits are divided by the temperature (1e-6 at least). Those below the k-th largest are dropped; ties with it
    stay. Then the most likely tokens are kept until their probabilities add up to `top_p`. Row i uses the i-th number
    of the generator Philox4x32-10 with the seed as key (0 stands for 0xDEADBEEF). Its token is the first one, in index
    order, at which the running sum of the remaining probabilities exceeds that number.

    The sums are taken over probabilities rounded to units of 2^-30, so they do not depend on the order in which a
    provider adds; probabilities may differ in their last bit between providers, which can change a token only if
    the number falls within about 1e-5 of a boundary. A temperature of 0 takes the most likely token.
    """

    top_k: int = 0
    top_p: float = 1.0
    temperature: float = 1.0
    seed: int = 0
    dtype: DType = DType.I32

    def __post_init__(self) -> None:
        if self.top_k < 0 or not 0 <= self.top_p <= 1 or not self.temperature >= 0 or not 0 <= self.seed < 1 << 64:
            raise GraphVerifyError(
                f"{self.describe()} needs top_k of 0 or more, top_p from 0 to 1, a temperature of 0 or more and a seed "
                "of 64 bits"
            )
        if self.dtype not in _RESULT_DTYPES:
            known = ", ".join(dtype.value for dtype in _RESULT_DTYPES)
            raise GraphVerifyError(f"Sample cannot give token ids as {self.dtype.value}; known: {known}")

    def _result(self, logits: TensorType) -> TensorType:
        shape = self.expect_rank(logits, (1, 2), "logits")
        if not isinstance(shape[-1], int) or not 0 < shape[-1] < 1 << 24:
            raise GraphVerifyError(f"Sample needs logits of 1 to 2^24 - 1 tokens, their number known, got {shape}")
        return TensorType(self.dtype, Shape(shape[:-1]))


def round_keys(seed: int) -> list[tuple[int, int]]:
    """Return the two key words of each round; the low word of the seed is the first one."""
    seed = seed or _DEFAULT_SEED
    low, high = seed & _WORD, seed >> 32
    return [((low + turn * _WEYL[0]) & _WORD, (high + turn * _WEYL[1]) & _WORD) for turn in range(PHILOX_ROUNDS)]


def uniforms(seed: int, count: int) -> npt.NDArray[np.float32]:
    """Return the first numbers of a seed's stream, in [0, 1): the upper 24 bits of each word, exact in f32."""
    blocks = np.arange(-(-count // 4), dtype=np.uint64)
    word = np.uint64(_WORD)
    a, b = blocks & word, blocks >> np.uint64(32)
    c, d = np.zeros_like(a), np.zeros_like(a)
    for first, second in round_keys(seed):
        left, right = np.uint64(PHILOX_FACTORS[0]) * a, np.uint64(PHILOX_FACTORS[1]) * c
        a, b, c, d = (
            (right >> np.uint64(32)) ^ b ^ np.uint64(first),
            right & word,
            (left >> np.uint64(32)) ^ d ^ np.uint64(second),
            left & word,
        )
    words = np.stack([a, b, c, d], axis=1).reshape(-1)[:count]
    return ((words >> np.uint64(8)).astype(np.float64) * 2.0**-24).astype(np.float32)


class SampleBuilders(LeafBuilders):
    """Builder of sampling."""

    __slots__ = ()

    def sample(
        self,
        logits: Operand,
        top_k: int = 0,
        top_p: float = 1.0,
        temperature: float = 1.0,
        seed: int = 0,
        output_shape: Iterable[Dim] | None = None,
        dtype: DType | str = DType.I32,
        *,
        name: str | None = None,
    ) -> Value:
        """Draw one token id from each row of logits `(B, V)`; the same seed draws the same ids in every run."""
        op = Sample(top_k, top_p, temperature, seed, DType.parse(dtype))
        return self._add(op, logits, shape=output_shape, name=name)
