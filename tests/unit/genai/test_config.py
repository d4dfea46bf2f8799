"""The config of a genai folder: what it says is read, and what cannot be meant is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from genai_folders import edit_config, write_folder

from rlx_ort.errors import ConversionError
from rlx_ort.genai.config import read_config


def test_a_folder_of_the_builder_is_read(tmp_path: Path) -> None:
    """The sizes of the cache, the names of inputs and outputs, and the providers come from the file."""
    config = read_config(write_folder(tmp_path, providers=[{"cuda": {"enable_cuda_graph": "0"}}]))
    assert (config.kind, config.layers, config.heads, config.head_size, config.context_length) == ("llama", 1, 1, 8, 64)
    assert config.cache_names() == [
        ("past_key_values.0.key", "present.0.key"),
        ("past_key_values.0.value", "present.0.value"),
    ]
    assert config.providers == (("cuda", {"enable_cuda_graph": "0"}),)
    assert config.stop_tokens == {32}
    assert config.notes == ()


@pytest.mark.parametrize("name", ["CUDA", "cuda", "CUDAExecutionProvider", "WebGPU", "webgpu", "DML", "NvTensorRtRtx"])
def test_every_spelling_of_a_provider_is_taken(tmp_path: Path, name: str) -> None:
    """Short and full names count, in upper and lower case, as onnxruntime-genai has them."""
    [(found, _)] = read_config(write_folder(tmp_path, providers=[{name: {}}])).providers
    assert found == name.lower().removesuffix("executionprovider")


@pytest.mark.parametrize(
    ("name", "meant"),
    [("webgpuu", "webgpu"), ("CUDAExecutionProvidr", "cuda"), ("cdua", "cuda"), ("Open VINO", "openvino")],
)
def test_a_misspelt_provider_is_refused_with_the_right_name(tmp_path: Path, name: str, meant: str) -> None:
    """The model would run on the CPU, or not at all, so the nearest provider is named."""
    with pytest.raises(ConversionError, match=rf"provider_options.*{name!r}.*did you mean.*{meant}"):
        read_config(write_folder(tmp_path, providers=[{name: {}}]))


def test_a_misspelt_session_option_is_noted(tmp_path: Path) -> None:
    """onnxruntime-genai hands it to ONNX Runtime, which ignores it."""
    options = {"intra_op_num_thread": "4", "session.intra_op.allow_spinning": "0"}
    [note] = read_config(write_folder(tmp_path, session_options=options)).notes
    assert "intra_op_num_thread is not an ONNX Runtime option" in note
    assert "'intra_op_num_threads'" in note


def test_a_folder_without_a_config_is_an_error(tmp_path: Path) -> None:
    """The message names the file that is missing."""
    with pytest.raises(ConversionError, match=r"has no genai_config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": []}', "\udcff"])
def test_what_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    """The message names the file."""
    write_folder(tmp_path)
    (tmp_path / "genai_config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConversionError, match=r"genai_config\.json.*not (a )?JSON"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({"type": "whisper", "decoder": None}, "'whisper' has no decoder"),
        ({"type": "whisper", "encoder": {"filename": "encoder.onnx"}}, "'encoder' beside its decoder"),
        ({"type": "phi3v", "vision": {"filename": "v.onnx"}}, "'vision' beside its decoder"),
        ({"type": None}, "model.type is missing"),
        ({"context_length": 0}, "context_length is 0, not a whole number"),
        ({"context_length": "64"}, "context_length is '64', not a whole number"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>', neither a token"),
    ],
)
def test_a_model_that_is_no_decoder_of_text_is_refused(tmp_path: Path, entries: dict[str, Any], reason: str) -> None:
    """The message has the entry and what is wrong with it."""
    edit_config(write_folder(tmp_path), **entries)
    with pytest.raises(ConversionError, match=reason):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"filename": "../model.onnx"}, "must be a relative path inside the folder"),
        ({"filename": "absent.onnx"}, "cannot be read"),
        ({"pipeline": [{"embedding": {"filename": "e.onnx"}}]}, "pipeline of several models"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers is above 16384"),
        ({"head_size": 10**40}, "head_size is above"),
        ({"head_size": True}, "head_size is True, not a whole number"),
        ({"inputs": {"input_ids": 3}}, "input_ids is 3, not text"),
        ({"session_options": {"provider_options": {"cuda": {}}}}, "is not a list of objects"),
        ({"session_options": {"custom_ops_library": "ops.so"}}, "native code"),
    ],
)
def test_a_decoder_that_cannot_be_opened_is_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    """Nothing is read outside the folder, and no library is loaded that the file names."""
    with pytest.raises(ConversionError, match=reason):
        read_config(write_folder(tmp_path, **changes))


def test_several_stop_tokens_may_be_given(tmp_path: Path) -> None:
    """The entry is a token or a list of them."""
    edit_config(write_folder(tmp_path), eos_token_id=[3, 7])
    assert read_config(tmp_path).stop_tokens == {3, 7}


def test_links_of_the_config_are_followed_into_trusted_folders_only(tmp_path: Path) -> None:
    """In Hugging Face's cache every file of a model is a link to a blob."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    write_folder(blobs)
    snapshot.mkdir()
    for file in blobs.iterdir():
        try:
            (snapshot / file.name).symlink_to(file)
        except OSError as err:
            pytest.skip(f"no symbolic links here: {err}")
    with pytest.raises(ConversionError, match="trusted_links"):
        read_config(snapshot)
    config = read_config(snapshot, (blobs.resolve(),))
    assert config.model == snapshot / "model.onnx"


@pytest.mark.parametrize(
    ("provider", "options"),
    [
        ("qnn", {"backend_path": "QnnHtp.dll"}),
        ("QNN", {"op_packages": "Op:ops.so:Provider"}),
        ("OpenVINO", {"load_config": {"NPU": {}}}),
        ("NvTensorRtRtx", {"nv_runtime_cache_path": "cache"}),
        ("vitisai", {"configFile": "vaip.json"}),
        ("cuda", {"user_compute_stream": "140737488355328"}),
        ("webgpu", {"dawnProcTable": "140737488355328"}),
        ("cuda", {"an_option_of_tomorrow": "/tmp/evil"}),
        ("cuda", {"an_option_of_tomorrow": "C:\\evil"}),
        ("cuda", {"an_option_of_tomorrow": "libevil.so.1"}),
        ("cuda", {"an_option_of_tomorrow": "x/../../evil"}),
    ],
)
def test_provider_options_that_name_files_are_refused(tmp_path: Path, provider: str, options: dict[str, Any]) -> None:
    """A provider would load them as native code, or use the address, whatever the file of a stranger says."""
    with pytest.raises(ConversionError, match=rf"provider_options.*{next(iter(options))}.*CompileOptions"):
        read_config(write_folder(tmp_path, providers=[{provider: options}]))


def test_session_options_that_name_files_are_refused(tmp_path: Path) -> None:
    """They would have ONNX Runtime read or write files outside the folder."""
    options = {"session.model_external_initializers_file_folder_path": "/"}
    with pytest.raises(ConversionError, match=r"session_options\.session\.model_external"):
        read_config(write_folder(tmp_path, session_options=options))


def test_provider_options_without_files_are_kept(tmp_path: Path) -> None:
    """Names of modes and sizes are no paths."""
    options = {"device_type": "NPU", "htp_performance_mode": "burst", "profiling_level": "off", "vtcm_mb": "8"}
    assert read_config(write_folder(tmp_path, providers=[{"qnn": options}])).providers == (("qnn", options),)
