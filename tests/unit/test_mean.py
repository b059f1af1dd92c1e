"""Means, medians, differences and steps of whole models, against float64; and what is refused."""

import os
import warnings

import ml_dtypes
import numpy as np
import pytest

import weighlock
from unit.combining_samples import BF16, DIGITS, mixed_models, ulps_off, weighted
from weighlock.errors import (
    Aborted,
    CombineError,
    DiskError,
    FormatError,
    LayoutError,
    LimitExceeded,
    SourceError,
    SpoolClosed,
)

WEIGHTS = (3, 1, 0.5, 2, 1)
MODELS = mixed_models(5)
FLOATS = [name for name in MODELS[0] if name not in ("steps", "mask", "empty", "c64")]


def loaded(catalog):
    return {name: ref.load() for name, ref in catalog.items()}


def same(found, expected):
    assert list(found) == list(expected)
    for name in found:
        assert found[name].dtype == expected[name].dtype, name
        assert found[name].shape == expected[name].shape, name
        assert found[name].tobytes() == expected[name].tobytes(), name


def check(found, expected_of, bound=0.51):
    """Every tensor is within so many units in the last place of what it should be."""
    assert list(found) == list(MODELS[0])
    for name in FLOATS:
        assert ulps_off(found[name].load(), expected_of(name), found[name].dtype.value) <= bound
    assert (found["steps"].load() == np.arange(12).reshape(3, 4)).all()
    assert found["mask"].load().tolist() == [True, False, True]
    assert found["empty"].shape == (0, 5)


@pytest.fixture
def paths(tmp_path):
    """The models as files."""
    found = []
    for number, model in enumerate(MODELS):
        found.append(tmp_path / f"{number}.safetensors")
        weighlock.save(found[-1], model, durable=False)
    return found


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_weighted_mean_is_that_of_float64(paths, tmp_path, no_leaks, threads):
    out = tmp_path / "out.safetensors"
    with weighlock.mean(paths, WEIGHTS, out, threads=threads, durable=False) as found:
        check(found, lambda name: weighted(MODELS, WEIGHTS, name))
        got = found["c64"].load()
        want = sum(w * m["c64"].astype(complex) for w, m in zip(WEIGHTS, MODELS, strict=True)) / 7.5
        assert ulps_off(got.real, want.real, "F32") <= 0.51
        assert ulps_off(got.imag, want.imag, "F32") <= 0.51
        in_memory = weighlock.mean(MODELS, WEIGHTS)
        same(loaded(found), loaded(in_memory))
    assert sorted(os.listdir(tmp_path)) == sorted([*(p.name for p in paths), "out.safetensors"])


def test_runs_and_thread_counts_give_the_same_bytes(paths, tmp_path, monkeypatch):
    outs = []
    for threads in (1, 2, 3, 2):
        outs.append(tmp_path / f"out-{len(outs)}")
        weighlock.mean(paths, WEIGHTS, outs[-1], threads=threads, durable=False).close()
    assert len({out.read_bytes() for out in outs}) == 1


@pytest.mark.parametrize("dtype", [name for name in DIGITS if name != "F4"])
@pytest.mark.parametrize("count", [3, 10, 512])
def test_the_mean_of_ones_is_one(dtype, count):
    one = {"w": np.ones(70, weighlock.DType(dtype).numpy)}
    found = weighlock.mean([one] * count)["w"].load()
    exact = count == 512 or dtype != "F64"
    assert (found == 1).all() if exact else np.allclose(found, 1, rtol=1e-15)


def test_float32_sums_if_asked(paths):
    found = weighlock.mean(paths, WEIGHTS, accumulate="f32")
    for name in ("f32", "scalar"):
        assert np.allclose(found[name].load(), weighted(MODELS, WEIGHTS, name), atol=1e-6)
    with pytest.raises(CombineError, match="F32 or F64"):
        weighlock.mean(paths, accumulate="bf16")


