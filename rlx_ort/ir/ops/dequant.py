"""Matrix products with packed weights, and products in which each row selects its matrix: mixtures of experts.

The weights stay in the form their file has. Schemes, for x `(..., M, K)` and a result `(..., M, N)`:

| scheme | inputs after x | weight |
|---|---|---|
| `int8_block` | w i8 `(K, N)`, scale `(K / block, N)` | w * s |
| `int8_block_asym` | w, scale, zero point like the scale | (w - zp) * s |
| `int4_block` | w, scale, zero point like the scale, or none | (w - zp) * s |
| `fp8_e4m3`, `fp8_e5m2` | w f8 or u8 `(K, N)`, scale `(N,)` | w * s |
| `nvfp4_block` | w u8 `(K, N / 2)`, scale f8e4m3 or u8 `(K / 16, N)`, global scale `(1,)` | e2m1(w) * s * global |
| `q4_0` ... `q8_k` | bytes u8 `(N, row bytes)` or flat | as GGUF defines; rows are of K |

Expanding a weight costs time and memory when a session opens: for `q4_k` of 4096 x 4096, about 1 s on one core and a
peak of 40 bytes per weight, then 4 bytes per weight in f32. A packed product opens in 0.6 s with a peak of 13 bytes per
weight, and keeps less than 1. It is as fast for one row of x; for 64 rows the expanded one is 1.5 times faster.

The weights of `int4_block` are unsigned, 0 to 15: u4 `(K, N)`, or bytes in which element p * N + j is a half byte, low
half first. In `nvfp4_block` column 2j is the low half.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.gguf_blocks import GGUF_FORMATS, BlockFormat
from rlx_ort.ir.op import Op, OpTypes, known_shape, named
from rlx_ort.ir.types import Dim, Shape, TensorType

_BLOCK_SCHEMES = ("int8_block", "int8_block_asym", "int4_block")
_FP8 = {"fp8_e4m3": DType.F8E4M3, "fp8_e5m2": DType.F8E5M2}
SCHEMES = (*_BLOCK_SCHEMES, *_FP8, "nvfp4_block", *GGUF_FORMATS)
"""Names of the schemes."""
_PACKED = ("int4_block", "q4_0", "q4_k")
_NVFP4_BLOCK = 16
_ROLES = {
    "int8_block": ((2,), "w and scale"),
    "int8_block_asym": ((3,), "w, scale and zero point"),
    "int4_block": ((2, 3), "w, scale and perhaps zero point"),
    "fp8_e4m3": ((2,), "w and scale"),
    "fp8_e5m2": ((2,), "w and scale"),
    "nvfp4_block": ((3,), "w, scale and global scale"),
}


class DequantMatMul(
    Op,
    operands="x:float w:own scale:own? extra:own?",
    builder="dequant_matmul x w_q scale! zero_point scheme block * packed; "
    "dequant_matmul_nvfp4 x w_q scale! global_scale! scheme=nvfp4_block; "
    "dequant_matmul_packed x data scheme * packed",
):
    """x times a packed weight; see the table of schemes.

    `block` is the number of rows of the weight that share a scale, for the block schemes; None for the others. If
    `packed`, the weight stays packed in the session, multiplied by ONNX Runtime's MatMulNBits, which not every provider
    has. Otherwise it is expanded once, when the session opens, and takes the bytes of x's dtype. Only `int4_block`,
    `q4_0` and `q4_k` can stay packed, since the CPU kernel of 8 bits needs prepacked weights.
    """

    scheme: str = named("scheme", SCHEMES)
    block: int | None = None
    packed: bool = False

    def __post_init__(self) -> None:
        Op.__post_init__(self)
        if (self.scheme in _BLOCK_SCHEMES) != (self.block is not None) or (self.block is not None and self.block < 1):
            wanted = "a block size of at least 1" if self.scheme in _BLOCK_SCHEMES else "no block size"
            raise GraphVerifyError(f"scheme {self.scheme!r} takes {wanted}, got {self.block}")
        if not self.packed:
            return
        if self.scheme not in _PACKED:
            known = ", ".join(_PACKED)
            raise GraphVerifyError(
                f"scheme {self.scheme!r} has no packed product, only {known} have; leave `packed` out"
            )
        if self.block is not None and (self.block < 16 or self.block & (self.block - 1)):
            raise GraphVerifyError(f"a packed product needs blocks of 16, 32, 64, ..., got {self.block}")

    @property
    def gguf(self) -> BlockFormat | None:
        """The GGUF format, None for the other schemes."""
        return GGUF_FORMATS.get(self.scheme)

    def sizes(self, inputs: OpTypes) -> tuple[int, int]:
        """Return K and N."""
        x, *rest = self._tensors(inputs)
        shape = known_shape(self, x, "x")
        if shape.rank < 2:
            raise GraphVerifyError(f"DequantMatMul needs a matrix, x is {shape}; reshape it to rank 2 or more")
        k = _size(self, shape[-1], "the last dimension of x")
        if self.gguf is not None:
            if len(rest) != 1:
                raise GraphVerifyError(f"scheme {self.scheme!r} takes x and the bytes; got {len(inputs)} inputs")
            _expect_dtype(self, rest[0], (DType.U8,), "the bytes")
            return k, _rows(self, self.gguf, k, self.expect_rank(rest[0], (1, 2), "bytes"), "in all")
        counts, roles = _ROLES[self.scheme]
        if len(rest) not in counts:
            raise GraphVerifyError(f"scheme {self.scheme!r} takes x, {roles}; got {len(inputs)} inputs")
        if self.scheme in _FP8:
            return k, self._fp8_columns(k, *rest)
        return k, self._block_columns(k, *rest)

    def _fp8_columns(self, k: int, w: TensorType, scale: TensorType) -> int:
        _expect_dtype(self, w, (_FP8[self.scheme], DType.U8), "w")
        rows, columns = self.expect_rank(w, (2,), "w")
        self.expect_dim(rows, k, "the rows of w")
        self.expect_float(scale, "scale")
        shape = self.expect_rank(scale, (0, 1), "scale")
        n = _size(self, columns, "the columns of w")
        if shape and shape[0] != 1:
            self.expect_dim(shape[0], n, "the number of scales")
        return n

    def _block_columns(self, k: int, w: TensorType, scale: TensorType, extra: TensorType | None = None) -> int:
        nvfp4 = self.scheme == "nvfp4_block"
        block = _NVFP4_BLOCK if nvfp4 else self.block or 1
        if k % block:
            raise GraphVerifyError(
                f"scheme {self.scheme!r} has blocks of {block} rows, so K must be a multiple; got {k}"
            )
        if nvfp4:
            _expect_dtype(self, scale, (DType.F8E4M3, DType.U8), "scale")
        else:
            self.expect_float(scale, "scale")
        rows, columns = self.expect_rank(scale, (2,), "scale")
        self.expect_dim(rows, k // block, "the rows of scale, one for each block of K,")
        n = _size(self, columns, "the columns of scale")
        if self.scheme == "int4_block":
            _expect_dtype(self, w, (DType.U4, DType.U8), "w")
            _check_elements(self, w, k * n if w.dtype is DType.U4 else (k * n + 1) // 2)
        else:
            _expect_dtype(self, w, (DType.U8,) if nvfp4 else (DType.I8,), "w")
            if nvfp4 and n % 2:
                raise GraphVerifyError(f"scheme 'nvfp4_block' packs two columns a byte, so N must be even; got {n}")
            self.expect_dims(self.expect_rank(w, (2,), "w"), (k, n // 2 if nvfp4 else n), "w")
        if extra is not None and nvfp4:
            self.expect_float(extra, "global scale")
            _check_elements(self, extra, 1)
        elif extra is not None:
            self.expect_float(extra, "zero point")
            self.expect_dims(self.expect_rank(extra, (2,), "zero point"), (k // block, n), "the zero point")
        return n

    def _result(self, x: TensorType, *weights: TensorType) -> TensorType:
        _, n = self.sizes((x, *weights))
        return TensorType(x.dtype, Shape((*known_shape(self, x, "x")[:-1], n)))


class DequantGroupedMatMul(
    Op, operands="x:float bytes:own experts:indices", builder="dequant_grouped_matmul x data experts scheme"
):
    """Row i of x times the packed weight of expert `experts[i]`: x `(M, K)`, bytes, experts `(M,)`.

    The bytes are u8 `(E, N, row bytes)` or `(E, N * row bytes)`, in a GGUF format. With up to E rows,
    packed weights are gathered for each row and expanded in the run; with more, all experts are expanded when the
    session opens, which takes E * K * N * 4 bytes. `scheme` is a GGUF format.
    """

    scheme: str = named("GGUF format", GGUF_FORMATS)

    def sizes(self, inputs: OpTypes) -> tuple[int, int, int]:
        """Return the number of experts, K and N."""
        x, data, chosen = self._tensors(inputs)
        rows, inner = self.expect_rank(x, (2,), "x")
        k = _size(self, inner, "the last dimension of x")
        _expect_dtype(self, data, (DType.U8,), "the bytes")
        shape = self.expect_rank(data, (2, 3), "bytes")
        experts, *sizes = (_size(self, dim, "every dimension of the bytes") for dim in shape)
        n = _rows(self, GGUF_FORMATS[self.scheme], k, sizes, "an expert")
        (count,) = self.expect_rank(chosen, (1,), "experts")
        self.expect_dim(count, rows, "the number of experts given, one for each row of x,")
        return experts, k, n

    def _result(self, x: TensorType, data: TensorType, experts: TensorType) -> TensorType:
        _, _, n = self.sizes((x, data, experts))
        return TensorType(x.dtype, Shape((known_shape(self, x, "x")[0], n)))


class DequantMoEWeights(Op, operands="bytes", builder="dequant_moe_weights data scheme"):
    """The packed weights of all experts as f32 `(E, K, N)`, from bytes u8 `(E, N, row bytes)` in a GGUF format."""

    scheme: str = named("GGUF format", GGUF_FORMATS)

    def _result(self, data: TensorType) -> TensorType:
        _expect_dtype(self, data, (DType.U8,), "bytes")
        experts, rows, width = self.expect_rank(data, (3,), "bytes")
        kind = GGUF_FORMATS[self.scheme]
        size = _size(self, width, "the bytes of a row")
        if size % kind.bytes:
            raise GraphVerifyError(f"{kind.name} rows are multiples of {kind.bytes} bytes, got {size}")
        return TensorType(DType.F32, Shape((experts, size // kind.bytes * kind.elements, rows)))


def _size(op: Op, dim: Dim, what: str) -> int:
    if not isinstance(dim, int):
        raise GraphVerifyError(f"{op.kind} needs a size for {what}, got {dim or 'an unknown dimension'}; bind it first")
    return dim


def _expect_dtype(op: Op, value: TensorType, dtypes: tuple[DType, ...], name: str) -> None:
    if value.dtype not in dtypes:
        wanted = " or ".join(dtype.value for dtype in dtypes)
        raise GraphVerifyError(f"{op.describe()} needs {name} as {wanted}, got {value}")


def _check_elements(op: Op, value: TensorType, wanted: int) -> None:
    elements = known_shape(op, value, "w").num_elements
    if elements is not None and elements != wanted:
        raise GraphVerifyError(f"{op.describe()} needs {wanted} elements of {value.dtype.value}, got {value}")


def _rows(op: Op, kind: BlockFormat, k: int, dims: Sequence[Dim], where: str) -> int:
    """Return N of packed rows of k weights, `(N, row bytes)` or `(N * row bytes,)`."""
    row = kind.row_bytes(k)
    if len(dims) == 2:
        op.expect_dim(dims[1], row, f"the bytes of a row of {k} weights")
        return _size(op, dims[0], "the rows of the bytes")
    total = _size(op, dims[0], "the number of bytes")
    if row == 0 or total % row:
        raise GraphVerifyError(f"{op.describe()} needs rows of {row} bytes, got {total} bytes {where}")
    return total // row


class GroupedMatMul(Op, operands="x w experts:indices", builder="grouped_matmul"):
    """Row i of x `(M, K)` times matrix `experts[i]` of w `(E, K, N)`; experts `(M,)` are 0 to E - 1.

    If M is known and at most E, each row gets a copy of its matrix: M * K * N elements of memory. Otherwise a loop
    goes through the experts that have rows, with one copied matrix at a time.
    """

    def _result(self, x: TensorType, w: TensorType, experts: TensorType) -> TensorType:
        dtype = self.same_dtype(x, w)
        rows, inner = self.expect_rank(x, (2,), "x")
        _, k, n = self.expect_rank(w, (3,), "w")
        self.expect_dim(k, inner, "the rows of each matrix of w")
        _expect_places(self, experts, "experts", rows)
        return TensorType(dtype, Shape((rows, n)))


class ScatterAdd(Op, operands="updates indices:indices", builder="scatter_add"):
    """Zeros with `rows` rows, with `updates[i]` added to row `indices[i]`: updates `(U, ...)`, indices `(U,)`."""

    rows: Dim

    def _result(self, updates: TensorType, indices: TensorType) -> TensorType:
        self.expect_number(updates, "the updates")
        shape = known_shape(self, updates, "updates")
        if shape.rank < 1:
            raise GraphVerifyError("ScatterAdd needs updates of rank 1 or more, got a scalar")
        _expect_places(self, indices, "indices", shape[0])
        return TensorType(updates.dtype, Shape((self.rows, *shape[1:])))


def _expect_places(op: Op, places: TensorType, name: str, count: Dim) -> None:
    (size,) = op.expect_rank(places, (1,), name)
    op.expect_dim(size, count, f"the number of {name}, one for each row,")
