"""Session config entries and provider options are checked, since ONNX Runtime takes any."""

from __future__ import annotations

import pytest

from rlx_ort.errors import EngineError, InputError
from rlx_ort.providers.engine import cores, runtime
from rlx_ort.providers.engine.recipe import check_config, check_provider_options
from rlx_ort.providers.registry import default_registry


def test_known_keys_pass():
    """A key ONNX Runtime documents is accepted."""
    check_config({"session.disable_prepacking": "1", "ep.context_enable": "0"})


def test_a_typing_error_is_refused_with_the_closest_key():
    """The message says what was probably meant."""
    with pytest.raises(InputError, match=r"did you mean 'session\.disable_prepacking'"):
        check_config({"session.disable_prepack": "1"})
    with pytest.raises(InputError) as caught:
        check_config({"session.compile_onl": "1"})
    assert "session.compile_only" not in str(caught.value)  # which is refused as well


@pytest.mark.parametrize("key", ["session.compile_only", "session.model_external_initializers_file_folder_path"])
def test_keys_that_belong_to_the_library_are_refused(key):
    """Setting them would crash, or send weights the wrong way."""
    with pytest.raises(InputError, match="cannot be set"):
        check_config({key: "1"})


@pytest.mark.parametrize("key", ["session.intra_op_num_threads", "session.use_deterministic_compute"])
def test_keys_that_only_the_c_api_obeys_are_refused(key, monkeypatch):
    """Through Python they would be taken and have no effect, in versions whose library has them too."""
    monkeypatch.setattr(runtime, "runtime_version", lambda: (1, 32, 0))
    assert key in cores.core_of((1, 32, 0)).config_keys
    with pytest.raises(InputError, match="no effect from Python"):
        check_config({key: "1"})


def test_the_keys_are_those_of_the_version(monkeypatch):
    """A key that a later version brought is refused before it, with the version to upgrade to."""
    key = "session.moe.offload.mode"
    monkeypatch.setattr(runtime, "runtime_version", lambda: (1, 32, 0))
    check_config({key: "auto"})
    monkeypatch.setattr(runtime, "runtime_version", lambda: (1, 31, 1))
    with pytest.raises(InputError, match=r"unknown to ONNX Runtime 1\.31; known from 1\.32 on"):
        check_config({key: "auto"})


def test_a_key_that_only_plugins_read_passes_with_every_version(monkeypatch):
    """The core hands all entries to the plugins, whichever version they were built for."""
    for core in cores.known_cores():
        monkeypatch.setattr(runtime, "runtime_version", lambda core=core: (*core.version, 0))
        check_config({"ep.share_ep_contexts": "1"})


def test_a_newer_version_than_all_known_ones_has_the_keys_of_the_newest(monkeypatch):
    """What it brought is refused with a message that says which version's keys are known."""
    monkeypatch.setattr(runtime, "runtime_version", lambda: (1, 99, 2))
    check_config({"session.moe.offload.mode": "auto"})
    with pytest.raises(InputError, match=r"the newest that this rlx_ort knows; 1\.99\.2 is installed"):
        check_config({"session.from_the_future": "1"})


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [((1, 24, 4), (1, 24)), ((1, 31, 0), (1, 31)), ((1, 99), (1, 32)), ((1, 8), (1, 24)), (None, (1, 32))],
)
def test_the_newest_core_that_is_not_newer_counts(asked, wanted):
    """Versions compare as numbers; before the oldest the oldest counts, and without a version the newest."""
    assert cores.core_of(asked).version == wanted


def test_an_unknown_option_names_the_closest():
    """Provider options are checked like session keys."""
    with pytest.raises(EngineError, match="did you mean 'device_id'"):
        check_provider_options("SomeExecutionProvider", {"deviceid": "0"}, {"device_id", "mem"})


def test_a_provider_without_a_list_takes_any_option():
    """None means that nobody wrote the options down."""
    check_provider_options("SomeExecutionProvider", {"x": "0"}, None)


def test_every_recipe_that_needs_no_engine_sets_only_options_it_lists():
    """A module's own options are in its own table."""
    from rlx_ort.device import Device
    from rlx_ort.options.compile_options import CompileOptions, Precision
    from rlx_ort.providers.ort_provider import OrtProvider

    checked = set()
    for provider in default_registry().providers():
        if isinstance(provider, OrtProvider) and provider.name in ("cpu", "rocm", "directml", "coreml"):
            for kind in provider.kinds:
                for precision in Precision:
                    recipe = provider.recipe(Device(kind), CompileOptions(precision=precision))
                    check_provider_options(provider.ep_name, recipe.options, provider.option_keys)
                    checked.add(provider.name)
    assert checked == {"cpu", "rocm", "directml", "coreml"}
