"""`rlx.json` and the names of a package's files: read strictly, written in one way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sample_packages.packages import files_of, make, rebuilt, repacked

from rlx_ort import Device, DevicePolicy, IntegrityError, PackageError, Precision
from rlx_ort.deploy.index import Index
from rlx_ort.deploy.names import check_name, check_names
from rlx_ort.deploy.package import Package


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the files of the small package."""
    return files_of(make(tmp_path_factory.mktemp("index") / "small.ortpackage"))


def test_everything_that_is_said_comes_back(tmp_path: Path) -> None:
    """Policy, dims, buckets, versions, licence, provenance and variants are read as they were given."""
    policy = DevicePolicy.only(["cpu", "cuda:1"]).with_deny(["webgpu"]).with_prefer(["cpu"]).with_benchmark_pick(3)
    said: dict[str, Any] = {
        "name": "a model",
        "version": "1.2",
        "serial": 9,
        "policy": policy,
        "dims": {"rows": 3},
        "buckets": ("rows", ((1, 4), (4, 9))),
        "requires": {"rlx_ort": "0.0.1"},
        "license": "MIT",
        "provenance": {"source": "here"},
        "verify_on_first_use": True,
        "precisions": {"webgpu": Precision.BF16},
    }
    with Package(make(tmp_path / "said.ortpackage", **said)) as package:
        index = package.index
    precisions = {item.device: item.precision for item in index.variants.values()}
    assert precisions == {"cpu": Precision.F32, "cuda": Precision.F16, "webgpu": Precision.BF16}
    found = {key: getattr(index, key) for key in said if key != "precisions"}
    assert found == {key: value for key, value in said.items() if key != "precisions"}
    assert index.policy.allow == (Device.CPU, Device("cuda:1"))


def test_reading_and_writing_gives_the_same_bytes(files: dict[str, bytes]) -> None:
    """There is one encoding of an index."""
    assert Index.from_bytes(files["rlx.json"]).to_bytes() == files["rlx.json"]


def _changed(index: Any, *path: str | int, to: Any) -> Any:
    made = json.loads(json.dumps(index))
    place = made
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    return made


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["format"], "something else"),
        (["schema"], 2),
        (["schema"], True),
        (["surprise"], 1),
        (["tensors", "tensor0", "size"], 8),
        (["tensors", "tensor0", "offset"], 1 << 40),
        (["tensors", "tensor0", "shape"], [-32, -32]),
        (["tensors", "tensor0", "dtype"], "f31"),
        (["tensors", "tensor0", "file"], "absent.bin"),
        (["tensors", "tensor0", "sha256"], "00"),
        (["graph"], "absent.json"),
        (["policy", "deny"], ["no such device"]),
        (["policy", "pick"], {"strategy": "dice"}),
        (["variants", "cpu-f32", "precision"], "f8"),
        (["variants", "cpu-f32", "rounded"], {"first": "absent"}),
        (["golden", "cases"], [{"inputs": {"x": "absent"}, "outputs": {}}]),
        (["golden", "cases", 0, "outputs"], {}),
        (["dims"], {"rows": -1}),
        (["golden", "tolerances"], {"f32": 10**400}),
        (["golden", "tolerances"], {"f32": -0.1}),
        (["golden", "tolerances"], {"f32": True}),
        (["variants", "cpu-f32", "device"], "cuda"),
        (["tensors", "tensor0", "shape"], [32, 32, True]),
        (["buckets"], {"dim": "rows", "ranges": [[True, 4]]}),
        (["buckets"], {"dim": "rows", "ranges": [[1]]}),
    ],
)
def test_a_wrong_entry_is_refused(files: dict[str, bytes], tmp_path: Path, path: list[str | int], value: Any) -> None:
    """An index that contradicts itself is refused though every digest in it is right."""
    index = _changed(json.loads(files["rlx.json"]), *path, to=value)
    with pytest.raises(IntegrityError):
        Package(repacked(tmp_path / "wrong.ortpackage", rebuilt(files, index)))


@pytest.mark.parametrize("name", ["hook.py", "ops.so", "../../x.json"])
def test_an_index_that_lists_a_forbidden_file_is_refused(files: dict[str, bytes], tmp_path: Path, name: str) -> None:
    """The names in the index are checked as those of the container are."""
    index = json.loads(files["rlx.json"])
    index["files"][name] = {"size": 0, "sha256": "0" * 64, "crc32": 0}
    with pytest.raises(IntegrityError, match="names a file"):
        Package(repacked(tmp_path / "wrong.ortpackage", {**files, "rlx.json": json.dumps(index).encode()}))


