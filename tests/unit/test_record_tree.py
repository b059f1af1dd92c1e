"""Names of tensors and plain values, from records made by hand."""

import time

import pytest

from weighlock.errors import LayoutError, LimitExceeded
from weighlock.formats.meanings import StoredTensor, Unreadable
from weighlock.formats.pickle_records import Call, Global, PersistentId, SetRecord
from weighlock.formats.record_tree import read_tree
from weighlock.limits import Limits

V2 = Global("torch._utils", "_rebuild_tensor_v2")


def tensor(key="0", size=4):
    storage = PersistentId(("storage", Global("torch", "FloatStorage"), key, "cpu", size))
    return Call(
        V2, (storage, 0, (size,), (1,), False, Call(Global("collections", "OrderedDict"), ()))
    )


def called(name, *args, state=None, items=None, appended=None, kwargs=None):
    module, _, short = name.rpartition(".")
    call = Call(Global(module, short), args, kwargs)
    if state is not None:
        call.states = [state]
    call.items = items
    call.appended = appended
    return call


def names(root, limits=None):
    return list(read_tree(root, limits).tensors)


def module(parameters=None, modules=None, buffers=None, **more):
    state = {"training": True, "_parameters": parameters or {}, "_buffers": buffers or {}}
    return called("somewhere.Net", state={**state, "_modules": modules or {}, **more})


class TestNames:
    def test_paths_are_dotted(self):
        tree = read_tree({"a": [tensor(), {"b": (tensor(),)}], "c": tensor()})
        assert list(tree.tensors) == ["a.0", "a.1.b.0", "c"]
        assert all(isinstance(found, StoredTensor) for found in tree.tensors.values())
        assert tree.notes == ()

    def test_a_tensor_alone(self):
        assert names(tensor()) == ["tensor"]

    def test_nothing(self):
        for root in (None, 3, "x", [], {}, Global("a", "b")):
            assert names(root) == []

    @pytest.mark.parametrize(
        ("key", "name"),
        [
            *((3, "3"), (-1, "-1"), (True, "True"), (None, "None"), (2.5, "2.5"), (b"x", "x")),
            *(((1, "a"), "(1, a)"), ("a.b", "a.b"), ("ä b", "ä b")),
        ],
    )
    def test_keys_of_all_kinds(self, key, name):
        assert names({key: tensor()}) == [name]

    def test_one_tensor_under_two_names(self):
        shared = tensor()
        tree = read_tree({"a": shared, "b": {"c": shared}})
        assert tree.tensors["a"] == tree.tensors["b.c"]

    def test_collisions_are_told(self):
        first, second, third = tensor("0"), tensor("1"), tensor("2")
        tree = read_tree({1: first, "1": second, "x": {1: third}, "x.1": first})
        assert list(tree.tensors) == ["1", "1#2", "x.1", "x.1#2"]
        assert tree.tensors["1#2"].storage.key == "1"
        assert len(tree.notes) == 2
        assert tree.notes[0] == "$[1] and $['1'] would both be named '1'; the second is 1#2"

    def test_three_of_a_name_and_one_that_looks_like_it(self):
        tree = read_tree({"1#2": tensor(), 1: tensor(), "1": tensor(), (): {}, "a": {}})
        assert list(tree.tensors) == ["1#2", "1", "1#3"]

    def test_names_that_no_file_can_hold(self):
        tree = read_tree({"__metadata__": tensor(), "": tensor()})
        assert len(tree.tensors) == 2
        assert "__metadata__" not in tree.tensors
        assert "" not in tree.tensors
        assert len(tree.notes) >= 1


