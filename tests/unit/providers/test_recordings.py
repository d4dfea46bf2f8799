"""When runs are recorded, replayed, refused and forgotten; with a driver and a session that are numpy."""

from __future__ import annotations

import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from doubles.fake_recorder import FakeRecorder
from onnx_text import parsed

from rlx_ort import DType, EngineError
from rlx_ort.ir.types import TensorType
from rlx_ort.providers.base import NodeAssignment
from rlx_ort.providers.engine import cuda_driver, recordings, replays
from rlx_ort.providers.engine.recordable import host_work, unrecordable
from rlx_ort.providers.engine.recordings import Recordings
from rlx_ort.providers.engine.replays import (
    BrokenSessionError,
    FixedRun,
    LaterError,
    NotRecordedError,
    check_replay,
)

SHARED = object()
EP = "CUDAExecutionProvider"


class Tensor:
    """A tensor on a device that is the host: a copy of an array."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = np.array(array)
        self.address, self.shape, self.dtype = self.array.ctypes.data, self.array.shape, self.array.dtype

    @property
    def value(self) -> Any:
        """What is bound."""
        return self.array

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return a copy of the array."""
        return self.array.copy()


class Doubling:
    """A session whose output `y` is twice its input `x`; counts its plain runs."""

    def __init__(self) -> None:
        self.runs = 0
        self.broken = ""
        self.warm_ns = 1, 1  # to launch, and in all
        self.kernels = threading.local()  # loaded by the first launch of a thread, gone with it

    def run(self, names: Any, feeds: Any, options: Any) -> list[Any]:
        """Run plainly."""
        self.runs += 1
        return [feeds["x"] * 2]

    def bind(self, ins: Any, outs: Any) -> Any:
        """Return the run over fixed buffers."""
        x = ins["x"].value if isinstance(ins["x"], Tensor) else np.zeros(ins["x"].shape, ins["x"].dtype)
        y = np.zeros(outs["y"].shape, outs["y"].dtype)

        def launch() -> None:
            if not hasattr(self.kernels, "loaded"):
                self.kernels.loaded = np.zeros(1)
            y[...] = x * 2

        def warm_up(wait: Any) -> tuple[int, int]:
            launch()
            wait()
            return self.warm_ns

        def settle() -> None:
            if self.broken:
                raise BrokenSessionError(self.broken)
            y.fill(1)

        return SimpleNamespace(
            addresses=([x.ctypes.data], [y.ctypes.data]), launch=launch, warm_up=warm_up, settle=settle, keep=(x, y)
        )