def test_a_file_of_many_blocks(tmp_path):
    rng = np.random.default_rng(3)
    models = [
        {
            "b": rng.standard_normal((1500, 1001)).astype(BF16),
            "f": rng.standard_normal((900, 999), np.float32),
        }
        for _ in range(3)
    ]
    for number, model in enumerate(models):
        weighlock.save(tmp_path / str(number), model, durable=False)
    found = weighlock.mean([tmp_path / str(n) for n in range(3)], [1, 2, 3], tmp_path / "out")
    for name, dtype in (("b", "BF16"), ("f", "F32")):
        assert ulps_off(found[name].load(), weighted(models, [1, 2, 3], name), dtype) <= 0.51
    found.close()


def test_checkpoints_strided_tensors_and_shards_go_together(tmp_path, no_leaks):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(4)
    arrays = [rng.standard_normal((1100, 1200), np.float32) for _ in range(4)]
    weighlock.save(tmp_path / "a.safetensors", {"w": arrays[0], "v": arrays[0][:3]})
    tensor = torch.from_numpy(arrays[1].T.copy()).T  # column-major in the file
    torch.save({"w": tensor, "v": tensor[:3]}, tmp_path / "b.pt")
    weighlock.save(tmp_path / "c", {"w": arrays[2], "v": arrays[2][:3]}, max_shard_bytes=5_000_000)
    in_memory = {"w": np.asfortranarray(arrays[3]), "v": torch.from_numpy(arrays[3][:3])}
    given = [tmp_path / "a.safetensors", tmp_path / "b.pt", tmp_path / "c", in_memory]
    models = [{"w": a, "v": a[:3]} for a in arrays]
    for found in (
        weighlock.mean(given, [1, 2, 3, 4]),
        weighlock.mean(given, [1, 2, 3, 4], tmp_path / "out"),
    ):
        for name in ("w", "v"):
            want = weighted(models, [1, 2, 3, 4], name)
            assert ulps_off(found[name].load(), want, "F32") <= 0.51
        found.close()


def test_median_and_trimmed_mean(paths):
    def stacked(name, count):
        return np.sort([np.asarray(m[name]).astype(np.float64) for m in MODELS[:count]], axis=0)

    ordered = [name for name in MODELS[0] if name != "c64"]
    chosen = [weighlock.open(path).only(ordered) for path in paths]
    for found, left in (
        (weighlock.median(chosen), slice(2, 3)),
        (weighlock.trimmed_mean(chosen, 0.2), slice(1, 4)),
        (weighlock.trimmed_mean(chosen, 0.19), slice(0, 5)),
        (weighlock.median(chosen[:4]), None),
    ):
        for name in FLOATS:
            want = (
                stacked(name, 5)[left].mean(axis=0) if left else stacked(name, 4)[1:3].mean(axis=0)
            )
            assert ulps_off(found[name].load(), want, found[name].dtype.value) <= 0.51
    with pytest.raises(CombineError, match="complex numbers have no order"):
        weighlock.median(paths)
    with pytest.raises(CombineError, match=r"share=0\.5"):
        weighlock.trimmed_mean(chosen, 0.5)


def test_difference_and_step(paths):
    delta = weighlock.difference(paths[0], paths[1], dtype="f32")
    rows = MODELS[:2]
    assert delta["bf16"].dtype == "F32"
    for name in ("bf16", "f32", "f16"):
        want = np.subtract(*(np.asarray(m[name]).astype(np.float64) for m in rows))
        assert ulps_off(delta[name].load(), want, "F32") <= 0.51
    assert not delta["steps"].load().any()
    assert delta["mask"].dtype == "I8"
    stepped = weighlock.apply(paths[1], weighlock.difference(paths[0], paths[1]), 0.5)
    for name in ("bf16", "f32", "f64"):
        b = np.asarray(MODELS[1][name])
        d = np.asarray(MODELS[0][name]).astype(np.float64) - b.astype(np.float64)
        want = b.astype(np.float64) + 0.5 * d.astype(b.dtype).astype(np.float64)
        assert stepped[name].dtype == weighlock.DType.of(b.dtype)
        assert ulps_off(stepped[name].load(), want, stepped[name].dtype.value) <= 0.51
    four, nine = {"n": np.int64(4)}, {"n": np.int64(9)}
    back = weighlock.apply(nine, weighlock.difference(four, nine))
    assert back["n"].load() == 4


