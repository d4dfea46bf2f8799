"""`storage`: files appear whole or not at all, whoever writes them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rlx_ort.ir.dtype import DType
from rlx_ort.ir.tensor import FileRange, TensorData
from rlx_ort.providers.engine.compiled import starts
from rlx_ort.providers.engine.compiled.store import CompileStore, Entry
from rlx_ort.providers.engine.injection import write_weights_file
from rlx_ort.storage import replacing, write_atomic


def _content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"}


def test_a_stream_that_raises_leaves_the_old_file_alone(tmp_path: Path) -> None:
    """What was written until then is removed."""
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def half() -> None:
        with replacing(path) as stream:
            stream.write(b"half of the n")
            raise KeyError("interrupted")

    with pytest.raises(KeyError):
        half()
    assert _content(tmp_path) == {"file": b"old"}


def test_two_writers_of_one_file_do_not_write_into_each_other(tmp_path: Path) -> None:
    """Each writes a file of its own, and the last to end wins."""
    path = tmp_path / "file"
    with replacing(path) as first:
        first.write(b"first, ")
        with replacing(path) as second:
            second.write(b"second")
        assert path.read_bytes() == b"second"
        first.write(b"whole")
    assert _content(tmp_path) == {"file": b"first, whole"}


def test_a_file_is_flushed_to_the_disk_before_it_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system that goes down after the rename has the bytes."""
    path, order = tmp_path / "file", []
    flush, rename = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (order.append("fsync"), flush(handle)))
    monkeypatch.setattr(os, "replace", lambda source, target: (order.append("rename"), rename(source, target)))
    write_atomic(path, b"new")
    assert order == ["fsync", "rename"]
    assert path.read_bytes() == b"new"


def test_an_incomplete_file_may_lie_beside_another_path(tmp_path: Path) -> None:
    """A folder that is read as a whole never has half a file in it."""
    folder = tmp_path / "package"
    folder.mkdir()
    with replacing(folder / "file", beside=folder) as stream:
        stream.write(b"new")
        assert list(folder.iterdir()) == []
        assert [path.name.startswith(".package.") for path in tmp_path.iterdir() if path != folder] == [True]
    assert _content(tmp_path) == {"file": b"new"}


def _note_a_start(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(starts, "default_store", lambda: CompileStore(folder))
        starts.note_start("0" * 64, starts.Start(Entry(folder, "1" * 32, {}, "", 0.0, 0.0, None), (), ()))


def _remember_a_digest(folder: Path) -> None:
    from rlx_ort.providers.engine.compiled.models import weights_digest

    path = folder.with_suffix(".weights")
    path.write_bytes(bytes(16))
    source = FileRange(str(path), 0, FileRange.stamp_of(path.stat()))
    weights_digest({"w": TensorData(DType.F32, (4,), np.zeros(16, np.uint8), source)}, folder)


def _write_weights(folder: Path) -> None:
    folder.mkdir()
    write_weights_file({"w": np.ones(64, np.uint8)}, folder)


@pytest.mark.parametrize("write", [_note_a_start, _remember_a_digest, _write_weights])
@pytest.mark.parametrize("step", ["replace", "fsync"])
def test_nothing_is_left_of_a_file_that_cannot_be_written(
    write: Callable[[Path], None], step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk, and where the target cannot be replaced."""

    def full(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = tmp_path / "cache"
    monkeypatch.setattr(os, step, full)
    try:
        write(folder)
    except OSError as err:
        assert err.errno == errno.ENOSPC  # noqa: PT017  # some callers go on without the file
    assert folder.is_dir()
    assert _content(folder) == {}


READ_IT = """
import sys
from pathlib import Path
import rlx_ort
from rlx_ort import errors
from rlx_ort.calibration.store import _read
from rlx_ort.converters.sources import open_source
from rlx_ort.ir.serde import load_json
from rlx_ort.ir.tensor import read_tensors
for read in (rlx_ort.load, rlx_ort.open_package, rlx_ort.from_onnx, load_json, read_tensors, open_source):
    try:
        read(Path(sys.argv[1]))
    except errors.RlxError:
        continue
    raise SystemExit(f"{read} took it")
assert _read(Path(sys.argv[1]), None).profile is None
"""


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes and devices among the files here")
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_only_regular_files_are_read(tmp_path, kind):
    """A pipe would block for ever, and a device without an end would fill the memory."""
    path = tmp_path / "model.onnx"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    done = subprocess.run(
        [sys.executable, "-P", "-c", READ_IT, str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