@pytest.fixture(autouse=True)
def always_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep recordings whatever the clock says; one test sets the limit itself."""
    monkeypatch.setattr(replays, "WORTH", 1e9)
    monkeypatch.setattr(recordings, "TIMED_PAIRS", 1)


def made(required: bool = False, replans: bool = False) -> tuple[Recordings, Doubling, FakeRecorder]:
    """Return recordings over a doubling session and a fake driver."""
    session, driver = Doubling(), FakeRecorder()
    lock = threading.RLock()
    found = Recordings(
        driver,
        session.run,
        session.bind,
        Tensor,
        lock,
        SHARED,
        required=required,
        errors=(RuntimeError,),
        replans=replans,
    )
    return found, session, driver


def run(found: Recordings, *shape: int, value: float = 3.0, options: Any = SHARED) -> np.ndarray[Any, Any]:
    """Run on an array of one value and return the output."""
    (result,) = found.run(["y"], {"x": np.full(shape, value, np.float32)}, options)
    return result


def step(found: Recordings, session: Doubling, x: Any) -> Any:
    """Run on a tensor or an array and return the output as a tensor."""

    def plain() -> list[Any]:
        session.runs += 1
        return [Tensor((x.array if isinstance(x, Tensor) else x) * 2)]

    (result,) = found.run_values(["y"], {"x": x}, frozenset("y"), plain)
    return result


def test_the_third_plain_run_of_a_signature_is_recorded_and_the_fourth_replays() -> None:
    """Two runs are plain, the third is plain and recorded, then ONNX Runtime is not called any more."""
    found, session, driver = made()
    for count in (1, 2):
        run(found, 4)
        assert (driver.made, session.runs) == (0, count)
    run(found, 4)
    assert driver.made == 1
    before = session.runs
    np.testing.assert_array_equal(run(found, 4, value=-1.5), np.full(4, -3.0, np.float32))
    assert session.runs == before


def test_a_run_that_the_device_takes_the_time_of_is_not_tried() -> None:
    """A replay saves launches only; trying it takes a dozen runs, which may be long."""
    found, session, driver = made()
    session.warm_ns = 400_000, 1_000_000
    for _ in range(5):
        run(found, 4)
    assert (driver.made, session.runs) == (0, 5)
    (reason,) = found.report().refused.values()
    assert reason == "of 1000 us, launching takes 400 us"
    found, again, driver = made()
    again.warm_ns = 600_000, 1_000_000
    for _ in range(3):
        run(found, 4)
    assert driver.made == 1


def test_run_returns_arrays_that_later_runs_leave_alone() -> None:
    """Replays write to one buffer, of which `run` returns copies."""
    found, _, _ = made()
    for _ in range(3):
        run(found, 4)
    first = run(found, 4, value=1.0)
    run(found, 4, value=2.0)
    np.testing.assert_array_equal(first, np.full(4, 2.0, np.float32))


def test_slots_have_buffers_that_plain_replays_do_not_touch() -> None:
    """Each owner's recording has buffers of its own, which its next run overwrites."""
    found, _, _ = made()
    x = np.ones(4, np.float32)
    for _ in range(4):
        (view,) = found.run_slots(1, ["y"], {"x": x}, None)
        run(found, 4, value=5.0)
        found.run_slots(2, ["y"], {"x": x * 7}, None)
    np.testing.assert_array_equal(view, np.full(4, 2.0, np.float32))
    assert found.run_slots(1, ["y"], {"x": x * 4}, None)[0] is view
    np.testing.assert_array_equal(view, np.full(4, 8.0, np.float32))


def test_a_state_on_the_device_is_replayed_from_step_to_step() -> None:
    """From the fourth step on the engine is not called, and each step reads what the last one left."""
    found, session, driver = made()
    state = Tensor(np.ones(4, np.float32))
    for _ in range(3):
        state = step(found, session, state)
    before = session.runs
    for _ in range(3):
        state = step(found, session, state)
    assert (driver.made, session.runs, driver.replays >= 4) == (1, before, True)
    np.testing.assert_array_equal(state.numpy(), np.full(4, 64.0, np.float32))


def test_tensors_that_runs_left_are_theirs_alone() -> None:
    """A plain run's output is copied out of the arena, and a replay's out of the buffer that replays write to."""
    found, session, _ = made()
    held = [step(found, session, Tensor(np.full(4, count, np.float32))) for count in range(7)]
    for count, tensor in enumerate(held):
        np.testing.assert_array_equal(tensor.numpy(), np.full(4, 2 * count, np.float32))
    assert len({tensor.address for tensor in held}) == 7


def test_a_tensor_that_stays_the_same_is_read_where_it_is() -> None:
    """A parameter is not copied before each replay; one that changes is recorded anew, and is copied from then on."""
    found, session, driver = made()
    weight = Tensor(np.ones(4, np.float32))
    for _ in range(4):
        step(found, session, weight)
    before, made_before = driver.moved, driver.made
    step(found, session, weight)
    assert driver.moved - before == 1  # the output
    for value in (5.0, 6.0, 7.0):
        other = Tensor(np.full(4, value, np.float32))
        for _ in range(4):
            np.testing.assert_array_equal(step(found, session, other).numpy(), np.full(4, 2 * value, np.float32))
    assert (driver.dropped, driver.made) == ([made_before], made_before + 1)


