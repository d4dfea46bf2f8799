"""What kills a process that uses ONNX Runtime from Python is refused or guarded here, in processes beside this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlx_ort.device import Device

ROOT = Path(__file__).resolve().parents[3]
LESS_THAN_THE_LONGEST_WAIT_S = 25.0  # for threads that are inside ONNX Runtime, which is 30 s

HEAD = """
import gc, os, sys, threading, time
import numpy as np
import onnx, onnx.numpy_helper, onnx.parser
from rlx_ort.converters.from_onnx import from_onnx
from rlx_ort.converters.files import load_graph
from rlx_ort.errors import DeviceUnavailableError, EngineError, InputError, RlxError
from rlx_ort.options.compile_options import CompileOptions, WeightSharing
from rlx_ort.execution.session import Session
from rlx_ort.ir.graph import Graph

def imported(text):
    return from_onnx(onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 21]> g ' + text))

def matmul(width=64, data=True):
    graph = Graph("g")
    x = graph.input("x", ["n", width])
    w = graph.param("w", [width, width], data=np.eye(width, dtype=np.float32) if data else None)
    graph.outputs = [x @ w]
    return graph

def mapped(path):
    proto = onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 21]> g '
        '(int64[n] i) => (float[n,1024] y) { y = Gather(w, i) }')
    table = np.arange(4096 * 1024, dtype=np.float32).reshape(4096, 1024)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(table, "w"))
    onnx.save(proto, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    return Session("cpu", CompileOptions(sharing=WeightSharing.RAW)).compile(load_graph(path))

def endless():
    text = '''(float[64,64] x) => (float[64,64] y)
        <int64 n = {9223372036854775807}, bool c = {1}>
        { y = Loop (n, c, x) <body = b (int64 i, bool k, float[64,64] v) => (bool k2, float[64,64] v2)
          { k2 = Identity (k) v2 = MatMul (v, v) }> }'''
    compiled = Session("cpu", CompileOptions(intra_op_threads=1)).compile(imported(text))
    return compiled, {"x": np.eye(64, dtype=np.float32)}

def ended(child):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, 9)
    return "the child hangs"
"""


def _python(code: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter and return how it ended."""
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-P", "-c", HEAD + code],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=timeout_s,
        check=False,
    )


def _ends(code: str) -> str:
    """Run code in a fresh interpreter, which then ends well and soon, and return what it wrote to stderr.

    Its end alone is timed: a busy machine takes many seconds to start it.
    """
    done = _python(f"{code}\nprint(time.monotonic(), flush=True)\n", timeout_s=120)
    took_s = time.monotonic() - float(done.stdout or "nan")
    assert done.returncode == 0, done.stderr
    assert took_s < LESS_THAN_THE_LONGEST_WAIT_S, done.stderr
    return done.stderr


def _fine(code: str) -> None:
    done = _python(code)
    assert (done.returncode, done.stdout.strip()) == (0, "fine"), f"{done.returncode}: {done.stdout}{done.stderr}"


mapped_files_change = pytest.mark.skipif(
    sys.platform == "win32", reason="Windows refuses to truncate or replace a file while it is mapped"
)
IN_TURN = """
import contextlib, io, json, traceback
fresh = dict(globals())
for line in sys.stdin:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            exec(json.loads(line), dict(fresh))
        except (Exception, SystemExit):
            traceback.print_exc(file=said)
    print(json.dumps(said.getvalue().strip()), flush=True)
"""
_interpreters: list[subprocess.Popen[str]] = []


def _fine_in_turn(code: str) -> None:
    """Run code in an interpreter that others use before and after it, until one of them ends it."""
    if not _interpreters or _interpreters[-1].poll() is not None:
        pipe = subprocess.PIPE
        command = [sys.executable, "-X", "faulthandler", "-P", "-c", HEAD + IN_TURN]
        _interpreters.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, encoding="utf-8"))
    child = _interpreters[-1]
    assert child.stdin is not None
    assert child.stdout is not None
    patience = threading.Timer(120, child.kill)
    patience.start()
    child.stdin.write(json.dumps(code) + "\n")
    child.stdin.flush()
    said = child.stdout.readline()
    patience.cancel()
    assert said, f"it ended the process: {child.wait()}"
    assert json.loads(said) == "fine"


@pytest.fixture(scope="module", autouse=True)
def _ended() -> Iterator[None]:
    """Have the interpreters end with the tests."""
    yield
    while _interpreters:
        with _interpreters.pop() as child:
            assert child.stdin is not None
            child.stdin.close()


