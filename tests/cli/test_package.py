"""`package ...`: made, looked at, checked, run and compared from the command line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from command_line import Cli
from sample_packages.keys import write_keys
from sample_packages.packages import flip, make

from rlx_ort.selection.policy import DevicePolicy

X = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("RLX_PACKAGE_KEY", raising=False)


@pytest.fixture
def package(cli: Cli, add_one: Path, tmp_path: Path) -> Path:
    """Return a package of `add_one` with a golden case."""
    np.savez(tmp_path / "in.npz", x=X)
    target = tmp_path / "add_one.ortpackage"
    outcome = cli("package", "create", add_one, "-o", target, "--golden", tmp_path / "in.npz", "--license", "MIT")
    assert outcome.code == 0, outcome.err
    return target


def test_create_says_what_it_wrote(cli: Cli, add_one: Path, tmp_path: Path) -> None:
    """The document has the size and the digest, which is that of rlx.json in the package."""
    from hashlib import sha256

    target = tmp_path / "a.ortpackage"
    document = cli("package", "create", add_one, "-o", target, "--folder", "--json").document
    assert document["sha256"] == sha256((target / "rlx.json").read_bytes()).hexdigest()
    assert document["bytes"] == sum(path.stat().st_size for path in target.rglob("*") if path.is_file())


def test_create_keeps_what_is_there(cli: Cli, add_one: Path, package: Path) -> None:
    """Without --force an existing package is exit code 7 and stays; with it, it is replaced."""
    before = package.read_bytes()
    outcome = cli("package", "create", add_one, "-o", package, "--json")
    assert (outcome.code, outcome.document["error"]["exit_code"]) == (7, 7)
    assert package.read_bytes() == before
    assert cli("package", "create", add_one, "-o", package, "--force", "--name", "other").code == 0
    assert package.read_bytes() != before


def test_inspect_shows_what_was_said(cli: Cli, add_one: Path, tmp_path: Path) -> None:
    """Variants, policy, dims, licence and provenance are in the document and in the text."""
    target = tmp_path / "a.ortpackage"
    said = [
        "--variant",
        "cpu:f32",
        "--variant",
        "cuda:f16",
        "--deny",
        "webgpu",
        "--policy",
        "benchmark",
        "--dim",
        "rows=2",
    ]
    said += ["--license", "Apache-2.0", "--provenance", "source=a test", "--version", "7", "--serial", "3"]
    assert cli("package", "create", add_one, "-o", target, *said).code == 0
    document = cli("package", "inspect", target, "--json").document
    assert [(row["device"], row["precision"]) for row in document["variants"]] == [("cpu", "f32"), ("cuda", "f16")]
    assert document["policy"] == {"allow": None, "deny": ["webgpu"], "prefer": [], "pick": "benchmark"}
    found = {key: document[key] for key in ("dims", "license", "provenance", "version", "serial", "signature", "form")}
    assert found == {
        "dims": {"rows": 2},
        "license": "Apache-2.0",
        "provenance": {"source": "a test"},
        "version": "7",
        "serial": 3,
        "signature": "none",
        "form": "file",
    }
    text = cli("package", "inspect", target).out
    assert [
        word for word in ("cuda-f16", "deny webgpu", "Apache-2.0", "manifest.json", "rows=2") if word not in text
    ] == []


def test_buckets_are_ranges_of_a_dim(cli: Cli, add_one: Path, tmp_path: Path) -> None:
    """They come back as they were given, and what is none is wrong usage."""
    target = tmp_path / "a.ortpackage"
    assert cli("package", "create", add_one, "-o", target, "--buckets", "rows=1:5,5:9").code == 0
    document = cli("package", "inspect", target, "--json").document
    assert document["buckets"] == {"dim": "rows", "ranges": [[1, 5], [5, 9]]}
    assert cli("package", "create", add_one, "-o", target, "--buckets", "rows", "--force").code == 2


def test_verify_has_a_row_for_each_device(cli: Cli, package: Path) -> None:
    """The CPU is right, a device that is not here was not run, and since it was named the exit code is 3."""
    outcome = cli("package", "verify", package, "--device", "cpu,tpu", "--json")
    assert outcome.code == 3, outcome.err
    assert [(row["device"], row["verdict"]) for row in outcome.document["devices"]] == [
        ("cpu", "right"),
        ("tpu", "not run"),
    ]
    table = cli("package", "verify", package, "--device", "cpu").out
    assert [word for word in ("verdict", "right", "f32") if word not in table] == []


def test_verify_all_runs_every_device_that_is_here(cli: Cli, package: Path) -> None:
    """`all` is every device that works here, each once; none of them is wrong."""
    from rlx_ort.providers.registry import available_devices, same_hardware

    document = cli("package", "verify", package, "--device", "all", "--json").document
    assert [row["device"] for row in document["devices"]] == [
        device.label for device in available_devices() if same_hardware(device)[0] == device
    ]
    assert {row["verdict"] for row in document["devices"]} == {"right"}


def test_wrong_outputs_are_exit_code_7(cli: Cli, add_one: Path, tmp_path: Path) -> None:
    """A device that gives other outputs than expected is named, after the document."""
    np.savez(tmp_path / "in.npz", x=X)
    np.savez(tmp_path / "out.npz", y=X + 2)
    target = tmp_path / "a.ortpackage"
    golden = ["--golden", tmp_path / "in.npz", "--expected", tmp_path / "out.npz"]
    assert cli("package", "create", add_one, "-o", target, *golden).code == 0
    outcome = cli("package", "verify", target, "--device", "cpu", "--json")
    assert outcome.code == 7
    assert outcome.document["devices"][0]["verdict"] == "wrong"
    assert "'y'" in outcome.err


@pytest.mark.parametrize("command", ["inspect", "verify", "run", "extract", "sign", "diff"])
def test_a_broken_package_is_exit_code_7(cli: Cli, package: Path, tmp_path: Path, command: str) -> None:
    """Every subcommand that reads a package refuses one with a changed bit, and prints no document."""
    place = package.read_bytes().index(b'"format": "rlx_ort package"')
    flip(package, place, 1)
    key = tmp_path / "key.pem"
    key.write_text("", encoding="utf-8")
    more = {"extract": ["-o", tmp_path / "out"], "sign": ["--key", key], "diff": [package]}.get(command, [])
    outcome = cli("package", command, package, *more, "--json")
    assert (outcome.code, outcome.document["error"]["exit_code"]) == (7, 7)
    assert "rlx.json" in outcome.err
    assert not (tmp_path / "out").exists()


def test_run_writes_the_outputs(cli: Cli, package: Path, tmp_path: Path) -> None:
    """Without inputs the golden case is run; the outputs are those of the model."""
    outcome = cli("package", "run", package, "--device", "cpu", "--outputs", tmp_path / "y.npz", "--json")
    assert outcome.code == 0, outcome.err
    assert (outcome.document["device"], outcome.document["inputs"]) == ("cpu", "golden case 0")
    with np.load(tmp_path / "y.npz", allow_pickle=False) as archive:
        np.testing.assert_array_equal(archive["y"], X + 1)


def test_run_narrows_the_policy_of_the_package(cli: Cli, add_one: Path, tmp_path: Path) -> None:
    """What the package or the command line denies is not used; naming it does not help."""
    target = tmp_path / "a.ortpackage"
    assert cli("package", "create", add_one, "-o", target, "--deny", "cpu").code == 0
    outcome = cli("package", "run", target, "--device", "cpu", "--json")
    assert (outcome.code, outcome.document["error"]["exit_code"]) == (3, 3)
    assert "denied" in outcome.err


def test_extract_goes_both_ways(cli: Cli, package: Path, tmp_path: Path) -> None:
    """A folder made of a file, packed into a file again, is the same file."""
    folder, again = tmp_path / "folder.ortpackage", tmp_path / "again.ortpackage"
    assert cli("package", "extract", package, "-o", folder, "--json").document["files"] == 6
    assert cli("package", "extract", folder, "-o", again, "--file").code == 0
    assert again.read_bytes() == package.read_bytes()
    assert cli("package", "extract", package, "-o", folder).code == 7


def test_diff_tells_what_changed(cli: Cli, add_one: Path, package: Path, tmp_path: Path) -> None:
    """Equal packages are exit code 0; a difference is listed, with exit code 1."""
    assert cli("package", "diff", package, package).code == 0
    other = tmp_path / "other.ortpackage"
    assert cli("package", "create", add_one, "-o", other, "--license", "MIT", "--serial", "2").code == 0
    outcome = cli("package", "diff", package, other, "--json")
    assert (outcome.code, outcome.document["same"]) == (1, False)
    names = {(row["what"], row["name"]) for row in outcome.document["differences"]}
    assert {("setting", "serial"), ("file", "golden/data.bin")} <= names


@pytest.mark.parametrize("command", ["verify", "run", "extract", "export"])
@pytest.mark.parametrize("pin", [("--sha256", "0" * 64), ("--min-serial", "6")], ids=["digest", "serial"])
def test_another_package_than_is_wanted_is_exit_code_7(
    cli: Cli, tmp_path: Path, command: str, pin: tuple[str, str]
) -> None:
    """Every subcommand that uses a package's bytes can be restricted to one package."""
    path = make(tmp_path / "a.ortpackage", serial=5)
    more = {"extract": ["-o", tmp_path / "out"], "export": [tmp_path / "out", "--format", "onnx"]}.get(command, [])
    outcome = cli("package", command, path, *more, *pin)
    assert (outcome.code, outcome.out) == (7, "")
    assert not (tmp_path / "out").exists()


