"""NVIDIA's own clients, HTTP and gRPC, each also as asyncio client, against the server: types, errors, extensions."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from served_models import WEIGHT, Served, save_product

from rlx_ort.ir.dtype import DType
from rlx_ort.serving.protocol import DATATYPES

pytest.importorskip("tritonclient.grpc")
import tritonclient.grpc.aio
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException

KINDS = {
    "http": tritonclient.http,
    "http.aio": tritonclient.http.aio,
    "grpc": tritonclient.grpc,
    "grpc.aio": tritonclient.grpc.aio,
}
X = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.float32)


class Client:
    """One client of any kind; its calls are awaited where they need to be."""

    def __init__(self, kind: str, served: Served) -> None:
        self.http = kind.startswith("http")
        self.module = KINDS[kind]
        self._loop = asyncio.new_event_loop()
        address = served.http if self.http else served.grpc
        self._client = self._call(lambda: self.module.InferenceServerClient(address))

    def _call(self, call: Any) -> Any:
        async def work() -> Any:
            found = call()
            return await found if inspect.isawaitable(found) else found

        return self._loop.run_until_complete(work())

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **given: self._call(lambda: getattr(self._client, name)(*args, **given))

    def close(self) -> None:
        """Close the client and its loop."""
        self._call(self._client.close)
        self._loop.close()

    def tensor(self, name: str, array: npt.NDArray[Any], datatype: str, binary: bool = True) -> Any:
        """Return an input."""
        found = self.module.InferInput(name, array.shape, datatype)
        found.set_data_from_numpy(array, **({"binary_data": binary} if self.http else {}))
        return found

    def wanted(self, name: str, binary: bool = True) -> Any:
        """Return an output to ask for."""
        return self.module.InferRequestedOutput(name, **({"binary_data": binary} if self.http else {}))

    def run(self, model: str, array: npt.NDArray[Any], outputs: Sequence[str] = (), **given: Any) -> Any:
        """Return the result for one float input named `x`."""
        wanted = [self.wanted(name) for name in outputs] or None
        return self.infer(model, [self.tensor("x", array, "FP32")], outputs=wanted, **given)


@pytest.fixture(params=KINDS)
def client(request: pytest.FixtureRequest, served: Served) -> Iterator[Client]:
    """Yield a client of each kind."""
    found = Client(request.param, served)
    yield found
    found.close()


def sample(dtype: DType) -> npt.NDArray[Any]:
    """Return two rows of two elements, the ends of the type's range among them."""
    if dtype is DType.STRING:
        return np.array([["", "ä€"], ["a" * 1000, "z"]], object)
    if dtype is DType.BOOL:
        return np.array([[True, False], [False, True]])
    if dtype.is_integer:
        ends = np.iinfo(dtype.numpy)
        return np.array([[ends.min, ends.max], [0, 1]], dtype.numpy)
    return np.array([[0.5, -2], [3, 1024]]).astype(dtype.numpy)


@pytest.mark.parametrize("dtype", DATATYPES)
def test_each_type_comes_back_in_binary_form(client: Client, dtype: DType) -> None:
    """An identity returns what was sent, to the bit."""
    array, datatype = sample(dtype), DATATYPES[dtype]
    result = client.infer(f"echo_{datatype.lower()}", [client.tensor("x", array, datatype)])
    found = result.as_numpy("y")
    if dtype is DType.STRING:
        found = np.array([text.decode() for text in found.ravel()], object).reshape(found.shape)
    np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize("kind", ["http", "http.aio"])
@pytest.mark.parametrize("dtype", [dtype for dtype in DATATYPES if dtype not in (DType.F16, DType.BF16)])
def test_each_type_comes_back_as_json(served: Served, kind: str, dtype: DType) -> None:
    """The same without binary data; the clients send no half floats so."""
    client = Client(kind, served)
    array, datatype = sample(dtype), DATATYPES[dtype]
    tensor = client.tensor("x", array, datatype, binary=False)
    result = client.infer(f"echo_{datatype.lower()}", [tensor], outputs=[client.wanted("y", binary=False)])
    found = result.get_response()["outputs"][0]
    assert found["datatype"] == datatype
    assert found["data"] == array.ravel().tolist()
    client.close()


def test_only_the_outputs_asked_for_come(client: Client) -> None:
    """All of them by default, in the order of the request otherwise."""
    np.testing.assert_allclose(client.run("product", X).as_numpy("matmul"), X @ WEIGHT)
    result = client.run("product", X, outputs=["neg"])
    np.testing.assert_allclose(result.as_numpy("neg"), -(X @ WEIGHT))
    assert result.as_numpy("matmul") is None