def test_an_input_below_a_window_has_no_result_of_another_run(device: Device) -> None:
    """It is an error or has no elements, however often. On CUDA the second one ended the process."""
    done = _python(f"""
text = "(float[n,1,length] x) => (y) <float[1,1,4] w = {{1, 2, 3, 4}}> {{ y = Conv (x, w) }}"
try:
    compiled = Session({device.label!r}).compile(imported(text))
except RlxError:
    print("fine")  # it takes no open sizes
    sys.exit()
lengths = []
for length in (3, 3, 9, 3, 1, 1, 4):
    try:
        lengths.append(compiled.run({{"x": np.ones((1, 1, length), np.float32)}})[0].shape[2])
    except RlxError:
        lengths.append(0)
print("fine" if lengths == [0, 0, 6, 0, 0, 0, 1] else lengths)
""")
    assert (done.returncode, "fine" in done.stdout.splitlines()) == (0, True), (
        f"{done.returncode}: {done.stdout}{done.stderr}"
    )


def test_a_session_closed_right_after_a_run_ends_nothing(device: Device) -> None:
    """CUDA's kernels of these operators leave buffers that are freed when the run is over, once after their session."""
    done = _python(f"""
text = '''(float[2,1,3,4] x, float[3,4,4] w) => (y) {{
  a = MatMul (x, w)
  b, c = Split <axis = 3, num_outputs = 2> (a)
  y = Concat <axis = 3> (c, b)
}}'''
feeds = {{"x": np.ones((2, 1, 3, 4), np.float32), "w": np.ones((3, 4, 4), np.float32)}}
for _ in range(60):
    try:
        compiled = Session({device.label!r}, CompileOptions(device_graph=False)).compile(imported(text))
    except RlxError:
        break  # it takes no such nodes
    assert compiled.run(feeds)[0].shape == (2, 3, 3, 4)
    compiled.close()
print("fine")
""")
    assert (done.returncode, "fine" in done.stdout.splitlines()) == (0, True), (
        f"{done.returncode}: {done.stdout}{done.stderr}"
    )


@pytest.mark.parametrize("sharing", ["PRIVATE", "RAW"])
def test_weights_outlive_everybody_who_brought_them(sharing: str) -> None:
    """1: the graph, the store's arrays and the session's maker are gone, and the session still has its weights."""
    _fine_in_turn(
        f"""
compiled = Session("cpu", CompileOptions(sharing=WeightSharing.{sharing})).compile(matmul(512))
compiled.weights.set("w", np.eye(512, dtype=np.float32) * 2)
compiled.run({{"x": np.ones((1, 512), np.float32)}})
slot = compiled._slot
engine = slot.current
slot.close()
del compiled, slot
gc.collect()
junk = [np.full((512, 512), 7, np.float32) for _ in range(20)]
out = engine.run(list(engine.session.output_types)[:1], {{"x": np.ones((1, 512), np.float32)}})[0]
print("fine" if (out == 2).all() else out)
"""
    )


