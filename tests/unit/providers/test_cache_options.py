"""What each provider lets the compile cache keep of it, and how weights stand in a key."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlx_ort import CompileOptions, Device, DType, WeightSharing
from rlx_ort.ir.tensor import FileRange, TensorData
from rlx_ort.providers.engine.compiled import models
from rlx_ort.providers.engine.compiled.models import use_for, weights_digest
from rlx_ort.providers.engine.recipe import Keeps, SessionRecipe
from rlx_ort.providers.ort_provider import OrtProvider
from rlx_ort.providers.registry import default_registry

COMPILERS = ("tensorrt", "nv-tensorrt-rtx", "openvino", "rocm", "metal", "qnn")


def recipe_of(kind: str, monkeypatch, tmp_path) -> tuple[OrtProvider, SessionRecipe]:
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(OrtProvider, "ep_devices", lambda self, device: ())
    monkeypatch.setattr("rlx_ort.providers.openvino.OpenVinoProvider._target", lambda self, device: "CPU")
    provider = default_registry().for_device(Device(kind))
    assert isinstance(provider, OrtProvider)
    return provider, provider.recipe(Device(kind), CompileOptions())


@pytest.mark.parametrize("kind", COMPILERS)
def test_a_provider_that_compiles_keeps_what_it_compiled(kind, monkeypatch, tmp_path):
    """In a folder that is named by one of its own options, or as an EPContext model."""
    provider, recipe = recipe_of(kind, monkeypatch, tmp_path)
    if recipe.cache_options is None:
        assert recipe.keeps is Keeps.CONTEXT
        return
    options = recipe.cache_options("/the/folder")
    assert "/the/folder" in options.values()
    assert provider.option_keys is not None
    assert options.keys() <= provider.option_keys


@pytest.mark.parametrize(
    ("kind", "keeps"), [("cpu", Keeps.PACKED), ("cuda", Keeps.OPTIMIZED), ("directx", Keeps.NOTHING)]
)
def test_a_provider_with_kernels_keeps_the_optimised_model(kind, keeps, monkeypatch, tmp_path):
    """DirectML fuses at load time what cannot be written to a file, so nothing of it is kept."""
    _, recipe = recipe_of(kind, monkeypatch, tmp_path)
    assert recipe.keeps is keeps


def test_packed_sharing_uses_the_cache_whatever_the_variable_says(monkeypatch):
    """It is a file, so there is no other way; elsewhere the variable counts."""
    packed = CompileOptions(sharing=WeightSharing.PREPACKED)
    monkeypatch.setenv("RLX_CACHE", "off")
    assert use_for(SessionRecipe("P", keeps=Keeps.PACKED), packed).value == "on"
    assert use_for(SessionRecipe("P", keeps=Keeps.OPTIMIZED), packed).value == "off"
    monkeypatch.setenv("RLX_CACHE", "on")
    assert use_for(SessionRecipe("P"), packed).value == "off"


def mapped(path: Path, offset: int, count: int) -> TensorData:
    view = np.memmap(path, np.uint8, "r", offset=offset, shape=(count,))
    return TensorData(DType.U8, (count,), view, FileRange(str(path), offset, FileRange.stamp_of(path.stat())))


def test_mapped_weights_are_read_once(tmp_path, monkeypatch):
    """The answer is remembered by the file's stamp, and forgotten once the file is another one."""
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(200)))
    weights = {"a": mapped(path, 0, 100), "b": mapped(path, 100, 100)}
    first = weights_digest(weights, tmp_path / "cache")
    with monkeypatch.context() as patched:
        patched.setattr(models, "_bytes_of", lambda tensor: pytest.fail("read again"))
        assert weights_digest(weights, tmp_path / "cache") == first
    weights.clear()  # Windows replaces no file that is mapped
    other = tmp_path / "other"
    other.write_bytes(bytes(range(199)) + b"\0")
    other.replace(path)
    changed = {"a": mapped(path, 0, 100), "b": mapped(path, 100, 100)}
    assert weights_digest(changed, tmp_path / "cache") != first


def test_a_damaged_memory_of_a_digest_is_not_believed(tmp_path):
    """The weights are read again."""
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(200)))
    weights = {"a": mapped(path, 0, 200)}
    first = weights_digest(weights, tmp_path / "cache")
    (memo,) = (tmp_path / "cache" / "digests").iterdir()
    memo.write_text("abc", encoding="ascii")
    assert weights_digest(weights, tmp_path / "cache") == first


def test_weights_in_memory_count_by_name_type_and_value(tmp_path):
    """Equal bytes of another shape, dtype or name are other weights."""
    zeros = np.zeros(4, np.float32)
    found = {
        weights_digest(given, tmp_path)
        for given in (
            {"a": TensorData.from_array(zeros)},
            {"b": TensorData.from_array(zeros)},
            {"a": TensorData.from_array(zeros.reshape(2, 2))},
            {"a": TensorData.from_array(zeros.view(np.int32))},
            {"a": TensorData.from_array(zeros + 1)},
        )
    }
    assert len(found) == 5
    assert list(tmp_path.iterdir()) == []
