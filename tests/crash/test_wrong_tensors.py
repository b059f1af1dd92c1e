"""A10: what comes is not what was announced. The destination is untouched and the error names it.

A table of what can be wrong, run with and without specs, into one file and into several, and with
a mapping, an iterable and a `Writer`.
"""

import contextlib
import gc
import os

import numpy as np
import pytest

import weighlock
from crash.disks import NamedDisk
from crash.saves import NEW, SHARD_BYTES, beside, put_old, seen, specs_of
from weighlock.errors import LayoutError

RIGHT = list(NEW.items())


def replaced(name, value, new_name=None):
    new_name = name if new_name is None else new_name
    return [(new_name, value) if n == name else (n, array) for n, array in RIGHT]


# What comes, and the name the error must say; for specs of NEW.
AGAINST_SPECS = {
    "another name": (replaced("bias", NEW["bias"], "bios"), "bios"),
    "another dtype": (replaced("bias", NEW["bias"].astype(np.float32)), "bias"),
    "a dtype of the same size": (replaced("bias", NEW["bias"].view(np.int16)), "bias"),
    "another shape": (replaced("weight", NEW["weight"][:39]), "weight"),
    "a shape of the same size": (replaced("weight", NEW["weight"].reshape(16, 40)), "weight"),
    "another number of dimensions": (replaced("scale", NEW["scale"].reshape(1)), "scale"),
    "more elements": (replaced("codes", np.arange(0, 256, dtype=np.uint8)), "codes"),
    "another shape of no elements": (replaced("nothing", np.zeros((3, 0), np.uint8)), "nothing"),
    "one too few": (RIGHT[:-1], "codes"),
    "the first one missing": (RIGHT[1:], "weight"),
    "none at all": ([], "weight"),
    "one too many": ([*RIGHT, ("more", NEW["bias"])], "more"),
    "one too many, first": ([("more", NEW["bias"]), *RIGHT], "more"),
}
# Wrong whether announced or not.
ALWAYS = {
    "one twice": ([*RIGHT, ("bias", NEW["bias"])], "bias"),
    "one twice in a row": ([RIGHT[0], *RIGHT], "weight"),
    "one twice, differently": ([*RIGHT, ("weight", NEW["bias"])], "weight"),
    "no tensor": (replaced("bias", [1, 2, 3]), "bias"),
    "nothing": (replaced("bias", None), "bias"),
    "text": (replaced("bias", np.array(["a", "b"])), "bias"),
    "an empty name": (replaced("bias", NEW["bias"], ""), "''"),
    "a reserved name": (replaced("bias", NEW["bias"], "__metadata__"), "__metadata__"),
    "a name that is no text": (replaced("bias", NEW["bias"], 7), "7"),
}
CASES = [
    pytest.param(case, specs, id=f"{name}, {'with' if specs else 'without'} specs")
    for table, kinds in ((AGAINST_SPECS, [True]), (ALWAYS, [True, False]))
    for name, case in table.items()
    for specs in kinds
]


@pytest.fixture(params=["file", "shards"])
def destination(request, tmp_path):
    """Where to save and what to hand to `save` beside it."""
    put_old(tmp_path / "model")
    if request.param == "file":
        return tmp_path / "model", {}
    return tmp_path / "new", {"max_shard_bytes": SHARD_BYTES}


def untouched(tmp_path):
    return seen(tmp_path / "model") == "old" and beside(tmp_path / "model") == []


@pytest.mark.parametrize(("case", "specs"), CASES)
def test_wrong_tensors_raise_and_leave_what_was_there(tmp_path, no_leaks, destination, case, specs):
    (items, name), (path, options) = case, destination
    announced = specs_of(NEW) if specs else None
    with pytest.raises((LayoutError, weighlock.errors.UnsupportedDType), match=name):
        weighlock.save(path, iter(items), announced, **options)
    assert untouched(tmp_path)


@pytest.mark.parametrize(
    "case", [case for name, case in AGAINST_SPECS.items()], ids=list(AGAINST_SPECS)
)
def test_a_mapping_against_specs_is_refused_too(tmp_path, no_leaks, case):
    items, name = case
    put_old(tmp_path / "model")
    with pytest.raises(LayoutError, match=name):
        weighlock.save(tmp_path / "model", dict(items), specs_of(NEW))
    with pytest.raises(LayoutError, match=name):
        weighlock.save(tmp_path / "new", dict(items), specs_of(NEW), max_shard_bytes=SHARD_BYTES)
    assert untouched(tmp_path)


@pytest.mark.parametrize("specs", [True, False])
def test_another_order_is_fine(tmp_path, no_leaks, destination, specs):
    path, options = destination
    for turn in range(len(NEW)):
        items = RIGHT[turn:] + RIGHT[:turn]
        target = path.with_name(f"turned by {turn}")
        weighlock.save(target, iter(items[::-1]), specs_of(NEW) if specs else None, **options)
        assert seen(target) == "new"


@pytest.mark.parametrize("broken", ["a spec twice", "a negative size", "no such dtype"])
def test_wrong_specs_are_refused_before_a_tensor_is_asked_for(
    tmp_path, no_leaks, destination, broken
):
    path, options = destination
    specs = specs_of(NEW)
    specs.append(
        {
            "a spec twice": specs[0],
            "a negative size": ("more", "F32", (-1,)),
            "no such dtype": ("more", "F33", (1,)),
        }[broken]
    )

    def never():
        raise AssertionError("a tensor was asked for")
        yield

    with pytest.raises((LayoutError, weighlock.errors.UnsupportedDType)):
        weighlock.save(path, never(), specs, **options)
    assert untouched(tmp_path)