SOUND = {
    # 1: an output that stayed on the device is readable after its graph was closed and forgotten.
    "a device tensor outlives its session": """
compiled = Session("cpu").compile(matmul())
tensor = compiled.run_dlpack({"x": np.ones((2, 64), np.float32)})[0]
view = np.from_dlpack(tensor)
compiled.close()
del compiled
gc.collect()
ok = (tensor.numpy() == 1).all()
del tensor
gc.collect()
junk = [np.full((2, 64), 7, np.float32) for _ in range(100)]
print("fine" if ok and (view == 1).all() else "wrong")
""",
    # 1: the arrays that `run_slots` returned are memory of their own.
    "slot buffers outlive the graph": """
compiled = Session("cpu").compile(matmul())
for _ in range(3):
    view = compiled.run_slots([np.ones((2, 64), np.float32)])[0]
compiled.close()
del compiled
gc.collect()
print("fine" if (view == 1).all() else "wrong")
""",
    # 1: an array that a handle took without a copy, and one that a run was fed, may be forgotten by who made it.
    "memory shared through dlpack outlives its maker": """
class Maker:
    def __init__(self, array): self.array = array
    def __dlpack__(self, **kwargs): return self.array.__dlpack__(**kwargs)
    def __dlpack_device__(self): return self.array.__dlpack_device__()
compiled = Session("cpu").compile(matmul())
compiled.bind_gpu_handle("x", Maker(np.ones((200, 64), np.float32)))
compiled.set_gpu_handle_feed("x", 0)
outs = []
for _ in range(4):
    outs += compiled.run_read_outputs({}, [0])
    outs += compiled.run_read_outputs({"x": Maker(np.ones((2, 64), np.float32))}, [0])
    compiled.bind_gpu_handle("x", Maker(np.ones((200, 64), np.float32)))
    gc.collect()
    junk = [np.full((200, 64), 7, np.float32) for _ in range(20)]
print("fine" if all((out == 1).all() for out in outs) else "wrong")
""",
    # 1: outputs of a loop over handles, and a tensor that was its state, stay when the loop goes on and is closed.
    "what a loop returned outlives the graph": """
compiled = Session("cpu").compile(matmul())
compiled.bind_gpu_handle("x", np.ones((2, 64), np.float32))
compiled.set_gpu_handle_feed("x", 0)
outs = [compiled.run_read_outputs({}, [0])[0] for _ in range(5)]
twin = compiled.clone()
compiled.close()
del compiled
gc.collect()
junk = [np.full((2, 64), 7, np.float32) for _ in range(100)]
outs += twin.run_read_outputs({}, [0])
outs.append(twin.read_gpu_handle("x"))
print("fine" if all((out == 1).all() for out in outs) else "wrong")
""",
    # 2: a layer norm with an empty optional at its end is a valid model and runs.
    "trailing empty inputs are left out": """
proto = onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 21]> g '
    '(float[2,4] x, float[2,4] r) => (float[2,4] y) <float[4] s = {1,1,1,1}> '
    '{ t = Add(x, r) y = LayerNormalization(t, s) }')
proto.graph.node[1].input.append("")
compiled = Session("cpu").compile(from_onnx(proto))
out = compiled.run({"x": np.arange(8, dtype=np.float32).reshape(2, 4), "r": np.zeros((2, 4), np.float32)})[0]
print("fine" if abs(out.mean()) < 1e-6 else out)
""",
    # 2: a batch norm with empty optional outputs at its end, in inference, is a valid model and runs.
    "trailing empty outputs are left out": """
proto = onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 15]> g '
    '(float[2,3,4] x) => (float[2,3,4] y) <float[3] s = {1,1,1}, float[3] z = {0,0,0}> '
    '{ t = Relu(x) y = BatchNormalization(t, s, z, z, s) }')
proto.graph.node[1].output.extend(["", ""])
x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
out = Session("cpu").compile(from_onnx(proto)).run({"x": x})[0]
print("fine" if np.allclose(out, x, rtol=1e-4) else out)
""",
    # 5: wrong shapes, dtypes and things that are no arrays are InputErrors on every path that binds memory.
    "no call takes an address": """
compiled = Session("cpu").compile(matmul())
good = np.ones((2, 64), np.float32)
compiled.run_slots([good]); compiled.run_slots([good])
class Liar:
    shape, dtype, nbytes = (2, 64), np.dtype(np.float32), 512
    __array_interface__ = None
for bad in (None, 7, good[:, :3], good.astype(np.float64), good.T, Liar(), b"x" * 512):
    for call in (compiled.run_slots, lambda a: compiled.run_raw({"x": a[0]}),
                 lambda a: compiled.bind_handle("x", a[0]), lambda a: compiled.bind_gpu_handle("x", a[0]),
                 lambda a: compiled.run({"x": a[0]})):
        try:
            call([bad])
        except RlxError:
            continue
        raise SystemExit(f"{bad!r} was taken")
print("fine")
""",
    # Kernels that refuse data leave the graph usable.
    "bad indices and sizes are typed errors": """
compiled = Session("cpu").compile(imported("(float[4] t, int64[1] i) => (float[1] y) { y = Gather(t, i) }"))
t = np.arange(4, dtype=np.float32)
try:
    compiled.run({"t": t, "i": np.array([99])})
except EngineError:
    pass
else:
    raise SystemExit("it ran")
print("fine" if compiled.run({"t": t, "i": np.array([3])})[0] == 3 else "wrong")
""",
}


@pytest.mark.parametrize("code", SOUND.values(), ids=SOUND)
def test_the_process_goes_on(code: str) -> None:
    """Nothing in these programs ends the interpreter, and each result is right."""
    _fine_in_turn(code)


