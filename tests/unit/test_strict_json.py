"""JSON that means one thing only."""

import pytest

from weighlock.errors import HeaderError
from weighlock.formats.strict_json import parse


def strict(text, tokens=1000):
    raw = text if isinstance(text, bytes) else text.encode()
    return parse(raw, source="the file", tokens=tokens)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{}", {}),
        ('{"a": [1, 2.5, "x", null, true]}', {"a": [1, 2.5, "x", None, True]}),
        ('{"a": {"b": 1}, "c": {"b": 2}}', {"a": {"b": 1}, "c": {"b": 2}}),
        ('{"\\u00fc": "\\n"}', {"ü": "\n"}),
        ("  {}  ", {}),
        ("5", 5),
    ],
)
def test_plain_json_is_read(text, value):
    assert strict(text) == value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "cannot be read"),
        ("{", "cannot be read"),
        ("{} {}", "cannot be read"),
        ("{'a': 1}", "cannot be read"),
        ('{"a": 1,}', "cannot be read"),
        ('{"a": 1, "a": 2}', "'a' occurs twice"),
        ('{"x": {"a": 1, "b": 2, "a": 1}}', "'a' occurs twice"),
        ('{"a": 1, "\\u0061": 2}', "'a' occurs twice"),
        ('{"a": NaN}', "NaN is not JSON"),
        ('{"a": Infinity}', "Infinity is not JSON"),
        ('{"a": -Infinity}', "-Infinity is not JSON"),
        (b'{"a\xff": 1}', "not UTF-8 at byte 3"),
        (b"\xef\xbb\xbf{}", "cannot be read"),
        ('{"a": ' + "9" * 5000 + "}", "cannot be read"),
        ("[" * 900 + "]" * 900, "nested too deeply|cannot be read|objects, arrays"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_two_readers_could_read_differently_is_refused(text, says):
    with pytest.raises(HeaderError, match=says) as caught:
        strict(text, tokens=500)
    assert str(caught.value).startswith("the file: ")
    assert caught.value.source == "the file"


def test_deep_nesting_is_an_error_and_not_a_crash():
    with pytest.raises(HeaderError, match="nested too deeply"):
        strict("[" * 200_000, tokens=300_000)


def test_more_than_allowed_is_refused_before_it_is_built():
    assert strict("[[],[],[]]", tokens=6) == [[], [], []]
    with pytest.raises(HeaderError, match="holds 6 objects, arrays and commas, 5 are expected"):
        strict("[[],[],[]]", tokens=5)