class TestObjects:
    def test_ordered_dicts_and_their_attributes(self):
        call = called(
            "collections.OrderedDict",
            state={"_metadata": {"x": tensor()}},
            items=[("w", tensor()), ("n", 3)],
        )
        tree = read_tree(call)
        assert list(tree.tensors) == ["w"]
        assert tree.extras == {"n": 3}

    def test_pairs_as_python_2_wrote_them(self):
        call = called("collections.OrderedDict", [["a", tensor()], ["b", 1]])
        tree = read_tree({"d": call})
        assert list(tree.tensors) == ["d.a"]
        assert tree.extras == {"d": {"b": 1}}

    def test_unknown_objects_are_walked(self):
        call = called(
            "some.Where",
            tensor(),
            5,
            state={"w": tensor(), "n": 1},
            items=[("k", tensor())],
            appended=[tensor()],
            kwargs={"x": tensor()},
        )
        tree = read_tree({"o": call})
        assert set(tree.tensors) == {"o.w", "o.k", "o.0", "o.args.0", "o.kwargs.x"}
        assert tree.extras["o"]["__class__"] == "some.Where"
        assert tree.extras["o"]["n"] == 1

    def test_slots(self):
        call = called("some.Where", state=({"a": tensor()}, {"b": tensor()}))
        assert names(call) == ["a", "b"]
        assert names(called("some.Where", state=(None, {"b": tensor()}))) == ["b"]
        assert names(called("some.Where", state=[tensor()])) == ["state.0"]

    def test_sets_and_lists(self):
        assert names({"s": SetRecord([tensor(), 1], frozen=False)}) == ["s.0"]
        assert names({"d": called("collections.deque", [], 5, appended=[tensor()])}) == ["d.0"]
        assert names({"d": called("builtins.list", [tensor()])}) == ["d.0"]

    def test_unreadable_tensors_have_names(self):
        tree = read_tree({"s": called("torch._utils._rebuild_wrapper_subclass")})
        assert isinstance(tree.tensors["s"], Unreadable)

    def test_a_tensor_that_contradicts_itself(self):
        broken = tensor()
        broken.args = (broken.args[0], 1, *broken.args[2:])
        with pytest.raises(LayoutError, match="reaches to element 5"):
            read_tree({"deep": [broken]})


class TestModules:
    def test_names_of_a_state_dict(self):
        inner = module({"weight": tensor(), "bias": None}, _flat_weights=[tensor()])
        root = module(
            {"scale": tensor()},
            called(
                "collections.OrderedDict", items=[("fc", inner), ("again", inner), ("no", None)]
            ),
            {"kept": tensor(), "scratch": tensor()},
            _non_persistent_buffers_set=called("builtins.set", ["scratch"]),
            other=tensor(),
        )
        assert names(root) == ["scale", "kept", "fc.weight", "again.weight"]
        assert names({"net": root}) == [
            "net.scale",
            "net.kept",
            "net.fc.weight",
            "net.again.weight",
        ]

    @pytest.mark.parametrize(
        "hidden",
        [
            SetRecord(["scratch"], frozen=False),
            called("builtins.set", ["scratch"]),
            called("builtins.set", [], appended=["scratch"]),
        ],
    )
    def test_buffers_that_are_not_kept(self, hidden):
        root = module(buffers={"scratch": tensor()}, _non_persistent_buffers_set=hidden)
        assert names(root) == []

    def test_modules_given_with_their_source(self):
        root = module({"w": tensor()})
        root.func = PersistentId(("module", root.func, "net.py", "class Net: ..."))
        assert names(root) == ["w"]


class TestExtras:
    def test_plain_values_stay(self):
        values = {"a": 1, "b": [1, (2, None)], "c": {"d": "x"}, "e": b"y", 3: 1.5}
        assert read_tree(values).extras == values

    def test_tensors_are_left_out(self):
        extras = read_tree({"m": {"w": tensor()}, "list": [tensor(), 5], "n": 1}).extras
        assert "m" not in extras
        assert extras["list"] == [None, 5]
        assert extras["n"] == 1

    def test_what_is_not_a_dict_is_an_extra_without_a_name(self):
        assert read_tree(["a", 1]).extras == {"": ["a", 1]}

    def test_objects(self):
        root = {
            "ns": called("argparse.Namespace", state={"lr": 1}),
            "simple": called("types.SimpleNamespace", state={"k": 2}),
            "path": called("pathlib.PosixPath", "/", "a", "b"),
            "device": called("torch.device", "cuda", 1),
            "size": called("torch.Size", (1, 2)),
            "complex": called("builtins.complex", 1.0, -2.0),
            "bytes": called("_codecs.encode", "\xff\x00", "latin1"),
            "dtype": Global("torch", "float16"),
            "old": called("__builtin__.set", [1, 2]),
        }
        extras = read_tree(root).extras
        assert extras["ns"] == {"lr": 1}
        assert extras["simple"] == {"k": 2}
        assert extras["path"] == "/a/b"
        assert extras["device"] == "cuda:1"
        assert extras["size"] == (1, 2)
        assert extras["complex"] == 1 - 2j
        assert extras["bytes"] == b"\xff\x00"
        assert extras["dtype"] == "torch.float16"
        assert list(extras["old"]) == [1, 2]

    def test_bytes_are_keys_in_every_protocol(self):
        for key in (b"by", called("_codecs.encode", "by", "latin1")):
            tree = read_tree({key: tensor(), "n": {key: 1}})
            assert list(tree.tensors) == ["by"]
            assert tree.extras == {"n": {b"by": 1}}

    def test_keys_that_become_one_are_not_lost_silently(self):
        tree = read_tree({(1, 2): "tuple", "(1, 2)": "text"})
        assert len(tree.extras) == 2 or tree.notes

    def test_keys_that_cannot_be_told_apart_are_numbered(self):
        date = called("numpy.dtype", "M8")
        keys = [called("numpy.core.multiarray.scalar", date, b"%d" % n) for n in range(3)]
        tree = read_tree({"x": dict(zip(keys, "abc", strict=True))})
        assert tree.extras == {"x": {"scalar": "a", "scalar#2": "b", "scalar#3": "c"}}
        assert "scalar#2" in tree.notes[0]
        thing = called("some.Thing", state={"x": 1}, items=[("x", 2)])
        assert read_tree(thing).extras == {"__class__": "some.Thing", "x": 1, "x#2": 2}

    def test_notes_of_keys_are_few(self):
        keys = [called("some.Key", [[]]) for _ in range(1000)]
        tree = read_tree(dict.fromkeys(keys, 1))
        assert len(tree.extras) == 1000
        assert len(tree.notes) < 200


