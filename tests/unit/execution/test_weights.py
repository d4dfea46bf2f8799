"""Weights: what is accepted, what is refused, and that nothing changes under an open session."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from rlx_ort import DType, Graph, ParamError
from rlx_ort.execution.weights import WeightStore
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import Shape, TensorType

VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)


def _store(dtype: DType = DType.F32, shape: tuple[int, ...] = (2, 3)) -> WeightStore:
    return WeightStore({"w": TensorType(dtype, Shape(shape)), "bias": TensorType(DType.F32, Shape([3]))})


def _numpy(store: WeightStore, name: str = "w") -> np.ndarray:
    data = store.get(name)
    assert data is not None
    return data.numpy()


@pytest.mark.parametrize(
    "array",
    [VALUES, np.asfortranarray(VALUES), VALUES.astype(">f4"), np.repeat(VALUES, 2, axis=1)[:, ::2], VALUES.tolist()],
    ids=["plain", "fortran", "big-endian", "strided", "list"],
)
def test_any_layout_and_byte_order_is_stored_alike(array: object) -> None:
    """Data of the declared dtype is stored with the same elements, whatever its layout or byte order."""
    store = _store()
    store.set("w", array)  # type: ignore[arg-type]  # the parametrisation holds only array-likes
    np.testing.assert_array_equal(_numpy(store), VALUES)
    assert _numpy(store).dtype == np.float32


@pytest.mark.parametrize("form", ["array", "read-only view", "bytes"])
def test_a_writable_array_is_copied(form: str) -> None:
    """Writing to the caller's memory afterwards does not reach the store; a read-only view of it protects nothing."""
    store, mine = _store(), bytearray(VALUES.tobytes())
    array = np.frombuffer(mine, np.float32).reshape(2, 3)
    if form == "bytes":
        store.set_typed("w", mine, DType.F32)
    else:
        view = array[:]
        view.flags.writeable = form == "array"
        store.set("w", view)
    array[:] = -1
    np.testing.assert_array_equal(_numpy(store), VALUES)


def test_memory_that_nobody_can_write_to_is_shared() -> None:
    """Immutable bytes and `TensorData` are not copied, so a mapped file stays mapped."""
    store = _store()
    frozen = np.frombuffer(VALUES.tobytes(), np.float32).reshape(2, 3)
    store.set("w", frozen)
    assert np.shares_memory(_numpy(store), frozen)
    data = TensorData.from_array(VALUES)
    store.set("w", data)
    assert store.get("w") is data


def test_a_new_value_is_a_new_buffer() -> None:
    """A snapshot keeps the values it was taken with."""
    store = _store()
    store.set("w", VALUES)
    version, before = store.snapshot(["w"])
    store.set("w", VALUES + 1)
    np.testing.assert_array_equal(before["w"].numpy(), VALUES)
    assert store.version > version


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros((3, 2), np.float32), "shape"),
        (np.zeros((2, 3), np.float64), r"\.astype\(numpy\.float32\)"),
        (np.zeros((2, 3), np.int32), "cast=True"),
        (np.ma.masked_array(VALUES, mask=VALUES > 2), "mask"),
        ([[1, 2, 3], [4, 5]], "not an array"),
        (np.array([["a"] * 3] * 2), "str|string"),
    ],
    ids=["shape", "f64", "int", "masked", "ragged", "text"],
)
def test_what_does_not_fit_is_refused(value: object, message: str) -> None:
    """A wrong shape, dtype or kind of array raises, names the parameter, and leaves the old value."""
    store = _store()
    store.set("w", VALUES)
    with pytest.raises(ParamError, match=message) as caught:
        store.set("w", value)  # type: ignore[arg-type]  # some are no array-likes, which is the point
    assert "'w'" in str(caught.value)
    np.testing.assert_array_equal(_numpy(store), VALUES)


def test_cast_converts_when_asked() -> None:
    """With `cast`, f64 data is rounded to the declared f32."""
    store = _store()
    store.set("w", VALUES.astype(np.float64) + 0.1, cast=True)
    np.testing.assert_array_equal(_numpy(store), (VALUES.astype(np.float64) + 0.1).astype(np.float32))


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    """A misspelt name raises and suggests the right one."""
    with pytest.raises(ParamError, match="did you mean 'bias'"):
        _store().set("bais", [1, 2, 3])