MAPPED = {
    # 4: reading a mapped file beyond its new end would be a bus error; the run is refused instead.
    "a weights file that shrinks under a session is an error": """
compiled = mapped(folder + "m.onnx")
first = compiled.run({"i": np.array([1])})[0]
assert first[0, 0] == 1024
os.truncate(folder + "w.bin", 4096)
for call in (lambda: compiled.run({"i": np.array([4000])}), lambda: compiled.run_slots([np.array([4000])])):
    try:
        call()
    except EngineError as err:
        assert "changed in place" in str(err), err
    else:
        raise SystemExit("it ran")
print("fine")
""",
    # 4: the same for a store that maps a safetensors file, on the runs of a loop over handles as well.
    "a safetensors file that shrinks under a session is an error": """
from safetensors.numpy import save_file
path = folder + "w.safetensors"
save_file({"w": np.eye(1024, dtype=np.float32)}, path)
compiled = Session("cpu", CompileOptions(sharing=WeightSharing.RAW)).compile(matmul(1024, data=False))
compiled.weights.load_safetensors(path)
compiled.bind_gpu_handle("x", np.ones((2, 1024), np.float32))
compiled.set_gpu_handle_feed("x", 0)
for _ in range(3):
    assert (compiled.run_read_outputs({}, [0])[0] == 1).all()
os.truncate(path, 4096)
x = np.ones((2, 1024), np.float32)
for call in (lambda: compiled.run_read_outputs({}, [0]), lambda: compiled.run({"x": x})):
    try:
        call()
    except EngineError as err:
        assert "changed in place" in str(err), err
    else:
        raise SystemExit("it ran")
print("fine")
""",
    # 4: a new file under the old name leaves the mapping of the old one alone.
    "a weights file that is replaced is harmless": """
compiled = mapped(folder + "m.onnx")
compiled.run({"i": np.array([1])})
with open(folder + "new.bin", "wb") as stream:
    stream.write(b"short")
os.replace(folder + "new.bin", folder + "w.bin")
print("fine" if compiled.run({"i": np.array([4000])})[0][0, 0] == 4000 * 1024 else "wrong")
""",
}


@mapped_files_change
@pytest.mark.parametrize("code", MAPPED.values(), ids=MAPPED)
def test_a_mapped_file_that_changes_ends_nothing(code: str, tmp_path: Path) -> None:
    """The run is right, or refused with the reason."""
    _fine_in_turn(f"folder = {str(tmp_path) + os.sep!r}\n{code}")


@pytest.mark.parametrize("op", ["Div", "Mod"])
@pytest.mark.parametrize("imported", [False, True], ids=["built", "imported"])
def test_the_least_integer_over_minus_one_is_guarded(op: str, imported: bool) -> None:
    """3: the quotient that does not fit is an error or a value, not the end of the process; for i32 and i64."""
    make = f'imported(f"({{name}}[4] a, {{name}}[4] b) => ({{name}}[4] y) {{{{ y = {op}(a, b) }}}}")'
    # C's quotient and ONNX's remainder, which has the sign of the divisor; the built one has that of the dividend.
    expected = "[least, -7, 3, -4]" if op == "Div" else str([0, 0, 1, -1 if imported else 1])
    _fine_in_turn(
        f"""
def built():
    graph = Graph("g")
    a, b = (graph.input(letter, [4], name.replace("nt", "")) for letter in "ab")
    graph.outputs = [graph.binary("{op.lower()}", a, b)]
    return graph
wrong = []
for name, least in (("int32", -2**31), ("int64", -2**63)):
    feeds = {{"a": np.array([least, 7, 7, 9], name), "b": np.array([-1, -1, 2, -2], name)}}
    found = Session("cpu").compile({make if imported else "built()"}).run(feeds)[0].tolist()
    wrong += [] if found == {expected} else [found]
print(wrong or "fine")
"""
    )


@pytest.mark.parametrize("device", ["cpu", pytest.param("webgpu", marks=pytest.mark.webgpu)])
def test_a_graph_cannot_be_compiled_only(device: str) -> None:
    """7: the option that ends the process where no session is open is refused before a session is opened."""
    _fine(
        f"""
try:
    Session("{device}", CompileOptions(session_config={{"session.compile_only": "1"}})).compile(matmul(8))
except RlxError as err:
    print("fine" if "compile_only" in str(err) else err)
"""
    )


