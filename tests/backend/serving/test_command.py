"""`rlx-ort serve` as a process: its addresses, token, TLS and end."""

from __future__ import annotations

import asyncio
import datetime
import http.client
import ipaddress
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner
from fault_provider import until
from sample_packages.packages import make
from served_attacks import GOOD, PATH, answers, ask, good_message, request
from served_models import save_product, started_command

from rlx_ort import DevicePolicy, Graph, Precision, ServingError, is_available, load, save_onnx, warm_package
from rlx_ort.cli import main
from rlx_ort.deploy.create import create_package
from rlx_ort.serving.options import ServeOptions
from rlx_ort.serving.repository import Repository

BODY = json.dumps(GOOD).encode()
INFER = "/inference.GRPCInferenceService/ModelInfer"


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Return a folder with a model."""
    (tmp_path / "models").mkdir()
    save_product(tmp_path / "models" / "product.onnx")
    return tmp_path / "models"


@pytest.fixture
def running() -> Iterator[list[subprocess.Popen[str]]]:
    """Yield a list; the processes that a test puts there are ended."""
    found: list[subprocess.Popen[str]] = []
    yield found
    for process in found:
        process.kill()
        process.wait()


def _refuses(address: str) -> bool:
    """Return whether a server takes no new connection."""
    try:
        ask(address, request(BODY))
    except ConnectionRefusedError:
        return True
    return False


def test_a_signal_drains(models: Path, running: list[subprocess.Popen[str]]) -> None:
    """A request whose body is under way is answered, later ones are refused, and the exit code is 0."""
    process, rest, rpc = started_command([str(models), "--device", "cpu"])
    running.append(process)
    assert answers(rest, rpc)
    if sys.platform == "win32":
        return  # a process cannot be asked to end there
    host, _, port = rest.rpartition(":")
    with socket.create_connection((host, int(port)), 10) as connection:
        data = request(BODY)
        connection.sendall(data[:-10])
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        until(lambda: _refuses(rest))
        assert process.poll() is None
        with grpc.insecure_channel(rpc) as channel, pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary(INFER)(good_message().SerializeToString(), timeout=5)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        connection.sendall(data[-10:])
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    assert process.wait(20) == 0


def test_the_token_is_asked_for_on_both_sides(models: Path, running: list[subprocess.Popen[str]]) -> None:
    """Of everything but health; it stays out of the command line."""
    process, rest, rpc = started_command([str(models), "--token-env", "OUR_TOKEN"], {"OUR_TOKEN": "secret"})
    running.append(process)
    assert ask(rest, request(BODY))[0] == 401
    assert ask(rest, request(BODY, "Authorization: Bearer wrong"))[0] == 401
    assert ask(rest, request(BODY, "Authorization: Bearer secret"))[0] == 200
    for path, status in (
        ("/v2/health/ready", 200),
        ("/v2/health/live", 200),
        ("/metrics", 401),
        ("/v2", 401),
        ("/status", 401),
    ):
        assert ask(rest, request(b"", method="GET", path=path, length=None))[0] == status
    with grpc.insecure_channel(rpc) as channel:
        call = channel.unary_unary(INFER)
        for token in ((), [("authorization", "Bearer wrong")]):
            with pytest.raises(grpc.RpcError) as refused:
                call(good_message().SerializeToString(), metadata=token)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert call(good_message().SerializeToString(), metadata=[("authorization", "Bearer secret")])
        assert channel.unary_unary("/grpc.health.v1.Health/Check")(b"") == b"\x08\x01"


def certificate(folder: Path) -> tuple[Path, Path]:
    """Write a certificate of 127.0.0.1 that signs itself; return it and its key. Skips a test without cryptography."""
    pytest.importorskip("cryptography")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(2))
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = builder.add_extension(x509.SubjectAlternativeName([address]), critical=False).sign(key, hashes.SHA256())
    public, private = folder / "cert.pem", folder / "key.pem"
    public.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    pkcs8, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    private.write_bytes(key.private_bytes(serialization.Encoding.PEM, pkcs8, plain))
    return public, private


def test_tls_on_both_sides(models: Path, running: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    """Clients that trust the certificate are answered; plain text is not."""
    public, private = certificate(tmp_path)
    process, rest, rpc = started_command([str(models), "--tls-cert", str(public), "--tls-key", str(private)])
    running.append(process)
    trusting = ssl.create_default_context(cafile=public)
    connection = http.client.HTTPSConnection(rest, context=trusting, timeout=10)
    connection.request("POST", PATH, BODY)
    assert connection.getresponse().status == 200
    connection.close()
    assert ask(rest, request(BODY))[0] == 0
    with grpc.secure_channel(rpc, grpc.ssl_channel_credentials(public.read_bytes())) as channel:
        assert channel.unary_unary(INFER)(good_message().SerializeToString(), timeout=10)
    with grpc.insecure_channel(rpc) as channel, pytest.raises(grpc.RpcError):
        channel.unary_unary(INFER)(good_message().SerializeToString(), timeout=5)


def test_an_address_of_ipv6(models: Path, running: list[subprocess.Popen[str]]) -> None:
    """It is printed in brackets, as clients write it."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("this machine has no IPv6")
    process, rest, rpc = started_command([str(models), "--host", "::1"])
    running.append(process)
    assert rest.startswith("[::1]:")
    connection = http.client.HTTPConnection(rest, timeout=10)
    connection.request("POST", PATH, BODY)
    assert connection.getresponse().status == 200
    connection.close()
    with grpc.insecure_channel(rpc) as channel:
        assert channel.unary_unary(INFER)(good_message().SerializeToString(), timeout=10)