@pytest.mark.parametrize("requires", [{"rlx_ort": "999"}, {"onnxruntime": "999.1"}, {"magic": "1"}])
def test_newer_versions_than_are_here_are_asked_for(
    files: dict[str, bytes], tmp_path: Path, requires: dict[str, str]
) -> None:
    """The message names what is required, and that is no fault of the package's bytes."""
    index = _changed(json.loads(files["rlx.json"]), "requires", to=requires)
    with pytest.raises(PackageError, match=next(iter(requires))) as caught:
        Package(repacked(tmp_path / "newer.ortpackage", rebuilt(files, index)))
    assert not isinstance(caught.value, IntegrityError)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["components", "model", "variants", "cpu-f32", "variant_directory"], "../elsewhere"),
        (["components", "model", "variants", "cpu-f32", "executor_info", "ort", "session_options"], {"session.x": "1"}),
        (["components", "other"], {"variants": {}}),
        (["layout"], "installed"),
    ],
)
def test_a_manifest_that_says_more_than_ours_is_refused(
    files: dict[str, bytes], tmp_path: Path, path: list[str], value: Any
) -> None:
    """What ONNX Runtime would do with the package may not lead out of it, even if all digests are right."""
    manifest = _changed(json.loads(files["manifest.json"]), *path, to=value)
    changed = {**files, "manifest.json": json.dumps(manifest).encode()}
    with pytest.raises(IntegrityError, match=r"manifest\.json"):
        Package(repacked(tmp_path / "wrong.ortpackage", rebuilt(changed, json.loads(files["rlx.json"]))))


BAD = {
    "absolute": "/etc/passwd.json",
    "parent": "../a.json",
    "inner parent": "a/../../b.json",
    "dot": "./a.json",
    "empty part": "a//b.json",
    "folder": "a/",
    "empty": "",
    "drive": "C:a.json",
    "drive path": "C:/a.json",
    "stream": "a.json:hidden.json",
    "backslash": "a\\b.json",
    "share": "\\\\server\\share\\a.json",
    "share with slashes": "//server/share/a.json",
    "nul": "a\0.json",
    "newline": "a\n.json",
    "reserved": "con.json",
    "reserved folder": "AUX/a.json",
    "reserved with two suffixes": "nul.txt.json",
    "port": "com1.bin",
    "trailing dot": "a.json.",
    "trailing space": "a.json ",
    "leading dot": ".hidden.json",
    "not ascii": "ä.json",
    "right to left": "a\u202enosj.json",
    "too long": "a" * 300 + ".json",
    "too deep": "/".join("abcdefghijk") + ".json",
    "library": "custom_ops.so",
    "versioned library": "libops.so.1",
    "windows library": "ops.dll",
    "mac library": "ops.dylib",
    "python": "hook.py",
    "pickle": "weights.pkl",
    "torch": "weights.pt",
    "shell": "run.sh",
    "no suffix": "Makefile",
}


@pytest.mark.parametrize("name", BAD.values(), ids=BAD)
def test_a_dangerous_name_is_refused(name: str) -> None:
    """Each is an error that quotes the name."""
    with pytest.raises(IntegrityError) as caught:
        check_name(name)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("name", ["rlx.json", "cpu-f32/model.onnx", "shared_assets/sha256-00ff/weights.bin", "a+b.txt"])
def test_a_plain_name_is_taken(name: str) -> None:
    """Letters, digits, `.`, `_`, `+` and `-` in a few folders are fine."""
    check_name(name)


@pytest.mark.parametrize(
    "names",
    [["a.json", "A.json"], ["a/b.json", "A/c.json"], ["a.json", "a.json/b.json"], ["a.json", "a.json"]],
    ids=["case", "folder case", "file and folder", "twice"],
)
def test_names_that_collide_are_refused(names: list[str]) -> None:
    """Two names that are one file on some system are an error."""
    with pytest.raises(IntegrityError):
        check_names(names)


def test_too_many_files_are_refused() -> None:
    """The number of files has a limit."""
    with pytest.raises(IntegrityError, match="more than"):
        check_names(f"f{number}.json" for number in range(5000))
