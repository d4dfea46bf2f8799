"""Recorded launches on real sessions: on the CPU provider with a driver that replays on the host, and on CUDA."""

from __future__ import annotations

import dataclasses
import gc
import threading
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from doubles.fake_recorder import FakeRecorder, record_whatever_the_clock_says
from model_corpus import user_model
from onnx_text import parsed
from sample_models.decoders import DECODER, build
from sample_models.step_graphs import assert_same, step_graph, step_inputs

from rlx_ort import CompiledGraph, CompileOptions, DecodeLoop, Device, EngineError, Graph, Session, from_onnx
from rlx_ort.execution import decode
from rlx_ort.providers.cpu import CpuProvider
from rlx_ort.providers.engine import lent_outputs, recordings, replays
from rlx_ort.providers.engine.recipe import Recording
from rlx_ort.providers.registry import default_registry

RNG = np.random.default_rng(17)
PROMPT = np.random.default_rng(7).integers(0, DECODER.vocabulary, (1, 6))


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[FakeRecorder]:
    """Make CPU sessions record with fake drivers, and return these in the order of the sessions."""
    Session("cpu")  # the probe's session must not be among them
    made: list[FakeRecorder] = []
    original = CpuProvider.recipe

    def recipe(self: CpuProvider, device: Device, options: CompileOptions) -> Any:
        def opened() -> FakeRecorder:
            made.append(FakeRecorder())
            return made[-1]

        recording = Recording(opened, options.device_graph is True) if options.device_graph else None
        return dataclasses.replace(original(self, device, options), recording=recording, ordered=opened)

    monkeypatch.setattr(CpuProvider, "recipe", recipe)
    record_whatever_the_clock_says(monkeypatch)
    return made


def test_every_path_replays_what_plain_runs_give(recorders: list[FakeRecorder]) -> None:
    """By name and by slots, over two signatures in turn, with new inputs each time."""
    compiled = Session("cpu").compile(step_graph())
    plain = Session("cpu", CompileOptions(device_graph=False)).compile(step_graph())
    for rows in (3, 5) * 8:
        (inputs,) = step_inputs(rows=rows)
        expected = plain.run(inputs)
        for found in (compiled.run(inputs), compiled.run_slots(list(inputs.values()))):
            for got, want in zip(found, expected, strict=True):
                np.testing.assert_array_equal(got, want)
    assert recorders[0].replays > 8
    assert compiled.device_graph_report().recorded
    assert plain.device_graph_report().recorded == ()