def test_the_request_id_comes_back(client: Client) -> None:
    """With the name and version of the model."""
    response = client.run("product", X, request_id="abc").get_response()
    found = response if isinstance(response, Mapping) else {
        "id": response.id, "model_name": response.model_name, "model_version": response.model_version
    }  # fmt: skip
    assert (found["id"], found["model_name"], found["model_version"]) == ("abc", "product", "1")


def test_the_newest_version_answers_unless_one_is_named(client: Client) -> None:
    """Version 3 is three times version 1."""
    np.testing.assert_allclose(client.run("versions", X).as_numpy("matmul"), 3 * X @ WEIGHT)
    np.testing.assert_allclose(client.run("versions", X, model_version="1").as_numpy("matmul"), X @ WEIGHT)
    with pytest.raises(InferenceServerException, match="no version '2'"):
        client.run("versions", X, model_version="2")


def test_the_server_is_live_and_its_models_are_ready(client: Client) -> None:
    """Health of the server, of a model, and of one that is not there."""
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("product")
    assert client.is_model_ready("versions", "3")
    if client.http:
        assert not client.is_model_ready("absent")
    else:
        with pytest.raises(InferenceServerException, match="no model 'absent'"):
            client.is_model_ready("absent")


def test_metadata_names_the_tensors(client: Client) -> None:
    """Of the server and of a model."""
    server, model = client.get_server_metadata(), client.get_model_metadata("versions")
    if not client.http:
        assert server.name == "rlx_ort"
        assert "binary_tensor_data" in server.extensions
        assert list(model.versions) == ["1", "3"]
        assert [(each.name, each.datatype, list(each.shape)) for each in model.inputs] == [("x", "FP32", [-1, 4])]
        return
    assert server["name"] == "rlx_ort"
    assert "statistics" in server["extensions"]
    assert model["versions"] == ["1", "3"]
    assert model["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
    assert [each["name"] for each in model["outputs"]] == ["matmul", "neg"]


def test_the_configuration_has_triton_types(client: Client) -> None:
    """With batches, the first dim is left out."""
    found = client.get_model_config("product")
    if not client.http:
        found = found.config
        assert found.max_batch_size == 256
        assert tritonclient.grpc.model_config_pb2.DataType.Name(found.input[0].data_type) == "TYPE_FP32"
        assert list(found.input[0].dims) == [4]
        return
    assert found["max_batch_size"] == 256
    assert found["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": [4]}]
    assert client.get_model_config("total")["max_batch_size"] == 0


def test_statistics_count_requests_and_failures(client: Client) -> None:
    """One success and one failure more."""

    def counts() -> tuple[int, int]:
        found = client.get_inference_statistics("product")
        if not client.http:
            spans = found.model_stats[0].inference_stats
            return spans.success.count, spans.fail.count
        spans = found["model_stats"][0]["inference_stats"]
        return spans["success"]["count"], spans["fail"]["count"]

    before = counts()
    client.run("product", X)
    with pytest.raises(InferenceServerException):
        client.run("product", X[:, :3])
    assert counts() == (before[0] + 1, before[1] + 1)


@pytest.mark.parametrize(
    ("model", "name", "array", "datatype", "message"),
    [
        ("absent", "x", X, "FP32", "no model 'absent'"),
        ("product", "z", X, "FP32", "missing: x; unknown: z"),
        ("product", "x", X[:, :3], "FP32", r"FP32 \[-1, 4\]"),
        ("product", "x", X[0], "FP32", r"FP32 \[-1, 4\]"),
        ("product", "x", X.astype(np.float64), "FP64", "given: float64"),
        ("product", "x", X[:0], "FP32", "rows"),
        ("../../etc/passwd", "x", X, "FP32", "no model|404|Not Found"),
    ],
)
def test_what_does_not_fit_is_refused(
    client: Client, model: str, name: str, array: npt.NDArray[Any], datatype: str, message: str
) -> None:
    """With the name and what the model takes; the connection stays usable."""
    with pytest.raises(InferenceServerException, match=message):
        client.infer(model, [client.tensor(name, array, datatype)])
    np.testing.assert_allclose(client.run("product", X).as_numpy("matmul"), X @ WEIGHT)


def test_an_unknown_output_is_refused(client: Client) -> None:
    """The message names those that are there."""
    with pytest.raises(InferenceServerException, match="it has matmul, neg"):
        client.run("product", X, outputs=["z"])


def test_classification_and_shared_memory_are_refused(client: Client) -> None:
    """They are extensions that this server does not have."""
    tensor, output = client.tensor("x", X, "FP32"), client.module.InferRequestedOutput("matmul", class_count=2)
    with pytest.raises(InferenceServerException, match="classification"):
        client.infer("product", [tensor], outputs=[output])
    tensor.set_shared_memory("region", 32)
    with pytest.raises(InferenceServerException, match="shared memory"):
        client.infer("product", [tensor])


