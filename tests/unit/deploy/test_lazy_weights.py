"""Weights: not read at opening, verified before anybody gets their bytes, and the same bytes ever after."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from sample_packages.packages import flip, make, weights

from rlx_ort import DType, IntegrityError
from rlx_ort.deploy.open import runner_of
from rlx_ort.deploy.package import Package, PackageTensor


@pytest.fixture(params=[False, True], ids=["file", "folder"])
def package(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return the small package in each form."""
    return make(tmp_path / "small.ortpackage", folder=request.param)


def _tensor(opened: Package, name: str = "first") -> PackageTensor:
    found = opened.graph().weights[name]
    assert isinstance(found, PackageTensor)
    return found


def _file(tensor: PackageTensor) -> Path:
    assert tensor.source is not None
    return Path(tensor.source.path)


def test_opening_reads_no_weights(package: Path) -> None:
    """Neither the package, its graph nor a runner takes the bytes of a weight; their sizes are known."""
    opened = Package(package)
    runner = runner_of(opened)
    tensors = [opened.tensor(name) for name in opened.index.tensors if not name.startswith("golden")]
    assert runner.weights.nbytes == 2 * 32 * 32 * 4
    assert [tensor.is_verified for tensor in tensors] == [False] * len(tensors)


def test_weights_are_right_and_mapped(package: Path) -> None:
    """The values are those that were packed, in memory that cannot be written."""
    tensor = _tensor(Package(package))
    np.testing.assert_array_equal(tensor.numpy(), weights()["first"])
    assert tensor.is_verified
    assert not tensor.buffer.flags.writeable


def test_weights_outlive_the_package(package: Path) -> None:
    """Closing the package does not take away the bytes that somebody uses."""
    with Package(package) as opened:
        tensor = _tensor(opened)
        array = tensor.numpy()
    np.testing.assert_array_equal(array, weights()["first"])


def test_a_weight_changed_before_its_first_use_is_found(package: Path) -> None:
    """Bytes that changed between opening and use are refused, and the tensor is named."""
    opened = Package(package)
    tensor = _tensor(opened, "second")
    flip(_file(tensor), tensor.source.offset + 100)  # type: ignore[union-attr]  # `_file` has seen it
    with pytest.raises(IntegrityError, match=r"weights\.bin|small\.ortpackage"):
        _ = tensor.buffer


@pytest.mark.skipif(os.name == "nt", reason="Windows cuts no file that is mapped")
def test_a_file_that_was_cut_and_written_again_is_verified_again(package: Path) -> None:
    """The map shows other bytes then, also where size and time were restored."""
    tensor = _tensor(Package(package), "second")
    path, offset = _file(tensor), tensor.source.offset  # type: ignore[union-attr]  # `_file` has seen it
    assert tensor.buffer[100] == path.read_bytes()[offset + 100]
    for right in (True, False):
        before, content = path.stat(), bytearray(path.read_bytes())
        content[offset + 100] ^= 0 if right else 1
        with path.open("r+b") as file:
            file.truncate(10)
            file.write(content)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        if right:
            assert tensor.buffer[100] == content[offset + 100]
        else:
            for _ in range(2):
                with pytest.raises(IntegrityError, match="changed since it was packed"):
                    _ = tensor.buffer


def test_a_file_replaced_under_its_name_changes_nothing(package: Path, tmp_path: Path) -> None:
    """The handle that was opened counts: another file of the same name is never read."""
    tensor = _tensor(Package(package))
    path = _file(tensor)
    (tmp_path / "forged").write_bytes(bytes(path.stat().st_size))
    if os.name == "nt":
        pytest.skip("Windows refuses to replace an open file")
    (tmp_path / "forged").replace(path)
    np.testing.assert_array_equal(tensor.numpy(), weights()["first"])


def test_a_private_copy_cannot_be_reached(package: Path) -> None:
    """With `private`, a later write to the file does not show in a weight that was taken."""
    opened = Package(package, private=True)
    tensor = _tensor(opened)
    before = tensor.numpy().copy()
    file, begin = opened._container.locate(opened.index.tensors["tensor0"].file)
    flip(file.path, begin + opened.index.tensors["tensor0"].offset + 10, 6)
    np.testing.assert_array_equal(tensor.numpy(), before)
    assert tensor.source is None


def test_rounded_weights_are_those_of_the_package(package: Path) -> None:
    """A session in f16 gets the stored f16 weights; the f32 ones are not even read."""
    opened = Package(package)
    runner = runner_of(opened)
    _, found = runner.weights.snapshot(["first"], {"first": DType.F16})
    assert isinstance(found["first"], PackageTensor)
    np.testing.assert_array_equal(found["first"].numpy(), weights()["first"].astype(np.float16))
    assert not runner.weights.get("first").is_verified  # type: ignore[union-attr]  # it is a PackageTensor


def test_a_new_value_is_not_answered_by_the_old_rounding(package: Path) -> None:
    """After `set_param` the stored f16 weights do not count any more."""
    runner = runner_of(Package(package))
    runner.set_param("first", np.ones((32, 32), np.float32))
    _, found = runner.weights.snapshot(["first"], {"first": DType.F16})
    np.testing.assert_array_equal(found["first"].numpy(), np.ones((32, 32), np.float16))
