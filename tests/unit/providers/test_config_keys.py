"""Session config entries and provider options are checked, since ONNX Runtime takes any."""

from __future__ import annotations

import pytest

from rlx_ort.errors import EngineError
from rlx_ort.providers.engine.recipe import check_config, check_provider_options
from rlx_ort.providers.registry import default_registry


def test_known_keys_pass():
    """A key ONNX Runtime documents is accepted."""
    check_config({"session.disable_prepacking": "1", "ep.context_enable": "0"})


def test_a_typing_error_is_refused_with_the_closest_key():
    """The message says what was probably meant."""
    with pytest.raises(EngineError, match=r"did you mean 'session\.disable_prepacking'"):
        check_config({"session.disable_prepack": "1"})


@pytest.mark.parametrize("key", ["session.compile_only", "session.model_external_initializers_file_folder_path"])
def test_keys_that_belong_to_the_library_are_refused(key):
    """Setting them would crash, or send weights the wrong way."""
    with pytest.raises(EngineError, match="cannot be set"):
        check_config({key: "1"})


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