def test_a_state_that_grows_ends_recording() -> None:
    """Copying each output of plain runs costs more than it may bring; eight runs in a row show that."""
    found, session, _ = made()
    for rows in range(1, 9):
        assert found.active
        step(found, session, Tensor(np.ones(rows, np.float32)))
    assert "left outputs on the device" in found.report().reason


def test_a_large_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording needs the state's memory once more."""
    monkeypatch.setattr(recordings, "MOST_DEVICE_BYTES", 1 << 20)
    found, session, driver = made()
    for _ in range(4):
        step(found, session, Tensor(np.ones(1 << 18, np.float32)))
    assert driver.made == 0
    assert "another 2 MB would be needed on the device" in found.report().reason


def test_a_wrong_replay_is_refused_with_the_reason() -> None:
    """The outputs of the first replay are compared with those of a plain run on the same inputs."""
    found, session, driver = made()
    driver.spoil = 1
    for _ in range(5):
        np.testing.assert_array_equal(run(found, 4), np.full(4, 6.0, np.float32))
    assert driver.dropped == [1]
    assert "error of 1.7e-01" in found.report().reason
    assert session.runs == 5


def test_a_replay_that_is_not_faster_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording that saves nothing would cost memory and make runs take turns for nothing."""
    monkeypatch.setattr(replays, "WORTH", 0.0)
    found, _, driver = made()
    for _ in range(3):
        run(found, 4)
    assert driver.dropped == [1]
    assert "us, a plain run" in found.report().reason


def test_the_driver_s_refusal_ends_recording_and_not_the_run() -> None:
    """What cannot be recorded runs plainly, and the report gives the driver's reason."""
    found, _, driver = made()
    driver.refusal = "the run launches a host function"
    for _ in range(5):
        np.testing.assert_array_equal(run(found, 4), np.full(4, 6.0, np.float32))
    assert found.report().reason == driver.refusal
    assert not found.active


def test_a_refused_signature_leaves_the_others_alone() -> None:
    """One signature that cannot be recorded does not keep the next from it."""
    found, _, driver = made()
    run(found, 8)  # undecided, so the session goes on
    driver.refusal = "not this one"
    for _ in range(3):
        run(found, 4)
    driver.refusal = ""
    for _ in range(3):
        run(found, 8)
    report = found.report()
    assert [one.inputs for one in report.recorded] == [{"x": "float32[8]"}]
    assert report.refused == {"x float32[4]": "not this one"}


def test_when_required_a_refusal_is_an_error_from_then_on() -> None:
    """The error has the reason and what to do."""
    found, _, driver = made(required=True)
    driver.refusal = "a reason"
    for _ in range(2):
        run(found, 4)
    for _ in range(2):
        with pytest.raises(EngineError, match=r"a reason; compile with device_graph='auto'"):
            run(found, 4)


@pytest.mark.parametrize("refusal", ["", "a node"])
def test_a_session_that_a_recording_broke_is_marked(refusal: str) -> None:
    """It records no more, and its owner must not destroy it."""
    found, session, driver = made()
    session.broken, driver.refusal = "RuntimeError: error 901", refusal
    for _ in range(5):
        run(found, 4)
    assert found.broken
    assert not found.active
    assert "error 901" in found.report().reason


def test_the_recording_used_longest_ago_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are at most 16 here; another one frees one, and its signature runs plainly again."""
    monkeypatch.setattr(recordings, "MOST_RECORDINGS", 16)
    found, _, driver = made(required=True)
    for rows in range(1, 17):
        for _ in range(3):
            run(found, rows)
    run(found, 1)
    for _ in range(3):
        run(found, 17)
    assert driver.dropped == [2]
    assert [one.inputs["x"] for one in found.report().recorded] == [f"float32[{n}]" for n in (*range(3, 17), 1, 17)]


def test_recordings_are_limited_by_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of 48 bytes are more than 100."""
    monkeypatch.setattr(recordings, "MOST_RECORDED_BYTES", 100)
    found, _, driver = made()
    for rows in (4, 5, 6):
        for _ in range(3):
            run(found, rows)
    assert [one.inputs["x"] for one in found.report().recorded] == ["float32[5]", "float32[6]"]
    assert driver.dropped == [1]


