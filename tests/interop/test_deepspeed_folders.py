"""ZeRO folders of all stages open as the fp32 weights they were saved from."""

import pickle

import pytest
import torch

import weighlock
from interop.make_deepspeed import GROUPS, expected, write_zero
from weighlock.errors import FormatError, LayoutError, TruncatedFile
from weighlock.formats.deepspeed_plan import plan_stage_3, plan_stages_1_and_2
from weighlock.sources.joined import Joined
from weighlock.sources.local import FileSource

CASES = {
    "stage 1, one rank": (1, 1, {}),
    "stage 1 of bf16": (1, 3, {"bf16": True}),
    "stage 2": (2, 2, {}),
    "stage 2, more ranks than some tensors have elements": (2, 12, {}),
    "stage 2, parameters padded within what ranks are": (2, 4, {"align": 2}),
    "stage 2, parameters padded beyond that": (2, 2, {"align": 8}),
    "stage 3, one rank": (3, 1, {}),
    "stage 3": (3, 2, {}),
    "stage 3, small groups": (3, 3, {"sub_group": 7}),
    "stage 3, twelve ranks": (3, 12, {}),
}


def check(catalog):
    wanted = expected()
    assert set(catalog) == set(wanted)
    for name, tensor in wanted.items():
        read = catalog[name].torch()
        assert read.dtype == tensor.dtype, name
        assert torch.equal(read, tensor), name


@pytest.mark.parametrize(("stage", "world", "options"), CASES.values(), ids=CASES)
def test_the_weights_are_those_that_were_trained(tmp_path, no_leaks, stage, world, options):
    folder = write_zero(tmp_path / "run", stage, world, **options)
    for path in (folder, tmp_path / "run"):  # by its own name, or as the latest
        with weighlock.open(path) as catalog:
            check(catalog)
            rows = catalog["embed.weight"][3:7, 1:4].to()
            assert torch.equal(rows, GROUPS[0]["embed.weight"][3:7, 1:4])
            assert catalog.extras["global_steps"] == 5
            assert catalog["tied.weight"].identity() == catalog["embed.weight"].identity()


def test_what_lies_in_one_file_is_read_from_it_directly(tmp_path):
    with weighlock.open(write_zero(tmp_path, 2, 2)) as catalog:
        sources = {type(catalog[name].source) for group in GROUPS for name in group}
    assert sources == {FileSource, Joined}


def test_refs_and_catalogs_survive_pickling(tmp_path):
    with weighlock.open(write_zero(tmp_path, 3, 3)) as catalog:
        copy = pickle.loads(pickle.dumps(catalog))
    with copy:
        check(copy)


def test_commands(tmp_path, weighlock_command):
    folder, target = write_zero(tmp_path / "run", 3, 2), tmp_path / "out.safetensors"
    done = weighlock_command("convert", tmp_path / "run", target)
    assert done.returncode == 0, done.stderr
    with weighlock.open(target) as catalog:
        check(catalog)
    assert weighlock_command("diff", folder, target).returncode == 0
    for command in (["info"], ["verify", "--data"], ["scan"]):
        done = weighlock_command(*command, folder)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_changed_byte_of_a_rank_is_found_by_its_checksum(tmp_path):
    folder = write_zero(tmp_path, 3, 1)
    with weighlock.open(folder) as catalog:
        catalog.check()
    path = next(folder.glob("*optim*"))
    content = bytearray(path.read_bytes())
    content[content.index(GROUPS[0]["layer.weight"].numpy().tobytes()) + 5] ^= 1
    path.write_bytes(content)
    with weighlock.open(folder) as catalog, pytest.raises(FormatError, match="checksum"):
        catalog.check()


def test_a_share_of_it_is_fetched_equal(tmp_path):
    folder = write_zero(tmp_path, 3, 3)
    with weighlock.open(folder) as catalog, weighlock.Server("127.0.0.1", 0) as server:
        check(weighlock.fetch(server.share(catalog).url))


def test_beside_weights_in_safetensors_the_folder_is_not_looked_at(tmp_path):
    write_zero(tmp_path, 2, 2)
    weighlock.save(tmp_path / "model.safetensors", {"a": torch.ones(2)})
    with weighlock.open(tmp_path) as catalog:
        assert list(catalog) == ["a"]


def removed(folder, name):
    next(folder.glob(name)).unlink()


