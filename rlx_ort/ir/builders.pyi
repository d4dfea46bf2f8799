"""The builders of all ops, with their types. Written by `scripts/builder_stubs.py`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Unpack

import numpy.typing as npt

from rlx_ort.ir.core import Graph, NodeArgs, Operand, Value
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.op import Sizes
from rlx_ort.ir.ops.control import Body
from rlx_ort.ir.ops.onnx import AttributeValue
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import Dim, TensorType, ValueType

class Builders:
    """Methods that add a node each and return its value."""

    __slots__ = ()

    def abs(self, x: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Return the absolute value."""

    def activation(self, kind: str, x: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Return a function of each element.

        `gelu` is the exact form with erf, `gelu_approx` the tanh form, `round` rounds half to even, `hard_sigmoid` is
        relu6(x + 3) / 6 and `hard_swish` x times that, `elu` has alpha 1.
        """

    def ada_layer_norm(
        self, x: Operand, scale: Operand, shift: Operand, eps: float = 1e-05, **node: Unpack[NodeArgs]
    ) -> Value:
        """Return layer normalisation along the last axis, then `* (1 + scale) + shift`; inputs x, scale and shift.

        Scale and shift are computed from a condition, such as a time step; they broadcast to x.
        """

    def add(self, lhs: Operand, rhs: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Return lhs + rhs."""

    def argmax(self, x: Operand, axis: int = -1, keep_dim: bool = False, **node: Unpack[NodeArgs]) -> Value:
        """Return the index (i64) of the largest element along an axis, the first one of equals."""

    def argmin(self, x: Operand, axis: int = -1, keep_dim: bool = False, **node: Unpack[NodeArgs]) -> Value:
        """Return the index (i64) of the smallest element along an axis, the first one of equals."""

    def argsort(self, x: Operand, axis: int = -1, descending: bool = False, **node: Unpack[NodeArgs]) -> Value:
        """Return the indices (i64) that sort the elements along an axis; equal elements in order of index."""

    def attention(
        self,
        q: Operand,
        k: Operand,
        v: Operand,
        mask: Operand,
        num_heads: int,
        head_dim: int,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        **node: Unpack[NodeArgs],
    ) -> Value:
        """Return softmax(q k^T * scale) v for each head; inputs q, k, v and, for `custom` and `bias`, a mask.

        Query i stands at position `i + max(K - Q, 0)` of the K keys. A masked score is replaced by the most negative
        number that is safe in the dtype, so a fully masked row averages all of v.

        Attributes:
            mask_kind: `none`; `causal`, keys up to the query; `sliding`, of those the last `window + 1`; `custom`, a
                `(B, K)` mask in which below 0.5 is masked; `bias`, added to the scaled scores, broadcast to `(B, H, Q, K)`.
            window: how many keys before its own position a query attends to under `sliding`.
            scale: factor of the scores, None for 1 / sqrt(head_dim).
            softcap: c of c * tanh(score / c), applied to the scaled scores before any mask; None for none.
        """

    def attention_bias(
        self,
        q: Operand,
        k: Operand,
        v: Operand,
        bias: Operand,
        num_heads: int,
        head_dim: int,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        **node: Unpack[NodeArgs],
    ) -> Value:
        """Return softmax(q k^T * scale) v for each head; inputs q, k, v and, for `custom` and `bias`, a mask.

        Query i stands at position `i + max(K - Q, 0)` of the K keys. A masked score is replaced by the most negative
        number that is safe in the dtype, so a fully masked row averages all of v.

        Attributes:
            mask_kind: `none`; `causal`, keys up to the query; `sliding`, of those the last `window + 1`; `custom`, a
                `(B, K)` mask in which below 0.5 is masked; `bias`, added to the scaled scores, broadcast to `(B, H, Q, K)`.
            window: how many keys before its own position a query attends to under `sliding`.
            scale: factor of the scores, None for 1 / sqrt(head_dim).
            softcap: c of c * tanh(score / c), applied to the scaled scores before any mask; None for none.
        """

    def attention_kind(
        self,
        q: Operand,
        k: Operand,
        v: Operand,
        num_heads: int,
        head_dim: int,
        mask_kind: str,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        **node: Unpack[NodeArgs],
    ) -> Value:
        """Return softmax(q k^T * scale) v for each head; inputs q, k, v and, for `custom` and `bias`, a mask.

        Query i stands at position `i + max(K - Q, 0)` of the K keys. A masked score is replaced by the most negative
        number that is safe in the dtype, so a fully masked row averages all of v.

        Attributes:
            mask_kind: `none`; `causal`, keys up to the query; `sliding`, of those the last `window + 1`; `custom`, a
                `(B, K)` mask in which below 0.5 is masked; `bias`, added to the scaled scores, broadcast to `(B, H, Q, K)`.
            window: how many keys before its own position a query attends to under `sliding`.
            scale: factor of the scores, None for 1 / sqrt(head_dim).
            softcap: c of c * tanh(score / c), applied to the scaled scores before any mask; None for none.
        """

    def axial_rope2d(
        self,
        x: Operand,
        end_x: int,
        end_y: int,
        head_dim: int,
        num_heads: int,
        theta: float = 10000.0,
        repeat_factor: int = 1,
        **node: Unpack[NodeArgs],
    ) -> Value:
        """Return rotary embedding of a grid of tokens: the first half of each head by the column, the second by the row.

        Token t has position p = t // repeat_factor, in column p % end_x and row p // end_x. Neighbours (2c, 2c + 1) are
        rotated by (column or row) * theta^(-4c / head_dim). x is `(S, H * D)` or `(B, S, H * D)`. head_dim is a
        multiple of 4.
        """

    def batch_norm_inference(
        self,
        input: Operand,
        scale: Operand,
        bias: Operand,
        mean: Operand,
        variance: Operand,
        eps: float = 1e-05,
        **node: Unpack[NodeArgs],
    ) -> Value:
        """Return (x - mean) / sqrt(variance + eps) * scale + bias a channel, with given statistics, of `(N, C, ...)`."""

    def batched_dense_solve(
        self,
        a: Operand,
        b: Operand,
        out_shape: Iterable[Dim] | None = None,
        dtype: DType | str | None = None,
        *,
        name: str | None = None,
    ) -> Value:
        """Return the x of A x = b for each of a batch, for A `(..., N, N)` and b `(..., N)` or `(..., N, K)`.

        b of the rank of A is `(..., N, K)`, b of one rank less is `(..., N)`; the batch is the same on both sides.
        """

    def binary(self, op: str, lhs: Operand, rhs: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Return a function of two elements of one dtype.

        Integer `div` drops the fraction, `mod` has the sign of the dividend, `shr` of a signed integer keeps its sign.
        """

    def bind(self, sizes: Mapping[str, int]) -> Graph:
        """Return a copy in which the named dims that are keys of `sizes` have those sizes; node ids stay.

        Raises:
            GraphVerifyError: the graph has no such dim, or the sizes do not fit it.
        """

    def cached_attention(
        self,
        q: Operand,
        k: Operand,
        v: Operand,
        past: tuple[Value, Value],
        past_length: Operand,
        num_heads: int,
        *,
        rotation: tuple[Operand, Operand] | None = None,
        scale: float | None = None,
        name: str | None = None,
    ) -> tuple[Value, Value, Value]:
        """Attend causally to new tokens and those of a cache of a fixed length; return the result, new keys and values.

        The new keys and values are the past ones with those of the new tokens behind them. Given to a graph as inputs
        and outputs, they may be the same memory, which `DecodeLoop` makes use of. The operator is ONNX Runtime's
        GroupQueryAttention; devices without a kernel of it refuse the graph.

        Args:
            q: `(B, S, num_heads * D)`.
            k: `(B, S, H * D)`, where H heads are shared by `num_heads / H` heads of q each.
            v: `(B, S, H * D)`.
            past: keys and values `(B, H, longest, D)`, of which the first `past_length` tokens count.
            past_length: the number of tokens before, i32 `(B,)`, the same for every sequence.
            num_heads: the heads of q.
            rotation: tables `(longest, D / 2)` of cosines and sines, which rotate q and k by their positions.
            scale: multiplies the scores; 1 / sqrt(D) by default.
            name: the name of the node.

        Raises:
            GraphVerifyError: the cache has another rank, or heads that are no multiple of 8, with a rotation of 16.
        """

    def cast(self, x: Operand, to: DType | str, **node: Unpack[NodeArgs]) -> Value:
        """Convert to a dtype; a value that already has it is returned unchanged."""

    def clamp(self, x: Operand, low: float | None = None, high: float | None = None, **node: Unpack[NodeArgs]) -> Value:
        """Return each element clamped to bounds; None for no bound."""

    def compare(self, op: str, lhs: Operand, rhs: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Return a comparison of two elements of one dtype; the result is bool."""

    def complex_norm_sq(self, x: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Return re^2 + im^2 of complex numbers whose parts are the two elements of the last axis."""

    def concat(self, inputs: Sequence[Operand], axis: int, **node: Unpack[NodeArgs]) -> Value:
        """Join tensors along an axis."""

    def conjugate(self, x: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Return the conjugate of complex numbers whose parts are the two elements of the last axis."""

    def constant(self, data: npt.ArrayLike | TensorData, dtype: DType | str | None = None, name: str = "") -> Value:
        """Add a tensor whose values are part of the graph; copies writeable arrays, as `param` does."""

    def conv2d(
        self,
        x: Operand,
        weight: Operand,
        bias: Operand | None = None,
        stride: Sizes = (1, 1),
        padding: Sizes = (0, 0),
        dilation: Sizes = (1, 1),
        groups: int = 1,
        *,
        kernel: Sizes | None = None,
        **node: Unpack[NodeArgs],
    ) -> Value:
        """Return a cross-correlation with a weight `(C_out, C_in / groups, kH, kW)` and perhaps a bias `(C_out,)`.

        `stride`, `padding` and `dilation` are for height and width; the padding is zeros on both sides, and the dilation is
        the distance between taps. The channels fall into `groups` parts.
        """

    def conv3d(
        self,
        x: Operand,
        weight: Operand,
        bias: Operand | None = None,
        stride: Sizes = (1, 1, 1),
        padding: Sizes = (0, 0, 0),
        dilation: Sizes = (1, 1, 1),
        groups: int = 1,
        **node: Unpack[NodeArgs],
    ) -> Value:
        """Return a cross-correlation of a volume with a weight `(C_out, C_in / groups, kD, kH, kW)` and perhaps a bias.

        The attributes are those of `Conv2d`, with one number each for depth, height and width.
        """

    def conv_transpose2d(
        self,
        x: Operand,
        weight: Operand,
        bias: Operand | None = None,
        stride: Sizes = (1, 1),
        padding: Sizes = (0, 0),
        output_padding: Sizes = (0, 0),
        dilation: Sizes = (1, 1),
        groups: int = 1,
        *,
        kernel: Sizes | None = None,
        **node: Unpack[NodeArgs],
    ) -> Value:
        """Return the transpose of a convolution, with a weight `(C_in, C_out / groups, kH, kW)` and perhaps a bias.

        The attributes are those of the convolution, whose padding is cut off here; `output_padding` is how many rows and
        columns are added at the end.
        """

    def cummax(self, x: Operand, axis: int = -1, **node: Unpack[NodeArgs]) -> Value:
        """Return the largest element so far along an axis, which needs a size."""

    def cumprod(self, x: Operand, axis: int = -1, **node: Unpack[NodeArgs]) -> Value:
        """Return the running product along an axis, which needs a size; written as log2(size) products of the whole."""

    def cumsum(
        self, input: Operand, axis: int, exclusive: bool = False, reverse: bool = False, **node: Unpack[NodeArgs]
    ) -> Value:
        """Return the running sum along an axis; `exclusive` leaves the element itself out, `reverse` runs from the end."""

    def custom_fn(self, inputs: Sequence[Operand], fwd_body: Body, *, name: str | None = None) -> Value:
        """Apply a function with one result: a graph, or a Python function `(graph, *inputs)` that builds one."""

    def custom_fn_multi(
        self, inputs: Sequence[Operand], fwd_body: Body, *, name: str | None = None
    ) -> tuple[Value, ...]:
        """Apply a function and return all its results; see `custom_fn`."""

    def custom_op(
        self,
        op_name: str,
        inputs: Sequence[Operand],
        types: Sequence[TensorType],
        *,
        domain: str,
        attributes: Mapping[str, AttributeValue] | None = None,
        version: int = 1,
        name: str | None = None,
    ) -> tuple[Value, ...]:
        """Add a kernel of a custom-op library and return its results, whose types are given."""

    def dense_solve(
        self,
        a: Operand,
        b: Operand,
        out_shape: Iterable[Dim] | None = None,
        dtype: DType | str | None = None,
        *,
        name: str | None = None,
    ) -> Value:
        """Return the x of A x = b, for A `(N, N)` and b `(N,)` or `(N, K)`."""

    def dequant_grouped_matmul(
        self, x: Operand, data: Operand, experts: Operand, scheme: str, **node: Unpack[NodeArgs]
    ) -> Value:
        """Return row i of x times the packed weight of expert `experts[i]`: x `(M, K)`, bytes, experts `(M,)`.

        The bytes are u8 `(E, N, row bytes)` or `(E, N * row bytes)`, in a GGUF format. With up to E rows,
        packed weights are gathered for each row and expanded in the run; with more, all experts are expanded when the
        session opens, which takes E * K * N * 4 bytes. `scheme` is a GGUF format.
        """

    def dequant_matmul(
        self,
        x: Operand,
        w_q: Operand,
        scale: Operand,
        zero_point: Operand | None,
        scheme: str,
        block: int | None = None,
        *,
        packed: bool = False,
        **node: Unpack[NodeArgs],
    ) -> Value:
        """Return x times a packed weight; see the table of schemes.

        `block` is the number of rows of the weight that share a scale, for the block schemes; None for the others. If
        `packed`, the weight stays packed in the session, multiplied by ONNX Runtime's MatMulNBits, which not every provider
        has. Otherwise it is expanded once, when the session opens, and takes the bytes of x's dtype. Only `int4_block`,
        `q4_0` and `q4_k` can stay packed, since the CPU kernel of 8 bits needs prepacked weights.
        """

    def dequant_matmul_nvfp4(
        self, x: Operand, w_q: Operand, scale: Operand, global_scale: Operand, **node: Unpack[NodeArgs]
    ) -> Value:
        """Return x times a packed weight; see the table of schemes.

        `block` is the number of rows of the weight that share a scale, for the block schemes; None for the others. If
        `packed`, the weight stays packed in the session, multiplied by ONNX Runtime's MatMulNBits, which not every provider
        has. Otherwise it is expanded once, when the session opens, and takes the bytes of x's dtype. Only `int4_block`,
        `q4_0` and `q4_k` can stay packed, since the CPU kernel of 8 bits needs prepacked weights.
        """

    def dequant_matmul_packed(
        self, x: Operand, data: Operand, scheme: str, *, packed: bool = False, **node: Unpack[NodeArgs]
    ) -> Value:
        """Return x times a packed weight; see the table of schemes.

        `block` is the number of rows of the weight that share a scale, for the block schemes; None for the others. If
        `packed`, the weight stays packed in the session, multiplied by ONNX Runtime's MatMulNBits, which not every provider
        has. Otherwise it is expanded once, when the session opens, and takes the bytes of x's dtype. Only `int4_block`,
        `q4_0` and `q4_k` can stay packed, since the CPU kernel of 8 bits needs prepacked weights.
        """

    def dequant_moe_weights(self, data: Operand, scheme: str, **node: Unpack[NodeArgs]) -> Value:
        """Return the packed weights of all experts as f32 `(E, K, N)`, from bytes u8 `(E, N, row bytes)` in a GGUF format."""

    def dequantize(
        self,
        q: Operand,
        scale: float | Iterable[float],
        zero_point: int | Iterable[int] = (0,),
        **node: Unpack[NodeArgs],
    ) -> Value:
        """Return (q - zero_point) * scale of i8 as f32."""

    def dequantize_per_channel(
        self,
        q: Operand,
        axis: int | None,
        scales: float | Iterable[float],
        zero_points: int | Iterable[int],
        **node: Unpack[NodeArgs],
    ) -> Value:
        """Return (q - zero_point) * scale of i8 as f32."""

    def div(self, lhs: Operand, rhs: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Return lhs / rhs; integers drop the fraction."""

    def dot_general(
        self,
        lhs: Operand,
        rhs: Operand,
        lhs_contracting: int | Iterable[int],
        rhs_contracting: int | Iterable[int],
        lhs_batch: int | Iterable[int] = (),
        rhs_batch: int | Iterable[int] = (),
        **node: Unpack[NodeArgs],
    ) -> Value:
        """Return a contraction over any axes: the result has the batch axes, the other axes of lhs, then those of rhs.

        Contracting axes are summed over, batch axes are kept side by side; those of lhs and rhs are paired in order.
        """

    def eq_(self, lhs: Operand, rhs: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Return lhs == rhs."""

    def exp(self, x: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Return e to the power of x."""

    def expand(self, x: Operand, shape: Iterable[Dim], *, name: str | None = None) -> Value:
        """Return the input repeated along dimensions of size 1, by numpy's rules; -1 keeps a dimension."""

    def fake_quantize(
        self,
        x: Operand,
        bits: int = 8,
        axis: int | None = None,
        state: Operand | None = None,
        scale_mode: str | None = None,
        **node: Unpack[NodeArgs],
    ) -> Value:
        """Quantise and dequantise by the scale `state`; without one, the scale is computed from x."""

    def fake_quantize_lsq(
        self, x: Operand, scale: Operand, bits: int = 8, axis: int | None = None, **node: Unpack[NodeArgs]
    ) -> Value:
        """Return clamp(round(x / scale), -qmax, qmax) * scale, with a learned scale as second input."""

    def fft(self, x: Operand, inverse: bool = False, **node: Unpack[NodeArgs]) -> Value:
        """Return the discrete Fourier transform along the last axis, which holds `[re | im]`; any N, not only powers of two.

        The exponent of the inverse is positive.
        """

    def fft_axis(self, x: Operand, axis: int, inverse: bool = False, norm: str = "backward") -> Value:
        """Transform one axis of a complex tensor, whose last axis holds `[re | im]` whichever axis is transformed.

        Raises:
            GraphVerifyError: there is no such axis, or a dimension that must be known is not.
        """

    def fft_conv1d(self, x: Operand, kernel: Operand) -> Value:
        """Return the whole convolution along the last axis, T + K - 1 numbers, computed by transforms."""

    def fft_norm(self, x: Operand, inverse: bool = False, norm: str = "backward", **node: Unpack[NodeArgs]) -> Value:
        """Return the discrete Fourier transform along the last axis, which holds `[re | im]`; any N, not only powers of two.

        The exponent of the inverse is positive.
        """

    def fft_real(self, x: Operand, norm: str = "backward") -> tuple[Value, Value]:
        """Return the transform (re, im) of real numbers along the last axis, zeros added up to a power of two."""

    def fftfreq(self, n: int) -> Value:
        """Return the frequencies of a transform of n elements, in cycles a sample; the middle of an even n is +0.5."""

    def fftn(
        self, x: Operand, axes: Sequence[int] | None = None, inverse: bool = False, norm: str = "backward"
    ) -> Value:
        """Transform several axes of a complex tensor, all when none are named; see `fft_axis`."""

    def fma(self, a: Operand, b: Operand, c: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Return a * b + c."""

    def fused_attention_block(
        self,
        hidden: Operand,
        qkv_weight: Operand,
        out_weight: Operand,
        mask: Operand,
        num_heads: int,
        head_dim: int,
        qkv_bias: Operand | None = None,
        out_bias: Operand | None = None,
        cos: Operand | None = None,
        sin: Operand | None = None,
        **node: Unpack[NodeArgs],
    ) -> Value:
        """Project, rotate if tables are given, attend, and project back; biases and tables come in pairs."""

    def fused_conv_bias_act(
        self,
        x: Operand,
        weight: Operand,
        bias: Operand,
        activation: str | None = None,
        stride: Sizes = (1, 1),
        padding: Sizes = (0, 0),
        dilation: Sizes = (1, 1),
        groups: int = 1,
        **node: Unpack[NodeArgs],
    ) -> Value:
        """Return activation(conv2d(x, weight) + bias): x `(N, C, H, W)`, weight `(C_out, C / groups, kH, kW)`, bias `(C_out,)`.

        The attributes are those of `Conv2d`, and the name of the activation, None for none.
        """

    def fused_matmul_bias_act(
        self,
        input: Operand,
        weight: Operand,
        bias: Operand,
        out_shape: Iterable[Dim] | None = None,
        dtype: DType | str | None = None,
        activation: str | None = None,
        *,
        name: str | None = None,
    ) -> Value:
        """Return act(x @ w + bias); the bias runs along the last dimension."""

    def fused_residual_ln(
        self,
        x: Operand,
        residual: Operand,
        bias: Operand | None,
        gamma: Operand,
        beta: Operand,
        eps: float = 1e-05,
        **node: Unpack[NodeArgs],
    ) -> Value:
        """Return LayerNorm(x + residual [+ bias]) along the last axis; the sum itself is no result."""

    def fused_residual_rms_norm(
        self,
        x: Operand,
        residual: Operand,
        bias: Operand | None,
        gamma: Operand,
        beta: Operand | None = None,
        eps: float = 1e-05,
        **node: Unpack[NodeArgs],
    ) -> Value:
        """Return RmsNorm(x + residual [+ bias]) along the last axis; the sum itself is no result."""

    def fused_swiglu(
        self, x: Operand, gate_first: bool = False, cast_to: DType | str | None = None, **node: Unpack[NodeArgs]
    ) -> Value:
        """Return up * silu(gate), where the last dimension holds up then gate, or gate then up.

        `cast_to` is the dtype of the result, None for that of the input.
        """

    def fused_swiglu_ffn(self, x: Operand, up_gate: Operand, down: Operand, gate_first: bool = False) -> Value:
        """Return (up * silu(gate)) @ down, where up and gate are the halves of x @ up_gate."""

    def gated_delta_net(
        self,
        q: Operand,
        k: Operand,
        v: Operand,
        g: Operand,
        beta: Operand,
        n: int | None = None,
        **node: Unpack[NodeArgs],
    ) -> Value:
        """Return the gated delta rule over a sequence, a matrix S as state of each head, from 0 or from a given state.

        For each token: S is scaled by exp(g); then k's entry, S^T k, moves to v by beta, S += k (beta (v - S^T k))^T;
        and the result is S^T q / sqrt(n). Inputs: q, k, v `(B, S, H, n)`, g and beta `(B, S, H)` and, with
        `carry_state`, the first state `(B, H, n, n)`. Narrow floats are computed in f32. n is the size of a head,
        which the builder takes from q when it is left out. The last state is a second result if the first one is an input.
        """

    def gated_delta_net_carry(
        self,
        q: Operand,
        k: Operand,
        v: Operand,
        g: Operand,
        beta: Operand,
        state: Operand,
        n: int | None = None,
        *,
        name: str | None = None,
    ) -> tuple[Value, Value]:
        """Return the gated delta rule's results from a given state `(B, H, n, n)`, and the last state.

        The given state is not changed; feed the second result back to continue.
        """

    def gated_residual(self, x: Operand, gate: Operand, y: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Return x + gate * y, broadcast."""

    def gather(self, table: Operand, indices: Operand, axis: int = 0, **node: Unpack[NodeArgs]) -> Value:
        """Return entries of a table along an axis, picked by integer indices; negative ones count from the end.

        The result has the table's dimensions before the axis, those of the indices, then the table's after the axis.
        """

    def gather_elements(self, x: Operand, indices: Operand, axis: int = 0, **node: Unpack[NodeArgs]) -> Value:
        """Return one element for each index: `out[i][j] = x[index[i][j]][j]` for axis 0, and so on for other axes."""

    def gather_nd(self, x: Operand, indices: Operand, batch_dims: int = 0, **node: Unpack[NodeArgs]) -> Value:
        """Return slices at positions given by the last dimension of the indices.

        `batch_dims` leading dimensions are shared by x and the indices.
        """

    def ge_(self, lhs: Operand, rhs: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Return lhs >= rhs."""

    def gelu(self, x: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Apply GELU, exact form."""

    def gelu_approx(self, x: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Apply GELU, tanh form."""

    def gqa(
        self,
        q: Operand,
        k: Operand,
        v: Operand,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mask_kind: str = "none",
        mask: Operand | None = None,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        **node: Unpack[NodeArgs],
    ) -> Value:
        """Return attention in which `num_heads / num_kv_heads` query heads share a head of k and v.

        Layouts and the other attributes are those of `Attention`, with `num_kv_heads` heads in k and v. Without a mask,
        with a `custom` one, and for one query under `causal`, query heads that share keys are folded into the query
        length, so k and v are not copied; otherwise k and v are repeated.
        """

    def group_norm(
        self,
        input: Operand,
        gamma: Operand,
        beta: Operand,
        num_groups: int,
        eps: float = 1e-05,
        **node: Unpack[NodeArgs],
    ) -> Value:
        """Return normalisation over groups of channels of an `(N, C, ...)` tensor, then gamma and beta a channel."""

    def grouped_matmul(self, x: Operand, w: Operand, experts: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Return row i of x `(M, K)` times matrix `experts[i]` of w `(E, K, N)`; experts `(M,)` are 0 to E - 1.

        If M is known and at most E, each row gets a copy of its matrix: M * K * N elements of memory. Otherwise a loop
        goes through the experts that have rows, with one copied matrix at a time.
        """

    def gt_(self, lhs: Operand, rhs: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Return lhs > rhs."""

    def if_(
        self,
        predicate: Operand,
        then_body: Body,
        else_body: Body,
        captures: Sequence[Operand] = (),
        *,
        name: str | None = None,
    ) -> Value:
        """Return the result of `then_body` where the predicate holds, else of `else_body`; both get the captures.

        A predicate that may have more than one element chooses element by element, and both bodies run.
        """

    def if_multi(
        self,
        predicate: Operand,
        then_body: Body,
        else_body: Body,
        captures: Sequence[Operand] = (),
        *,
        name: str | None = None,
    ) -> tuple[Value, ...]:
        """Return the results of one of two bodies; see `if_`."""

    def ifftn(self, x: Operand, axes: Sequence[int] | None = None, norm: str = "backward") -> Value:
        """Apply the inverse transform to several axes of a complex tensor; see `fftn`."""

    def im2col(
        self,
        x: Operand,
        kernel: Sizes,
        stride: Sizes = (1, 1),
        padding: Sizes = (0, 0),
        dilation: Sizes = (1, 1),
        **node: Unpack[NodeArgs],
    ) -> Value:
        """Return the windows of an `(N, C, H, W)` image as columns, `(N, C * kH * kW, windows)`, zeros in the padding.

        `kernel` is the height and width of a window; the other attributes are those of `Conv2d`.
        """

    def input(self, name: str, shape: Iterable[Dim], dtype: DType | str = DType.F32) -> Value:
        """Add an input of every run.

        Raises:
            GraphVerifyError: the graph already has an input or parameter of that name.
        """

    def interpolate(
        self,
        x: Operand,
        sizes: int | Iterable[int],
        mode: str = "nearest",
        align_corners: bool = False,
        **node: Unpack[NodeArgs],
    ) -> Value:
        """Return an `(N, C, ...)` tensor resized to other spatial sizes.

        `nearest` takes element floor(i * old / new). `linear` and `cubic` (coefficient -0.75) treat elements as areas
        whose centres are at i + 0.5, unless `align_corners` maps the first and last element to the first and last one.
        There is a size for each dimension after the channels.
        """

    def irfft(self, re: Operand, im: Operand, n: int, norm: str = "backward") -> Value:
        """Return the n real numbers whose transform starts with (re, im), n // 2 + 1 elements; `backward` is n-fold.

        Raises:
            GraphVerifyError: re or im has another number of elements.
        """

    def layer_norm(
        self,
        input: Operand,
        gamma: Operand,
        beta: Operand,
        axis: int = -1,
        eps: float = 1e-05,
        **node: Unpack[NodeArgs],
    ) -> Value:
        """Return (x - mean) / sqrt(variance + eps) * gamma + beta along one axis, with the biased variance."""

    def layer_norm2d(
        self, input: Operand, gamma: Operand, beta: Operand, eps: float = 1e-05, **node: Unpack[NodeArgs]
    ) -> Value:
        """Return layer normalisation over the channels of each pixel of an `(N, C, H, W)` image."""

    def le_(self, lhs: Operand, rhs: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Return lhs <= rhs."""

    def linear_bias(self, x: Operand, weight: Operand, bias: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Return act(x @ w + bias); the bias runs along the last dimension."""

    def linear_bias_act(
        self, x: Operand, weight: Operand, bias: Operand, activation: str | None, **node: Unpack[NodeArgs]
    ) -> Value:
        """Return act(x @ w + bias); the bias runs along the last dimension."""

    def linear_fused(
        self, x: Operand, weight: Operand, bias: Operand, activation: str | None = None, **node: Unpack[NodeArgs]
    ) -> Value:
        """Return act(x @ w + bias); the bias runs along the last dimension."""

    def log(self, x: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Return the natural logarithm."""

    def lora_matmul(
        self,
        x: Operand,
        w: Operand,
        a: Operand,
        b: Operand,
        scale: float = 1.0,
        out_shape: Iterable[Dim] | None = None,
        dtype: DType | str | None = None,
        *,
        name: str | None = None,
    ) -> Value:
        """Return x @ w + scale * ((x @ a) @ b): a weight with a low-rank correction."""

    def lt_(self, lhs: Operand, rhs: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Return lhs < rhs."""

    def matmul(self, lhs: Operand, rhs: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Return `[..., M, K] @ [..., K, N]`, leading dimensions broadcast."""

    def matmul_with_shape(
        self,
        lhs: Operand,
        rhs: Operand,
        out_shape: Iterable[Dim] | None,
        dtype: DType | str | None,
        *,
        name: str | None = None,
    ) -> Value:
        """Return `[..., M, K] @ [..., K, N]`, leading dimensions broadcast."""

    def max(
        self, x: Operand, axes: int | Sequence[int] | None = None, keep_dim: bool = False, **node: Unpack[NodeArgs]
    ) -> Value:
        """Return the largest element over axes."""

    def maximum(self, lhs: Operand, rhs: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Return the larger element."""

    def mean(
        self, x: Operand, axes: int | Sequence[int] | None = None, keep_dim: bool = False, **node: Unpack[NodeArgs]
    ) -> Value:
        """Return the mean over axes; integers drop the fraction."""

    def min(
        self, x: Operand, axes: int | Sequence[int] | None = None, keep_dim: bool = False, **node: Unpack[NodeArgs]
    ) -> Value:
        """Return the smallest element over axes."""

    def minimum(self, lhs: Operand, rhs: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Return the smaller element."""

    def mul(self, lhs: Operand, rhs: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Return lhs * rhs."""

    def narrow(self, x: Operand, axis: int, start: int, length: int, **node: Unpack[NodeArgs]) -> Value:
        """Return `length` elements from `start` along one axis."""

    def ne_(self, lhs: Operand, rhs: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Return lhs != rhs."""

    def neg(self, x: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Return -x."""

    def onnx_node(
        self,
        op_type: str,
        inputs: Sequence[Value | None],
        attributes: Mapping[str, AttributeValue] | None = None,
        *,
        types: Sequence[ValueType],
        domain: str = "",
        version: int = 21,
        name: str | None = None,
    ) -> tuple[Value, ...]:
        """Add an ONNX node that has no IR op and return its results; `types` are the types of the results."""

    def pad(
        self,
        x: Operand,
        before: int | Iterable[int],
        after: int | Iterable[int],
        mode: str = "constant",
        value: float = 0.0,
        **node: Unpack[NodeArgs],
    ) -> Value:
        """Return elements added before and after each axis.

        The modes are `constant`, `reflect` (mirrored without the edge) and `edge` (the edge repeated).
        """

    def param(
        self,
        name: str,
        shape: Iterable[Dim],
        dtype: DType | str = DType.F32,
        data: npt.ArrayLike | TensorData | None = None,
        *,
        mutable: bool = False,
    ) -> Value:
        """Add a weight; `data` gives it an initial value, else it must be set before the first run.

        Writeable arrays are copied. `TensorData` and read-only arrays, such as memory maps, are shared.

        A `mutable` weight may change between runs at no cost, but kernels that use it are slower.

        Raises:
            GraphVerifyError: the name is taken, a dimension has no size, or the data has another shape.
        """

    def pool(
        self,
        kind: str,
        x: Operand,
        kernel: Sizes,
        stride: Sizes = (1, 1),
        padding: Sizes = (0, 0),
        **node: Unpack[NodeArgs],
    ) -> Value:
        """Return the largest, mean, sum or smallest element of each window.

        `max` and `min` ignore padding; `mean` counts it as zeros and divides by the whole window.
        """

    def pow(self, lhs: Operand, rhs: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Return lhs to the power of rhs."""

    def prod(
        self, x: Operand, axes: int | Sequence[int] | None = None, keep_dim: bool = False, **node: Unpack[NodeArgs]
    ) -> Value:
        """Return the product over axes."""

    def psd(self, re: Operand, im: Operand) -> Value:
        """Return the power re^2 + im^2 of each element of a transform."""

    def psd_real(self, x: Operand, norm: str = "backward") -> Value:
        """Return the power of each element of `fft_real`."""

    def q_conv2d(
        self,
        x: Operand,
        w: Operand,
        bias: Operand | None,
        x_zp: int,
        w_zp: int,
        out_zp: int,
        mult: float,
        stride: Sizes = (1, 1),
        padding: Sizes = (0, 0),
        dilation: Sizes = (1, 1),
        groups: int = 1,
        **node: Unpack[NodeArgs],
    ) -> Value:
        """Return a convolution of i8 with an i8 result, scaled like `QMatMul`; taps in the padding contribute nothing.

        The other attributes are those of `Conv2d`.
        """

    def q_matmul(
        self,
        x: Operand,
        w: Operand,
        bias: Operand | None,
        x_zp: int,
        w_zp: int,
        out_zp: int,
        mult: float,
        **node: Unpack[NodeArgs],
    ) -> Value:
        """Return a product of i8 with an i8 result: clamp(round(acc * mult) + out_zp, -128, 127).

        acc is the i32 sum of (x - x_zp) * (w - w_zp) over K, plus an i32 bias; it wraps around if it leaves 32 bits,
        which needs K above 33 000. acc * mult is computed in f64, since f32 cannot hold every i32. `mult` is the scale
        of x times the scale of w divided by the scale of the result.
        """

    def quantize(
        self,
        x: Operand,
        scale: float | Iterable[float],
        zero_point: int | Iterable[int] = (0,),
        **node: Unpack[NodeArgs],
    ) -> Value:
        """Return clamp(round(x / scale) + zero_point, -128, 127) as i8."""

    def quantize_per_channel(
        self,
        x: Operand,
        axis: int | None,
        scales: float | Iterable[float],
        zero_points: int | Iterable[int],
        **node: Unpack[NodeArgs],
    ) -> Value:
        """Return clamp(round(x / scale) + zero_point, -128, 127) as i8."""

    def reduce(
        self,
        input: Operand,
        op: str,
        axes: int | Sequence[int] | None,
        keep_dim: bool = False,
        **node: Unpack[NodeArgs],
    ) -> Value:
        """Reduce over axes by name (`REDUCTIONS`); None means all axes, an empty list none."""

    def relu(self, x: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Return max(x, 0)."""

    def reshape(self, x: Operand, new_shape: Iterable[Dim], **node: Unpack[NodeArgs]) -> Value:
        """Return the same elements with other dimensions; one may be -1. A size 0 means 0, not "as it was"."""

    def resize_nearest_2x(self, x: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Return each pixel doubled in height and width."""

    def reverse(self, x: Operand, axes: int | Iterable[int], **node: Unpack[NodeArgs]) -> Value:
        """Return the elements in reverse order along axes."""

    def rfft(self, x: Operand, norm: str = "backward") -> tuple[Value, Value]:
        """Return the first N // 2 + 1 elements (re, im) of the transform of N real numbers along the last axis."""

    def rfftfreq(self, n: int) -> Value:
        """Return the frequencies of `rfft` of n numbers, in cycles a sample."""

    def rms_norm(
        self,
        input: Operand,
        gamma: Operand,
        beta: Operand | None = None,
        eps: float = 1e-05,
        axis: int = -1,
        **node: Unpack[NodeArgs],
    ) -> Value:
        """Return x / sqrt(mean(x * x) + eps) * gamma + beta along one axis."""

    def rope(
        self,
        x: Operand,
        cos: Operand,
        sin: Operand,
        head_dim: int,
        *,
        interleaved: bool = False,
        **node: Unpack[NodeArgs],
    ) -> Value:
        """Return rotary position embedding of each head of x by cos and sin tables of head_dim / 2 columns.

        x is `(S, H*D)` or `(B, S, H*D)`; row s of the tables belongs to position s of the sequence; tables of rank 3 `(B,
        S, D/2)` are per sequence. Only the first `n_rot` elements of each head are rotated, by the first `n_rot / 2`
        columns; the number is even, and None rotates all. If `interleaved`, the pairs are neighbours `(2i, 2i + 1)` instead
        of halves `(i, i + n_rot / 2)`.
        """

    def rope_n(
        self,
        x: Operand,
        cos: Operand,
        sin: Operand,
        head_dim: int,
        n_rot: int | None,
        *,
        interleaved: bool = False,
        **node: Unpack[NodeArgs],
    ) -> Value:
        """Return rotary position embedding of each head of x by cos and sin tables of head_dim / 2 columns.

        x is `(S, H*D)` or `(B, S, H*D)`; row s of the tables belongs to position s of the sequence; tables of rank 3 `(B,
        S, D/2)` are per sequence. Only the first `n_rot` elements of each head are rotated, by the first `n_rot / 2`
        columns; the number is even, and None rotates all. If `interleaved`, the pairs are neighbours `(2i, 2i + 1)` instead
        of halves `(i, i + n_rot / 2)`.
        """

    def rsqrt(self, x: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Return 1 / sqrt(x)."""

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
        """Return one token of each row of logits `(B, V)` or `(V,)`, drawn by the seed: the same seed gives the same tokens.

        The logits are divided by the temperature (1e-6 at least). Those below the k-th largest are dropped; ties with it
        stay. Then the most likely tokens are kept until their probabilities add up to `top_p`. Row i uses the i-th number
        of the generator Philox4x32-10 with the seed as key (0 stands for 0xDEADBEEF). Its token is the first one, in index
        order, at which the running sum of the remaining probabilities exceeds that number.

        The sums are taken over probabilities rounded to units of 2^-30, so they do not depend on the order in which a
        provider adds; probabilities may differ in their last bit between providers, which can change a token only if
        the number falls within about 1e-5 of a boundary. A temperature of 0 takes the most likely token.
        """

    def scan(self, init: Operand, body: Body, length: int, **node: Unpack[NodeArgs]) -> Value:
        """Apply `body` `length` times to `init` and return the last carried value."""

    def scan_checkpointed(
        self, init: Operand, body: Body, length: int, num_checkpoints: int, **node: Unpack[NodeArgs]
    ) -> Value:
        """Apply `body` `length` times and return K rows of the trajectory, those at floor(t * length / K)."""

    def scan_trajectory(self, init: Operand, body: Body, length: int, **node: Unpack[NodeArgs]) -> Value:
        """Apply `body` `length` times and return every carried value `(length, ...)`, the first step's first."""

    def scan_with_bcasts_and_xs(
        self,
        init: Operand,
        bcasts: Sequence[Operand],
        xs: Sequence[Operand],
        body: Body,
        length: int,
        save_trajectory: bool = False,
        num_checkpoints: int = 0,
        **node: Unpack[NodeArgs],
    ) -> Value:
        """Apply `body` to the carried value, values that stay the same, and rows of sequences; see `Scan`."""

    def scan_with_xs(
        self,
        init: Operand,
        xs: Sequence[Operand],
        body: Body,
        length: int,
        save_trajectory: bool = False,
        **node: Unpack[NodeArgs],
    ) -> Value:
        """Apply `body` to the carried value and the rows of sequences `(length, ...)`, one row a step."""

    def scatter_add(self, updates: Operand, indices: Operand, rows: Dim, **node: Unpack[NodeArgs]) -> Value:
        """Return zeros with `rows` rows, with `updates[i]` added to row `indices[i]`: updates `(U, ...)`, indices `(U,)`."""

    def scatter_elements(
        self, x: Operand, indices: Operand, updates: Operand, axis: int = 0, mode: str = "set", **node: Unpack[NodeArgs]
    ) -> Value:
        """Return x with one element changed for each index; the updates have the indices' shape."""

    def scatter_nd(
        self, x: Operand, indices: Operand, updates: Operand, mode: str = "set", **node: Unpack[NodeArgs]
    ) -> Value:
        """Return x with slices changed at positions given by the last dimension of the indices."""

    def selective_scan(
        self,
        x: Operand,
        delta: Operand,
        a: Operand,
        b: Operand,
        c: Operand,
        n: int | None = None,
        **node: Unpack[NodeArgs],
    ) -> Value:
        """Return the selective scan y_t = sum of c_t h_t over the n states, with h_t = exp(delta_t a) h_{t-1} + delta_t b_t x_t.

        Inputs: x and delta `(B, S, H)`, a `(H, n)`, b and c `(B, S, n)`; the result is `(B, S, H)`. h is 0 at first. Narrow
        floats are computed in f32. The builder takes n from the columns of a when it is left out.
        """

    def shared_matmul_pair(self, x: Operand, first: Operand, second: Operand) -> tuple[Value, Value]:
        """Return x @ first and x @ second.

        They stay two products, because one product with joined weights would keep a second copy of both.
        """

    def sigmoid(self, x: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Return 1 / (1 + exp(-x))."""

    def silu(self, x: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Return x * sigmoid(x)."""

    def slice(
        self,
        x: Operand,
        axes: Sequence[int],
        starts: Sequence[int | None],
        ends: Sequence[int | None],
        steps: Sequence[int] | None = None,
        **node: Unpack[NodeArgs],
    ) -> Value:
        """Take `x[start:end:step]` along axes, by Python's rules."""

    def softmax(self, input: Operand, axis: int = -1, **node: Unpack[NodeArgs]) -> Value:
        """Return exp(x) along an axis, scaled to the sum 1."""

    def softmax_cross_entropy_with_logits(self, logits: Operand, labels: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Return the loss of each row of logits `(N, C)` for a label `(N,)`: log(sum(exp(row))) - row[label].

        Float labels drop their fraction. Good for scoring; rlx_ort computes no gradients.
        """

    def sort(self, x: Operand, axis: int = -1, descending: bool = False, **node: Unpack[NodeArgs]) -> Value:
        """Return the elements along an axis in order, the smallest first unless `descending`."""

    def sqrt(self, x: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Return the square root."""

    def stft(
        self, x: Operand, n_fft: int, hop: int, window: Operand | None = None, norm: str = "backward"
    ) -> tuple[Value, Value]:
        """Return `rfft` (re, im) of every `hop`-th frame of `n_fft` numbers: `(..., frames, n_fft // 2 + 1)`.

        Frames lie wholly inside the signal; pad it first for others. A window `(n_fft,)` multiplies each frame.

        Raises:
            GraphVerifyError: the signal is shorter than a frame.
        """

    def stop_gradient(self, x: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Return the input unchanged; a marker for training frameworks."""

    def sub(self, lhs: Operand, rhs: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Return lhs - rhs."""

    def sum(
        self, x: Operand, axes: int | Sequence[int] | None = None, keep_dim: bool = False, **node: Unpack[NodeArgs]
    ) -> Value:
        """Return the sum over axes."""

    def swiglu_ffn(self, x: Operand, up: Operand, gate: Operand, down: Operand) -> Value:
        """Return ((x @ up) * silu(x @ gate)) @ down."""

    def tanh(self, x: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Return the hyperbolic tangent."""

    def tile(self, x: Operand, repeats: int | Iterable[int], **node: Unpack[NodeArgs]) -> Value:
        """Return the whole input repeated along each axis."""

    def topk(self, x: Operand, k: int, dtype: DType | str = DType.I64, **node: Unpack[NodeArgs]) -> Value:
        """Return indices of the k largest elements along the last axis, largest first; equal elements in order of index."""

    def transpose(self, x: Operand, perm: int | Iterable[int], **node: Unpack[NodeArgs]) -> Value:
        """Return the axes in another order: axis i of the result is axis `perm[i]` of the input."""

    def trilu(self, x: Operand, upper: bool = False, diagonal: int = 0, **node: Unpack[NodeArgs]) -> Value:
        """Return the upper or lower triangle of the last two dimensions; zeros elsewhere.

        The triangle begins at a diagonal: 0 is the main one, above 0 lie those to the right of it.
        """

    def where_(self, condition: Operand, then: Operand, otherwise: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Return `then` where the condition is not zero, `otherwise` elsewhere."""

    def while_(
        self,
        carries: Sequence[Operand],
        cond: Body,
        body: Body,
        captures: Sequence[Operand] = (),
        max_iterations: int | None = None,
        *,
        name: str | None = None,
    ) -> tuple[Value, ...]:
        """Repeat `body` while `cond` holds and return the carried values; both get the carries, then the captures."""