def test_typed_bytes_are_little_endian_elements() -> None:
    """Raw bytes of the declared dtype are taken as they are."""
    store = _store()
    store.set_typed("w", VALUES.astype("<f4").tobytes(), "float32")
    np.testing.assert_array_equal(_numpy(store), VALUES)


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
def test_narrow_floats_widen_without_cast(dtype: DType) -> None:
    """f16 and bf16 data of an f32 parameter keeps its values, as bytes and as an array."""
    store = _store()
    narrow = VALUES.astype(dtype.numpy)
    store.set_typed("w", narrow.tobytes(), dtype)
    np.testing.assert_array_equal(_numpy(store), narrow.astype(np.float32))
    store.set("w", narrow + 1)
    np.testing.assert_array_equal(_numpy(store), (narrow + 1).astype(np.float32))


@pytest.mark.parametrize(
    ("declared", "given"),
    [
        (DType.F16, DType.F32),
        (DType.BF16, DType.F32),
        (DType.F16, DType.BF16),
        (DType.BF16, DType.F16),
        (DType.F32, DType.I8),
    ],
)
def test_typed_bytes_that_would_lose_values_need_cast(declared: DType, given: DType) -> None:
    """A narrower float, one of another range, and integers for floats are refused, and converted when asked."""
    store = _store(declared)
    data = VALUES.astype(given.numpy)
    with pytest.raises(ParamError, match="cast"):
        store.set_typed("w", data.tobytes(), given)
    store.set_typed("w", data.tobytes(), given, cast=True)
    np.testing.assert_array_equal(_numpy(store), data.astype(declared.numpy))


@pytest.mark.parametrize("count", [0, 5, 7])
def test_typed_bytes_must_fill_the_shape(count: int) -> None:
    """Too few or too many bytes raise; nothing is clipped or left over."""
    with pytest.raises(ParamError, match="needs 24 bytes"):
        _store().set_typed("w", bytes(4 * count), "f32")


def test_packed_and_bf16_weights_round_trip() -> None:
    """4-bit integers and bf16 come back as they were given."""
    nibbles = np.array([[-8, 7, 1], [0, -1, 3]]).astype(ml_dtypes.int4)
    store = _store(DType.I4)
    store.set("w", nibbles)
    np.testing.assert_array_equal(_numpy(store).astype(np.int8), nibbles.astype(np.int8))
    halves = VALUES.astype(ml_dtypes.bfloat16)
    store = _store(DType.BF16)
    store.set("w", halves)
    np.testing.assert_array_equal(_numpy(store).astype(np.float32), VALUES)


def test_missing_names_what_is_not_set() -> None:
    """Parameters without data are listed in order, and a snapshot of them raises and names them."""
    store = _store()
    assert store.missing() == ["w", "bias"]
    store.set("w", VALUES)
    assert store.missing(["w", "bias"]) == ["bias"]
    with pytest.raises(ParamError, match="'bias' is not set"):
        store.snapshot(["w", "bias"])


def test_an_update_block_that_raises_changes_nothing() -> None:
    """A block that ends with an error leaves every value as it was."""
    store = _store()
    store.set("w", VALUES)
    before = store.version
    with pytest.raises(ParamError), store.update():  # noqa: PT012  # the first call must succeed
        store.set("w", VALUES + 1)
        store.set("bias", [1, 2])
    assert store.version == before
    np.testing.assert_array_equal(_numpy(store), VALUES)


def test_release_frees_what_no_session_uses() -> None:
    """A parameter that was released is not set any more; one that is pinned cannot be released."""
    store = _store()
    store.set("w", VALUES)
    store.pin(["w"])
    with pytest.raises(ParamError, match="in use"):
        store.release("w")
    store.unpin(["w"])
    store.release("w")
    assert store.missing(["w"]) == ["w"]


def test_a_graphs_own_data_is_taken_over() -> None:
    """A store made for a graph has its parameters and the data they were declared with."""
    graph = Graph("g")
    graph.param("w", [2, 3], data=VALUES)
    graph.param("later", [1])
    store = WeightStore.for_graph(graph)
    assert (store.names, store.missing()) == (("w", "later"), ["later"])
    np.testing.assert_array_equal(_numpy(store), VALUES)
