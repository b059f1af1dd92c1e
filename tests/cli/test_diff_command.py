"""`weighlock diff` as a real process."""

import itertools
import json
import math

import ml_dtypes
import numpy as np
import pytest
from cli_checks import ESCAPES, assert_refused, layers, save, succeeded

NAN, INF = np.nan, np.inf


@pytest.fixture
def diff(tmp_path, weighlock_command):
    """Compares two sets of arrays; returns the facts."""

    def run(before, after, *options):
        a = save(tmp_path / "a.safetensors", before)
        b = save(tmp_path / "b.safetensors", after)
        return json.loads(succeeded(weighlock_command("diff", a, b, "--json", *options)))

    return run


def test_the_same(tmp_path, weighlock_command, diff):
    facts = diff(layers(), layers())
    assert (facts["same"], facts["changes"]) == (7, [])
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    assert succeeded(weighlock_command("diff", a, b)) == "7 tensors are the same, 0 differ\n"
    assert weighlock_command("diff", "--exit-code", a, b).returncode == 0
    turned = dict(reversed(layers().items()))
    assert diff(layers(), turned)["changes"] == []


def test_added_removed_shape_dtype_and_data(tmp_path, weighlock_command, diff):
    before = {
        "same": np.ones(3, np.float32),
        "gone": np.ones(2, np.float32),
        "shape": np.ones((2, 3), np.float32),
        "dtype": np.ones(3, np.float32),
        "data": np.array([1, 2, 3], np.float32),
    }
    after = {
        "same": np.ones(3, np.float32),
        "shape": np.ones((3, 2), np.float32),
        "dtype": np.ones(3, ml_dtypes.bfloat16),
        "data": np.array([1, 2.5, 7], np.float32),
        "new": np.ones(4, np.int8),
    }
    facts = diff(before, after)
    assert facts["same"] == 1
    changes = {change["name"]: change for change in facts["changes"]}
    assert {name: change["kind"] for name, change in changes.items()} == {
        "gone": "removed",
        "new": "added",
        "shape": "shape",
        "dtype": "dtype",
        "data": "data",
    }
    assert changes["gone"]["before"] == "F32 [2]"
    assert changes["new"]["after"] == "I8 [4]"
    assert (changes["shape"]["before"], changes["shape"]["after"]) == ("F32 [2, 3]", "F32 [3, 2]")
    assert (changes["dtype"]["before"], changes["dtype"]["after"]) == ("F32 [3]", "BF16 [3]")
    assert (changes["dtype"]["largest"], changes["dtype"]["elements"]) == (0, 0)
    assert (changes["data"]["largest"], changes["data"]["elements"]) == (4, 2)
    assert (changes["shape"]["largest"], changes["shape"]["elements"]) == (None, None)
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    lines = succeeded(weighlock_command("diff", a, b)).splitlines()
    assert [line.split()[:2] for line in lines[:-1]] == [
        ["-", "gone"],
        ["+", "new"],
        ["~", "shape"],
        ["~", "dtype"],
        ["~", "data"],
    ]
    assert "2 elements differ by up to 4" in lines[4]
    assert lines[-1] == "1 tensor is the same, 5 differ"
    result = weighlock_command("diff", "--exit-code", a, b)
    assert result.returncode == 1
    assert result.stdout.splitlines() == lines
    assert "Traceback" not in result.stderr


def only(facts):
    (change,) = facts["changes"]
    return change


LARGEST = [
    (np.array([2**53]), np.array([2**53 + 1]), 1, 1),
    (np.array([2**62 + 1, 5]), np.array([2**62, 5]), 1, 1),
    (np.array([-(2**63)]), np.array([2**63 - 1]), 2**64 - 1, 1),
    (np.array([2**64 - 1], np.uint64), np.array([0], np.uint64), 2**64 - 1, 1),
    (np.array([2**64 - 1], np.uint64), np.array([2**64 - 3], np.uint64), 2, 1),
    (np.array([-128], np.int8), np.array([127], np.int8), 255, 1),
    (np.array([0], np.uint8), np.array([255], np.uint8), 255, 1),
    (np.array([True, False]), np.array([False, False]), 1, 1),
    (np.array([0.0], np.float32), np.array([-0.0], np.float32), 0, 1),
    (np.array([1e-45], np.float32), np.array([0], np.float32), 1.401298464324817e-45, 1),
    (np.array([1.0, 2.0]), np.array([1.0, 2.0 + 2**-50]), 2**-50, 1),
    (np.array([INF]), np.array([-INF]), INF, 1),
    (np.array([INF, 1]), np.array([INF, 2]), 1, 1),
    (np.array([3 + 4j], np.complex64), np.array([0], np.complex64), 5, 1),
    (np.array([1], ml_dtypes.bfloat16), np.array([3], ml_dtypes.bfloat16), 2, 1),
    (np.array([1], ml_dtypes.float8_e4m3fn), np.array([3], ml_dtypes.float8_e4m3fn), 2, 1),
    (np.array([1], ml_dtypes.float8_e5m2), np.array([3], ml_dtypes.float8_e5m2), 2, 1),
    (
        np.array([1, 0], ml_dtypes.float4_e2m1fn),
        np.array([6, 0], ml_dtypes.float4_e2m1fn),
        5,
        1,
    ),
]


