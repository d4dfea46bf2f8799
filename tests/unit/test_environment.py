"""`RLX_*` variables: keys, overrides, flags, parsing, the bulk builder and the guard."""

import pytest

from rlx_ort import environment
from rlx_ort.environment import RlxEnv


def test_a_key_gets_its_prefix_unless_it_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of writing a key read the same variable."""
    monkeypatch.setenv("RLX_THING", "1")
    assert environment.get("THING") == environment.get("RLX_THING") == "1"


def test_an_unset_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable nobody set has no value, not an empty one."""
    monkeypatch.delenv("RLX_THING", raising=False)
    assert environment.get("THING") is None


def test_an_override_comes_before_the_environment_until_it_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """What code sets wins without touching the environment, which shows through again afterwards."""
    monkeypatch.setenv("RLX_THING", "outside")
    environment.set_override("RLX_THING", "inside")
    assert environment.get("THING") == "inside"
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


@pytest.mark.parametrize("on", ["1", "2", "00", "10", "true", "yes", "on", "anything"])
@pytest.mark.parametrize("off", [None, "", "0", "false", "FALSE", "off", "Off", "no", " no "])
def test_a_flag_is_off_for_the_words_that_say_so(on: str, off: str | None) -> None:
    """Where it is not set, and for empty, 0, false, off and no; it is on for every other text."""
    with environment.override({"THING": on}):
        assert environment.flag("THING")
    with environment.override({} if off is None else {"THING": off}):
        assert not environment.flag("THING")


@pytest.mark.parametrize(("value", "parsed"), [("12", 12), ("", 7), ("twelve", 7), ("1.5", 7), (None, 7)])
def test_a_value_that_does_not_parse_gives_the_default(value: str | None, parsed: int) -> None:
    """Neither does one that is not set."""
    with environment.override({} if value is None else {"THING": value}):
        assert environment.parse_or("THING", 7, int) == parsed


def test_the_guard_restores_what_was_overridden_before() -> None:
    """After the block, also one that fails, old overrides are back and new ones gone; blocks nest."""
    environment.set_override("A", "old")
    with environment.override({"A": "new", "RLX_B": "1"}):
        with pytest.raises(KeyError), environment.override({"A": "inner"}):
            raise KeyError(environment.get("A"))
        assert (environment.get("A"), environment.get("B")) == ("new", "1")
    assert (environment.get("A"), environment.get("B")) == ("old", None)


def test_the_bulk_builder_sets_values_and_flags_once_it_is_applied() -> None:
    """Values become text, flags 1 or 0, and they stay."""
    noted = RlxEnv().set("A", 5).flag("RLX_B").flag("C", on=False)
    assert environment.get("A") is None
    noted.apply()
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
