"""`weighlock mean` as a real process."""

import json

import numpy as np
import pytest
from cli_checks import ESCAPES, assert_refused, assert_wrong_usage, save, succeeded

import weighlock

F32 = np.float32


@pytest.fixture
def models(tmp_path):
    values = (1, 2, 6)
    return [
        save(tmp_path / f"{n}.safetensors", {"w": np.full((2, 3), v, F32), "n": np.arange(2)})
        for n, v in enumerate(values)
    ]


@pytest.fixture
def mean(weighlock_command, tmp_path):
    def run(*arguments):
        return weighlock_command("mean", *arguments, "-o", tmp_path / "out", "--no-sync")

    return run


def test_it_writes_the_mean_and_says_so_in_one_line(models, mean, tmp_path):
    result = mean(*models, "--weights", "3,1,1")
    assert succeeded(result) == f"{tmp_path / 'out'}: 2 tensors, 40 B, the mean of 3\n"
    assert result.stderr == ""
    found = weighlock.open(tmp_path / "out")
    assert np.allclose(found["w"].load(), (3 * 1 + 2 + 6) / 5)
    assert found["n"].load().tolist() == [0, 1]


def test_json(models, mean, tmp_path):
    facts = json.loads(succeeded(mean(*models[:2], "--json")))
    assert facts == {
        "target": str(tmp_path / "out"),
        "sources": [str(path) for path in models[:2]],
        "tensors": 2,
        "bytes": 40,
        "read_bytes": 80,
        "weights": {str(path): 0.5 for path in models[:2]},
        "skipped": {},
        "excluded": {},
        "unreadable": {},
        "notes": [],
    }


def test_json_names_models_by_their_paths(models, mean, tmp_path):
    less, gone = save(tmp_path / "less", {"w": np.ones((2, 3), F32)}), tmp_path / "gone"
    given = (models[0], models[0], less, gone)
    result = mean(*given, "--skip-missing", "--exclude-lost", "--json")
    facts = json.loads(succeeded(result))
    assert facts["weights"] == pytest.approx({str(models[0]): 2 / 3, str(less): 1 / 3})
    assert facts["skipped"] == {"n": [str(less)]}
    assert list(facts["excluded"]) == [str(gone)]


def test_tensors_that_are_not_read_are_not_left_out_in_silence(mean, tmp_path):
    paths = [tmp_path / f"{number}.npz" for number in range(2)]
    for path in paths:
        np.savez(path, w=np.ones(3, F32), when=np.array(["now"]))
    assert_refused(mean(*paths), f"({paths[0]}): tensor 'when' is not read: ", "--skip-missing")
    assert not (tmp_path / "out").exists()
    result = mean(*paths, "--skip-missing")
    assert "out: 1 tensor, " in succeeded(result)
    assert "tensor 'when' is left out: " in result.stderr
    facts = json.loads(succeeded(mean(*paths, "--skip-missing", "--force", "--json")))
    assert (facts["tensors"], list(facts["unreadable"]), facts["skipped"]) == (1, ["when"], {})


def test_notes_on_files_are_told_with_their_paths(mean, tmp_path):
    paths = [tmp_path / f"{number}.npy" for number in range(2)]
    for path in paths:
        np.save(path, np.ones(3, F32))
    with open(paths[1], "ab") as file:
        np.save(file, np.ones(3, F32))
    result = mean(*paths)
    assert "the mean of 2" in succeeded(result)
    told = f"contributor 2 of 2 ({paths[1]}): 140 bytes follow: only the first array is read"
    assert result.stderr == f"note: {told}\n"
    facts = json.loads(succeeded(mean(*paths, "--force", "--json")))
    assert facts["notes"] == [told]


def test_it_replaces_nothing_unless_told(models, mean, tmp_path):
    (tmp_path / "out").write_bytes(b"precious")
    assert_refused(mean(*models), "exists; --force replaces it")
    assert (tmp_path / "out").read_bytes() == b"precious"
    succeeded(mean(*models, "--force"))


def test_what_does_not_fit_is_one_line_and_leaves_nothing(models, mean, tmp_path):
    odd = save(tmp_path / "odd", {"w": np.full((2, 3), np.nan, F32), "n": np.arange(2)})
    assert_refused(mean(*models, odd), "contributor 4 of 4", "odd", "'w' holds NaN")
    assert not (tmp_path / "out").exists()
    succeeded(mean(*models, odd, "--allow-nonfinite"))


def test_models_that_lack_something_or_are_gone(models, mean, tmp_path):
    less = save(tmp_path / "less", {"w": np.ones((2, 3), F32)})
    assert_refused(mean(*models, less), "lacks tensor 'n'", "--skip-missing")
    result = mean(*models, less, tmp_path / "gone", "--skip-missing", "--exclude-lost")
    assert "the mean of 4" in succeeded(result)
    assert "gone) was lost and left out" in result.stderr
    assert "tensor 'n' is made without" in result.stderr


def test_integers(models, mean, tmp_path):
    odd = save(tmp_path / "odd", {"w": np.ones((2, 3), F32), "n": np.array([8, 1])})
    assert_refused(mean(*models, odd), "'n' is 8 where others have 0", "--integers")
    succeeded(mean(*models, odd, "--integers", "max"))
    assert weighlock.open(tmp_path / "out")["n"].load().tolist() == [8, 1]


def test_names_are_escaped(mean, tmp_path):
    given = [save(tmp_path / str(n), {ESCAPES: np.full(1, n, np.int8)}) for n in range(2)]
    assert_refused(mean(*given), "is 1 where others have 0")


def test_wrong_usage(models, mean, weighlock_command):
    assert_wrong_usage(mean(*models, "--weights", "a,b"))
    assert_wrong_usage(mean(*models, "--threads", "-1"))
    assert_wrong_usage(weighlock_command("mean", *models))
    assert_wrong_usage(mean(*models, "--weights", "1,2"), "2 weights for 3 models")