def test_a_package_is_served(running: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    """By its file's name; one of the two sides may be left out."""
    path = make(tmp_path / "small.ortpackage")
    process, rest, _ = started_command([str(path), "--device", "cpu", "--max-batch", "1"])
    running.append(process)
    status, body = ask(rest, request(b"", method="GET", path="/v2/models/small", length=None))
    assert (status, json.loads(body)["inputs"][0]["shape"]) == (200, [-1, 32])


def _options_of(models: Path, *arguments: str) -> ServeOptions:
    """Return the options that the command makes of its arguments."""
    given: list[ServeOptions] = []

    def repository(_: Sequence[Path], options: ServeOptions) -> Repository:
        given.append(options)
        raise ServingError("stop here")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlx_ort.serving.repository.Repository", repository)
        CliRunner().invoke(main, ["serve", str(models), *arguments])
    return given[0]


def test_devices_that_are_named_narrow_the_policy_of_a_package(models: Path, tmp_path: Path) -> None:
    """A package that denies a device is not served on it, whatever the options of the command allow."""
    path = make(tmp_path / "mine.ortpackage", policy=DevicePolicy().with_deny(["cpu"]))
    found = Repository([path], _options_of(models, "--device", "cpu"))
    asyncio.run(found.load_all())
    assert not found.entries["mine"].loaded
    assert "cpu: denied by the policy (deny: cpu)" in found.entries["mine"].reason


def test_files_are_compiled_in_the_precision_that_is_asked_for(models: Path) -> None:
    """By the option, and by `ServeOptions` of an embedded server."""
    found = Repository([models], _options_of(models, "--device", "cpu", "--precision", "fp16"))
    asyncio.run(found.load_all())
    assert found.entries["product"].loaded["1"].runner.options.precision is Precision.F16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--precision", "f8"], "'f8' is not one of"),
        (["--tls-cert", "MODEL"], "belong together"),
        (["--signed-only"], "needs --key"),
        (["--token-env", "NO_SUCH_VARIABLE"], "is not set"),
        (["--tls-cert", "MODEL", "--tls-key", "MODEL"], "not a certificate"),
        (["--http", "-1", "--grpc", "-1"], "neither"),
        (["--http", "99999"], "99999 is not in the range"),
        (["--http-port", "99999"], "99999 is not in the range"),  # as Triton calls it
        (["--port", "8000"], "--http-port"),
        (["--host", "192.0.2.1"], "192.0.2.1"),
    ],
)
def test_wrong_options_end_the_command(models: Path, arguments: list[str], message: str) -> None:
    """With what to do, and no traceback."""
    model = str(models / "product.onnx")
    result = CliRunner().invoke(main, ["serve", model, *(model if each == "MODEL" else each for each in arguments)])
    assert isinstance(result.exception, SystemExit)
    assert result.exit_code != 0
    assert message in result.output


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (["--device", "cuda,cpu"], {}),
        (["--prefer", "cuda"], {"RLX_DEVICES": "cpu,cuda"}),
        ([], {"RLX_DEVICE_CHAIN": "cuda,cpu"}),
    ],
    ids=["option", "preferred", "chain"],
)
def test_the_ready_line_names_devices_and_why_others_are_not_used(
    models: Path, arguments: list[str], environment: dict[str, str]
) -> None:
    """Of those that were named; without CUDA the CPU does not answer without a word, and the reason comes once."""
    if is_available("cuda"):
        pytest.skip("this machine has CUDA")
    save_product(models / "second.onnx")
    lines = _lines_until("not on", [str(models), *arguments], environment)
    assert lines[-2] == "ready: product on cpu, second on cpu\n"
    assert lines[-1].startswith("not on cuda: ")


