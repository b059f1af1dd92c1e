"""Messages without a network: what travels, what is refused and where, drafts and their seals."""

import dataclasses
import enum

import ml_dtypes
import numpy as np
import pytest

import weighlock
from unit.message_samples import ARRAYS, VALUES, same
from weighlock import Limits, Registry, pack, unpack
from weighlock.errors import (
    CodecRefused,
    LimitExceeded,
    LocalProtocolError,
    MessageError,
    MessageInvalid,
)
from weighlock.messages.leaves import TorchDType, TorchSize
from weighlock.tensors.ref import ArrayRef
from weighlock.tensors.stored import StoredRef

URL = "http://127.0.0.1:9/s/" + 32 * "0" + "/model.safetensors#r=site-1.0123abcd"


def there_and_back(obj, **options):
    return unpack(pack(obj, threshold_bytes=None, **options).seal(), **options)


@pytest.mark.parametrize("value", VALUES, ids=[type(value).__name__ for value in VALUES])
def test_a_value_comes_back_as_it_was(value):
    assert same(value, there_and_back(value))
    assert same({"a": [value, (value,)]}, there_and_back({"a": [value, (value,)]}))


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{array.shape}")
def test_an_array_comes_back_as_it_was(array):
    assert same(array, there_and_back(array))
    assert same([array], there_and_back([array]))
    ref = there_and_back({"x": ArrayRef.of("named", array)})["x"]
    assert ref.name == "named"
    assert same(array, ref)


def test_packing_again_gives_the_same_bytes():
    obj = {"values": VALUES, "arrays": ARRAYS, "by name": {str(n): a for n, a in enumerate(ARRAYS)}}
    body = pack(obj, threshold_bytes=None).seal()
    assert pack(unpack(body), threshold_bytes=None).seal() == body


def test_torch_values_travel():
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(3, 2)
    obj = {
        "state": model.state_dict(),
        "size": torch.Size([2, 3]),
        "dtypes": [torch.bfloat16, torch.float8_e4m3fn, torch.int64],
        "parameter": model.weight,
        "half": torch.tensor([1.5, -2], dtype=torch.bfloat16),
    }
    found = there_and_back(obj)
    assert torch.equal(found["state"]["weight"].torch(), model.weight)
    assert torch.equal(found["parameter"].torch(), model.weight)
    assert torch.equal(found["half"].torch(), obj["half"])
    assert type(found["size"]) is torch.Size
    assert found["size"] == (2, 3)
    assert found["dtypes"] == obj["dtypes"]


WITHOUT_TORCH = """
import sys
import weighlock
body = bytes.fromhex(sys.argv[1])
found = weighlock.unpack(body)
assert "torch" not in sys.modules
assert type(found["size"]).__name__ == "TorchSize" and found["size"] == (2, 3), found
assert found["dtype"] == "bfloat16"
assert weighlock.pack(found).seal() == body
"""


def test_without_torch_its_values_pass_through(run_python):
    torch = pytest.importorskip("torch")
    body = pack({"size": torch.Size([2, 3]), "dtype": torch.bfloat16}).seal()
    assert pack({"size": TorchSize((2, 3)), "dtype": TorchDType("bfloat16")}).seal() == body
    run_python(WITHOUT_TORCH, body.hex())


class Hook:
    pass


@dataclasses.dataclass
class Step:
    rate: float
    weight: object
    hook: object = None


class Phase(enum.Enum):
    TRAIN = 1
    TEST = 2


class Bits(enum.Flag):
    A = 1
    B = 2


@dataclasses.dataclass
class Pair:
    left: int
    right: int