BROKEN = {
    "a rank in the middle is gone": (
        lambda f: removed(f, "zero_pp_rank_1_*optim*"),
        TruncatedFile,
        "no file of rank 1",
    ),
    "the last rank is gone": (
        lambda f: removed(f, "zero_pp_rank_2_*optim*"),
        TruncatedFile,
        "saved by 3 ranks, files of 2",
    ),
    "two files of one rank": (
        lambda f: (f / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").write_bytes(b""),
        LayoutError,
        "two files of one rank",
    ),
    "model-parallel ranks": (
        lambda f: (f / "zero_pp_rank_0_mp_rank_01_optim_states.pt").write_bytes(b""),
        FormatError,
        "2 model-parallel ranks",
    ),
    "experts": (
        lambda f: (f / "expp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b""),
        FormatError,
        "experts",
    ),
    "a file that is a link out": (
        lambda f: (
            next(f.glob("*_rank_1_*optim*")).rename(f.parent / "elsewhere"),
            (f / "zero_pp_rank_1_mp_rank_00_optim_states.pt").symlink_to(f.parent / "elsewhere"),
        ),
        LayoutError,
        "link out",
    ),
    "a file cut off": (
        lambda f: (p := next(f.glob("*_rank_1_*optim*"))).write_bytes(p.read_bytes()[:-30]),
        TruncatedFile,
        "end record",
    ),
}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(("spoil", "kind", "says"), BROKEN.values(), ids=BROKEN)
def test_folders_that_lack_something_are_refused_with_a_reason(
    tmp_path, no_leaks, stage, spoil, kind, says
):
    folder = write_zero(tmp_path, stage, 3)
    spoil(folder)
    with pytest.raises(kind, match=says):
        weighlock.open(folder)


LIES = {
    "a shape too large": ([{"a": torch.Size((1000, 1000))}, {}], "1,000,000|500,000"),
    "a shape too small": ([{"a": torch.Size((2,))}, {}], "take"),
    "a group too few": ([{"a": torch.Size((87,))}], "2 groups|take"),
    "a shape that overflows": ([{"a": torch.Size((2**40, 2**40))}], "larger than any file"),
    "a negative size": ([{"a": (-3, 5)}], "negative"),
    "True as a size": ([{"a": (True,)}], "not a tuple of ints"),
    "a name twice": (
        [{"a": torch.Size((87,))}, {"a": torch.Size((28,))}],
        "twice|groups|elements",
    ),
    "no list": ("shapes", "as param_shapes"),
    "a list of numbers": ([5], "in param_shapes"),
    "a number as name": ([{5: torch.Size((2,))}], "something 5"),
    "nothing": ([], "as param_shapes"),
}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(("shapes", "says"), LIES.values(), ids=LIES)
def test_shapes_that_lie_are_refused_with_a_reason(tmp_path, no_leaks, stage, shapes, says):
    folder = write_zero(tmp_path, stage, 2, param_shapes=shapes)
    with pytest.raises(LayoutError, match=says):
        weighlock.open(folder)


PADDINGS = {
    "other than the elements allow": ([[0, 0, 100], [0, 0, 0]], "187"),
    "of a group too few": ([[0, 0, 0]], "of other parameters"),
    "of a parameter too many": ([[0, 0, 0, 0], [0, 0, 0]], "of other parameters"),
    "below nothing": ([[-1, 1, 0], [0, 0, 0]], "paddings of a group"),
    "beyond any file": ([[2**70, 0, 0], [0, 0, 0]], "paddings of a group"),
    "no numbers": ([[True, 0, 0], [0, 0, 0]], "paddings of a group"),
    "no lists": ([5, 5], "paddings of a group"),
    "no list": (5, "as param_alignment_paddings"),
}


@pytest.mark.parametrize(("paddings", "says"), PADDINGS.values(), ids=PADDINGS)
def test_paddings_that_lie_are_refused_with_a_reason(tmp_path, no_leaks, paddings, says):
    folder = write_zero(tmp_path, 2, 2, paddings=paddings)
    with pytest.raises(LayoutError, match=says):
        weighlock.open(folder)


def test_experts_in_parts_are_refused(tmp_path, no_leaks):
    layers = [{"checkpoint_format": "zero3_partitioned"}]
    folder = write_zero(tmp_path, 3, 2, ds_autoep_layers=layers)
    with pytest.raises(FormatError, match="experts"):
        weighlock.open(folder)


@pytest.mark.parametrize("tag", ["../elsewhere", "/etc", "nothing", "", "a\0b", "x" * 5000])
def test_a_latest_that_points_elsewhere_is_not_followed(tmp_path, tag):
    write_zero(tmp_path / "elsewhere", 2, 2)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "latest").write_text(tag)
    with pytest.raises(FormatError, match="holds no model"):
        weighlock.open(tmp_path / "run")


@pytest.mark.parametrize("beside", [["scheduler.pt"], ["scheduler.pt", "rng_state_0.pth", "x.pt"]])
def test_a_trainer_s_directory_holds_the_model_that_latest_names(tmp_path, beside):
    write_zero(tmp_path, 2, 2)
    for name in (*beside, "training_args.bin", "zero_to_fp32.py"):
        torch.save({"not": torch.ones(1)}, tmp_path / name)
    with weighlock.open(tmp_path) as catalog:
        check(catalog)
    weighlock.save(tmp_path / "model.safetensors", {"whole": torch.ones(1)})
    with weighlock.open(tmp_path) as catalog:
        assert list(catalog) == ["whole"]


def test_plans_are_a_partition():
    shapes = [{"a": (7,), "b": ()}, {"c": (3, 5), "d": (0, 4)}]
    flat = plan_stages_1_and_2(shapes, [[4, 8], [4, 8]])
    assert flat["a"].parts == ((0, 0, 0, 4), (1, 0, 0, 3))
    assert flat["b"].parts == ((1, 0, 3, 1),)
    assert flat["c"].parts == ((0, 1, 0, 8), (1, 1, 0, 7))
    assert flat["d"].parts == ()
    parts = plan_stage_3(shapes, [[6, 7], [6, 7]])
    assert parts["a"].parts == ((0, 0, 0, 4), (1, 0, 0, 3))
    assert parts["b"].parts == ((0, 0, 4, 1),)
    assert parts["c"].parts == ((0, 0, 5, 1), (0, 1, 0, 7), (1, 0, 5, 1), (1, 1, 0, 6))