def test_a_warmed_package_says_once_it_is_open_which_named_devices_it_does_not_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers on the CPU before, so that `ready` cannot know."""
    if is_available("cuda"):
        pytest.skip("this machine has CUDA")
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path / "cache"))
    path = make(tmp_path / "small.ortpackage")
    warm_package(path, ["cpu"])
    lines = _lines_until("not on", [str(path), "--device", "cuda,cpu"], {}, after="opened in full")
    assert "ready: small on cpu\n" in lines
    assert lines[-1].startswith("not on cuda: ")
    assert "being opened" not in lines[-1]


@pytest.mark.parametrize(
    ("arguments", "environment", "reason"),
    [
        (["--device", "cpu", "--load-limit", "0.001"], {}, "the opening was ended|longer than"),
        ([], {"RLX_DEVICE": "cuda"}, "cuda: "),
    ],
    ids=["slow", "device"],
)
def test_a_server_without_a_model_ends(
    models: Path, arguments: list[str], environment: dict[str, str], reason: str
) -> None:
    """With the reason, and a code for whoever started it; RLX_DEVICE names the only device."""
    if environment and is_available("cuda"):
        pytest.skip("this machine has CUDA")
    with _started([str(models), *arguments], environment) as process:
        _, text = process.communicate(timeout=60)
    assert process.returncode == 1
    assert re.search(reason, text)
    assert "no model could be loaded (product)" in text
    assert "ready" not in text


def test_clients_may_load_a_model_later_where_the_server_may_wait_for_one(models: Path) -> None:
    """With --repository-control it goes on without a model."""
    line = _lines_until("ready", [str(models), "--load-limit", "0.001", "--repository-control"], {})[-1]
    assert line == "ready: no model; 1 failed\n"


@pytest.mark.parametrize("name", ["uvicorn", "httptools", "prometheus_client", "grpc", "google.protobuf"])
def test_a_missing_library_is_one_line_with_the_command(models: Path, name: str) -> None:
    """Before a model is loaded, and whichever of the extra's it is."""
    hidden = f"""if True:
        import sys
        class Hidden:
            def find_spec(self, name, path=None, target=None):
                if name == {name!r}:
                    raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        sys.meta_path.insert(0, Hidden())
        from rlx_ort.cli import main
        main()"""
    found = subprocess.run([sys.executable, "-c", hidden, "serve", str(models)], capture_output=True, text=True)
    assert found.returncode == 10
    assert found.stderr.count("\n") == 1
    assert name in found.stderr
    assert 'pip install ".[serve]"' in found.stderr


@pytest.mark.parametrize("packed", [False, True], ids=["file", "package"])
def test_the_first_request_imports_nothing(tmp_path: Path, running: list[subprocess.Popen[str]], packed: bool) -> None:
    """Over either side: all libraries are there at `ready`, so that it takes about as long as the later ones."""
    save_product(tmp_path / "product.onnx")
    path = tmp_path / "product.onnx"
    if packed:
        graph, path = load(path).graph, tmp_path / "product.ortpackage"
        create_package(graph, path)
    command = [sys.executable, "-X", "importtime", "-c", "from rlx_ort.cli import main; main()", "serve", str(path)]
    command += ["--device", "cpu", "--http", "0", "--grpc", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, encoding="utf-8")
    running.append(process)
    assert process.stderr is not None
    before = []
    for line in process.stderr:
        before.append(line)
        if line.startswith("ready:"):
            break
    [(rest, rpc)] = re.findall(r"REST on http://(\S+:\d+), gRPC on (\S+:\d+)", "".join(before))
    assert answers(rest, rpc)
    process.kill()
    with process.stderr as stderr:
        imported = {line.split("|")[-1].strip() for line in stderr if line.startswith("import time:")}
    assert "numpy" in "".join(before)
    assert {name for name in imported if name.partition(".")[0] not in sys.stdlib_module_names} == set()


def test_help_shows_the_option_that_names_devices() -> None:
    """By the name that the other commands have."""
    assert "--device DEVICES" in CliRunner().invoke(main, ["serve", "--help"]).output


def test_the_command_says_which_model_is_not_batched_and_why(tmp_path: Path) -> None:
    """Its throughput is another one, and the log does not show it."""
    graph = Graph("fixed")
    graph.outputs = [graph.input("x", [1, 4]) * 2.0]
    save_onnx(graph, tmp_path / "fixed.onnx")
    line = _lines_until("fixed runs", [str(tmp_path), "--device", "cpu"], {})[-1]
    assert "fixed runs one request at a time: inputs and outputs have no open first dim in common" in line


def _started(arguments: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    """Return a server on free ports."""
    command = [sys.executable, "-c", "from rlx_ort.cli import main; main()", "serve", *arguments]
    command += ["--http", "0", "--grpc", "0"]
    environment = {**os.environ, **environment, "PYTHONUTF8": "1"}
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, encoding="utf-8", env=environment)


def _lines_until(part: str, arguments: list[str], environment: dict[str, str], after: str = "") -> list[str]:
    """Return the lines of a server up to one that begins with some words, behind one with others; it is ended then.

    It is ended after two minutes in every case.
    """
    lines: list[str] = []
    with _started(arguments, environment) as process:
        late = threading.Timer(120, process.kill)
        late.start()
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if line.startswith(part) and after in "".join(lines):
                break
        late.cancel()
        process.kill()
    return lines