def test_diff_finds_every_setting(cli: Cli, package: Path, tmp_path: Path) -> None:
    """Also one that `inspect` shows in short: here the number of runs of a strategy."""
    a = make(tmp_path / "a.ortpackage", policy=DevicePolicy().with_benchmark_pick(3))
    b = make(tmp_path / "b.ortpackage", policy=DevicePolicy().with_benchmark_pick(4))
    outcome = cli("package", "diff", a, b, "--json")
    assert outcome.code == 1
    assert outcome.document["differences"] == [{"what": "setting", "name": "policy.pick.runs", "first": 3, "second": 4}]


@pytest.mark.parametrize("name", ["../outside/net", "/{folder}/outside/net", "C:net", "nul"])
@pytest.mark.parametrize("form", ["onnx", "triton"])
def test_the_name_of_a_package_leads_nowhere(cli: Cli, tmp_path: Path, form: str, name: str) -> None:
    """A package may call itself anything; where an export writes does not follow from it."""
    path = make(tmp_path / "a.ortpackage", name=name.format(folder=str(tmp_path)[1:]))
    (tmp_path / "outside").mkdir()
    cli("package", "export", path, tmp_path / "out", "--format", form).fails(7, "--name")
    assert list((tmp_path / "outside").iterdir()) == []
    assert not (tmp_path / "out").exists()
    assert cli("package", "export", path, tmp_path / "out", "--format", form, "--name", "net").code == 0