REFUSED = [
    ({"weights": {"layer.3": {"hook": Hook()}}}, "test_message.Hook", "$.weights['layer.3'].hook"),
    ([0, (1, Hook())], "Hook", "$[1][1]"),
    ({"a": Step(1.0, None)}, "register_dataclass(Step, name=…)", "$.a"),
    ({"a": Phase.TRAIN}, "register_enum(Phase, name=…)", "$.a"),
    ({3: {(1, "x"): Hook}}, "messages carry no classes", "$[3][(1, 'x')]"),
    ({"o": np.array([object()])}, "safetensors has no type", "$.o"),
    ({"t": np.array(["text"])}, "safetensors has no type", "$.t"),
    ({"m": np.ma.array([1], mask=[True])}, "MaskedArray", "$.m"),
    ({"l": np.longdouble(1)}, "longdouble is not a type that travels: send plain values,", "$.l"),
    ({"d": np.dtype([("a", "f4")])}, "VoidDType is not a type that travels: send plain", "$.d"),
    ({"s": {ArrayRef.of("x", np.ones(1))}}, "tensors cannot be keys or in sets", "$.s[0]"),
    ({"b": bytearray(b"x")}, "bytearray", "$.b"),
    (type("Sub", (int,), {})(3), "Sub", "$"),
    ({"c": np.zeros(10_000, np.complex128)}, "threshold_bytes=None", "$.c"),
]


@pytest.mark.parametrize(("obj", "text", "path"), REFUSED, ids=[row[1] for row in REFUSED])
def test_what_does_not_travel_is_refused_by_name_and_place(obj, text, path):
    with pytest.raises(CodecRefused) as caught:
        pack(obj)
    assert text in str(caught.value)
    assert str(caught.value).endswith(f"at {path}")
    assert caught.value.path == path
    assert isinstance(caught.value, TypeError)


def test_text_that_utf8_cannot_carry_is_refused():
    with pytest.raises(CodecRefused, match="lone surrogate"):
        pack(["\ud800"])


def test_an_object_that_holds_itself_is_refused():
    loop = {}
    loop["again"] = [loop]
    with pytest.raises(LimitExceeded, match="holds itself"):
        pack(loop)


class TestRegistry:
    @pytest.fixture
    def registry(self):
        registry = Registry()
        registry.register_dataclass(Step, name="step")
        registry.register_enum(Phase, name="phase")
        registry.register_enum(Bits, name="bits")
        registry.register(
            Pair,
            name="pair",
            encode=lambda pair: [pair.left, pair.right],
            decode=lambda plain: Pair(*plain),
        )
        return registry

    def test_registered_objects_travel(self, registry):
        obj = [
            Step(0.1, np.ones(3), Phase.TEST),
            {Phase.TRAIN: Pair(1, 2**70)},
            Bits.A | Bits.B,
            Step(0.2, {"deep": [Pair(3, 4)]}),
        ]
        found = there_and_back(obj, registry=registry)
        assert np.array_equal(found[0].weight, np.ones(3))
        assert found[0].hook is Phase.TEST
        assert found[1] == obj[1]
        assert found[2] is obj[2]
        assert found[3] == obj[3]

    def test_paths_go_through_registered_objects(self, registry):
        with pytest.raises(CodecRefused) as caught:
            pack({"a": Step(0.1, None, Hook())}, registry=registry)
        assert caught.value.path == "$.a.hook"

    def test_a_receiver_takes_only_what_it_registered(self, registry):
        body = pack({"p": [Pair(1, 2)]}, registry=registry).seal()
        with pytest.raises(MessageInvalid, match="'pair' is not a registered name") as caught:
            unpack(body)
        assert caught.value.path == "$.p[0]"

    @pytest.mark.parametrize(
        ("sent", "text"),
        [(Step(1.0, 2, 3), "has the fields"), (Phase.TRAIN, "refused what came")],
        ids=["fields", "member"],
    )
    def test_what_does_not_fit_the_receivers_type_is_refused(self, registry, sent, text):
        other = Registry()
        if isinstance(sent, Step):
            other.register_dataclass(Pair, name="step")
        else:
            other.register_enum(enum.Enum("Other", {"X": 1}), name="phase")
        with pytest.raises(MessageInvalid, match=text):
            unpack(pack(sent, registry=registry).seal(), registry=other)

    def test_names_and_types_are_taken_once(self, registry):
        with pytest.raises(LocalProtocolError, match="'pair' is the registered name of Pair"):
            registry.register_enum(enum.Enum("E", {"A": 1}), name="pair")
        with pytest.raises(LocalProtocolError, match="Pair is registered already, as 'pair'"):
            registry.register_dataclass(Pair, name="other")
        for known in (dict, int, np.float32, np.ndarray, weighlock.TensorRef, weighlock.Catalog):
            with pytest.raises(LocalProtocolError, match="messages know it already"):
                registry.register(known, name="d", encode=list, decode=dict)
        registry.register(range, name="range", encode=repr, decode=lambda text: range(3))
        with pytest.raises(LocalProtocolError, match="not a dataclass"):
            registry.register_dataclass(Hook, name="hook")
        with pytest.raises(LocalProtocolError, match="not an enum"):
            registry.register_enum(Hook, name="hook")
        with pytest.raises(LocalProtocolError, match="under a text"):
            registry.register_dataclass(Pair, name="")

    def test_a_copy_goes_its_own_way(self, registry):
        copy = registry.copy()
        copy.register(Hook, name="hook", encode=lambda _: None, decode=lambda _: Hook())
        assert registry.of_name("hook") is None
        assert isinstance(there_and_back(Hook(), registry=copy), Hook)

    def test_the_default_registry_is_what_functions_change(self):
        class Mine:
            pass

        weighlock.register(Mine, name="test.mine", encode=lambda _: 1, decode=lambda _: Mine())
        assert isinstance(there_and_back([Mine()])[0], Mine)
        with pytest.raises(LocalProtocolError):
            weighlock.register(Mine, name="other", encode=str, decode=Mine)

    def test_errors_of_an_encoder_say_where(self):
        def fail(_):
            raise KeyError("mine")

        registry = Registry()
        registry.register(Hook, name="hook", encode=fail, decode=fail)
        with pytest.raises(KeyError) as caught:
            pack({"a": Hook()}, registry=registry)
        assert caught.value.__notes__ == ["at $.a"]


