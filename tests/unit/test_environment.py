"""`RLX_*` variables: keys, overrides, flags, parsing, the bulk builder and the guard."""

from collections.abc import Iterator

import pytest

from rlx_ort import environment
from rlx_ort.environment import RlxEnv


@pytest.fixture(autouse=True)
def no_overrides() -> Iterator[None]:
    """No override comes into a test or leaves it."""
    environment.clear_overrides()
    yield
    environment.clear_overrides()


def test_a_key_gets_its_prefix_unless_it_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of writing a key read the same variable."""
    monkeypatch.setenv("RLX_THING", "1")
    assert environment.get("THING") == environment.get("RLX_THING") == "1"


def test_an_unset_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable nobody set has no value, not an empty one."""
    monkeypatch.delenv("RLX_THING", raising=False)
    assert environment.get("THING") is None


def test_an_override_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What code sets wins, without touching the environment."""
    monkeypatch.setenv("RLX_THING", "outside")
    environment.set_override("THING", "inside")
    assert environment.get("THING") == "inside"


def test_unsetting_removes_only_the_override(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process environment shows through again."""
    monkeypatch.setenv("RLX_THING", "outside")
    environment.set_override("RLX_THING", "inside")
    environment.unset_override("THING")
    assert environment.get("THING") == "outside"


def test_clearing_removes_every_override(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that code set is left."""
    monkeypatch.delenv("RLX_A", raising=False)
    environment.set_override("A", "1")
    environment.clear_overrides()
    assert environment.get("A") is None


def test_a_lookup_is_literal(monkeypatch: pytest.MonkeyPatch) -> None:
    """`lookup` adds no prefix, as policies with a prefix of their own need."""
    monkeypatch.setenv("MYAPP_THING", "mine")
    assert environment.lookup("MYAPP_THING") == "mine"
    assert environment.get("MYAPP_THING") is None


@pytest.mark.parametrize("value", ["", "0", "false", "FALSE", "off", "Off", "no", " no "])
def test_a_flag_is_off_for_the_words_that_say_so(value: str) -> None:
    """Empty, 0, false, off and no are off."""
    environment.set_override("THING", value)
    assert not environment.flag("THING")


@pytest.mark.parametrize("value", ["1", "2", "00", "10", "true", "yes", "on", "anything"])
def test_a_flag_is_on_for_everything_else(value: str) -> None:
    """Digits other than 0 and any other text are on."""
    environment.set_override("THING", value)
    assert environment.flag("THING")


def test_an_unset_flag_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag nobody set is off."""
    monkeypatch.delenv("RLX_THING", raising=False)
    assert not environment.flag("THING")


def test_a_value_is_parsed() -> None:
    """`parse_or` returns what the parser makes of the variable."""
    environment.set_override("THING", "12")
    assert environment.parse_or("THING", 7, int) == 12


@pytest.mark.parametrize("value", ["", "twelve", "1.5"])
def test_a_value_that_does_not_parse_gives_the_default(value: str) -> None:
    """A ValueError of the parser means the default."""
    environment.set_override("THING", value)
    assert environment.parse_or("THING", 7, int) == 7


def test_an_unset_value_gives_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing to parse means the default."""
    monkeypatch.delenv("RLX_THING", raising=False)
    assert environment.parse_or("THING", 7, int) == 7


def test_the_guard_restores_what_was_overridden_before() -> None:
    """After the block, old overrides are back and new ones gone."""
    environment.set_override("A", "old")
    with environment.override({"A": "new", "RLX_B": "1"}):
        assert (environment.get("A"), environment.get("B")) == ("new", "1")
    assert environment.get("A") == "old"
    assert environment.get("B") is None


def test_the_guard_restores_after_an_exception() -> None:
    """A failing block leaves nothing behind."""
    with pytest.raises(KeyError), environment.override({"A": "1"}):
        raise KeyError
    assert environment.get("A") is None


def test_guards_nest() -> None:
    """The inner block gives way to the outer one."""
    with environment.override({"A": "outer"}):
        with environment.override({"A": "inner"}):
            assert environment.get("A") == "inner"
        assert environment.get("A") == "outer"


def test_the_bulk_builder_sets_nothing_before_it_is_applied() -> None:
    """Collecting is not setting."""
    RlxEnv().set("A", 5)
    assert environment.get("A") is None


def test_the_bulk_builder_applies_values_and_flags_at_once() -> None:
    """Values become text, flags 1 or 0, and they stay."""
    RlxEnv().set("A", 5).flag("RLX_B").flag("C", on=False).apply()
    assert [environment.get(key) for key in "ABC"] == ["5", "1", "0"]


def test_the_bulk_builder_can_be_a_guard() -> None:
    """The noted variables are set inside the block only."""
    with RlxEnv().set("A", "x").guard():
        assert environment.get("A") == "x"
    assert environment.get("A") is None


def test_every_documented_variable_has_the_prefix_and_a_meaning() -> None:
    """The table of variables is fit to be shown to a user."""
    assert {"RLX_DEVICE", "RLX_DEVICES", "RLX_DENY_DEVICES", "RLX_PREFER_DEVICES"} <= set(environment.VARIABLES)
    assert all(name.startswith("RLX_") and meaning for name, meaning in environment.VARIABLES.items())
