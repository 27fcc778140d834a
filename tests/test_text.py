"""Text of candidates is stored whatever it is, and no text takes much room."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from session_support import Square

from schedsearch.errors import ConfigError, UsageError
from schedsearch.measurement import MESSAGE_CHARACTERS, Measurement, Outcome
from schedsearch.space import Knob
from schedsearch.template import TemplateSet
from schedsearch.text import is_storable, storable_text

# All code points, surrogates too, which st.text() leaves out unless it is told so.
anything = st.text(st.characters(codec=None, exclude_categories=()), max_size=400)


@given(anything, st.integers(100, 300))
def test_storable_text_is_short_encodable_and_final(text: str, limit: int) -> None:
    stored = storable_text(text, limit)
    stored.encode()
    assert "\0" not in stored and len(stored) <= limit
    assert storable_text(stored, limit) == stored


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=100))
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    assert storable_text(text, 100) == text and is_storable(text)


def test_long_text_keeps_its_beginning_and_its_end() -> None:
    text = "first line\n" + "x" * 10_000 + "\nValueError: the last line"
    stored = storable_text(text, 1000)
    assert stored.startswith("first line\n") and stored.endswith("\nValueError: the last line")
    left_out = int(stored.split("[... ")[1].split(" characters left out")[0].replace(",", ""))
    assert left_out + stored.count("x") == 10_000
    assert stored.index("[...") < 200 < 700 < len(stored.split("...]")[1]), "a compiler's output ends with the error"


def test_the_texts_of_a_measurement_are_storable() -> None:
    measurement = Measurement(
        Outcome.COMPILE_ERROR,
        message="\udc80" + "y" * (1 << 20) + "\0",
        host="h\udcff",
        device_uuid="\0",
        clocks={"sm\0": 1, "throttle": "\udc80", "power": math.nan},
    )
    assert len(measurement.message) <= MESSAGE_CHARACTERS and measurement.message.startswith(r"\udc80yyy")
    assert (measurement.host, measurement.device_uuid) == (r"h\udcff", r"\x00")
    assert measurement.clocks == {r"sm\x00": 1, "throttle": r"\udc80"}, "NaN has no JSON form"
    json.dumps(json.loads(measurement.to_json()), allow_nan=False)


@pytest.mark.parametrize(("name", "value"), [("a\udc80", 1), ("a", "\udc80"), ("a", "b\0")])
def test_a_knob_that_cannot_be_stored_is_refused(name: str, value: int | str) -> None:
    with pytest.raises(ConfigError, match="cannot be stored"):
        Knob(name, (value,))


@pytest.mark.parametrize("name", ["", "a\udc80", "a\nb", "\x1b[2J", None])
def test_a_template_whose_name_cannot_be_printed_is_refused(name: str) -> None:
    template = Square()
    template.name = name  # type: ignore[misc]
    with pytest.raises(UsageError, match="text that can be printed"):
        TemplateSet([template])