def test_a_package_does_not_steer_the_terminal(cli: Cli, tmp_path: Path) -> None:
    """Escape sequences in what a package says of itself are shown and not obeyed."""
    path = make(tmp_path / "a.ortpackage", license="\x1b[31mred", provenance={"a\x07": "b\x9b"})
    text = cli("package", "inspect", path).out
    assert [letter for letter in text if not letter.isprintable() and letter != "\n"] == []
    assert "\\x1b[31mred" in text


def test_tolerances_are_kept(cli: Cli, add_one: Path, tmp_path: Path) -> None:
    """They take the place of the usual ones, and nonsense is refused."""
    np.savez(tmp_path / "in.npz", x=X)
    target = tmp_path / "a.ortpackage"
    golden = ("package", "create", add_one, "-o", target, "--golden", tmp_path / "in.npz")
    assert cli(*golden, "--tolerance", "f16=many").code == 2
    assert cli(*golden, "--tolerance", "f31=0.1").code == 7
    assert cli(*golden, "--tolerance", "fp16=0.25").code == 0
    assert cli("package", "inspect", target, "--json").document["tolerances"]["f16"] == 0.25


def test_a_signed_package_is_taken_by_its_key_only(cli: Cli, package: Path, tmp_path: Path) -> None:
    """`sign` and `verify --key` agree; another key, or no signature where one is asked for, is exit code 7."""
    pytest.importorskip("model_signing.signing", exc_type=ImportError)
    ours, theirs = write_keys(tmp_path, "ours"), write_keys(tmp_path, "theirs")
    assert cli("package", "verify", package, "--key", ours[1]).code == 7
    assert cli("package", "sign", package, "--key", ours[0], "--json").document["signed"] is True
    assert cli("package", "verify", package, "--key", ours[1], "--json").document["signature"] == "verified"
    assert cli("package", "verify", package, "--key", theirs[1]).code == 7
    assert cli("package", "run", package, "--key", ours[1], "--device", "cpu").code == 0
    assert cli("package", "diff", package, package, "--key", ours[1]).code == 0
    assert cli("package", "warm", package, "--key", ours[1], "--device", "cpu").code == 0
    assert cli("cache", "explain", package, "--key", ours[1], "--json").document["cached"] is True


@pytest.mark.parametrize("asked", ["option", "variable"])
@pytest.mark.parametrize("command", ["inspect", "verify", "run", "extract", "diff", "warm", "export", "explain"])
def test_every_command_that_reads_a_package_asks_for_its_signature(
    cli: Cli, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, asked: str
) -> None:
    """A package without one is refused by all of them, by `--key` and by `RLX_PACKAGE_KEY`."""
    pytest.importorskip("model_signing.signing", exc_type=ImportError)
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path / "cache"))
    _, public = write_keys(tmp_path, "ours")
    out = tmp_path / "out"
    more = {"extract": ["-o", out], "export": [out, "--format", "onnx"], "diff": [package]}.get(command, [])
    if asked == "option":
        more = [*more, "--key", public]
    else:
        monkeypatch.setenv("RLX_PACKAGE_KEY", str(public))
    cli("cache" if command == "explain" else "package", command, package, *more).fails(7, "sign")
    assert not out.exists()


def test_the_help_lists_the_subcommands(cli: Cli) -> None:
    """Each has a line of its own."""
    text = cli("package", "--help").out
    assert [
        name for name in ("create", "inspect", "verify", "run", "extract", "diff", "sign") if name not in text
    ] == []


def test_no_command_leaves_a_partial_file(package: Path) -> None:
    """Nothing but the package is where it was written."""
    assert [path for path in package.parent.iterdir() if "partial" in path.name] == []