@pytest.mark.parametrize("name", ["unregister_execution_provider_library", "ModelCompiler", "add_initializer("])
def test_calls_that_crash_are_made_nowhere(name: str) -> None:
    """1, 6, 7: unregistering a library in use, compiling without a session and injecting by reference."""
    places = [ROOT / folder for folder in ("rlx_ort", "providers", "converters", "calibration")]
    users = [str(path) for place in places for path in place.rglob("*.py") if name in path.read_text(encoding="utf-8")]
    assert users == []


@pytest.mark.webgpu
def test_webgpu_sessions_run_in_many_threads() -> None:
    """8: two sessions in two threads take turns, and plain runs, slots and device tensors may be mixed."""
    _fine_in_turn(
        """
graphs = [Session("webgpu").compile(matmul(8)) for _ in range(2)]
wrong = []
def work(compiled):
    x = np.ones((1, 8), np.float32)
    for number in range(15):
        tensor = compiled.run_dlpack({"x": x})[0]
        for out in (compiled.run({"x": x})[0], compiled.run_slots([x])[0], tensor.numpy()):
            if not (out == 1).all():
                wrong.append(out)
threads = [threading.Thread(target=work, args=(graphs[index % 2],)) for index in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print("fine" if not wrong else wrong[0])
"""
    )


@pytest.mark.webgpu
def test_webgpu_tensors_move_between_sessions_that_come_and_go() -> None:
    """8: memory of a session that another one has read is not freed under it."""
    _fine_in_turn(
        """
compiled = Session("webgpu").compile(matmul(8))
compiled.bind_gpu_handle("x", np.ones((1, 8), np.float32))
compiled.set_gpu_handle_feed("x", 0)
for number in range(8):
    compiled.set_param("w", np.eye(8, dtype=np.float32) * (1 + number % 2))
    compiled.run({})
print("fine" if (compiled.read_gpu_handle("x") == 16).all() else compiled.read_gpu_handle("x"))
"""
    )


@pytest.mark.parametrize(
    "start",
    [
        "threading.Thread(target=lambda: compiled.run(inputs), daemon=True).start()",
        "threading.Thread(target=lambda: compiled.run_slots([inputs['x']]), daemon=True).start()",
        "compiled.bind_gpu_handle('x', inputs['x']); compiled.set_gpu_handle_feed('x', 0); "
        "threading.Thread(target=lambda: compiled.run({}), daemon=True).start()",
        "threading.Thread(target=lambda: compiled.run_pipelined([inputs] * 4), daemon=True).start()",
        "threading.Thread(target=lambda: compiled.run_dlpack(inputs), daemon=True).start()",
        "compiled.commit_no_wait(inputs)",
        "[compiled.commit_no_wait(inputs) for _ in range(50)]",
        "import asyncio; asyncio.new_event_loop().create_task(compiled.run_async(inputs)).get_loop()"
        ".run_until_complete(asyncio.sleep(0.05))",
    ],
    ids=["daemon", "slots", "handles", "pipelined", "dlpack", "commit", "many", "async"],
)
def test_the_interpreter_ends_cleanly_with_a_run_in_flight(start: str) -> None:
    """9: the run is stopped and waited for, within a moment, and the exit code is 0.

    The error of a daemon thread is not printed, by which Python itself ends badly if its own end comes in between.
    """
    quiet = "threading.excepthook = lambda error: None"
    assert "Fatal" not in _ends(f"{quiet}\ncompiled, inputs = endless()\n{start}\ntime.sleep(0.1)")


@pytest.mark.parametrize(
    "run",
    [
        "import asyncio; asyncio.run(compiled.run_async(inputs))",
        "compiled.commit_no_wait(inputs); compiled.sync_pending()",
        "from rlx_ort.providers.workers import Workers; Workers(2, 'idle').submit(list).result()",
    ],
    ids=["async", "commit", "workers"],
)
def test_the_interpreter_does_not_wait_for_idle_threads(run: str) -> None:
    """Threads that have run something in the background and wait for more are not inside ONNX Runtime."""
    inputs = "inputs = {'x': np.ones((2, 64), np.float32)}"
    _ends(f"compiled = Session('cpu').compile(matmul())\n{inputs}\n{run}")