def test_steps_without_all_tensors():
    base = {"a": np.ones(3, np.float32), "b": np.ones(2, np.float32)}
    delta = {"a": np.full(3, 2, np.float32)}
    with pytest.raises(CombineError, match="delta: lacks tensor 'b'"):
        weighlock.apply(base, delta)
    found = weighlock.apply(base, delta, -1, missing="skip")
    assert loaded(found)["a"].tolist() == [-1] * 3
    assert loaded(found)["b"].tolist() == [1] * 2
    with pytest.raises(CombineError, match="base: lacks tensor 'b'"):
        weighlock.apply(delta, base, missing="skip")
    assert list(weighlock.difference(base, delta, missing="skip")) == ["a"]
    with pytest.raises(CombineError, match="does not go together"):
        weighlock.apply({"a": np.ones(3, np.int32)}, delta)
    with pytest.raises(CombineError, match="finite length"):
        weighlock.apply(base, delta, float("nan"))


F32 = np.float32
GOOD = {"w": np.ones(4, F32), "n": np.arange(3)}
REFUSED = {
    # what the second contributor is, options, what the error says, tensor
    "another shape": ({**GOOD, "w": np.ones(5, F32)}, {}, r"is F32 \[5\], but F32 \[4\] in", "w"),
    "another dtype": ({**GOOD, "w": np.ones(4)}, {}, r"is F64 \[4\], but F32 \[4\]", "w"),
    "a tensor less": ({"w": GOOD["w"]}, {}, "lacks tensor 'n', which contributor 1 of 3 has", "n"),
    "NaN": (
        {**GOOD, "w": np.array([1, 1, np.nan, 1], F32)},
        {},
        r"holds NaN \(element 2 of 4",
        "w",
    ),
    "Inf": ({**GOOD, "w": np.array([1, -np.inf, 1, 1], F32)}, {}, r"holds Inf \(element 1", "w"),
    "other integers": ({**GOOD, "n": np.arange(3) * 2}, {}, "is 2 where others have 1", "n"),
    "a negative weight": (GOOD, {"weights": [1, -1, 3]}, "has the weight -1", None),
    "a weight of NaN": (GOOD, {"weights": [1, float("nan"), 1]}, "has the weight nan", None),
    "an infinite weight": (GOOD, {"weights": [1, float("inf"), 1]}, "has the weight inf", None),
    "a weight that is none": (GOOD, {"weights": [1, "two", 1]}, "has the weight 'two'", None),
}