class TestDrafts:
    def test_the_threshold_decides_what_is_offered(self):
        obj = {"small": np.zeros(8), "large": np.zeros(10_000), "empty": np.zeros((0, 2))}
        assert list(pack(obj).tensors) == ["large"]
        assert list(pack(obj, threshold_bytes=64).tensors) == ["small", "large"]
        assert list(pack(obj, threshold_bytes=65).tensors) == ["large"]
        assert list(pack(obj, threshold_bytes=0).tensors) == ["small", "large"]
        assert list(pack(obj, threshold_bytes=None).tensors) == []

    def test_a_draft_with_holes_wants_a_url(self):
        draft = pack({"w": np.zeros(10_000)})
        with pytest.raises(LocalProtocolError, match="1 tensors must be offered"):
            draft.seal()
        ref = unpack(draft.seal(URL))["w"]
        assert isinstance(ref, StoredRef)
        assert (ref.name, ref.dtype, ref.shape) == ("w", "F64", (10_000,))
        assert ref.source.ticket == URL
        assert ref.source.size == draft.file_bytes
        assert pack({"w": 1}).seal(URL) == pack({"w": 1}).seal()

    def test_foreign_refs_pack_as_themselves_wherever_they_stand(self):
        body = pack({"a": np.zeros(10_000), "b": [np.ones(10_000)]}).seal(URL)
        found = unpack(body)
        assert pack(found).seal() == body
        for threshold in (0, None, 10**9):
            assert pack(found, threshold_bytes=threshold).seal() == body
        moved = unpack(pack({"elsewhere": [found["b"][0]], "a": found["a"]}).seal())
        assert moved["elsewhere"][0].identity() == found["b"][0].identity()
        assert moved["elsewhere"][0].spec == found["b"][0].spec
        assert moved["a"].source == found["a"].source

    def test_owners_mix(self):
        other = URL.replace("site-1", "site-2")
        first = unpack(pack({"w": np.zeros(10_000)}).seal(URL))["w"]
        second = unpack(pack({"w": np.ones(10_000)}).seal(other))["w"]
        draft = pack({"theirs": [first, second], "mine": np.ones(20_000), "small": np.ones(2)})
        assert list(draft.tensors) == ["mine"]
        mixed = unpack(draft.seal("http://me:1/s/1/model.safetensors"))
        assert [ref.source.ticket for ref in mixed["theirs"]] == [URL, other]
        assert mixed["mine"].source.ticket == "http://me:1/s/1/model.safetensors"
        assert pack(mixed).seal() == draft.seal("http://me:1/s/1/model.safetensors")

    def test_tied_tensors_are_sent_once(self):
        shared = np.arange(20_000.0)
        obj = {"a": shared, "b": [shared, shared[:]], "turned": shared.reshape(2, -1).T}
        draft = pack(obj)
        assert list(draft.tensors) == ["a", "turned"]
        found = unpack(draft.seal(URL))
        assert found["a"] is found["b"][0] is found["b"][1]
        inline = there_and_back(obj)
        assert inline["a"] is inline["b"][1]
        sizes = [len(pack([shared] * n, threshold_bytes=None).seal()) for n in (1, 2)]
        assert sizes[1] - sizes[0] < 20

    def test_views_are_tied_if_they_are_the_same(self):
        owner = np.arange(100.0).reshape(10, 10)
        view, part, turned = owner[:], owner[2:], owner.T
        foreign = np.frombuffer(bytes(80))

        def rows(*arrays):
            return len(pack(list(arrays), threshold_bytes=0).tensors)

        assert rows(owner, view, owner[:][:], ArrayRef.of("x", owner)) == 1
        assert rows(view, owner) == rows(owner[:], owner[:]) == 1
        assert rows(part, owner[2:]) == 1
        assert rows(owner, part, turned, owner.reshape(4, 25), owner.view("i8")) == 5
        assert rows(foreign, foreign[:]) == 1
        assert rows(np.ones(3), np.ones(3)) == 2

    def test_what_an_encoder_makes_anew_is_not_taken_for_tied(self):
        """Strided arrays are copied: freed before the walk is over, the next has their address."""

        def encode(hook):
            return [np.full((100, 2), hook.n)[:, 0], bytes([hook.n]) * 5000]

        def decode(plain):
            hook = Hook()
            hook.n = int(plain[0][7]), plain[1][7]
            return hook

        registry = Registry()
        registry.register(Hook, name="hook", encode=encode, decode=decode)
        hooks = [Hook() for _ in range(50)]
        for n, hook in enumerate(hooks):
            hook.n = n
        found = there_and_back(hooks, registry=registry)
        assert [hook.n for hook in found] == [(n, n) for n in range(50)]

    def test_names_of_offered_tensors_are_keys_or_paths(self):
        big = [np.full(10_000, float(n)) for n in range(6)]
        obj = {"weights": {"w": big[0]}, "momentum": {"w": big[1]}, "list": [big[2]]}
        obj |= {"__metadata__": big[3], "": big[4], 7: {8: big[5]}}
        draft = pack(obj)
        assert list(draft.tensors) == ["w", "momentum.w", "list.0", "tensor", "tensor~2", "7.8"]
        found = unpack(draft.seal(URL))
        assert found["momentum"]["w"].name == "momentum.w"
        assert pack(found).seal() == draft.seal(URL)

    def test_a_catalog_stays_one(self, tmp_path):
        arrays = {"w": np.zeros(20_000), "b": np.arange(3.0), "n": np.ones(4, ml_dtypes.bfloat16)}
        arrays["tied"] = arrays["w"]
        weighlock.save(tmp_path / "m.safetensors", arrays, metadata={"round": "3"}, tied="alias")
        catalog = weighlock.open(tmp_path / "m.safetensors")
        draft = pack({"model": catalog})
        assert list(draft.tensors) == ["w"]
        found = unpack(draft.seal(URL))["model"]
        assert isinstance(found, weighlock.Catalog)
        assert list(found) == ["w", "b", "n", "tied"]
        assert found.metadata == {"round": "3"}
        assert found["b"].load().tolist() == [0, 1, 2]
        assert found["tied"].name == "tied"
        assert found["tied"].identity() == found["w"].identity()
        assert pack({"model": found}).seal() == draft.seal(URL)

    def test_parts_are_views_and_unpacked_arrays_too(self):
        array = np.arange(1000.0)
        parts = pack({"x": array}).parts()
        assert any(np.shares_memory(np.frombuffer(part, np.uint8), array) for part in parts)
        body = bytearray(b"".join(parts))
        found = unpack(body)["x"]
        assert np.shares_memory(found, np.frombuffer(body, np.uint8))
        assert found.flags.writeable
        assert not unpack(bytes(body))["x"].flags.writeable
        assert found.ctypes.data % 8 == 0
        assert np.array_equal(unpack(np.frombuffer(body, np.uint8))["x"], array)

    def test_where_tensors_lie_is_what_a_share_will_do(self, tmp_path):
        from weighlock.transfer.layout import lay_out

        torch = pytest.importorskip("torch")
        big = np.zeros((200, 100))
        weighlock.save(tmp_path / "f.safetensors", {"z": big, "y": big.astype("f4"), "x": big + 1})
        for obj in (
            {"a": big, "h": big.astype("f2"), "t": big.T, "s": np.zeros(2)},
            {"a": torch.zeros(20_000), "b": big},
            dict(weighlock.open(tmp_path / "f.safetensors")),
        ):
            draft = pack(obj)
            file = lay_out(draft.tensors)
            assert file.size == draft.file_bytes
            spans = {segment.ref.name: segment.span for segment in file.segments}
            found = unpack(draft.seal(URL))
            assert {n: r.span for n, r in found.items() if isinstance(r, StoredRef)} == spans