# --- a writer that is told off and goes on ---


@pytest.mark.parametrize("specs", [specs_of(NEW), None], ids=["with specs", "without"])
def test_a_writer_that_refused_a_tensor_can_still_be_given_the_right_one(tmp_path, no_leaks, specs):
    with weighlock.Writer(tmp_path / "model", specs) as writer:
        with pytest.raises(LayoutError):
            writer.write("bias", "not a tensor")
        if specs:
            with pytest.raises(LayoutError):
                writer.write("bias", NEW["weight"])
        for name, array in RIGHT:
            writer.write(name, array)
        with pytest.raises(LayoutError):
            writer.write("bias", NEW["bias"])
    assert seen(tmp_path / "model") == "new"


@pytest.mark.parametrize("specs", [specs_of(NEW), None], ids=["with specs", "without"])
def test_tensors_that_were_refused_together_are_not_taken_for_written(tmp_path, no_leaks, specs):
    """One of several is wrong, so none is written: the file must not hold zeros in their place."""
    weighlock.save(tmp_path / "source.safetensors", NEW)
    path = tmp_path / "model"
    with weighlock.open(tmp_path / "source.safetensors") as catalog:
        refs = list(catalog.values())
        writer = weighlock.Writer(path, specs)
        with pytest.raises(LayoutError, match="weight"):
            writer.copy_all([refs[1], refs[0], refs[0]])
        for ref in refs:
            with contextlib.suppress(LayoutError):
                writer.copy_all([ref])
        with contextlib.suppress(LayoutError):  # a writer may also end with the first error
            writer.finish()
    assert seen(path) in ("new", "absent")
    assert beside(path) == []


def test_a_writer_whose_tensor_broke_halfway_cannot_be_finished(tmp_path, no_leaks):
    path = tmp_path / "model"
    put_old(path)
    source = tmp_path / "source.safetensors"
    weighlock.save(source, NEW)
    with weighlock.open(source) as catalog:
        os.truncate(source, os.path.getsize(source) - 1)
        writer = weighlock.Writer(path, [ref.spec for ref in catalog.values()])
        with pytest.raises(weighlock.errors.SourceError):
            writer.copy_all(catalog.values())
    with pytest.raises(LayoutError):
        writer.write("weight", NEW["weight"])
    with pytest.raises(LayoutError):
        writer.finish()
    assert untouched(tmp_path)


def test_a_block_that_ends_well_after_a_tensor_broke_halfway_does_not_end_well(tmp_path, no_leaks):
    """Who swallows the error of a tensor must not go on as if there were a file."""
    source = tmp_path / "source.safetensors"
    weighlock.save(source, NEW)

    def swallow(catalog):
        with weighlock.Writer(tmp_path / "model") as writer:
            try:
                writer.copy_all(catalog.values())
            except weighlock.errors.SourceError:
                return

    with weighlock.open(source) as catalog:
        os.truncate(source, 1000)
        with pytest.raises(weighlock.WeighlockError):
            swallow(catalog)
    assert seen(tmp_path / "model") == "absent"


def test_a_block_in_which_the_file_was_given_up_ends_well(tmp_path, no_leaks):
    with weighlock.Writer(tmp_path / "model") as writer:
        writer.write("weight", NEW["weight"])
        writer.discard()
    assert os.listdir(tmp_path) == []


# --- A13: the one who gives the tensors raises ---


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("specs", [True, False])
def test_a_generator_that_raises_at_any_tensor_leaves_what_was_there(
    tmp_path, no_leaks, destination, specs, error
):
    """A13: also after the last one, where everything has been written."""
    path, options = destination

    def breaks(at):
        yield from RIGHT[:at]
        raise error(f"tensor {at} is missing")

    for at in range(len(NEW) + 1):
        with pytest.raises(error, match=f"tensor {at} is missing"):
            weighlock.save(path, breaks(at), specs_of(NEW) if specs else None, **options)
        assert untouched(tmp_path)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_in_the_block_of_a_writer_discards(tmp_path, no_leaks, error):
    def leave():
        with weighlock.Writer(tmp_path / "model", specs_of(NEW)) as writer:
            for name, array in RIGHT:
                writer.write(name, array)
            raise error("changed my mind")

    put_old(tmp_path / "model")
    with pytest.raises(error, match="changed my mind"):
        leave()
    assert untouched(tmp_path)


def test_progress_that_raises_discards(tmp_path, no_leaks, destination):
    path, options = destination
    for at in (1, 2, 3, 4):
        steps = []

        def progress(count, steps=steps, at=at):
            steps.append(count)
            if len(steps) == at:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            weighlock.save(path, iter(RIGHT), progress=progress, **options)
        assert untouched(tmp_path)


@pytest.mark.parametrize("disk", [None, NamedDisk()], ids=["posix", "named"])
def test_a_writer_that_is_forgotten_leaves_nothing(tmp_path, no_leaks, disk):
    put_old(tmp_path / "model")
    writer = weighlock.Writer(tmp_path / "model", disk=disk)
    writer.write("weight", NEW["weight"])
    del writer
    gc.collect()
    assert untouched(tmp_path)
