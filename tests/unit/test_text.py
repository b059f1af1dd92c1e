"""Facts as text for people."""

import json

import pytest

from weighlock.cli.text import as_json_value, columns, escaped, parse_size, quantity, size


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("encoder.0.weight", "encoder.0.weight"),
        ("größe 😀", "größe 😀"),
        ("a\nb", r"a\nb"),
        ("a\tb\r", r"a\tb\r"),
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\x7f\x9b", r"\x7f\x9b"),
        ("\u202egnp.exe", r"\u202egnp.exe"),  # would turn the line around
        ("\u2028", r"\u2028"),
        ("\U000e0001", r"\U000e0001"),
        ("\udcff", r"\udcff"),
        ("", ""),
    ],
)
def test_what_could_move_a_terminal_is_escaped(text, shown):
    assert escaped(text) == shown
    assert escaped(text).isprintable()


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1234, "1.23 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (999_999, "1 MB"),
        (12_345_678, "12.3 MB"),
        (2_400_000_000, "2.4 GB"),
        (10**12, "1 TB"),
        (10**15, "1 PB"),
    ],
)
def test_sizes_have_three_digits_and_a_unit(count, shown):
    assert size(count) == shown


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0"),
        (999, "999"),
        (12_345, "12,345"),
        (999_999, "999,999"),
        (1_000_000, "1 M"),
        (124_439_808, "124 M"),
        (7_240_000_000, "7.24 B"),
        (1_800_000_000_000, "1.8 T"),
        (999_499_999, "999 M"),
        (999_999_999, "1 B"),
        (999_600_000_000, "1 T"),
    ],
)
def test_quantities_are_said_as_people_say_them(count, shown):
    assert quantity(count) == shown


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1024", 1024),
        ("5GB", 5 * 10**9),
        ("5gb", 5 * 10**9),
        ("5 GB", 5 * 10**9),
        (" 5G ", 5 * 10**9),
        ("500MiB", 500 * 1024**2),
        ("1.5k", 1500),
        ("2Ki", 2048),
        ("2TiB", 2 * 1024**4),
        ("1e3", 1000),
        ("7b", 7),
    ],
)
def test_sizes_are_read(text, count):
    assert parse_size(text) == count


@pytest.mark.parametrize(
    "text", ["", "GB", "5XB", "five", "-5GB", "0", "0.1", "nan", "inf", "5GBB", "1 2", "5GB5", "k"]
)
def test_what_is_no_size_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="size") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


def test_large_sizes_are_exact():
    assert parse_size(str(2**53 + 1)) == 2**53 + 1


def test_columns_are_aligned_without_trailing_blanks():
    rows = [["name", "1", "x"], ["longer name", "1,000", ""]]
    assert columns(rows, frozenset({1})) == "name             1  x\nlonger name  1,000"
    assert columns([["only"]]) == "only"


def test_columns_need_rows_of_one_length():
    with pytest.raises(ValueError, match=r"argument"):
        columns([["a", "b"], ["c"]])


def test_json_text_keeps_every_name(capsys):
    from weighlock.cli.shared import print_json

    names = ["a\nb", "\x1b[31m", "\x7f\x9b", "\u202e", "\U000e0001", "\U0010ffff", "😀", 'a"\\']
    print_json([{"name": name} for name in names])
    printed = capsys.readouterr().out
    assert [fact["name"] for fact in json.loads(printed)] == names
    assert all(char.isprintable() or char == "\n" for char in printed)
    print_json({"names": names})
    assert json.loads(capsys.readouterr().out) == {"names": names}
    print_json([])
    assert json.loads(capsys.readouterr().out) == []


class TestJSONValues:
    def test_what_is_small_is_whole(self):
        value = {"a": [1, 2.5, None, True, "x"], 3: {"b": (1, 2)}}
        assert as_json_value(value) == {"a": [1, 2.5, None, True, "x"], "3": {"b": [1, 2]}}

    @pytest.mark.parametrize("wrap", [lambda x: [x] * 10, lambda x: dict.fromkeys(range(10), x)])
    def test_what_is_shared_many_times_over_is_cut(self, wrap):
        value = "leaf"
        for _ in range(12):
            value = wrap(value)
        text = json.dumps(as_json_value(value), ensure_ascii=False)
        assert len(text) < 500_000

    def test_a_long_mapping_is_cut(self):
        shown = as_json_value({"long": dict.fromkeys(range(5000), 0), "epoch": 3})
        assert len(shown["long"]) == 1001
        assert shown["long"]["…"] == "…"
        assert shown["epoch"] == 3

    def test_a_long_list_is_cut(self):
        assert as_json_value(list(range(5000))) == [*range(1000), "…"]

    def test_a_long_text_is_not_written_many_times(self):
        text = "x" * 1_000_000
        assert as_json_value(text) == text
        assert len(json.dumps(as_json_value([text] * 1000))) < 20_000_000