def test_the_interpreter_ends_cleanly_in_the_middle_of_a_loop() -> None:
    """9: a loop over handles whose steps are long is stopped in a step that runs over a binding made before."""
    done = _python(
        """
text = '''(int64[1] n, float[64,64] x) => (float[64,64] y)
    <bool c = {1}> { m = Squeeze(n) y = Loop (m, c, x) <body = b (int64 i, bool k, float[64,64] v) =>
      (bool k2, float[64,64] v2) { k2 = Identity (k) v2 = MatMul (v, v) }> }'''
compiled = Session("cpu", CompileOptions(intra_op_threads=1)).compile(imported(text))
compiled.bind_gpu_handle("x", np.eye(64, dtype=np.float32))
compiled.set_gpu_handle_feed("x", 0)
for _ in range(3):
    compiled.run_read_outputs({"n": np.array([2])}, [])
endless = {"n": np.array([2**62])}
threading.excepthook = lambda error: None
threading.Thread(target=lambda: compiled.run_read_outputs(endless, []), daemon=True).start()
time.sleep(0.1)
print("fine", flush=True)
"""
    )
    assert (done.returncode, done.stdout.strip()) == (0, "fine"), done.stderr
    assert "Fatal" not in done.stderr


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


@needs_fork
def test_a_fork_may_run_on_the_cpu() -> None:
    """10: a graph on the CPU runs in the child."""
    _fine(
        """
compiled = Session("cpu", CompileOptions(intra_op_threads=2)).compile(matmul(256))
x = np.ones((64, 256), np.float32)
compiled.run({"x": x})
child = os.fork()
if child == 0:
    os._exit(0 if (compiled.run({"x": x})[0] == 1).all() else 1)
print("fine" if ended(child) == 0 else "wrong")
"""
    )


@needs_fork
@pytest.mark.webgpu
def test_a_fork_is_refused_on_a_device() -> None:
    """10: WebGPU hangs in the child, so every call there is a typed error."""
    _fine(
        """
compiled = Session("webgpu").compile(matmul(8))
x = np.ones((1, 8), np.float32)
compiled.run({"x": x})
compiled.bind_gpu_handle("x", x)
child = os.fork()
if child == 0:
    refused = 0
    for call in (lambda: compiled.run({"x": x}), lambda: compiled.run({}), lambda: compiled.run_slots([x]),
                 lambda: compiled.run_dlpack({"x": x}), lambda: compiled.read_gpu_handle("x"),
                 lambda: Session("webgpu").compile(matmul(8))):
        try:
            call()
        except DeviceUnavailableError:
            refused += 1
    os._exit(0 if refused == 6 else 1)
found = ended(child)
print("fine" if found == 0 else found)
"""
    )


@needs_fork
@pytest.mark.parametrize("device", ["cpu", pytest.param("webgpu", marks=pytest.mark.webgpu)])
def test_a_fork_ends_while_the_parent_has_sessions_and_device_tensors(device: str) -> None:
    """10: destroying them in the child would wait for threads that it does not have."""
    _fine(
        f"""
device = "{device}"
compiled = Session(device, CompileOptions(intra_op_threads=2 if device == "cpu" else None)).compile(matmul(8))
x = np.ones((1, 8), np.float32)
kept = compiled.run_dlpack({{"x": x}}), compiled.run_slots([x])
for way in ("exit", "close"):
    child = os.fork()
    if child == 0:
        if way == "close":
            compiled.close()
        sys.exit(7)
    found = ended(child)
    if found != 7:
        print(found)
assert (compiled.run({{"x": x}})[0] == 1).all()
print("fine")
"""
    )


@needs_fork
def test_background_runs_and_foreign_classes_survive_a_fork() -> None:
    """The child starts threads of its own, and objects whose class has no name of a module are passed over."""
    _fine(
        """
import asyncio, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads, from Python 3.12 on
from rlx_ort.resilience.limits import limited_async
class Odd:
    pass
Odd.__module__ = 5
kept = [Odd(), np.random.default_rng(0)]
compiled = Session("cpu", CompileOptions(intra_op_threads=1)).compile(matmul(8))
x = np.ones((2, 8), np.float32)
async def both():
    await compiled.run_async({"x": x})
    return await limited_async(lambda: compiled.run({"x": x}))
asyncio.run(both())
compiled.commit_no_wait({"x": x}, [0])
compiled.sync_pending()
sys.stderr = sys.stdout
child = os.fork()
if child == 0:
    compiled.commit_no_wait({"x": x}, [0])
    ((found,),) = compiled.sync_pending()
    os._exit(0 if (found == 1).all() and (asyncio.run(both())[0] == 1).all() else 1)
print("fine" if ended(child) == 0 else "wrong")
"""
    )
