"""What devices answer here: proven, or a reason with a remedy; never another device."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from rlx_ort import Device, DeviceUnavailableError, EngineError
from rlx_ort.providers.base import Availability, NodeAssignment
from rlx_ort.providers.hardware import core_share
from rlx_ort.providers.null import NullProvider
from rlx_ort.providers.ort_provider import prove
from rlx_ort.providers.registry import default_registry

ADD = "(float[2,2] a, float[2,2] b) => (float[2,2] y) { y = Add(a, b) }"


def test_the_cpu_is_available_and_names_its_hardware():
    """The probe ran on the CPU and returns its name."""
    answer = default_registry().availability(Device.CPU)
    assert (answer.available, answer.reason) == (True, "")
    assert answer.hardware
    assert answer.memory_bytes > 0


def test_a_second_cpu_is_refused():
    """cpu:1 does not exist; cores are not devices."""
    assert not default_registry().availability(Device("cpu:1")).available


@pytest.mark.parametrize("kind", [device.kind for device in Device.all()])
def test_every_known_device_answers_with_a_reason_and_a_remedy_or_works(kind):
    """No probe raises, and whatever is unavailable says why and what to do."""
    answer = default_registry().availability(Device(kind))
    assert answer.available or (answer.reason and answer.remedy)


@pytest.mark.parametrize("kind", ["tpu", "opengl"])
def test_devices_nobody_serves_say_so(open_model, kind):
    """Known names without an execution provider are refused in words."""
    with pytest.raises(DeviceUnavailableError, match="no ONNX Runtime execution provider"):
        open_model(ADD, device=kind)


CUDA = """
from conftest import open_text
from rlx_ort.errors import DeviceUnavailableError
try:
    open_text("(float[2,2] a) => (float[2,2] y) { y = Neg(a) }", device="cuda")
except DeviceUnavailableError as err:
    print(err.reason, "|", err.remedy)
"""


def test_cuda_without_cuda_is_unavailable_with_the_install_command(python):
    """Asking for CUDA on a CPU build never gives a CPU session."""
    from rlx_ort.providers.engine.runtime import available_eps

    if "CUDAExecutionProvider" in available_eps():
        pytest.skip("this ONNX Runtime has CUDA")
    done = python(CUDA)
    assert done.returncode == 0, done.stderr
    assert "has no CUDA execution provider" in done.stdout
    assert 'pip install ".[cuda]"' in done.stdout


ABSENT = """
import sys, importlib.metadata, importlib.util
from rlx_ort.providers.engine import runtime
runtime.importlib.util.find_spec = lambda name, *rest: None
runtime.runtime_packages = lambda: {}
from rlx_ort.device import Device
from rlx_ort.providers.registry import default_registry
for device in Device.all():
    answer = default_registry().availability(device)
    assert not answer.available
    assert answer.reason and answer.remedy, device
print(default_registry().availability(Device.CPU).remedy, default_registry().availability(Device.CUDA).remedy)
assert "onnxruntime" not in sys.modules
"""


def test_without_onnx_runtime_every_probe_gives_the_install_command(python):
    """An absent ONNX Runtime is an answer, not an exception."""
    done = python(ABSENT)
    assert done.returncode == 0, done.stderr
    assert ".[cpu]" in done.stdout
    assert ".[cuda]" in done.stdout


def test_importing_the_registry_does_not_import_onnx_runtime(python):
    """Providers can be listed without loading the engine, and telemetry is off before it is loaded."""
    done = python(
        "import sys, os\n"
        "from rlx_ort.providers.registry import known_devices\n"
        "known_devices()\n"
        "assert 'onnxruntime' not in sys.modules\n"
        "from rlx_ort.providers.engine.runtime import onnxruntime\n"
        "onnxruntime()\n"
        "print(os.environ['ORT_DISABLE_TELEMETRY'])",
        ORT_DISABLE_TELEMETRY=None,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr


def test_telemetry_stays_on_when_the_user_allows_it(python):
    """RLX_ALLOW_ORT_TELEMETRY=1 leaves the environment alone."""
    done = python(
        "import os\nfrom rlx_ort.providers.engine.runtime import onnxruntime\nonnxruntime()\n"
        "print(os.environ.get('ORT_DISABLE_TELEMETRY'))",
        ORT_DISABLE_TELEMETRY=None,
        RLX_ALLOW_ORT_TELEMETRY="1",
    )
    assert (done.returncode, done.stdout.strip()) == (0, "None"), done.stderr


THREAD_COUNT = """
import numpy as np
import rlx_ort
g = rlx_ort.Graph()
g.outputs = [g.relu(g.input("x", [2]))]
compiled = rlx_ort.Session("cpu").compile(g)
from rlx_ort.providers.engine import runtime
made = runtime.onnxruntime().SessionOptions
print(compiled._slot.engine(compiled.rule).session.raw.get_session_options().intra_op_num_threads)
"""


@pytest.mark.parametrize(("workers", "expected"), [(None, core_share().threads), ("3", 3)])
def test_the_first_session_of_a_process_gets_all_the_threads_it_may_use(python, workers, expected):
    """The process's share of the cores, which ONNX Runtime's own default does not look at, or RLX_WORKERS."""
    done = python(THREAD_COUNT, RLX_WORKERS=workers)
    assert (done.returncode, done.stdout.strip()) == (0, str(expected)), done.stderr


@pytest.mark.webgpu
@pytest.mark.parametrize("kind", ["gpu", "webgpu", "vulkan"])
def test_webgpu_kinds_work_and_take_their_node(open_model, kind):
    """A session on each kind assigns the node to WebGPU and computes it."""
    session = open_model(ADD, device=kind)
    assert {node.provider for node in session.assignments} == {"WebGpuExecutionProvider"}
    ones = np.ones((2, 2), np.float32)
    np.testing.assert_array_equal(session.run(["y"], {"a": ones, "b": ones})[0], ones * 2)


@pytest.mark.webgpu
def test_webgpu_has_one_device():
    """The plugin picks the GPU itself."""
    assert not default_registry().availability(Device("webgpu:1")).available


WEBGPU_ABSENT = """
from conftest import open_text
from rlx_ort.device import Device
from rlx_ort.errors import DeviceUnavailableError
from rlx_ort.providers.registry import default_registry
answer = default_registry().availability(Device.WEBGPU)
assert not answer.available and answer.reason and answer.remedy, answer
try:
    open_text("(float[2,2] a) => (float[2,2] y) { y = Neg(a) }", device="webgpu")