def test_recording_waits_where_it_took_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of tries is bounded as well as their number."""
    monkeypatch.setattr(recordings, "FIRST_TRIES_NS", 1)
    found, _, driver = made()
    for rows in (4, 5):
        for _ in range(4):
            run(found, rows)
    assert driver.made == 1


def test_a_plain_run_of_another_size_drops_recordings_that_it_would_spoil() -> None:
    """Where kernels are planned anew for each size, the code that a recording launches is gone after it."""
    found, session, driver = made(replans=True)
    for _ in range(4):
        run(found, 4)
    assert driver.dropped == []
    run(found, 5)
    assert driver.dropped == [1]
    before = session.runs
    run(found, 4)
    assert session.runs == before + 1


def test_recordings_of_kernels_that_stay_last() -> None:
    """A text recogniser then replays every width that it has seen, in one session."""
    found, session, driver = made(replans=True)
    driver.lasting = True
    for rows in (4, 5, 6) * 4:
        run(found, rows)
    before = session.runs
    for rows in (4, 6, 5):
        assert found.lasts(["y"], {"x": np.ones(rows, np.float32)})
        run(found, rows)
    assert (session.runs, driver.made, driver.dropped) == (before, 3, [])


@pytest.mark.parametrize(("required", "runs"), [(False, 4), (True, 3)])
def test_a_run_is_recorded_later_while_a_session_opens(
    monkeypatch: pytest.MonkeyPatch, required: bool, runs: int
) -> None:
    """With the next run of its kind, or, where it must be recorded, once the session is open."""
    found, session, driver = made(required=required)
    record, refusals = driver.record, [LaterError("a session opens")]

    def busy(*given: Any) -> Any:
        if refusals:
            raise refusals.pop()
        return record(*given)

    monkeypatch.setattr(driver, "record", busy)
    for _ in range(5):
        np.testing.assert_array_equal(run(found, 4), np.full(4, 6.0))
    assert (driver.made, session.runs >= runs, found.report().refused) == (1, True, {})


def test_what_waits_for_a_gpu_is_kept_apart_from_recordings() -> None:
    """It waits for a recording; while it lasts, there is none."""
    apart, began = cuda_driver._Apart(), []

    def opens() -> None:
        with apart.other():
            began.append(1)

    with apart.recording():
        thread = threading.Thread(target=opens)
        thread.start()
        thread.join(0.05)
        assert not began
    thread.join()
    assert began
    with apart.other():
        with pytest.raises(LaterError), apart.recording():
            pass
        with apart.other():
            pass
    with apart.recording():
        pass


@pytest.mark.parametrize(
    ("kernel", "stays"),
    [
        ("_ZN5cudnn3cnn28conv2d_grouped_direct_kernelILb0ELb1ELb0ELb0ELb0ELb0ELi1ELi0EiffffffEEv", True),
        ("sm80_xmma_fprop_implicit_gemm_f32f32_f32f32_f32_nchwkcrs_nchw_g1_ffma_execute_kernel__5x_cudnn", True),
        ("ampere_sgemm_32x32_sliced1x4_tn", True),
        ("conv2d_c1_k1_nchw_hw_packed", False),
        ("cudnn_generated_sass_convFwd_sm80_knob_7", False),
        ("", False),
    ],
)
def test_kernels_that_cudnn_compiles_for_a_plan_are_known_by_their_names(kernel: str, stays: bool) -> None:
    """They have names of C; those of libraries have names of C++, or of NVIDIA's generators."""
    assert cuda_driver.stays_loaded(kernel) is stays


