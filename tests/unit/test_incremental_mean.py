"""The mean that grows: what is in, what is not, and that it is on disk."""

import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import weighlock
from unit.combining_samples import BF16, mixed_models, ulps_off, weighted
from weighlock.combining.ledger import Ledger
from weighlock.errors import (
    CombineError,
    DiskError,
    FormatError,
    LocalProtocolError,
    SourceError,
)

MODELS = [
    {name: array for name, array in model.items() if name not in ("f4", "c64")}
    for model in mixed_models(4)
]
WEIGHTS = [1, 2, 0.5, 3]
F32 = np.float32


def test_adding_one_by_one_gives_the_mean(tmp_path, no_leaks):
    reports = []
    with weighlock.Mean(tmp_path / "acc", durable=False, report=reports.append) as mean:
        for number, (model, weight) in enumerate(zip(MODELS, WEIGHTS, strict=True)):
            mean.add(model, weight, name=f"site-{number}")
        assert mean.weights == {f"site-{n}": w for n, w in enumerate(WEIGHTS)}
        found = mean.finish(tmp_path / "out.safetensors")
        assert list(found) == list(MODELS[0])
        for name in ("bf16", "f16", "f32", "f64", "f8"):
            assert found[name].dtype == weighlock.DType.of(MODELS[0][name].dtype)
            want = weighted(MODELS, WEIGHTS, name)
            # What is left where large numbers cancel out is known less exactly.
            told = np.abs(want) > np.abs(want).max() / 100
            digits = "F8_E4M3" if name == "f8" else name.upper()
            most = 100 if name == "f64" else 0.51  # the reference is float64 itself
            assert ulps_off(found[name].load()[told], want[told], digits) <= most
        assert ulps_off(found["f32"].load(), weighted(MODELS, WEIGHTS, "f32"), "F32") <= 0.51
        assert (found["steps"].load() == MODELS[0]["steps"]).all()
        assert reports[-1].weights["site-3"] == 3 / 6.5
        found.close()
    assert os.listdir(tmp_path / "acc") == []
    assert len(reports) == 1


def test_what_was_not_made_into_a_mean_yet_is_kept(tmp_path):
    for number, model in enumerate(MODELS):
        with weighlock.Mean(tmp_path, durable=False) as mean:
            assert len(mean) == number
            mean.add(model)
    with weighlock.Mean(tmp_path, durable=False) as mean:
        mean.finish()
        mean.add(MODELS[0])  # after that
    with weighlock.Mean(tmp_path, durable=False) as mean:
        assert len(mean) == 5
        mean.finish()
    assert os.listdir(tmp_path) == []


def test_what_another_process_added_after_the_mean_was_made_is_kept(tmp_path):
    with weighlock.Mean(tmp_path, durable=False) as mean:
        mean.add(MODELS[0], name="a")
        mean.finish()
        weighlock.Mean(tmp_path, durable=False).add(MODELS[1], name="b")
    with weighlock.Mean(tmp_path, durable=False) as mean:
        assert list(mean.weights) == ["a", "b"]
        mean.finish()
        weighlock.Mean(tmp_path, durable=False).close()
        weighlock.Mean(tmp_path, durable=False).add(MODELS[0], name="a")  # begun anew
    assert os.listdir(tmp_path) == ["accumulator.safetensors"]


def test_names_mean_nothing(tmp_path):
    with weighlock.Mean(tmp_path, durable=False) as mean:
        for value, name in ((3, "what was added before"), (5, "x"), (10, "contribution 1")):
            mean.add({"w": np.full(4, value, F32)}, name=name)
        assert mean.finish()["w"].load().tolist() == [6] * 4


def test_others_may_add_while_a_mean_is_made(tmp_path):
    mean, other = weighlock.Mean(tmp_path, durable=False), weighlock.Mean(tmp_path, durable=False)
    array = np.ones(3_000_000, F32)
    mean.add({"w": array})
    adding = threading.Thread(target=other.add, args=({"w": 3 * array},))

    def begin(done, total):
        if adding.ident is None:
            adding.start()

    found = mean.finish(progress=begin, threads=1)
    adding.join()
    assert found["w"].load()[-1] == 1
    assert mean.finish()["w"].load()[-1] == 2
    mean.close()


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(DiskError, match="cannot be made"):
            weighlock.Mean(path)