except DeviceUnavailableError as err:
    print("refused:", err)
"""


@pytest.mark.webgpu
@pytest.mark.parametrize("allow", [None, "1"])
def test_webgpu_without_a_driver_is_unavailable_with_a_remedy(python, tmp_path, allow):
    """A driver list that names nothing gives a reason, never the CPU."""
    done = python(
        WEBGPU_ABSENT,
        VK_DRIVER_FILES=str(tmp_path / "none.json"),
        VK_ICD_FILENAMES=None,
        ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER=allow,
    )
    assert done.returncode == 0, done.stderr
    assert "refused:" in done.stdout


THREADS = """
import threading, numpy as np
from conftest import open_text
wrong = []
def work(number):
    text = "(float[4,64] x) => (float[4,32] y) { t = Transpose<perm=[1,0]>(W) y = MatMul(x, t) }"
    weight = np.random.default_rng(number).standard_normal((32, 64)).astype(np.float32)
    session = open_text(text, {"W": weight}, "webgpu")
    for step in range(40):
        x = np.random.default_rng(step).standard_normal((4, 64)).astype(np.float32)
        y = session.run(["y"], {"x": x})[0]
        if not np.allclose(y, x @ weight.T, atol=1e-3):
            wrong.append((number, step))
    session.close()
threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not wrong, wrong
print("right")
"""


@pytest.mark.webgpu
def test_two_webgpu_sessions_in_two_threads_take_turns(python):
    """Without the process-wide lock this crashes or gives wrong values."""
    done = python(THREADS)
    assert (done.returncode, done.stdout.strip()) == (0, "right"), done.stderr


FORK = """
import os, sys, numpy as np
from conftest import open_text
from rlx_ort.device import Device
from rlx_ort.errors import DeviceUnavailableError
from rlx_ort.providers.registry import default_registry
session = open_text("(float[2,2] a) => (float[2,2] y) { y = Neg(a) }", device="webgpu")
child = os.fork()
if child == 0:
    try:
        session.run(["y"], {"a": np.ones((2, 2), np.float32)})
    except DeviceUnavailableError as err:
        refused = "spawn" in err.remedy and not default_registry().availability(Device.WEBGPU).available
        os._exit(0 if refused else 3)
    os._exit(4)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.webgpu
@pytest.mark.skipif("not hasattr(__import__('os'), 'fork')", reason="this system does not fork")
def test_webgpu_is_refused_in_a_forked_child(python):
    """A run there would hang forever."""
    done = python(FORK, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.webgpu
@pytest.mark.parametrize(
    ("option", "message"),
    [({"preferedLayout": "NHWC"}, "preferredLayout"), ({"preferredLayout": "XX"}, "preferred layout")],
    ids=["unknown", "of no such value"],
)
def test_a_webgpu_option_that_the_plugin_does_not_take_is_refused(open_model, option, message):
    """The plugin would ignore it."""
    with pytest.raises(EngineError, match=message):
        open_model(ADD, device="webgpu", provider_options=option)


def test_a_probe_closes_its_session():
    """Probing leaves no session behind, however it ends."""
    provider = NullProvider()
    facts = provider.probe(Device.CPU)
    answer = prove(Device.CPU, provider.ep_name, provider.open, facts)
    assert not answer.available
    assert provider.sessions == 0


RIGHT, NODE = np.array([[19, 22], [43, 50]], np.float32), NodeAssignment("SomeExecutionProvider", "p", "", "MatMul")


@pytest.mark.parametrize(
    ("assignments", "result", "reason"),
    [((), RIGHT, "left a matrix product"), ((NODE,), 0 * RIGHT, "wrongly")],
    ids=["no assignment is recorded, so the result may be the CPU's", "the known product is another one"],
)
def test_a_device_that_is_not_proven_is_not_available(assignments, result, reason):
    """Although its session opened and ran; the remedy that was known before stays."""
    session = SimpleNamespace(assignments=assignments, run=lambda names, feeds: [result], close=lambda: None)
    answer = prove(Device.CPU, "SomeExecutionProvider", lambda _: session, Availability(False, remedy="do"))
    assert (answer.available, answer.remedy) == (False, "do")
    assert reason in answer.reason


@pytest.mark.webgpu
def test_a_plugin_on_a_core_that_does_not_record_it_is_refused(open_model, monkeypatch):
    """ONNX Runtime before 1.31 does not say where a plugin's nodes run."""
    from rlx_ort.providers.engine import runtime

    monkeypatch.setattr(runtime, "parse_version", lambda _: (1, 30, 0))
    with pytest.raises(DeviceUnavailableError, match=r"1\.31 or newer"):
        open_model(ADD, device="webgpu")