def test_a_stoppable_run_drops_them_too() -> None:
    """It is plain, and of whatever size."""
    found, _, driver = made(replans=True)
    for _ in range(4):
        run(found, 4)
    run(found, 5, options=object())
    assert driver.dropped == [1]


def test_recording_ends_where_sizes_take_turns_and_spoil_each_other() -> None:
    """Each try takes ten runs."""
    found, _, driver = made(replans=True)
    for rows in (4, 5) * 10:
        for _ in range(4):
            run(found, rows)
    assert driver.made == recordings.MOST_CHANGES
    assert found.report().reason == "its sizes take turns, and each change plans convolutions anew"


def test_signatures_that_take_turns_are_seldom_recorded_until_one_of_them_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server with one client after many: whatever its batch size is, it is recorded at most 256 runs later."""
    monkeypatch.setattr(recordings, "FIRST_TRIES", 20)
    monkeypatch.setattr(recordings, "MOST_RECORDINGS", 16)
    found, session, driver = made()
    for _ in range(200):
        for rows in range(1, 25):
            run(found, rows)
    assert driver.made <= recordings.FIRST_TRIES + session.runs / recordings.RUNS_PER_TRY
    assert "take turns" in "".join(found.report().refused.values())
    for rows in range(1, 25):
        for _ in range(recordings.RUNS_PER_TRY):
            run(found, rows)
        before = session.runs
        run(found, rows)
        assert session.runs == before


def test_recording_ends_where_no_signature_comes_again() -> None:
    """A session whose shapes change with each run does not look at them for ever."""
    found, _, _ = made()
    for rows in range(1, 65):
        run(found, rows)
    assert "no input signature came 3 times in 64 runs" in found.report().reason


@pytest.mark.parametrize(
    ("array", "reason"), [(np.zeros(0, np.float32), "empty"), (np.zeros(17 << 20, np.float32), "MB")]
)
def test_empty_and_large_tensors_are_refused(array: np.ndarray[Any, Any], reason: str) -> None:
    """There is nothing to copy, or too much pinned memory to keep."""
    found, _, driver = made()
    for _ in range(3):
        found.run(["y"], {"x": array}, SHARED)
    assert driver.made == 0
    assert reason in found.report().reason


def test_a_run_with_options_of_its_own_is_plain() -> None:
    """A replay could not be stopped by them."""
    found, session, _ = made()
    for _ in range(3):
        run(found, 4)
    before = session.runs
    run(found, 4, options=object())
    assert session.runs == before + 1


def test_giving_up_frees_every_recording() -> None:
    """The reason is in the report, and later runs are plain."""
    found, session, driver = made(required=True)
    for _ in range(3):
        run(found, 4)
    found.give_up("outputs were left on the device")
    before = session.runs
    run(found, 4)
    assert (driver.dropped, session.runs) == ([1], before + 1)
    assert found.report().recorded == ()
    assert found.report().reason == "outputs were left on the device"


def test_runs_of_threads_do_not_mix() -> None:
    """Four threads get the results of their own inputs."""
    found, _, _ = made()
    wrong = []

    def work(value: float) -> None:
        for _ in range(200):
            got = run(found, 64, value=value)
            if not np.array_equal(got, np.full(64, 2 * value, np.float32)):
                wrong.append((value, got))

    threads = [threading.Thread(target=work, args=(float(n),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_floats_may_differ_by_roundings() -> None:
    """Kernels with atomic additions do not repeat themselves to the bit; NaN equals NaN."""
    want = np.array([1.0, np.nan, np.inf, 1e-9], np.float32)
    check_replay(["y"], [want], [want * np.float32(1 + 4e-7)])
    with pytest.raises(NotRecordedError, match="'y'"):
        check_replay(["y"], [want], [np.array([1.0, 0.0, np.inf, 0.0], np.float32)])
    with pytest.raises(NotRecordedError, match="'y'"):
        check_replay(["y"], [np.array([1, 2])], [np.array([1, 3])])


@pytest.mark.parametrize(
    ("op", "domain", "text"),
    [
        ("If", "", "control flow"),
        ("RandomNormal", "", "random"),
        ("NonZero", "", "depend on values"),
        ("Mine", "my.ops", "domain my.ops"),
    ],
)
def test_some_nodes_are_never_recorded(op: str, domain: str, text: str) -> None:
    """The reason names the node."""
    nodes = [NodeAssignment(EP, "first", "", "Add"), NodeAssignment(EP, "second", domain, op)]
    reason = unrecordable(nodes, {"x": TensorType(DType.F32)})
    assert "second" in reason
    assert text in reason


@pytest.mark.parametrize("dtype", [DType.STRING, DType.BF16, DType.U4])
def test_some_types_are_never_recorded(dtype: DType) -> None:
    """What numpy cannot hold is not staged in pinned memory."""
    assert "'x'" in unrecordable([], {"x": TensorType(dtype)})
    assert unrecordable([], {"x": TensorType(DType.F16)}) == ""


def _session(inputs: list[tuple[str, int]], outputs: list[tuple[str, int]]) -> Any:
    """Return a session with inputs and outputs in memories of these names and types."""
    named = [SimpleNamespace(name=name) for name in "abc"]
    infos = [[SimpleNamespace(name=n, device_mem_type=t) for n, t in side] for side in (inputs, outputs)]
    return SimpleNamespace(
        get_inputs=lambda: named[: len(inputs)],
        get_outputs=lambda: named[: len(outputs)],
        get_input_memory_infos=lambda: infos[0],
        get_output_memory_infos=lambda: infos[1],
    )


def test_host_work_is_found_in_placements_and_memories() -> None:
    """A node elsewhere, an input that the host reads, and an output that it makes."""
    here = [NodeAssignment(EP, "n", "", "Add")]
    device, host, pinned = ("", 0), ("Cpu", 0), ("", 5)
    assert host_work(EP, "cuda", here, _session([device], [device])) == ""
    assert "CPUExecutionProvider" in host_work(
        EP, "cuda", [*here, NodeAssignment("CPUExecutionProvider", "m", "", "Atan")], _session([device], [device])
    )
    assert host_work(EP, "cuda", here, _session([device, host], [device])) == "input 'b' is in host memory"
    assert host_work(EP, "cuda", here, _session([device], [device, pinned])) == "output 'b' is in host memory"


def test_a_large_output_is_new_in_each_replay_and_keeps_its_values() -> None:
    """Its memory is the caller's as long as the caller has it: a later replay does not write there."""
    found, session, driver = made()
    elements = replays.LENT_BYTES // 4
    for _ in range(3):
        run(found, elements)
    plain_runs = session.runs
    first = run(found, elements, value=1.0)
    second = run(found, elements, value=2.0)
    assert (driver.replays >= 2, session.runs) == (True, plain_runs)
    np.testing.assert_array_equal(first, np.full(elements, 2.0, np.float32))
    np.testing.assert_array_equal(second, np.full(elements, 4.0, np.float32))