def test_in_float64_if_asked(tmp_path):
    with weighlock.Mean(tmp_path, "f64", durable=False) as mean:
        for model, weight in zip(MODELS, WEIGHTS, strict=True):
            mean.add(model, weight)
        found = mean.finish()
        for name, dtype in (("bf16", "BF16"), ("f16", "F16"), ("f32", "F32")):
            want = weighted(MODELS, WEIGHTS, name)
            told = np.abs(want) > 1e-12  # below, what float64 is off itself counts for more
            assert ulps_off(found[name].load()[told], want[told], dtype) <= 0.51


def test_ones_stay_ones(tmp_path):
    with weighlock.Mean(tmp_path, durable=False) as mean:
        for number in range(30):
            mean.add({"w": np.ones(10, BF16)}, 1 / 3 + number / 7)
        assert (mean.finish()["w"].load() == 1).all()


def test_another_process_goes_on_where_one_died(tmp_path):
    first = weighlock.Mean(tmp_path, durable=False)
    first.add(MODELS[0], 1, name="a")
    first.add(MODELS[1], 2, name="b")
    del first  # without closing: as if it had been killed
    with weighlock.Mean(tmp_path, durable=False) as mean:
        assert mean.weights == {"a": 1, "b": 2}
        with pytest.raises(CombineError, match="b: was counted already"):
            mean.add(MODELS[1], 2, name="b")
        mean.add(MODELS[2], 0.5, name="c")
        found = mean.finish()
        want = weighted(MODELS[:3], WEIGHTS[:3], "f32")
        assert ulps_off(found["f32"].load(), want, "F32") <= 0.51


def test_two_that_add_in_one_directory_at_the_same_time_lose_nothing(tmp_path):
    """The lock is that of an open file: two objects are kept apart like two processes."""
    together, model = threading.Barrier(2), {"w": np.ones(200_000)}

    def add(who):
        mean = weighlock.Mean(tmp_path, durable=False)
        for number in range(5):
            together.wait(timeout=60)
            mean.add(model, name=f"{who}{number}")

    with ThreadPoolExecutor() as pool:
        list(pool.map(add, "ab"))
    with weighlock.Mean(tmp_path) as mean:
        assert sorted(mean.weights) == sorted(f"{who}{n}" for who in "ab" for n in range(5))
        assert (mean.finish()["w"].load() == 1).all()


def test_a_mean_that_was_closed_elsewhere_is_not_gone_on_with(tmp_path):
    mean, other = weighlock.Mean(tmp_path), weighlock.Mean(tmp_path)
    mean.add({"w": np.ones(3)}, name="a")
    other.add({"w": np.ones(3)}, name="b")
    assert mean.finish()["w"].load().tolist() == [1, 1, 1]
    assert list(mean.weights) == ["a", "b"]
    other.close()
    for go_on in (lambda: mean.add({"w": np.ones(3)}, name="c"), mean.finish):
        with pytest.raises(SourceError, match="is gone, and with it what 2 contributed"):
            go_on()
    mean.close()


