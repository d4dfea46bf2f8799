"""The dispatch policy: its decision table, its variable, and what it refuses."""

from __future__ import annotations

import pytest

from rlx_ort import CompileOptions, ConversionError, KernelDispatch, KernelDispatchPolicy, environment

PREFER, COMMON, NATIVE = (
    KernelDispatchPolicy.PREFER_NATIVE,
    KernelDispatchPolicy.FORCE_COMMON,
    KernelDispatchPolicy.FORCE_NATIVE,
)


@pytest.mark.parametrize(
    ("config", "has_both", "claimed", "decomposed"),
    [
        # 1. An op with one form is never decomposed, whatever is forced.
        (KernelDispatch(COMMON), False, True, False),
        (KernelDispatch(COMMON, force_common_kinds=frozenset({"RmsNorm"})), False, False, False),
        # 2. A kind that is forced native is not, even if it is forced common as well, or the policy is common.
        (KernelDispatch(COMMON, force_native_kinds=frozenset({"RmsNorm"})), True, False, False),
        (KernelDispatch(PREFER, frozenset({"RmsNorm"}), frozenset({"RmsNorm"})), True, False, False),
        # 3. A kind that is forced common is, even under a policy that forces native.
        (KernelDispatch(NATIVE, force_common_kinds=frozenset({"RmsNorm"})), True, True, True),
        (KernelDispatch(PREFER, force_common_kinds=frozenset({"RmsNorm"})), True, True, True),
        # 4. and 5. A policy that forces decides for all others, claimed or not.
        (KernelDispatch(COMMON), True, True, True),
        (KernelDispatch(NATIVE), True, False, False),
        (KernelDispatch(NATIVE, force_common_kinds=frozenset({"Rope"})), True, False, False),
        # 6. Else what the provider claims decides.
        (KernelDispatch(PREFER), True, True, False),
        (KernelDispatch(PREFER), True, False, True),
        (KernelDispatch(PREFER, frozenset({"Rope"}), frozenset({"Attention"})), True, True, False),
    ],
)
def test_the_first_rule_that_applies_decides(
    config: KernelDispatch, has_both: bool, claimed: bool, decomposed: bool
) -> None:
    """The rows of the table, each rule against the ones below it."""
    assert config.decomposes("RmsNorm", has_both=has_both, claimed=claimed) is decomposed


@pytest.mark.parametrize(
    ("text", "policy"),
    [(text, COMMON) for text in ("common", "force_common", "ForceCommon")]
    + [(text, NATIVE) for text in ("native", "force_native", "ForceNative", " native ")]
    + [(text, PREFER) for text in ("prefer_native", "PreferNative", "", " ")],
)
def test_the_variable_names_a_policy(text: str, policy: KernelDispatchPolicy) -> None:
    """Options that are made while it is set have it; an empty one counts as unset."""
    with environment.override({"RLX_KERNEL_DISPATCH": text}):
        assert CompileOptions().kernel_dispatch == KernelDispatch(policy)


def test_without_the_variable_native_is_preferred() -> None:
    """That is the default."""
    assert CompileOptions().kernel_dispatch == KernelDispatch(PREFER)


@pytest.mark.parametrize("text", ["Native", "COMMON", "fast", "force common"])
def test_a_variable_that_names_no_policy_is_an_error(text: str) -> None:
    """Case counts, and the message names the variable, what it holds and what it takes."""
    with environment.override({"RLX_KERNEL_DISPATCH": text}), pytest.raises(ConversionError) as caught:
        CompileOptions()
    assert "RLX_KERNEL_DISPATCH" in str(caught.value)
    assert repr(text) in str(caught.value)
    assert "force_native" in str(caught.value)


@pytest.mark.parametrize("field", ["force_common_kinds", "force_native_kinds"])
def test_a_kind_that_does_not_exist_is_an_error_with_a_hint(field: str) -> None:
    """A typo would silently force nothing."""
    with pytest.raises(ConversionError, match=f"{field}.*Atention.*did you mean 'Attention'"):
        KernelDispatch(**{field: {"Atention"}})  # type: ignore[arg-type]  # the field's name is a parameter


def test_options_with_a_policy_can_be_compared_and_hashed() -> None:
    """They are part of keys."""
    first, second = (KernelDispatch(NATIVE, frozenset({"Rope"})) for _ in range(2))
    assert len({first, second, KernelDispatch(NATIVE)}) == 2