def test_the_largest_difference_is_exact(diff):
    before = {str(n): case[0] for n, case in enumerate(LARGEST)}
    after = {str(n): case[1] for n, case in enumerate(LARGEST)}
    changes = diff(before, after)["changes"]
    assert len(changes) == len(LARGEST)
    for change in changes:
        left, right, largest, elements = LARGEST[int(change["name"])]
        assert change["kind"] == "data"
        assert change["elements"] == elements, (left, right)
        expected = "Infinity" if math.isinf(largest) else float(largest)  # JSON has no such number
        assert change["largest"] == expected, (left, right)


def test_nan_on_one_side_is_the_largest_difference_there_is(diff, tmp_path, weighlock_command):
    before = {"a": np.array([1, NAN, 5, NAN], np.float32)}
    after = {"a": np.array([2, NAN, NAN, NAN], np.float32)}
    change = only(diff(before, after))
    assert change["elements"] == 2
    assert change["largest"] == "NaN"
    said = succeeded(
        weighlock_command("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    )
    assert "2 elements differ by up to nan" in said


def test_f6_is_told_apart_but_not_measured(tmp_path, weighlock_command):
    def packed(name, data):
        spec = {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}
        header = json.dumps({"a": spec, "b": {**spec, "data_offsets": [3, 6]}}).encode()
        (tmp_path / name).write_bytes(len(header).to_bytes(8, "little") + header + data)
        return tmp_path / name

    files = packed("x.safetensors", b"abcdef"), packed("y.safetensors", b"abcdeg")
    facts = json.loads(succeeded(weighlock_command("diff", *files, "--json")))
    change = only(facts)
    assert (facts["same"], change["name"], change["kind"]) == (1, "b", "data")
    assert (change["largest"], change["elements"]) == (None, None)
    assert "F6_E2M3 [4], packed bytes differ" in succeeded(weighlock_command("diff", *files))


def test_the_same_nan_is_no_difference(diff):
    arrays = {
        "f32": np.array([NAN, 1], np.float32),
        "bf16": np.array([NAN], ml_dtypes.bfloat16),
        "c64": np.array([complex(NAN, 1)], np.complex64),
    }
    assert diff(arrays, arrays)["changes"] == []


def test_other_bits_of_nan_are_another_element_but_no_distance(diff):
    one, other = (np.array([code], np.uint32).view(np.float32) for code in (0x7FC00000, 0x7FC00001))
    change = only(diff({"a": one}, {"a": other}))
    assert (change["largest"], change["elements"]) == (0, 1)


DTYPES = [
    *(np.float32, np.float64, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn),
    *(ml_dtypes.float8_e5m2, ml_dtypes.float8_e5m2fnuz, np.int8, np.uint64, np.int64),
    *(np.complex64, np.bool_),
]


def test_every_two_dtypes_compare_by_value(diff):
    before, after = {}, {}
    for left, right in itertools.permutations(DTYPES, 2):
        name = f"{np.dtype(left).name}-{np.dtype(right).name}"
        before[name] = np.array([0, 1, 1, 0]).astype(left)
        after[name] = np.array([0, 1, 0, 0]).astype(right)
    changes = diff(before, after)["changes"]
    assert len(changes) == len(before)
    for change in changes:
        assert change["kind"] == "dtype"
        assert (change["largest"], change["elements"]) == (1, 1), change["name"]


def test_integers_of_two_dtypes_compare_exactly(diff):
    before = {"a": np.array([2**53 + 1, 5]), "b": np.array([-1])}
    after = {"a": np.array([2**53, 5], np.uint64), "b": np.array([2**64 - 1], np.uint64)}
    changes = {change["name"]: change for change in diff(before, after)["changes"]}
    assert (changes["a"]["largest"], changes["a"]["elements"]) == (1, 1)
    assert (changes["b"]["largest"], changes["b"]["elements"]) == (2.0**64, 1)


def test_f4_and_another_dtype_cannot_be_compared_by_value(diff):
    codes = np.array([1, 2], np.uint8).view(ml_dtypes.float4_e2m1fn)
    change = only(diff({"a": codes}, {"a": np.array([0.5, 1], np.float32)}))
    assert (change["kind"], change["elements"]) == ("dtype", None)


def test_double_complex_numbers_of_a_checkpoint_are_compared(tmp_path, weighlock_command):
    torch = pytest.importorskip("torch")
    for name, last in (("a.pt", 3), ("b.pt", 4)):
        numbers = torch.tensor([1 + 2j, last], dtype=torch.complex128)
        torch.save({"a": numbers}, tmp_path / name)
    result = weighlock_command("diff", tmp_path / "a.pt", tmp_path / "b.pt", "--json")
    change = only(json.loads(succeeded(result)))
    assert (change["kind"], change["largest"], change["elements"]) == ("data", 1, 1)


def test_blocks_are_compared_to_their_ends(diff):
    before = np.zeros(1_200_000, np.float32)
    after = before.copy()
    for index, step in [(0, 1), ((1 << 19) - 1, 2), (1 << 19, 3), (1_199_999, 9)]:
        after[index] = step
    change = only(diff({"a": before}, {"a": after}))
    assert (change["largest"], change["elements"]) == (9, 4)
    change = only(diff({"a": before}, {"a": after.astype(np.float64)}))
    assert (change["largest"], change["elements"]) == (9, 4)


def test_specs_compares_names_dtypes_and_shapes_only(diff):
    before = {"data": np.zeros(3), "dtype": np.zeros(3), "gone": np.zeros(1)}
    after = {"data": np.ones(3), "dtype": np.zeros(3, np.float32)}
    changes = diff(before, after, "--specs")["changes"]
    assert [(change["name"], change["kind"]) for change in changes] == [
        ("gone", "removed"),
        ("dtype", "dtype"),
    ]
    assert all(change["elements"] is None for change in changes)


def test_specs_reads_no_data_and_says_nothing_on_stderr(tmp_path, weighlock_command):
    a = save(tmp_path / "a.safetensors", layers())
    result = weighlock_command("diff", "--specs", a, a)
    assert succeeded(result) == "7 tensors have the same dtype and shape, 0 differ\n"
    assert result.stderr == ""


def test_one_file_and_a_sharded_model(tmp_path, weighlock_command):
    a = save(tmp_path / "a.safetensors", layers())
    save(tmp_path / "model", layers(), max_shard_bytes=100)
    result = weighlock_command("diff", "--exit-code", a, tmp_path / "model")
    assert succeeded(result) == "7 tensors are the same, 0 differ\n"


def test_empty_tensors_and_single_numbers(diff):
    before = {"empty": np.zeros((0, 3)), "number": np.array(1.0)}
    assert diff(before, before)["changes"] == []
    change = only(diff(before, before | {"number": np.array(3.0)}))
    assert (change["largest"], change["elements"]) == (2, 1)


def test_hostile_names(tmp_path, weighlock_command):
    a = save(tmp_path / "a.safetensors", {ESCAPES: np.zeros(1), "x": np.zeros(1)})
    b = save(tmp_path / f"b{ESCAPES}", {ESCAPES: np.ones(1), f"y{ESCAPES}": np.zeros(1)})
    said = succeeded(weighlock_command("diff", a, b))
    assert len(said.splitlines()) == 4
    assert r"\x1b[31mred" in said
    facts = json.loads(succeeded(weighlock_command("diff", a, b, "--json")))
    assert {change["name"] for change in facts["changes"]} == {ESCAPES, "x", f"y{ESCAPES}"}


def test_what_cannot_be_compared(tmp_path, weighlock_command):
    a = save(tmp_path / "a.safetensors", layers())
    assert_refused(weighlock_command("diff", a, tmp_path / "missing"), "missing")
    told = weighlock_command("diff", tmp_path / "missing", a, "--exit-code")
    assert told.returncode == 2  # 1 would be an answer
    assert len(told.stderr.splitlines()) == 1
    assert "missing" in told.stderr


def test_what_cannot_be_read_is_told_and_answers_nothing(tmp_path, weighlock_command):
    """Objects in an npz: nobody can say whether they are the same."""
    for name in ("a.npz", "b.npz"):
        np.savez(tmp_path / name, w=np.ones(3), odd=np.array([name, 1], object))
    a, b = tmp_path / "a.npz", tmp_path / "b.npz"
    told = weighlock_command("diff", a, b)
    assert "1 tensor is the same, 0 differ" in succeeded(told)
    assert told.stderr.count("odd is left out") == 2
    assert weighlock_command("diff", "--exit-code", a, b).returncode == 2
    facts = json.loads(weighlock_command("diff", "--json", a, b).stdout)
    assert list(facts["unreadable"]["a"]) == list(facts["unreadable"]["b"]) == ["odd"]


def test_trouble_of_every_kind_is_2(tmp_path, weighlock_command):
    np.save(tmp_path / "a.npy", np.ones(3))
    (tmp_path / "headers").write_bytes(b"X: \xff")
    a = tmp_path / "a.npy"
    for words in (("http://u@127.0.0.1:1/x", a), (a, a, "--header-file", tmp_path / "headers")):
        told = weighlock_command("diff", "--exit-code", *words)
        assert told.returncode == 2
        assert told.stderr.startswith("weighlock: ")
        assert weighlock_command("diff", *words).returncode == 1


def test_notes_of_both_are_facts_too(tmp_path, weighlock_command):
    path = tmp_path / "a.npy"
    with open(path, "wb") as file:
        np.save(file, np.arange(3))
        np.save(file, np.arange(4))
    other = tmp_path / "b.npy"
    np.save(other, np.arange(3))
    facts = json.loads(succeeded(weighlock_command("diff", path, other, "--json", "--specs")))
    assert "only the first array is read" in facts["notes"]["a"][0]
    assert facts["notes"]["b"] == []