REFUSED = {
    "another dtype": ({"w": np.ones(3)}, 1, "tensor 'w' is F64, but F32 before"),
    "another shape": ({"w": np.ones(4, F32)}, 1, r"late: tensor 'w' is F32 \[4\]"),
    "NaN": ({"w": np.array([1, np.nan, 1], F32)}, 1, "late: tensor 'w' holds NaN"),
    "a tensor less": ({}, 1, "late: lacks tensor 'w'"),
    "a tensor more": ({"w": np.ones(3, F32), "x": np.ones(1, F32)}, 1, "lacks tensor 'x'"),
    "a weight of 0": ({"w": np.ones(3, F32)}, 0, "late: has the weight 0"),
    "a weight of NaN": ({"w": np.ones(3, F32)}, float("nan"), "late: has the weight nan"),
    "4-bit numbers": ({"w": np.ones(4, weighlock.DType.F4.numpy)}, 1, "is F4"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_does_not_count(case, tmp_path, no_leaks):
    model, weight, says = REFUSED[case]
    with weighlock.Mean(tmp_path, durable=False) as mean:
        mean.add({"w": np.full(3, 5, F32)}, name="early")
        before = (tmp_path / "accumulator.safetensors").read_bytes()
        with pytest.raises(CombineError, match=says):
            mean.add(model, weight, name="late")
        assert (tmp_path / "accumulator.safetensors").read_bytes() == before
        assert os.listdir(tmp_path) == ["accumulator.safetensors"]
        assert list(mean.weights) == ["early"]
        assert mean.finish()["w"].load().tolist() == [5, 5, 5]


def test_who_lacks_a_tensor_can_be_skipped(tmp_path):
    reports = []
    with weighlock.Mean(tmp_path, missing="skip", durable=False, report=reports.append) as mean:
        mean.add({"w": np.full(1, 4, F32)}, 1, name="a")
        mean.add({"w": np.full(1, 1, F32), "x": np.full(1, 3, F32)}, 2, name="b")
        mean.add({"x": np.full(1, 6, F32)}, 1, name="c")
        found = mean.finish()
    assert found["w"].load().tolist() == [2]
    assert found["x"].load().tolist() == [4]
    assert reports[0].skipped == {"w": ("c",), "x": ("a",)}
    assert any("'x' is made without a" in note for note in found.notes)


@pytest.mark.parametrize(("policy", "want"), [("first", 4), ("max", 9), ("round", 5)])
def test_integers(policy, want, tmp_path):
    with weighlock.Mean(tmp_path, integers=policy, durable=False) as mean:
        for value, weight in ((4, 3), (9, 1), (6, 1)):
            mean.add({"n": np.array([value])}, weight)
        found = mean.finish()["n"]
        assert found.load().tolist() == [want]
        assert found.dtype == "I64"


def test_any_thread_may_add(tmp_path):
    with weighlock.Mean(tmp_path, "f64", durable=False) as mean:
        threads = [
            threading.Thread(
                target=mean.add, args=({"w": np.full(100, n, F32)},), kwargs={"name": str(n)}
            )
            for n in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(mean.weights) == list("01234567")
        assert (mean.finish()["w"].load() == 3.5).all()


def test_a_spool_may_hold_it(tmp_path, no_leaks):
    with weighlock.Spool(tmp_path) as spool:
        mean = weighlock.Mean(spool)
        mean.add({"w": np.ones(3, F32)})
        found = mean.finish(spool)
        assert found["w"].load().tolist() == [1, 1, 1]
        found.close()
    assert os.listdir(tmp_path) == []


def test_what_is_to_be_known_of_files_is_told_in_the_end(tmp_path):
    noted = tmp_path / "a.npy"
    with open(noted, "wb") as file:
        np.save(file, np.ones(2))
        np.save(file, np.ones(2))
    unread = tmp_path / "b.npz"
    np.savez(unread, data=np.ones(2), when=np.array(["now"]))
    with weighlock.open(noted) as catalog:
        first = next(iter(catalog))
        assert catalog.notes
        weighlock.Mean(tmp_path / "acc", missing="skip").add(noted, name="a")
        weighlock.Mean(tmp_path / "acc", missing="skip").add(unread, name="b")
        weighlock.Mean(tmp_path / "acc", missing="skip").add(catalog, name="seen")
        reports = []
        with weighlock.Mean(tmp_path / "acc") as mean:
            found = mean.finish(report=reports.append)
        assert reports[0].of_files["a"] == catalog.notes
    assert "seen" not in reports[0].of_files
    assert list(reports[0].unread) == ["when"]
    assert first in found
    assert any(note.startswith("tensor 'when' is left out: ") for note in found.notes)
    assert any(note.startswith("a: ") and "follow" in note for note in found.notes)


def test_what_one_cannot_read_and_another_has_is_not_left_out(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, w=np.ones(2), when=np.array(["now"]))
    reports = []
    with weighlock.Mean(tmp_path / "acc", missing="skip") as mean:
        mean.add(path, name="a")
        mean.add({"w": np.ones(2), "when": np.ones(1)}, name="b")
        found = mean.finish(report=reports.append)
    assert sorted(found) == ["w", "when"]
    assert (reports[0].unread, reports[0].skipped) == ({}, {"when": ("a",)})


def test_an_accumulator_from_before_notes_were_kept(tmp_path):
    with weighlock.Mean(tmp_path) as mean:
        mean.add({"w": np.ones(3, F32)}, name="a")
    path = tmp_path / "accumulator.safetensors"
    with weighlock.open(path) as catalog:
        ledger = json.loads(catalog.metadata["weighlock.mean"])
        assert (ledger.pop("notes"), ledger.pop("unread")) == ({}, {})
        arrays = {name: ref.load() for name, ref in catalog.items()}
    weighlock.save(path, arrays, metadata={"weighlock.mean": json.dumps(ledger)})
    with weighlock.Mean(tmp_path) as mean:
        assert mean.weights == {"a": 1.0}
        assert mean.finish()["w"].load().tolist() == [1, 1, 1]


def test_of_many_notes_on_a_file_the_first_are_kept():
    ledger = Ledger().counting("a", 1.0, {}, {}, notes=[f"note {n}" for n in range(20)])
    assert ledger.notes["a"] == (*(f"note {n}" for n in range(7)), "13 more notes")
    assert Ledger.of(ledger.text(), "a file") == ledger


def test_integers_that_are_rounded_are_not_taken_for_what_they_were(tmp_path):
    weighlock.Mean(tmp_path, integers="round").add({"n": np.array([4])}, name="a")
    for policy in ("equal", "first", "max"):
        with pytest.raises(CombineError, match=r'b: tensor .n. .*begun with integers="round"'):
            weighlock.Mean(tmp_path, integers=policy).add({"n": np.array([9])}, name="b")
    with weighlock.Mean(tmp_path, integers="round") as mean:
        mean.add({"n": np.array([9])}, name="b")
        mean.add({"n": np.array([8])}, name="c")
        assert mean.finish()["n"].load().tolist() == [7]


def test_integers_that_were_equal_may_be_rounded_later(tmp_path):
    for value, policy in ((4, "equal"), (4, "equal"), (9, "round")):
        weighlock.Mean(tmp_path, integers=policy).add({"n": np.array([value])})
    assert weighlock.Mean(tmp_path).finish()["n"].load().tolist() == [6]


def test_float32_is_not_for_numbers_of_64_bits(tmp_path):
    model = {"t": np.array([1_700_000_001.0, 1e300])}
    with weighlock.Mean(tmp_path, "f32") as mean:
        mean.add(model)
        mean.add(model)
        assert mean.finish()["t"].load().tolist() == model["t"].tolist()


def test_what_is_refused_after_a_mean_was_made_keeps_nothing(tmp_path):
    with weighlock.Mean(tmp_path, durable=False) as mean:
        mean.add({"w": np.ones(3)})
        mean.finish()
        with pytest.raises(CombineError, match="NaN"):
            mean.add({"w": np.array([1, np.nan, 1])})
    assert os.listdir(tmp_path) == []


def test_a_number_is_a_name_and_so_is_0(tmp_path):
    with weighlock.Mean(tmp_path, durable=False) as mean:
        mean.add({"w": np.ones(3)}, name=0)
        assert list(mean.weights) == ["0"]
        with pytest.raises(CombineError, match="0: was counted already"):
            mean.add({"w": np.ones(3)}, name=0)


def test_closing_waits_for_whoever_adds_in_the_same_directory(tmp_path):
    """What it puts in place would bring back all that is to be gone."""
    weighlock.Mean(tmp_path, durable=False).add({"w": np.ones(3)}, name="a")
    other = weighlock.Mean(tmp_path, durable=False)
    closing = []

    def close(*_):
        if not closing:
            closing.append(threading.Thread(target=other.close))
            closing[0].start()
            closing[0].join(0.2)
            assert closing[0].is_alive()

    weighlock.Mean(tmp_path, durable=False, progress=close).add({"w": np.ones(3)}, name="b")
    closing[0].join(10)
    assert os.listdir(tmp_path) == []


def test_closing_where_the_directory_is_gone(tmp_path):
    mean = weighlock.Mean(tmp_path / "acc", durable=False)
    mean.add({"w": np.ones(3)})
    shutil.rmtree(tmp_path / "acc")
    mean.close()
    mean.close()
    assert os.listdir(tmp_path) == []


def test_nothing_added_and_closed(tmp_path):
    mean = weighlock.Mean(tmp_path)
    with pytest.raises(CombineError, match="nobody was added"):
        mean.finish()
    mean.close()
    mean.close()
    with pytest.raises(LocalProtocolError, match="was closed"):
        mean.add({"w": np.ones(3, F32)})


def test_another_file_of_that_name_is_not_taken_for_one(tmp_path):
    weighlock.save(tmp_path / "accumulator.safetensors", {"w": np.ones(3, F32)})
    with pytest.raises(FormatError, match="is not the accumulator of a mean"):
        weighlock.Mean(tmp_path)