@pytest.mark.parametrize("out", [None, "out"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_names_contributor_and_tensor(case, out, tmp_path, no_leaks):
    """D16."""
    second, options, says, tensor = REFUSED[case]
    place = out and tmp_path / out
    with pytest.raises(CombineError, match=says) as caught:
        weighlock.mean([GOOD, second, GOOD], out=place, **options)
    assert str(caught.value).startswith("contributor 2 of 3: ")
    assert caught.value.contributor == "contributor 2 of 3"
    assert caught.value.tensor == tensor
    assert os.listdir(tmp_path) == []


def test_a_result_that_was_there_stays_if_the_next_is_refused(tmp_path):
    out = tmp_path / "out"
    weighlock.mean([GOOD], out=out).close()
    before = out.read_bytes()
    with pytest.raises(CombineError):
        weighlock.mean([GOOD, {**GOOD, "n": np.arange(3) + 1}], out=out)
    assert out.read_bytes() == before


WRONG = [
    (([],), {}, "no contributor was given"),
    (([GOOD, GOOD], [0, 0]), {}, "add up to 0.*: contributor 1 of 2 has 0, .* more than 0"),
    (({f"site-{n}": GOOD for n in range(9)}, [0] * 9), {}, "site-2 has 0 and 6 more; one must"),
    (([GOOD] * 3, [1, 1e308, 1e308]), {}, "add up to inf.*: contributor 2 of 3 has 1e.308, .*div"),
    (([GOOD, GOOD], [1]), {}, "2 contributors and 1 weights"),
    (("model.safetensors",), {}, "not one model"),
    (({"a": GOOD}, {"b": 1}), {}, "weight for 'b'"),
    (({"a": GOOD, "b": GOOD}, {"a": 1}), {}, "b: has the weight None"),
    (([GOOD],), {"integers": "maximum"}, "integers='maximum': must be one of 'equal'"),
    (([GOOD],), {"missing": "ignore"}, "missing='ignore': must be one of 'error', 'skip'"),
    (([GOOD],), {"on_lost": "skip"}, "on_lost='skip': must be one of 'error', 'exclude'"),
    (([GOOD],), {"threads": -1}, "threads=-1"),
]


@pytest.mark.parametrize(("given", "options", "says"), WRONG)
def test_wrong_calls_are_refused(given, options, says):
    with pytest.raises(CombineError, match=says):
        weighlock.mean(*given, **options)


def test_what_is_no_tensor_is_told_by_whose_it_is():
    with pytest.raises(LayoutError, match="contributor 2 of 2: tensor 'w' is a list"):
        weighlock.mean([GOOD, {"w": [1.0]}])


def test_options_that_are_not_there_are_refused(tmp_path):
    calls = {
        "mean": lambda **options: weighlock.mean([GOOD], **options),
        "median": lambda **options: weighlock.median([GOOD], **options),
        "difference": lambda **options: weighlock.difference(GOOD, GOOD, **options),
        "Mean": lambda **options: weighlock.Mean(tmp_path / "sum", **options),
    }
    for call in calls.values():
        with pytest.raises(TypeError, match="no option 'mising'"):
            call(mising="skip")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64", "F8_E4M3"])
def test_what_overflows_is_refused(dtype):
    kind = weighlock.DType.of(dtype).numpy
    largest = {"w": np.full(3, ml_dtypes.finfo(kind).max)}
    smallest = {"w": -largest["w"]}
    assert largest["w"].dtype == kind
    for call in (
        lambda **options: weighlock.apply(largest, largest, **options),
        lambda **options: weighlock.difference(largest, smallest, **options),
    ):
        with pytest.raises(CombineError, match="tensor 'w' overflows"):
            call()
        assert not np.isfinite(call(finite=False)["w"].load().astype(np.float64)).any()
    for found in (
        weighlock.mean([largest] * 3),
        weighlock.median([largest] * 4),
        weighlock.trimmed_mean([largest] * 5, 0.2),
        weighlock.apply(largest, largest, -0.5),
    ):
        assert np.isfinite(found["w"].load().astype(np.float64)).all()


def test_names_are_used_in_reports_and_errors(tmp_path):
    reports = []
    given = {"site-1": {"w": np.zeros(2, F32)}, "site-2": {"w": np.ones(2, F32)}}
    found = weighlock.mean(given, {"site-1": 1, "site-2": 3}, report=reports.append)
    assert found["w"].load().tolist() == [0.75, 0.75]
    assert reports[0].weights == {"site-1": 0.25, "site-2": 0.75}
    assert (reports[0].tensors, reports[0].nbytes, reports[0].read_bytes) == (1, 8, 16)
    with pytest.raises(CombineError, match=r"^site-2: tensor 'w' holds NaN"):
        weighlock.mean({**given, "site-2": {"w": np.full(2, np.nan, F32)}})


@pytest.fixture
def tied_paths(tmp_path):
    """Two models whose files say that `head` is `embed`."""
    paths = [tmp_path / "0.safetensors", tmp_path / "1.safetensors"]
    for number, path in enumerate(paths):
        array = np.full((100, 4), number + 1, np.float32)
        tensors = {"embed": array, "w": np.ones(2), "head": array}
        weighlock.save(path, tensors, tied="alias", durable=False)
    return paths


class TestTied:
    def test_what_all_files_tie_is_read_and_written_once(self, tied_paths, tmp_path):
        out = tmp_path / "out.safetensors"
        reports = []
        for target in (None, out):
            found = weighlock.mean(tied_paths, out=target, report=reports.append)
            assert list(found) == ["embed", "w", "head"]
            assert found.aliases == {"head": "embed"}
            assert (found["head"].load() == 1.5).all()
            assert found.nbytes == 1616
            assert (reports[-1].tensors, reports[-1].read_bytes) == (3, 2 * 1616)
        assert os.path.getsize(out) == os.path.getsize(tied_paths[0])

    def test_one_who_does_not_tie_them_counts(self, tied_paths):
        apart = {"embed": np.zeros((100, 4), np.float32), "w": np.ones(2)}
        apart["head"] = apart["embed"] + 9
        found = weighlock.mean([*tied_paths, apart])
        assert not found.aliases
        assert (found["embed"].load() == 1).all()
        assert (found["head"].load() == 4).all()
        del apart["head"]
        found = weighlock.mean([*tied_paths, apart], missing="skip")
        assert (found["embed"].load() == 1).all()
        assert (found["head"].load() == 1.5).all()

    def test_refs_that_got_other_names_are_not_tied_by_what_their_file_says(self, tied_paths):
        with weighlock.open(tied_paths[0]) as a, weighlock.open(tied_paths[1]) as b:
            turned = [c.rename({"w": "embed", "embed": "w"}) for c in (a, b)]
            found = weighlock.mean(turned)
            assert (found["w"].load() == 1.5).all()
            assert (found["head"].load() == 1.5).all()
            assert (found["embed"].load() == 1).all()
            assert list(weighlock.mean([c.select("w") for c in (a, b)])) == ["w"]
            assert list(weighlock.mean([c.select("head") for c in (a, b)])) == ["head"]

    def test_step_by_step(self, tied_paths, tmp_path):
        with weighlock.Mean(tmp_path / "sums") as total:
            for path in tied_paths:
                total.add(path)
            found = total.finish()
            assert found.aliases == {"head": "embed"}
            assert (found["head"].load() == 1.5).all()
            apart = {"embed": np.zeros((100, 4), np.float32), "w": np.ones(2)}
            total.add({**apart, "head": apart["embed"] + 9})
            found = total.finish(tmp_path / "out.safetensors")
        assert not found.aliases
        assert (found["embed"].load() == 1).all()
        assert (found["head"].load() == 4).all()

    def test_from_a_server(self, tied_paths, tmp_path):
        with weighlock.Server() as server, weighlock.Mean(tmp_path / "sums") as total:
            urls = [server.share(weighlock.open(path)).url for path in tied_paths]
            assert weighlock.mean(urls).aliases == {"head": "embed"}
            for url in urls:
                total.add(url)
            found = total.finish(tmp_path / "out.safetensors")
        assert found.aliases == {"head": "embed"}
        assert (found["head"].load() == 1.5).all()

    def test_differences_and_steps(self, tied_paths):
        delta = weighlock.difference(tied_paths[1], tied_paths[0])
        assert delta.aliases == {"head": "embed"}
        found = weighlock.apply(tied_paths[1], delta)
        assert found.aliases == {"head": "embed"}
        assert (found["head"].load() == 3).all()

    def test_texts_that_are_given_stay_texts(self, tied_paths):
        found = weighlock.mean(tied_paths, metadata={"head": "of the table"})
        assert found.metadata["head"] == "of the table"
        assert (found["head"].load() == 1.5).all()
        with pytest.raises(LayoutError, match="metadata 'note' is 'w', the name of a tensor"):
            weighlock.mean(tied_paths, metadata={"note": "w"})
        with pytest.raises(FormatError, match="holds text only"):
            weighlock.mean(tied_paths, metadata={"note": []})


def test_notes_on_files_become_notes_on_the_mean(tmp_path):
    paths = [tmp_path / f"{number}.npy" for number in range(12)]
    for number, path in enumerate(paths):
        with open(path, "wb") as file:
            np.save(file, np.ones(2))
            if number:
                np.save(file, np.ones(2))
    reports = []
    given = {path.stem: path for path in paths}
    found = weighlock.mean(given, report=reports.append)
    assert list(reports[0].of_files) == [str(number) for number in range(1, 12)]
    assert found.notes[0].startswith("1: 144 bytes follow")
    assert (len(found.notes), found.notes[-1][:12]) == (9, "3 more notes")
    with weighlock.open(paths[1]) as catalog:  # who gives a catalog has seen its notes
        assert catalog.notes
        assert not weighlock.mean([catalog, catalog]).notes


def test_float32_is_not_for_numbers_of_64_bits():
    models = [{"t": np.array([1_700_000_001.0, 1e300]), "w": np.ones(2, np.float32)}] * 2
    found = weighlock.mean(models, accumulate="f32")
    assert found["t"].load().tolist() == [1_700_000_001.0, 1e300]
    complex_ones = [{"c": np.array([1_700_000_001 + 1e300j])}] * 2
    assert weighlock.mean(complex_ones, accumulate="f32")["c"].load()[0] == 1_700_000_001 + 1e300j


def test_trimmed_means_of_equal_models_are_the_model():
    numbers = np.random.default_rng(0).standard_normal(1000) * 10.0 ** np.arange(-300, 200, 0.5)
    numbers[:3] = 0.1, -0.1, 5e-324
    for count in (3, 5, 7, 10):
        found = weighlock.trimmed_mean([{"w": numbers}] * count, 0)
        assert found["w"].load().tobytes() == numbers.tobytes()


def test_texts_that_shards_agree_on_stay_in_order(tmp_path):
    texts = {f"key {number}": "text" for number in range(20)}
    arrays = {name: np.ones(4) for name in "abc"}
    weighlock.save(tmp_path / "m", arrays, metadata=texts, max_shard_bytes=32)
    found = weighlock.mean([tmp_path / "m"] * 2)
    assert [key for key in found.metadata if key in texts] == list(texts)


@pytest.mark.parametrize("policy", ["round", "difference"])
def test_integers_are_worked_on_in_steps(policy):
    rng = np.random.default_rng(0)
    models = [{"n": rng.integers(-100, 100, 100_003, np.int8).astype(np.int16)} for _ in range(3)]
    if policy == "round":
        found = weighlock.mean(models, integers="round")["n"].load()
        assert (found == np.rint(sum(m["n"].astype(float) for m in models) / 3)).all()
    else:
        found = weighlock.difference(*models[:2])["n"].load()
        assert (found == models[0]["n"] - models[1]["n"]).all()
        large = {"n": np.full(100_003, -(2**15), np.int16)}
        large["n"][:-2] = 0
        with pytest.raises(CombineError, match=r"element 100,001 of 100,003"):
            weighlock.difference(large, {"n": np.ones(100_003, np.int16)})


def test_what_a_file_has_and_is_not_read(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, w=np.ones(2), when=np.array(["now"]), n=np.ones(1))
    other = {"w": np.zeros(2), "n": np.ones(1), "when": np.ones(1)}
    with pytest.raises(CombineError, match=r"^a: tensor .when. is not read: .*out 1$") as met:
        weighlock.mean({"a": path, "b": other})
    assert (met.value.contributor, met.value.tensor) == ("a", "when")
    with pytest.raises(CombineError, match="tensor 'when' is not read"):
        weighlock.difference(path, path)
    with weighlock.Mean(tmp_path / "sums") as total:
        with pytest.raises(CombineError, match="tensor 'when' is not read"):
            total.add(path)
        assert not total.weights
    reports = []
    found = weighlock.mean({"a": path, "b": other}, missing="skip", report=reports.append)
    assert list(found) == ["w", "n", "when"]
    assert (reports[0].skipped, reports[0].unread) == ({"when": ("a",)}, {})
    found = weighlock.mean([path, path], missing="skip", report=reports.append)
    assert list(reports[1].unread) == ["when"]
    assert any("'when' is left out" in note for note in found.notes)
    with weighlock.open(path) as catalog:  # who gives a catalog has seen what is in it
        assert list(weighlock.mean([catalog, catalog])) == ["w", "n"]


def test_who_lacks_a_tensor_can_be_skipped():
    reports = []
    given = {
        "a": {"w": np.full(2, 4, F32), "only.a": np.ones(1, F32)},
        "b": {"w": np.full(2, 1, F32)},
        "c": {"w": np.full(2, 1, F32), "late": np.full(1, 5, F32)},
    }
    found = weighlock.mean(given, [2, 1, 1], missing="skip", report=reports.append)
    assert {name: array.tolist() for name, array in loaded(found).items()} == {
        "w": [2.5, 2.5],
        "only.a": [1.0],
        "late": [5.0],
    }
    assert reports[0].skipped == {"only.a": ("b", "c"), "late": ("a", "b")}
    assert "tensor 'only.a' is made without b, c" in found.notes


def test_a_weight_of_zero_counts_for_nothing():
    odd = {"w": np.full(4, np.nan, F32), "n": np.arange(3) + 1}
    found = weighlock.mean([GOOD, odd], [2, 0])
    same(loaded(found), GOOD)
    with pytest.raises(CombineError, match=r"everybody who has it .* 0: .*one of them"):
        weighlock.mean([GOOD, {**GOOD, "x": GOOD["w"]}], [1, 0], missing="skip")


def test_policies_for_integers():
    given = [{"n": np.array([1, 2])}, {"n": np.array([3, 2])}, {"n": np.array([3, 5])}]
    for policy, want in (("first", [1, 2]), ("max", [3, 5]), ("round", [2, 3])):
        assert weighlock.mean(given, integers=policy)["n"].load().tolist() == want


def test_metadata_is_what_all_agree_on(tmp_path):
    for number in range(2):
        text = {"format": "pt", "round": str(number)}
        weighlock.save(tmp_path / str(number), GOOD, metadata=text, durable=False)
    given = [tmp_path / "0", tmp_path / "1"]
    assert weighlock.mean(given).metadata == {"format": "pt"}
    assert weighlock.mean(given, metadata={"a": "b"}).metadata == {"a": "b"}


def test_progress_ends_where_it_should(paths):
    told = []
    weighlock.mean(paths, progress=lambda done, total: told.append((done, total)))
    assert max(told) == (told[0][1],) * 2
    assert told[0][1] == sum(weighlock.open(path).nbytes for path in paths)


def test_an_abort_ends_it_and_leaves_nothing(paths, tmp_path, no_leaks):
    abort = weighlock.Abort()

    def stop(done, total):
        abort.set("enough")

    with pytest.raises(Aborted, match="enough"):
        weighlock.mean(paths, out=tmp_path / "out", abort=abort, progress=stop)
    assert not (tmp_path / "out").exists()


def test_a_contributor_that_shrinks_is_named(paths, tmp_path, no_leaks):
    """D16: one dies midway."""
    catalogs = {path.name: weighlock.open(path) for path in paths}
    os.truncate(paths[3], paths[3].stat().st_size // 2)
    with pytest.raises(SourceError, match=r"^3\.safetensors: tensor '\w+.*changed since"):
        weighlock.mean(catalogs, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    reports = []
    found = weighlock.mean(catalogs, WEIGHTS, on_lost="exclude", report=reports.append)
    left = [n for n in range(5) if n != 3]
    want = loaded(weighlock.mean([MODELS[n] for n in left], [WEIGHTS[n] for n in left]))
    same(loaded(found), want)  # as if it had never been there
    assert list(reports[0].excluded) == ["3.safetensors"]
    assert found.notes[0].startswith("3.safetensors was lost and left out: tensor ")
    for catalog in catalogs.values():
        catalog.close()


def overwritten(path, bits):
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(np.full(1000, bits, np.uint16).tobytes())


CHANGES = {
    "other numbers": lambda path: overwritten(path, 0x3F80),
    "NaN": lambda path: overwritten(path, 0x7FC0),
    "cut short": lambda path: os.truncate(path, path.stat().st_size // 2),
    "another file in its place": lambda path: os.replace(path.with_name("other"), path),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_while_it_is_read_is_told_as_changed(
    change, threads, tmp_path, no_leaks
):
    """Whatever its numbers have become: the second block of a tensor is what is changed."""
    rng = np.random.default_rng(1)
    paths = [tmp_path / name for name in ("0", "1", "2", "other")]
    for path in paths:
        array = rng.standard_normal(2_000_000, np.float32).astype(BF16)
        weighlock.save(path, {"a": array, "b": array}, durable=False)
    times = []

    def spoil(done, total):
        times.append(done)
        if len(times) == 1:
            CHANGES[change](paths[1])

    with pytest.raises(SourceError, match=r"contributor 2 of 3 .*tensor '[ab]': .*changed since"):
        weighlock.mean(paths[:3], [1, 2, 4], tmp_path / "out", threads=threads, progress=spoil)
    assert not (tmp_path / "out").exists()
    assert max(times) < 3 * 2 * array.nbytes


def test_a_shard_that_is_gone_or_broken_is_somebodys(tmp_path, no_leaks):
    """Shards are opened when their tensors are looked for, which is after their index was."""
    whole = {f"t{n}": np.full(100, n, np.float32) for n in range(4)}
    weighlock.save(tmp_path / "C", whole, max_shard_bytes=900, durable=False)
    first, second = sorted((tmp_path / "C").glob("*.safetensors"))
    models = {"A": whole, "B": {name: 2 * array for name, array in whole.items()}}
    with weighlock.open(tmp_path / "C") as sharded:
        os.unlink(second)
        with pytest.raises(SourceError, match=r"^C: tensor 't\d': .*cannot be opened"):
            weighlock.mean({**models, "C": sharded}, out=tmp_path / "out")
        assert not (tmp_path / "out").exists()
        found = weighlock.mean({**models, "C": sharded}, on_lost="exclude")
        assert found["t2"].load()[0] == 3
    second.write_bytes(first.read_bytes()[:50])
    with pytest.raises(FormatError, match=r"^C: "):
        weighlock.mean({**models, "C": tmp_path / "C"}, on_lost="exclude")


def test_a_spool_that_is_closed_meanwhile(tmp_path, no_leaks):
    arrays = {name: np.ones(700_000, np.float32) for name in "ab"}
    for options, outcome in (({}, None), ({"on_lost": "exclude"}, 3)):
        spool = weighlock.Spool(tmp_path / "spools")
        with weighlock.save(spool, arrays) as spooled:
            models = {"spooled": spooled, "other": {k: 3 * v for k, v in arrays.items()}}
            options["progress"] = lambda done, total, spool=spool: spool.close()
            if outcome is None:
                with pytest.raises(SpoolClosed, match=r"^spooled: tensor 'b': "):
                    weighlock.mean(models, threads=1, **options)
            else:
                found = weighlock.mean(models, threads=1, **options)
                assert found["a"].load()[0] == outcome


def test_what_numpy_would_say_of_numbers_is_told_by_errors_only(tmp_path):
    tiny = {"a": np.full(100, 1e-38, np.float32).astype(BF16)}
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        for threads in (1, 2):
            weighlock.mean([tiny, tiny, tiny], threads=threads)
        for bits in (0x7F80, 0x7F81, 0x7FC0):
            odd = {"a": np.full(100, bits, np.uint16).view(BF16)}
            with pytest.raises(CombineError, match=r"holds (NaN|Inf)"):
                weighlock.apply(tiny, odd, 0.0)


def test_files_that_are_not_there(paths, tmp_path):
    gone = tmp_path / "gone"
    with pytest.raises(SourceError, match=r"contributor 2 of 2 \(.*gone\): .*cannot be opened"):
        weighlock.mean([paths[0], gone])
    found = weighlock.mean([paths[0], gone], on_lost="exclude")
    same(loaded(found), loaded(weighlock.mean([paths[0]])))
    with pytest.raises(CombineError, match="every contributor was lost"):
        weighlock.mean([gone], on_lost="exclude")
    with pytest.raises(CombineError, match="every contributor that has a weight was lost"):
        weighlock.mean([paths[0], gone], [0, 1], on_lost="exclude")


def test_a_full_or_absent_disk_leaves_nothing(paths, tmp_path, no_leaks):
    with pytest.raises(DiskError):
        weighlock.mean(paths, out=tmp_path / "no" / "out")
    with pytest.raises(LimitExceeded):
        weighlock.mean(paths, limits=weighlock.Limits(memory_bytes=100))


def test_a_spool_gives_a_file_that_goes(paths, tmp_path, no_leaks):
    with weighlock.Spool(tmp_path / "spools") as spool:
        found = weighlock.mean(paths, WEIGHTS, out=spool)
        check(found, lambda name: weighted(MODELS, WEIGHTS, name))
        assert spool.used_bytes > 0
        found.close()
        assert spool.used_bytes == 0


def test_a_model_may_be_replaced_by_its_own_mean(paths):
    want = loaded(weighlock.mean(paths[:2]))
    weighlock.mean(paths[:2], out=paths[0]).close()
    same(loaded(weighlock.open(paths[0])), want)