@pytest.fixture
def host_memory(monkeypatch: pytest.MonkeyPatch) -> dict[int, Any]:
    """Take the driver's pinned memory from numpy; return what is allocated, by address."""
    allocated: dict[int, Any] = {}

    def allocate(context: int, nbytes: int) -> int:
        block = np.empty(nbytes, np.uint8)
        allocated[block.ctypes.data] = block
        return int(block.ctypes.data)

    monkeypatch.setattr(cuda_driver, "_allocated", allocate)
    monkeypatch.setattr(cuda_driver, "_free_host", lambda context, address: allocated.pop(address))
    return allocated


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("strided", [True, False])
def test_a_large_input_in_pinned_memory_is_copied_from_where_it_is(pinned: bool, strided: bool) -> None:
    """Any other one is brought into memory of the recording first; both give what a plain run gives."""
    found, _, driver = made()
    size = replays.LENT_BYTES // 4
    for _ in range(3):
        run(found, size)
    for value in (1.0, -2.0):
        x = np.full(2 * size, value, np.float32)[:: 2 if strided else 1][:size]
        driver.pinned = x.ctypes.data if pinned else 0
        (result,) = found.run(["y"], {"x": x}, SHARED)
        np.testing.assert_array_equal(result, np.full(size, 2 * value, np.float32))
        assert (driver.sources[-2] == x.ctypes.data) == (pinned and not strided)


