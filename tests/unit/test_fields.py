"""Strict JSON: what is refused, and that the message has the place, the value and what belongs there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlx_ort.errors import ConversionError
from rlx_ort.fields import Fields, parse


def _top(text: str) -> Fields:
    return parse(text.encode(), "a.json", ConversionError)


@pytest.mark.parametrize(
    "text", ["", "[]", "7", '{"a": NaN}', '{"a": 1e999}', '{"a": 1, "a": 2}', "[" * 300 + "]" * 300]
)
def test_json_that_readers_take_differently_is_refused(text: str) -> None:
    """The message names the file."""
    with pytest.raises(ConversionError, match=r"a\.json"):
        _top(text)


def test_entries_of_the_right_type_are_taken_out() -> None:
    """Each as it is, objects with their place."""
    top = _top('{"t": "x", "n": 1, "f": 0.5, "b": true, "l": [{"k": 2}], "o": {"i": {"k": 3}}}')
    assert (top.text("t"), top.count("n"), top.number("f"), top.number("n"), top.flag("b")) == ("x", 1, 0.5, 1.0, True)
    assert [item.count("k") for item in top.objects("l")] == [2]
    assert {name: item.count("k") for name, item in top.entries("o").items()} == {"i": 3}
    assert (top.text("absent", "y"), top.items("absent"), top.fields("absent").raw) == ("y", [], {})


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda top: top.text("o"), r"a\.json: o is \{.*, not text"),
        (lambda top: top.text("absent"), r"a\.json: absent is missing"),
        (lambda top: top.name("e"), r"a\.json: e is an empty text"),
        (lambda top: top.fields("o").text("k"), r"a\.json: o\.k is 3, not text"),
        (lambda top: top.fields("o").fields("k"), r"o\.k is 3, not a JSON object"),
        (lambda top: top.count("b"), r"b is True, not a whole number"),
        (lambda top: top.count("n", least=1), r"n is -1, not a whole number of at least 1"),
        (lambda top: top.fields("o").count("k", most=2), r"o\.k is above 2"),
        (lambda top: top.number("b"), r"b is True, not a number"),
        (lambda top: top.number("big"), r"big is 1.*, not a number"),
        (lambda top: top.flag("n"), r"n is -1, not true or false"),
        (lambda top: top.objects("l"), r"a\.json: l is not a JSON object: 1"),
        (lambda top: top.parsed("e", int), r"a\.json: e: invalid literal"),
        (lambda top: top.fields("o").only("x"), r"o\.k is not known; known are x"),
    ],
)
def test_an_entry_of_another_type_is_refused_with_its_place(read: Callable[[Fields], Any], message: str) -> None:
    """The error is of the class that the reader names."""
    top = _top('{"o": {"k": 3}, "e": "", "b": true, "n": -1, "l": [1], "big": 1' + "0" * 400 + "}")
    with pytest.raises(ConversionError, match=message):
        read(top)