class TestBounds:
    def test_cycles(self):
        ring = [tensor()]
        ring.append(ring)
        loop = {"r": ring}
        loop["self"] = loop
        assert names(loop) == ["r.0"]
        read_tree(loop)

    def test_lists_shared_many_times_without_a_tensor(self):
        node = [1]
        for _ in range(60):
            node = [node, node]
        start = time.process_time()
        assert names({"x": node}) == []
        assert time.process_time() - start < 2

    def test_lists_shared_many_times_with_a_tensor(self):
        node = [tensor()]
        for _ in range(60):
            node = [node, node]
        with pytest.raises(LimitExceeded, match="names of tensors"):
            read_tree(node, Limits(tensors=1000))

    def test_depth(self):
        node = [tensor()]
        for _ in range(500):
            node = [node]
        assert len(names(node)) == 1
        for _ in range(100_000):
            node = [node]
        with pytest.raises(LimitExceeded, match="nesting"):
            read_tree(node)
        while node:  # freed step by step: Python would recurse
            node = node.pop() if isinstance(node, list) else None

    @pytest.mark.parametrize("how", ["state", "argument", "parameters", "attributes"])
    def test_entries_that_many_objects_share(self, how):
        """Each has its own copy in the extras: a hundred bytes a pickle would become gigabytes."""
        shared = {f"key {n}": None for n in range(1000)}
        make = {
            "state": lambda: called("some.Thing", state=shared),
            "argument": lambda: called("collections.OrderedDict", shared),
            "parameters": lambda: module(shared),
            "attributes": lambda: called(
                "torch._tensor._rebuild_from_type_v2", V2, Global("a", "T"), tensor().args, shared
            ),
        }[how]
        read_tree([make() for _ in range(100)])
        with pytest.raises(LimitExceeded) as caught:
            read_tree([make() for _ in range(3000)])
        assert caught.value.limit == "pickle_entries"

    def test_an_object_that_is_given_its_state_many_times(self):
        thing = called("some.Thing", state={n: n for n in range(20_000)})
        thing.states *= 20_000
        other = {0: "last"}
        thing.states.append((other, None))
        assert read_tree(thing).extras == {"__class__": "some.Thing", **thing.states[0], **other}

    def test_containers(self):
        with pytest.raises(LimitExceeded) as caught:
            read_tree([[] for _ in range(1000)], Limits(pickle_entries=999))
        assert caught.value.limit == "pickle_entries"
        read_tree([[] for _ in range(998)], Limits(pickle_entries=999))

    def test_an_optimizer_of_many_tensors_is_within_the_bounds(self):
        state = {n: {"step": tensor(), "exp_avg": tensor(), "lr": 0.1} for n in range(20_000)}
        groups = [{"params": list(range(20_000)), "lr": 0.1}]
        root = {"optimizer": {"state": state, "param_groups": groups}, "merges": [(1, 2)] * 50_000}
        assert len(names(root, Limits(pickle_entries=50_000))) == 40_000