class TestLimits:
    def test_a_tree_too_large_is_refused_on_both_sides(self):
        limits = Limits(message_tree_bytes=1000)
        with pytest.raises(LimitExceeded) as caught:
            pack(["x" * 1000], limits=limits).seal()
        assert caught.value.limit == "message_tree_bytes"
        body = pack(["x" * 1000]).seal()
        with pytest.raises(LimitExceeded, match=r"limits=Limits\(message_tree_bytes="):
            unpack(body, limits=limits)
        assert len(pack(b"x" * 5_000_000).seal()) > 5_000_000  # raw bytes lie beside the tree

    def test_nodes_are_counted_on_both_sides(self):
        body = pack(list(range(1000))).seal()
        with pytest.raises(LimitExceeded) as caught:
            unpack(body, limits=Limits(message_nodes=900))
        assert caught.value.limit == "message_nodes"
        with pytest.raises(LimitExceeded):
            pack(list(range(1000)), limits=Limits(message_nodes=900)).seal()

    @pytest.mark.parametrize(
        ("start", "levels", "wrap"),
        [
            (1, 10, lambda x: [x]),
            (1, 10, lambda x: {"k": x}),
            (1, 10, lambda x: (x,)),
            (1, 10, lambda x: {1: x}),
            (1j, 9, lambda x: [x]),
        ],
        ids=["list", "dict", "tuple", "pairs", "leaf"],
    )
    def test_depth_is_the_same_on_both_sides(self, start, levels, wrap):
        limits = Limits(message_depth=10)
        obj = start
        for _ in range(levels):
            obj = wrap(obj)
        body = pack(obj, limits=limits).seal()
        assert same(obj, unpack(body, limits=limits))
        with pytest.raises(LimitExceeded):
            unpack(body, limits=Limits(message_depth=9))
        with pytest.raises(LimitExceeded):
            pack(wrap(obj), limits=limits)


def test_a_message_of_a_later_version_says_so():
    body = bytearray(pack(1).seal())
    body[4] = 2
    with pytest.raises(MessageInvalid, match="version 2, this library reads 1"):
        unpack(body)


@pytest.mark.parametrize("body", ["text", 7, [1], None], ids=repr)
def test_what_is_not_bytes_is_not_a_message(body):
    with pytest.raises(MessageError, match="a message is bytes"):
        unpack(body)


def test_importing_messages_needs_no_torch(run_python):
    script = """
import sys
import weighlock
weighlock.unpack(weighlock.pack({"a": 1}).seal())
print("torch" in sys.modules)
"""
    assert run_python(script).stdout == "False\n"


@pytest.mark.parametrize("url", ["junk", "/s/1/model.safetensors", "ftp://host/a", "http://"])
def test_a_message_is_not_sealed_with_what_is_no_url(url):
    draft = weighlock.pack({"w": np.zeros(100_000)})
    with pytest.raises(LocalProtocolError, match="is not the URL of a share"):
        draft.seal(url)
    assert weighlock.pack({"w": 1}).seal(url)  # nothing is offered: it is not looked at
