"""A model that cannot be opened, is no file, has no usable name or never ends keeps nothing else from being served."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import time
from pathlib import Path

import onnx
import pytest
from onnx_text import parsed
from served_models import save_product

from rlx_ort import DevicePolicy, RlxError
from rlx_ort.serving.options import ServeOptions
from rlx_ort.serving.repository import Repository

CPU = ServeOptions(policy=DevicePolicy.only("cpu"))


def save_endless(path: Path) -> None:
    """Write a model whose loop ends after 2^62 rounds."""
    text = """(float[2] x) => (float[2] y) <int64 rounds = {4611686018427387904}> {
      y = Loop (rounds, "", x) <body = b (int64 i, bool c, float[2] s) => (bool c2, float[2] s2) {
        c2 = Identity (c)
        s2 = Add (s, s)
      }>
    }"""
    onnx.save(parsed(text), path)


@pytest.mark.parametrize("error", [RuntimeError("no"), ValueError("no"), MemoryError(), OSError("no")], ids=repr)
async def test_a_model_that_fails_in_any_way_keeps_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The models behind it are loaded."""
    for name in ("a", "b", "c"):
        save_product(tmp_path / f"{name}.onnx")
    whole = Repository._opened

    def failing(self: Repository, name: str, version: str, path: Path) -> object:
        if name == "b":
            raise error
        return whole(self, name, version, path)

    monkeypatch.setattr(Repository, "_opened", failing)
    repository = Repository([tmp_path], CPU)
    await repository.load_all()
    assert [name for name, entry in repository.entries.items() if entry.loaded] == ["a", "c"]
    assert repository.entries["b"].reason == (str(error) or "MemoryError")
    await repository.close()


async def test_a_text_output_of_one_dim_does_not_stop_the_models_behind_it(tmp_path: Path) -> None:
    """Its made-up inputs once raised an error that was none of ours."""
    onnx.save(parsed("(string[batch] x) => (string[batch] y) { y = Identity (x) }"), tmp_path / "a.onnx")
    save_product(tmp_path / "b.onnx")
    repository = Repository([tmp_path], CPU)
    await repository.load_all()
    assert repository.entries["b"].loaded
    await repository.close()


async def test_a_file_whose_name_cannot_be_served_is_left_out(tmp_path: Path) -> None:
    """At the start, and when it is dropped into the folder later; one that is named itself is refused."""
    save_product(tmp_path / "good.onnx")
    shutil.copy(tmp_path / "good.onnx", tmp_path / "not good.onnx")
    repository = Repository([tmp_path], CPU)
    await repository.load_all()
    assert list(repository.entries) == ["good"]
    assert repository.ready
    shutil.copy(tmp_path / "good.onnx", tmp_path / "not good either!.onnx")
    await repository.load("good")
    await repository.close()
    with pytest.raises(RlxError, match="rename it"):
        Repository([tmp_path / "not good.onnx"], CPU)


async def test_two_files_of_one_version_fail_alone(tmp_path: Path) -> None:
    """The model has the reason; the others are served."""
    save_product(tmp_path / "a.onnx")
    save_product(tmp_path / "b.onnx")
    (tmp_path / "a").mkdir()
    shutil.copytree(tmp_path / "a", tmp_path / "a" / "1")
    save_product(tmp_path / "a" / "1" / "model.onnx")
    repository = Repository([tmp_path], CPU)
    await repository.load_all()
    assert "both version 1" in repository.entries["a"].reason
    assert repository.entries["b"].loaded
    await repository.close()


@pytest.mark.skipif(sys.platform == "win32", reason="no named pipes in folders there")
async def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    """It is refused at once, and so is a link to a device."""
    os.mkfifo(tmp_path / "a.onnx")
    (tmp_path / "b.onnx").symlink_to("/dev/zero")
    save_product(tmp_path / "c.onnx")
    repository = Repository([tmp_path], CPU)
    await asyncio.wait_for(repository.load_all(), 20)
    assert [name for name, entry in repository.entries.items() if entry.loaded] == ["c"]
    assert "not a regular file" in repository.entries["a"].reason
    assert "not a regular file" in repository.entries["b"].reason
    await repository.close()


async def test_a_model_that_never_ends_blocks_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ones behind it are loaded, loads and unloads go on, and the server ends."""
    monkeypatch.setattr("rlx_ort.serving.repository._PATIENCE_S", 0.3)
    save_endless(tmp_path / "a.onnx")
    save_product(tmp_path / "b.onnx")
    repository = Repository([tmp_path], CPU)
    loading = asyncio.ensure_future(repository.load_all())
    until_s = time.monotonic() + 20
    while not repository.entries["b"].loaded and time.monotonic() < until_s:
        await asyncio.sleep(0.05)
    await asyncio.wait_for(repository.load("b"), 20)
    assert not repository.ready
    await asyncio.wait_for(repository.unload("b"), 5)
    await asyncio.wait_for(repository.close(), 5)
    await asyncio.wait_for(loading, 5)


async def test_a_model_that_takes_too_long_to_load_is_given_up(tmp_path: Path) -> None:
    """With the time limit as its reason."""
    save_endless(tmp_path / "a.onnx")
    repository = Repository([tmp_path], ServeOptions(policy=DevicePolicy.only("cpu"), load_limit_s=0.5))
    await asyncio.wait_for(repository.load_all(), 20)
    assert repository.entries["a"].reason == "it took longer than 0.5 s to open"
    await repository.close()