def test_lent_memory_is_lent_again_when_its_last_view_is_gone(host_memory: dict[int, Any]) -> None:
    """A slice keeps it."""
    lender, like = cuda_driver._Lender(0), np.zeros((4, 8), np.float32)
    array = lender.lend(like)
    view, address = array[1:], array.ctypes.data
    del array
    other = lender.lend(like)
    assert (other.ctypes.data == address, other.shape, other.dtype) == (False, (4, 8), np.float32)
    del view
    assert lender.lend(like).ctypes.data == address


def test_memory_is_freed_while_a_session_ends_in_the_middle_of_it(
    host_memory: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Garbage may be collected in any call, and its finalizers free as well; the thread waited for itself."""
    lender = cuda_driver._Lender(0)
    lender.lend(np.zeros(600, np.uint8))

    def free(context: int, address: int) -> None:
        lender.free_idle()
        host_memory.pop(address)

    monkeypatch.setattr(cuda_driver, "_free_host", free)
    worker = threading.Thread(target=lender.free_idle, daemon=True)
    worker.start()
    worker.join(10)
    assert not worker.is_alive()
    assert not host_memory


def test_no_more_memory_is_pinned_than_the_limit(host_memory: dict[int, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle memory of other sizes goes first; beyond the limit arrays are of ordinary memory."""
    monkeypatch.setattr(cuda_driver, "MOST_LENT_BYTES", 1000)
    lender = cuda_driver._Lender(0)
    lender.lend(np.zeros(600, np.uint8))
    held = [lender.lend(np.zeros(700, np.uint8)) for _ in range(2)]
    assert sum(block.nbytes for block in host_memory.values()) == 700
    assert [array.nbytes for array in held] == [700, 700]
    held.clear()
    lender.free_idle()
    assert not host_memory


def test_kernels_that_belong_to_a_thread_are_loaded_before_a_recording_and_last_as_long() -> None:
    """The thread that runs ends here, as one of a user or of a server does; ONNX Runtime keeps some plans by thread."""
    found, session, driver = made()
    loaded: list[weakref.ref[Any]] = []
    original = driver.record

    def record(*arguments: Any) -> Any:
        loaded.append(weakref.ref(session.kernels.loaded))
        return original(*arguments)

    driver.record = record  # type: ignore[method-assign]
    thread = threading.Thread(target=lambda: [run(found, 4) for _ in range(3)])
    thread.start()
    thread.join()
    assert driver.made == 1
    assert loaded[0]() is not None
    driver.close()
    deadline = time.monotonic() + 10
    while loaded[0]() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert loaded[0]() is None


def test_the_last_run_of_a_warm_up_waits() -> None:
    """It frees the host buffers that runs without a wait keep, since the session may be closed next."""
    text = "(float[2] x) => (float[2] y) { y = Add (x, x) }"
    real: Any = ort.InferenceSession(parsed(text).SerializeToString(), providers=["CPUExecutionProvider"])
    waits, quiet = ort.RunOptions(), ort.RunOptions()
    used: list[object] = []

    def run_with_iobinding(io: Any, options: Any) -> None:
        used.append(options)
        real.run_with_iobinding(io, options)

    session = SimpleNamespace(io_binding=real.io_binding, run_with_iobinding=run_with_iobinding)
    x = np.ones(2, np.float32)
    bound = FixedRun(ort, session, ("cpu", 0), (waits, quiet), (RuntimeError,), {"x": x}, {"y": x})
    bound.warm_up(lambda: None)
    assert quiet in used
    assert used[-1] is waits