def test_large_outputs_of_runs_that_are_not_recorded_are_lent(
    recorders: list[FakeRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the caller's, and the session goes with its stream while the caller has them."""
    monkeypatch.setattr(recordings, "HOST_BOUND", 1e9)
    graph = Graph("large")
    graph.outputs = [-graph.input("x", ["n", 64])]
    compiled = Session("cpu", CompileOptions(sized_sessions=0)).compile(graph)
    rows = replays.LENT_BYTES // 256
    kept = [compiled.run({"x": np.full((rows, 64), value, np.float32)})[0] for value in range(8)]
    assert (recorders[0].replays, recorders[0].lent) == (0, 5)
    for value, got in enumerate(kept):
        np.testing.assert_array_equal(got, np.full_like(got, -value))
    compiled.close()
    gc.collect()
    assert recorders[0].closed


@pytest.mark.parametrize("name", ["distilbert-dynamo-20", "distilbert-torchscript-17"])
def test_outputs_of_an_exported_model_are_lent(
    recorders: list[FakeRecorder], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """PyTorch's first exporter gives the sizes of outputs names of their own, which inference ties to the inputs'."""
    monkeypatch.setattr(recordings, "HOST_BOUND", 1e9)
    monkeypatch.setattr(lent_outputs, "LENT_BYTES", 1)
    model = user_model(name)
    compiled = Session("cpu", CompileOptions(sized_sessions=0)).compile(from_onnx(model.model()))
    feeds = model.feeds(model.cases[-1])
    wanted = compiled.run(feeds)
    for _ in range(6):
        for got, want in zip(compiled.run(feeds), wanted, strict=True):
            np.testing.assert_array_equal(got, want)
    assert recorders[0].lent > 0


@pytest.mark.parametrize("device_graph", ["auto", False])
def test_a_graph_with_a_branch_runs_on_a_stream_that_records_nothing(
    recorders: list[FakeRecorder], device_graph: Any
) -> None:
    """CUDA's copies wait for that stream; it is there without recordings as well, and goes with the session."""
    graph = Graph("branch")
    x, flag = graph.input("x", [3]), graph.input("flag", [], "bool")
    graph.outputs = [graph.if_(flag, lambda b, v: b.neg(v), lambda b, v: v, [x])]
    compiled = Session("cpu", CompileOptions(device_graph=device_graph)).compile(graph)
    for value in (True, False) * 6:
        (got,) = compiled.run({"x": np.arange(3, dtype=np.float32), "flag": np.array(value)})
        np.testing.assert_array_equal(got, [0, -1, -2] if value else [0, 1, 2])
    assert "control flow" in compiled.device_graph_report().reason
    (stream,) = recorders
    assert stream.replays == 0
    compiled.close()
    gc.collect()
    assert stream.closed


def test_a_changed_parameter_opens_a_session_that_records_anew(recorders: list[FakeRecorder]) -> None:
    """The old recordings and their stream go with the old session."""
    graph = Graph("scaled")
    x = graph.input("x", [4])
    graph.outputs = [x * graph.param("s", [4], data=np.full(4, 2.0, np.float32))]
    compiled = Session("cpu").compile(graph)
    ones = {"x": np.ones(4, np.float32)}
    for _ in range(5):
        compiled.run(ones)
    compiled.set_param("s", np.full(4, 3.0, np.float32))
    for _ in range(5):
        np.testing.assert_array_equal(compiled.run(ones)[0], np.full(4, 3.0, np.float32))
    gc.collect()
    assert len(recorders) == 2
    assert (recorders[0].closed, recorders[0].dropped) == (True, [1])
    assert recorders[1].replays > 0
    compiled.close()
    gc.collect()
    assert recorders[1].closed


def test_outputs_left_on_the_device_are_replayed_too(recorders: list[FakeRecorder]) -> None:
    """Each run gives tensors of its own, whatever was recorded before."""
    compiled = Session("cpu").compile(step_graph())
    (inputs,) = step_inputs()
    for _ in range(5):
        expected = compiled.run(inputs)
    held = [compiled.run_dlpack(inputs) for _ in range(5)]
    assert len(compiled.device_graph_report().recorded) == 2
    (other,) = step_inputs()
    for call in (compiled.run, compiled.run_dlpack):
        call({name: array + 1 if array.dtype.kind == "f" else array for name, array in other.items()})
    for tensors in held:
        for tensor, want in zip(tensors, expected, strict=True):
            np.testing.assert_array_equal(tensor.numpy(), want)


def test_a_loop_over_device_handles_is_replayed(recorders: list[FakeRecorder]) -> None:
    """Its state stays on the device from step to step, and each step gives what a plain one gives."""
    compiled = Session("cpu").compile(step_graph())
    plain = Session("cpu", CompileOptions(device_graph=False)).compile(step_graph())
    (inputs,) = step_inputs()
    for each in (compiled, plain):
        each.bind_gpu_handle("out0", inputs["out0"])
        each.set_gpu_handle_feed("out0", 0)
    for step in range(8):
        rest = {"x": inputs["x"] + step}
        for got, want in zip(compiled.run(rest), plain.run(rest), strict=True):
            np.testing.assert_array_equal(got, want)
    assert recorders[0].replays >= 5
    assert len(compiled.device_graph_report().recorded) == 1
    np.testing.assert_array_equal(compiled.read_gpu_handle("out0"), plain.read_gpu_handle("out0"))


@pytest.mark.parametrize("form", ["cached", "masked"])
def test_steps_of_a_decode_loop_are_replayed(recorders: list[FakeRecorder], form: str) -> None:
    """The third step is recorded, five are run and replayed, and the others only replayed, in every text."""
    loop = DecodeLoop(Session("cpu").compile(build(form=form)), 32)
    for seed in (7, 8):
        prompt = np.random.default_rng(seed).integers(0, DECODER.vocabulary, (1, 6))
        loop.reset()
        found = np.stack(list(loop.generate(prompt, 16)), axis=1)
        np.testing.assert_array_equal(found, DECODER.tokens(prompt, 16))
    assert recorders[0].made == 1
    assert recorders[0].replays == 2 * 15 - recordings.PLAIN_RUNS
    (report,) = loop._compiled.device_graph_report().recorded
    assert report.inputs["input_ids"] == "int64[1, 1]"
    del loop
    gc.collect()
    assert (recorders[0].dropped, recorders[0].closed) == ([1], True)


@pytest.mark.parametrize(("what", "value"), [("spoil", 1), ("failure", "the replay failed")])
def test_a_step_whose_replay_differs_or_fails_is_run_plainly(
    recorders: list[FakeRecorder], what: str, value: object
) -> None:
    """The first comparison finds it; the plain run had its result before, and the recording is dropped."""
    compiled = Session("cpu").compile(build(form="cached"))
    compiled.open()
    setattr(recorders[0], what, value)
    found = np.stack(list(DecodeLoop(compiled, 32).generate(PROMPT, 16)), axis=1)
    np.testing.assert_array_equal(found, DECODER.tokens(PROMPT, 16))
    assert (recorders[0].replays, recorders[0].dropped) == (1, [1])


def test_steps_whose_mask_grows_are_not_recorded(
    recorders: list[FakeRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask of just the tokens there are has another shape in each step."""
    monkeypatch.setattr(decode, "_tried", lambda engine, sizes: False)
    loop = DecodeLoop(Session("cpu").compile(build(form="masked")), 32)
    found = np.stack(list(loop.generate(PROMPT, 16)), axis=1)
    np.testing.assert_array_equal(found, DECODER.tokens(PROMPT, 16))
    assert recorders[0].made == 0


def test_what_other_runs_leave_on_the_device_is_out_of_the_way_of_replayed_steps(recorders: list[FakeRecorder]) -> None:
    """Also once no other runs are recorded any more."""
    compiled = Session("cpu").compile(build(form="cached"))
    loop = DecodeLoop(compiled, 32)
    list(loop.generate(PROMPT, 16))
    inputs = {
        name: np.zeros([dim if isinstance(dim, int) else 1 for dim in kind.shape], kind.dtype.numpy)
        for name, kind in compiled.input_specs.items()
    }
    compiled.engine().session._core.recordings.give_up("for the test")
    before = recorders[0].moved
    compiled.run_dlpack(inputs)
    assert recorders[0].moved == before + len(compiled.output_specs)
    del loop
    gc.collect()
    compiled.run_dlpack(inputs)
    assert recorders[0].moved == before + len(compiled.output_specs)


def test_the_arena_is_not_shrunk_under_replayed_steps(recorders: list[FakeRecorder]) -> None:
    """Replays write to blocks of it that look free, also once no other runs are recorded."""
    compiled = Session("cpu").compile(build(form="cached"))
    loop = DecodeLoop(compiled, 32)
    list(loop.generate(PROMPT, 16))
    session = compiled.engine().session
    session._core.recordings.give_up("for the test")
    assert session.shrink_arena() is False
    del loop
    gc.collect()
    assert session.shrink_arena() is True


def test_a_mutable_parameter_is_recorded_where_it_is(recorders: list[FakeRecorder]) -> None:
    """Runs are replayed, and a changed value is in the next run."""
    graph = Graph("scaled")
    x = graph.input("x", [4])
    graph.outputs = [x * graph.param("s", [4], data=np.full(4, 2.0, np.float32), mutable=True)]
    compiled = Session("cpu").compile(graph)
    ones = {"x": np.ones(4, np.float32)}
    for value in (2.0, 3.0):
        compiled.set_param("s", np.full(4, value, np.float32))
        for _ in range(5):
            np.testing.assert_array_equal(compiled.run(ones)[0], np.full(4, value, np.float32))
    assert len(recorders) == 1
    assert recorders[0].replays > 2


def test_a_session_with_a_recorded_loop_goes_with_its_owner(recorders: list[FakeRecorder]) -> None:
    """Recordings keep the memory of tensors, not the tensors, which keep the session."""
    compiled = Session("cpu").compile(step_graph())
    (inputs,) = step_inputs()
    compiled.bind_gpu_handle("x", inputs["x"])
    for _ in range(5):
        compiled.run({"out0": inputs["out0"]})
    assert recorders[0].made
    compiled.close()
    del compiled
    assert recorders[0].closed


@pytest.mark.parametrize("how", ["auto", False])
def test_slots_write_plain_runs_to_pinned_buffers(recorders: list[FakeRecorder], monkeypatch: Any, how: Any) -> None:
    """Runs that are not recorded, or not yet, write to the same buffers, whatever the layout of what is given."""
    original, pinned = CpuProvider.recipe, []

    def buffer(like: Any) -> Any:
        pinned.append(np.empty(like.shape, like.dtype))
        return pinned[-1]

    def recipe(self: CpuProvider, device: Device, options: CompileOptions) -> Any:
        found = original(self, device, options)
        return dataclasses.replace(found, pinned=buffer, run_config={"session.none": "1"}, memory=("cpu", 0))

    monkeypatch.setattr(CpuProvider, "recipe", recipe)
    graph = Graph("sum")
    x = graph.input("x", ["n", 3])
    graph.outputs = [x * 2.0, x + x]
    compiled = Session("cpu", CompileOptions(device_graph=how)).compile(graph)
    compiled.run_slots([np.zeros((2, 3), np.float32)])
    for turned in (False, True):
        given = RNG.standard_normal((3, 2) if turned else (2, 3)).astype(np.float32)
        given = given.T if turned else given
        found = compiled.run_slots([given])
        assert [view is place for view, place in zip(found, pinned, strict=True)] == [True, True]
        for view in found:
            np.testing.assert_array_equal(view, given * 2)


def _positions() -> Graph:
    return from_onnx(parsed("(float[4] x) => (int64[1, n] y) { y = NonZero(x) }"))


def test_a_refusal_before_opening_takes_no_stream(recorders: list[FakeRecorder]) -> None:
    """A graph that cannot be recorded keeps sessions whose runs may be side by side."""
    graph = _positions()
    compiled = Session("cpu").compile(graph)
    compiled.run({"x": np.ones(4, np.float32)})
    assert recorders == []
    assert "depend on values" in compiled.device_graph_report().reason


def test_when_required_a_graph_that_cannot_be_recorded_raises(recorders: list[FakeRecorder]) -> None:
    """`device_graph=True` is no wish."""
    graph = _positions()
    compiled = Session("cpu", CompileOptions(device_graph=True)).compile(graph)
    for call in (compiled.run, lambda inputs: compiled.run_slots(list(inputs.values()))):
        with pytest.raises(EngineError, match="device_graph='auto'"):
            call({"x": np.ones(4, np.float32)})


def test_automatic_recording_changes_nothing_elsewhere(device: Device) -> None:
    """Providers that do not record run as with False, and the report has the reason."""
    if device.kind == "cuda":
        pytest.skip("CUDA records")
    compiled = Session(device, CompileOptions(device_graph="auto")).compile(step_graph())
    plain = Session(device, CompileOptions(device_graph=False)).compile(step_graph())
    for inputs in step_inputs(5):
        for got, want in zip(compiled.run(inputs), plain.run(inputs), strict=True):
            assert_same(device, got, want)
    report = compiled.device_graph_report()
    assert report.recorded == ()
    assert report.reason


# --- CUDA


@pytest.fixture
def cuda(device: Device, monkeypatch: pytest.MonkeyPatch) -> Device:
    """Return a CUDA device on which times do not decide, since other tests use it at the same time; others skip."""
    if device.kind != "cuda":
        pytest.skip("only CUDA records launches")
    record_whatever_the_clock_says(monkeypatch)
    return device


def _chain(rows: int | str = 1, width: int = 256, count: int = 6) -> Graph:
    graph = Graph("chain")
    value = graph.input("x", [rows, width])
    for index in range(count):
        data = (RNG.standard_normal((width, width)) / width**0.5).astype(np.float32)
        value = graph.tanh(value @ graph.param(f"w{index}", [width, width], data=data))
    graph.outputs = [value]
    return graph


def _x(rows: int = 1, width: int = 256) -> dict[str, Any]:
    return {"x": RNG.standard_normal((rows, width)).astype(np.float32)}


def _pair(cuda: Device, graph: Graph, how: Any = True) -> tuple[CompiledGraph, CompiledGraph]:
    """Return the graph that records and the graph that does not."""
    return tuple(Session(cuda, CompileOptions(device_graph=each)).compile(graph) for each in (how, False))  # type: ignore[return-value]


def test_every_run_on_a_recorders_stream_sets_the_gpu_first(recorders: list[FakeRecorder]) -> None:
    """By name, by slots and over tensors of the device, recorded or not."""
    compiled = Session("cpu").compile(step_graph())
    (inputs,) = step_inputs(rows=3)
    ways = (
        lambda: compiled.run(inputs),
        lambda: compiled.run_slots(list(inputs.values())),
        lambda: compiled.run_dlpack(inputs),
    )
    for way in ways:
        for _ in range(5):
            before = recorders[0].entered
            way()
            assert recorders[0].entered > before


def test_two_gpus_take_turns_in_any_thread(cuda: Device) -> None:
    """ONNX Runtime leaves a thread on the GPU of its last run if a session has a stream of its own."""
    if not default_registry().availability(Device("cuda:1")).available:
        pytest.skip("there is one GPU")
    graph = _chain("n")
    host = Session("cpu").compile(graph)
    runs = [Session(label).compile(graph).run for label in ("cuda:0", "cuda:1")]
    wrong = []

    def check(at: int, rows: int) -> None:
        inputs = _x(rows)
        found, wanted = runs[at](inputs)[0], host.run(inputs)[0]
        if not np.allclose(found, wanted, rtol=1e-4, atol=1e-5):
            wrong.append((at, rows))

    for rows in (1, 2, 3, 1, 2, 3, 1, 2, 3, 4):
        for at in (0, 1):
            check(at, rows)
            thread = threading.Thread(target=check, args=(at, rows))
            thread.start()
            thread.join()
    assert not wrong


def test_cuda_replays_give_what_plain_runs_give(cuda: Device) -> None:
    """Eighteen signatures in turn; the first run of a size through slots is one by name. New inputs each time."""
    compiled, plain = _pair(cuda, _chain("n"))
    for rows in (*range(1, 19),) * 3:
        inputs = _x(rows)
        (want,) = plain.run(inputs)
        np.testing.assert_allclose(compiled.run(inputs)[0], want, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(compiled.run_slots([inputs["x"]])[0], want, rtol=1e-5, atol=1e-6)
    assert len(compiled.device_graph_report().recorded) == 18


def test_cuda_outputs_whose_size_values_decide_have_it(cuda: Device) -> None:
    """The model declares another one, which the first runs keep; later ones have as many elements."""
    text = """(float[n, 512] x, float[2] size) => (float[n, 512] y)
    { negative = Neg (x) whole = Cast <to=7> (size) y = Reshape (negative, whole) }"""
    compiled = Session(cuda.label).compile(from_onnx(parsed(text)))
    x = np.arange(1024 * 512, dtype=np.float32).reshape(1024, 512)
    for way in (compiled.run, lambda feeds: compiled.run_slots(list(feeds.values()))):
        for shape in [x.shape] * 12 + [(512, 1024), x.shape]:
            (got,) = way({"x": x, "size": np.array(shape, np.float32)})
            np.testing.assert_array_equal(got, -x.reshape(shape))


def test_cuda_large_outputs_are_right_and_the_caller_s(cuda: Device) -> None:
    """Of sizes that take turns, in threads, while all earlier results are kept."""
    graph = Graph("large")
    weight = RNG.standard_normal((512, 512)).astype(np.float32)
    graph.outputs = [graph.input("x", ["n", 512]) @ graph.param("w", [512, 512], data=weight)]
    compiled = Session(cuda.label).compile(graph)
    results: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for rows in (130, 257, 4000) * 6:
            x = rng.standard_normal((rows, 512)).astype(np.float32)
            results.append((x, compiled.run({"x": x})[0]))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 54
    for x, got in results:
        np.testing.assert_allclose(got, x.astype(np.float64) @ weight, rtol=1e-3, atol=1e-3)


def test_cuda_records_a_launch_bound_graph_by_itself(cuda: Device) -> None:
    """After some plain runs a chain of small products is replayed, in every thread alike."""
    compiled, plain = _pair(cuda, _chain(count=12), "auto")
    cases = [_x() for _ in range(4)]
    wanted = [plain.run(inputs)[0] for inputs in cases]
    for inputs in cases:
        compiled.run(inputs)
    assert len(compiled.device_graph_report().recorded) == 1, compiled.device_graph_report()
    errors: list[float] = []

    def work(index: int) -> None:
        for _ in range(50):
            errors.append(float(np.abs(compiled.run(cases[index])[0] - wanted[index]).max()))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 200
    assert max(errors) < 1e-5


def test_cuda_attention_recorded_in_threads_that_end_stays_right(cuda: Device) -> None:
    """ONNX Runtime 1.31 keeps the kernels of f16 attention on Hopper GPUs by thread; others take their place."""
    layers = "".join(
        f"m{at} = com.microsoft.MultiHeadAttention<num_heads=12>(h{at}, h{at}, h{at}) h{at + 1} = Add(h{at}, m{at}) "
        for at in range(4)
    )
    text = f"(float16[n, 128, 384] h0) => (float16[n, 128, 384] h4) {{ {layers}}}"
    graph = from_onnx(parsed(text, imports='"com.microsoft": 1'))
    recorded: list[tuple[CompiledGraph, dict[str, Any], np.ndarray[Any, Any]]] = []
    for rows in range(1, 17):
        compiled, plain = _pair(cuda, graph)
        inputs = {"h0": RNG.standard_normal((rows, 128, 384)).astype(np.float16)}
        thread = threading.Thread(target=lambda run=compiled.run, given=inputs: [run(given) for _ in range(3)])
        thread.start()
        thread.join()
        assert compiled.device_graph_report().recorded
        recorded.append((compiled, inputs, plain.run(inputs)[0]))
        for other, given, want in recorded:
            np.testing.assert_allclose(other.run(given)[0], want, atol=2e-3 * float(np.abs(want).max()))


def test_cuda_runs_of_other_shapes_between_replays_are_right(cuda: Device) -> None:
    """Plain runs use the arena that a recording's intermediates lie in, in turn."""
    compiled, plain = _pair(cuda, _chain("n", count=12), "auto")
    small = _x(1)
    (want,) = plain.run(small)
    for _ in range(4):
        compiled.run(small)
    for rows in (64, 2, 300, 7):
        inputs = _x(rows)
        np.testing.assert_allclose(compiled.run(inputs)[0], plain.run(inputs)[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(compiled.run(small)[0], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "sizes", "last"),
    [
        ("crnn-torchscript-17", [{"batch": 1, "width": width} for width in range(48, 144, 16)], True),
        ("efficientnet-dynamo-20", [{"batch": batch} for batch in (1, 2, 3)], False),
    ],
)
def test_cuda_convolutions_of_sizes_in_turns_are_right(
    cuda: Device, name: str, sizes: list[dict[str, int]], last: bool
) -> None:
    """A change of sizes unloads kernels that cuDNN compiled, as for depthwise convolutions; one session replays others.

    Replays of unloaded kernels ended in CUDA errors 700 and 715 (H200).
    """
    model, rng = user_model(name), np.random.default_rng(5)
    compiled = Session(cuda).compile(from_onnx(model.model()))
    plain = ort.InferenceSession(model.model(), providers=["CPUExecutionProvider"])
    feeds = [model.feeds(each) for each in sizes]
    expected = [plain.run(None, each)[0] for each in feeds]
    for _ in range(6):
        for place in rng.permutation(len(feeds)):
            error = np.abs(compiled.run(feeds[place])[0] - expected[place]).max()
            assert error <= 1e-4 * np.abs(expected[place]).max()
    report = compiled.device_graph_report()
    if last:
        assert (len(report.recorded), report.sized) == (len(feeds), ()), report


def test_cuda_replays_do_not_overwrite_outputs_that_are_held(cuda: Device) -> None:
    """Outputs left on the device, before and after launches were recorded, keep their values."""
    compiled, plain = _pair(cuda, _chain("n", count=12), "auto")
    inputs = _x(32)
    (want,) = plain.run(inputs)
    for _ in range(5):
        compiled.run(inputs)
    assert compiled.device_graph_report().recorded
    held = [compiled.run_dlpack(inputs)[0] for _ in range(6)]
    for _ in range(20):
        compiled.run(_x(32))
        compiled.run_slots([_x(32)["x"]])
    for tensor in held:
        np.testing.assert_allclose(tensor.numpy(), want, rtol=1e-5, atol=1e-6)


def test_cuda_replayed_loops_over_handles_equal_plain_ones(cuda: Device) -> None:
    """A state on the device is right whatever was recorded before, and runs between the steps are as well."""
    graph = Graph("state")
    x, state = graph.input("x", [8, 64]), graph.input("state", [8, 64])
    graph.outputs = [graph.tanh(x + state)]
    compiled, plain = _pair(cuda, graph)
    inputs = {name: RNG.standard_normal((8, 64)).astype(np.float32) for name in ("x", "state")}
    for _ in range(3):
        compiled.run(inputs)
    assert compiled.device_graph_report().recorded
    for each in (compiled, plain):
        each.bind_gpu_handle("state", inputs["state"])
        each.set_gpu_handle_feed("state", 0)
    for step in range(40):
        given = {"x": inputs["x"] * (1 + step % 3)}
        np.testing.assert_allclose(compiled.run(given)[0], plain.run(given)[0], atol=1e-6)
        if step % 4 == 0:
            np.testing.assert_allclose(compiled.run(inputs)[0], np.tanh(inputs["x"] + inputs["state"]), atol=1e-6)
            for each in (compiled, plain):  # the run above moved its output into the handle as well
                each.bind_gpu_handle("state", inputs["state"])
    assert len(compiled.device_graph_report().recorded) == 3, compiled.device_graph_report()


def test_cuda_records_with_mutable_parameters(cuda: Device) -> None:
    """They are read where they are; a changed one is in the next run."""
    graph = Graph("scaled")
    x = graph.input("x", [64])
    graph.outputs = [graph.tanh(x) * graph.param("s", [64], data=np.ones(64, np.float32), mutable=True)]
    compiled = Session(cuda, CompileOptions(device_graph=True)).compile(graph)
    inputs = {"x": RNG.standard_normal(64).astype(np.float32)}
    for value in (2.0, 3.0):
        compiled.set_param("s", np.full(64, value, np.float32))
        for _ in range(6):
            np.testing.assert_allclose(compiled.run(inputs)[0], np.tanh(inputs["x"]) * value, atol=1e-6)
    assert len(compiled.device_graph_report().recorded) == 1, compiled.device_graph_report()


@pytest.mark.parametrize("how", ["auto", False])
def test_cuda_slots_give_what_runs_give(cuda: Device, how: Any) -> None:
    """Outputs are in their pinned buffers when a call returns; large ones and many calls would show it otherwise."""
    graph = Graph("large")
    x = graph.input("x", [1 << 20])
    graph.outputs = [x * 2.0, x - 1.0]
    compiled = Session(cuda, CompileOptions(device_graph=how)).compile(graph)
    cases = [RNG.standard_normal(1 << 20).astype(np.float32) for _ in range(4)]
    for turn in range(60):
        given = cases[turn % 4]
        double, less = compiled.run_slots([given])
        np.testing.assert_array_equal(double, given * 2)
        np.testing.assert_array_equal(less, given - 1)
    held = double
    compiled.close()
    np.testing.assert_array_equal(held, cases[3] * 2)


def _failing(self: replays.FixedRun, launch: Any = replays.FixedRun.launch) -> None:
    launch(self)
    raise RuntimeError("in the middle")


def _waiting(self: replays.FixedRun) -> None:
    self._session.run_with_iobinding(self._io, self._options)  # waits for the device, which no capture allows


@pytest.mark.parametrize(("launch", "reason"), [(_failing, "in the middle"), (_waiting, "")], ids=["fails", "waits"])
def test_a_run_that_cannot_be_captured_leaves_the_session_usable(
    cuda: Device, monkeypatch: pytest.MonkeyPatch, launch: Any, reason: str
) -> None:
    """Whether its capture is ended in the middle or ONNX Runtime fails inside: later runs are right."""
    monkeypatch.setattr(replays.FixedRun, "launch", launch)
    compiled, plain = _pair(cuda, _chain(), "auto")
    for _ in range(6):
        inputs = _x()
        np.testing.assert_allclose(compiled.run(inputs)[0], plain.run(inputs)[0], rtol=1e-5, atol=1e-6)
    report = compiled.device_graph_report()
    assert not report.recorded
    assert report.reason
    assert reason in report.reason


def test_many_concatenated_inputs_are_right_with_and_without_recording(cuda: Device) -> None:
    """Concat of many inputs copies a table of addresses from host memory; a replay must not read a stale one."""
    graph = Graph("concat")
    values = [graph.input(f"x{index}", [2, 3]) for index in range(80)]
    graph.outputs = [graph.tanh(graph.concat(values, 0))]
    compiled, plain = _pair(cuda, graph, "auto")
    for _ in range(80):
        inputs = {f"x{index}": RNG.standard_normal((2, 3)).astype(np.float32) for index in range(80)}
        want = np.tanh(np.concatenate(list(inputs.values()), 0))
        np.testing.assert_allclose(compiled.run(inputs)[0], want, atol=1e-6)
        np.testing.assert_allclose(plain.run(inputs)[0], want, atol=1e-6)


def test_cuda_close_frees_recordings(cuda: Device) -> None:
    """Twenty sessions that record leave no streams or graphs behind that the driver would run out of."""
    graph = Graph("small")
    x = graph.input("x", [4])
    graph.outputs = [graph.tanh(x)]
    for _ in range(20):
        with Session(cuda, CompileOptions(device_graph=True)).compile(graph) as compiled:
            for _ in range(5):
                np.testing.assert_allclose(compiled.run({"x": np.zeros(4, np.float32)})[0], np.zeros(4))
                compiled.run_slots([np.zeros(4, np.float32)])
            assert len(compiled.device_graph_report().recorded) == 2


def _concat() -> Graph:
    """Return a graph that joins 80 inputs, whose addresses the kernel copies from host memory."""
    graph = Graph("concat")
    graph.outputs = [graph.concat([graph.input(f"x{index}", [2, 3]) for index in range(80)], 0)]
    return graph


@pytest.mark.parametrize("how", ["auto", False])
def test_cuda_close_is_clean_where_kernels_copy_from_the_host(cuda: Device, how: Any) -> None:
    """Sessions with pinned buffers that runs have left would abort the process, 20 of them almost surely."""
    inputs = {f"x{index}": np.full((2, 3), index, np.float32) for index in range(80)}
    for runs in range(5, 25):
        with Session(cuda, CompileOptions(device_graph=how)).compile(_concat()) as compiled:
            for _ in range(runs):
                np.testing.assert_array_equal(compiled.run(inputs)[0], np.concatenate(list(inputs.values())))


@pytest.mark.parametrize("how", ["auto", False])
def test_cuda_close_is_clean_after_runs_in_threads(cuda: Device, how: Any) -> None:
    """Each run in flight leaves buffers of its own."""
    inputs = {f"x{index}": np.full((2, 3), index, np.float32) for index in range(80)}
    for _ in range(5):
        with Session(cuda, CompileOptions(device_graph=how)).compile(_concat()) as compiled:

            def work(compiled: CompiledGraph = compiled) -> None:
                for _ in range(20):
                    compiled.run(inputs)
                compiled.run_dlpack(inputs)

            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()


@pytest.mark.webgpu
def test_a_device_graph_replays_with_new_inputs() -> None:
    """Recorded launches give new results for new inputs, on every path."""
    graph = Graph("static")
    x = graph.input("x", [2, 4])
    state = graph.input("state", [2, 4])
    graph.outputs = [graph.tanh(x + state)]
    compiled = Session("webgpu", CompileOptions(device_graph=True)).compile(graph)
    plain = Session("webgpu").compile(graph)
    for _ in range(4):
        inputs = {name: RNG.standard_normal((2, 4)).astype(np.float32) for name in ("x", "state")}
        expected = plain.run(inputs)[0]
        np.testing.assert_allclose(compiled.run(inputs)[0], expected, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(compiled.run_slots(list(inputs.values()))[0], expected, rtol=1e-6, atol=1e-6)
    compiled.bind_gpu_handle("state", inputs["state"])
    compiled.set_gpu_handle_feed("state", 0)
    plain.bind_gpu_handle("state", inputs["state"])
    plain.set_gpu_handle_feed("state", 0)
    for _ in range(3):
        np.testing.assert_allclose(
            compiled.run({"x": inputs["x"]})[0], plain.run({"x": inputs["x"]})[0], rtol=1e-6, atol=1e-6
        )


@pytest.mark.webgpu
def test_a_device_graph_needs_static_shapes() -> None:
    """Dims without a size are refused, with the option that binds them."""
    compiled = Session("webgpu", CompileOptions(device_graph=True)).compile(step_graph())
    with pytest.raises(EngineError, match="dims="):
        compiled.run(step_inputs()[0])