def test_models_are_unloaded_and_loaded_again(client: Client, served: Served) -> None:
    """The index shows both states, and a changed file answers after its load."""
    path = served.folder / "changing.onnx"
    for factor in (1.0, 2.0):
        path.unlink(missing_ok=True)
        save_product(path, factor)
        client.load_model("changing")
        np.testing.assert_allclose(client.run("changing", X).as_numpy("matmul"), factor * X @ WEIGHT)
    client.unload_model("changing")
    with pytest.raises(InferenceServerException, match="not ready: unloaded"):
        client.run("changing", X)
    index = client.get_model_repository_index()
    rows = index if client.http else [{"name": row.name, "state": row.state} for row in index.models]
    assert {row["state"] for row in rows if row["name"] == "changing"} == {"UNAVAILABLE"}
    assert {row["state"] for row in rows if row["name"] == "product"} == {"READY"}
    with pytest.raises(InferenceServerException, match="no model 'never'"):
        client.load_model("never")
    path.unlink()
    del served.repository.entries["changing"]


def test_requests_at_a_time_run_together(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 64 clients gets its own rows, and those that come during a run have one together."""
    wrong: list[object] = []
    (lane,) = served.repository.find("product").scheduler.lanes
    run = lane.run

    def slowly(inputs: Any, wanted: Any) -> Any:
        time.sleep(0.005)
        return run(inputs, wanted)

    monkeypatch.setattr(lane, "run", slowly)

    def ask(number: int) -> None:
        client = Client("grpc", served)
        for step in range(10):
            x = np.full((1 + number % 3, 4), number + step, np.float32)
            found = client.run("product", x, outputs=["matmul"]).as_numpy("matmul")
            if not np.allclose(found, x @ WEIGHT):
                wrong.append((number, step))
        client.close()

    batches = served.repository.find("product").statistics.batches
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert max(batches) > 3


def test_a_model_whose_rows_depend_on_each_other_is_not_batched(served: Served) -> None:
    """Its second output adds up all rows; its configuration names the operator."""
    assert served.repository.find("total").batched_along is None
    config = tritonclient.grpc.InferenceServerClient(served.grpc).get_model_config("total").config
    assert "ReduceSum" in config.parameters["not_batched"].string_value
    assert served.repository.find("product").batched_along == "batch"


def test_a_stream_answers_in_order_and_goes_on_after_an_error(served: Served) -> None:
    """The bidirectional call of gRPC."""
    client = tritonclient.grpc.InferenceServerClient(served.grpc)
    answers: list[Any] = []
    arrived = threading.Event()

    def take(result: Any, error: Any) -> None:
        answers.append(error or result)
        if len(answers) == 5:
            arrived.set()

    client.start_stream(take)
    for at in range(5):
        x = np.full((1, 4 if at != 2 else 3), at, np.float32)
        tensor = tritonclient.grpc.InferInput("x", x.shape, "FP32")
        tensor.set_data_from_numpy(x)
        client.async_stream_infer("product", [tensor], request_id=str(at))
    assert arrived.wait(10)
    client.stop_stream()
    client.close()
    assert isinstance(answers[2], InferenceServerException)
    for at in (0, 1, 3, 4):
        np.testing.assert_allclose(answers[at].as_numpy("matmul"), np.full((1, 4), at, np.float32) @ WEIGHT)


def test_compressed_requests_are_read(served: Served) -> None:
    """Both of the clients' codings."""
    client = Client("http", served)
    for coding in ("gzip", "deflate"):
        found = client.run("product", X, request_compression_algorithm=coding).as_numpy("matmul")
        np.testing.assert_allclose(found, X @ WEIGHT)
    client.close()


def test_our_messages_have_the_fields_of_the_clients(served: Served) -> None:
    """Names, numbers and wire types of every field we know are those of the clients' stubs."""
    from rlx_ort.serving.messages import messages

    wire = {5: 0, 13: 0, 14: 0, 3: 0, 4: 0, 8: 0, 9: 2, 11: 2, 12: 2, 1: 1, 2: 5}  # a field's type -> how it is written
    theirs: dict[str, Any] = {}
    waiting = [
        each
        for module in (tritonclient.grpc.service_pb2, tritonclient.grpc.model_config_pb2)
        for each in module.DESCRIPTOR.message_types_by_name.values()
    ]
    while waiting:
        each = waiting.pop()
        theirs[each.name] = each
        waiting += each.nested_types
    compared = 0
    for name, ours in vars(messages).items():
        if name.startswith("HealthCheck"):
            continue
        known = {field.name: (field.number, wire[field.type]) for field in theirs[name].fields}
        for field in ours.DESCRIPTOR.fields:
            assert known[field.name] == (field.number, wire[field.type]), f"{name}.{field.name}"
            compared += 1
    assert compared > 100
