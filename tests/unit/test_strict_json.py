"""JSON that means one thing only."""

import json

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


@pytest.mark.parametrize(
    "text",
    ["[,{" * 5, '[]"[', '\\"[,{', "\\\\", '\\\\"[[[', "é,ü[" * 3],
    ids=["plain", "quote", "escapes", "backslashes", "all", "utf-8"],
)
def test_what_stands_in_texts_is_not_counted(text):
    value = {text: [text, text]}
    assert strict(json.dumps(value), tokens=3) == value
    assert strict(json.dumps(value, ensure_ascii=False), tokens=3) == value
    with pytest.raises(HeaderError, match="holds 3 objects, arrays and commas, 2 are expected"):
        strict(json.dumps(value), tokens=2)


@pytest.mark.parametrize("before", range(6))
@pytest.mark.parametrize("text", ['\\"[,', "\\\\[,", '\\\\\\"[,'], ids=["1", "2", "3"])
def test_a_long_text_may_have_escapes_anywhere(before, text):
    # what is counted is counted a megabyte at a time
    value = ["x" * (2**20 - before - 8) + text, 7, "x" * 2**20 + text]
    assert strict(json.dumps(value), tokens=3) == value
    with pytest.raises(HeaderError, match="holds 3 objects"):
        strict(json.dumps(value), tokens=2)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('["a", "' + "[" * 100, "cannot be read: Unterminated"),
        ('["a" \\" ' + "[" * 100, "cannot be read|objects, arrays"),
        ('["a"' + ",[]" * 100 + ', "]', "holds 202 objects"),
        ('["a\\\\"' + ",[]" * 100 + "]", "holds 201 objects"),
    ],
    ids=["open text", "stray backslash", "open text after many", "escaped backslash"],
)
def test_quotes_hide_nothing_that_would_be_built(text, says):
    with pytest.raises(HeaderError, match=says):
        strict(text, tokens=5)
