"""Tar checkpoints made to run code, to lie, or to be read in two ways (B7 to B12 for 0.1.9).

A table of files, each refused by one class of error, or open with the right numbers and every name
told. An audit hook watches.
"""

import io
import re
import struct
import sys
import tarfile

import numpy as np
import pytest

import weighlock
from hostile.make_checkpoints import (
    BINPERSID,
    FLOATS,
    call,
    glob,
    num,
    pickled,
    row,
    table,
    text,
    tup,
)
from hostile.watching import watched
from weighlock.errors import FormatError, HeaderError, LayoutError, LimitExceeded, TruncatedFile
from weighlock.formats.scanning import scan_source
from weighlock.limits import Limits
from weighlock.sources.local import BytesSource

SYSTEM = ("os", "system")
EVIL = call(glob(*SYSTEM), text("touch hacked"))
ORDER = ("sys_info", "pickle", "tensors", "storages")


def storage_record(key=1, elements=4, raw=FLOATS, kind=("torch", "FloatStorage")):
    head = pickled(tup(num(key), text("cpu"), glob(*kind)))
    return head + struct.pack("<q", elements) + raw


def storages(*records, count=None, views=b""):
    count = len(records) if count is None else count
    return pickled(num(count)) + b"".join(records) + (views or pickled(row()))


def tensor_record(key=2, root=1, size=(4,), stride=(1,), offset=0, ndim=None, kind="FloatTensor"):
    ndim = len(size) if ndim is None else ndim
    head = pickled(tup(num(key), num(root), glob("torch", kind)))
    numbers = (*size, *stride, offset)
    return head + struct.pack(f"<iI{len(numbers)}q", ndim, 0, *numbers)


def tensors(*records, count=None):
    return pickled(num(len(records) if count is None else count)) + b"".join(records)


def by_key(key="2"):
    return text(key) + BINPERSID


def parts(**changes):
    known = {
        "sys_info": pickled(table(("protocol_version", num(1000)))),
        "pickle": pickled(table(("w", by_key()))),
        "tensors": tensors(tensor_record()),
        "storages": storages(storage_record()),
    }
    return known | changes


def header(name, size, kind=b"0", **pax):
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    info.pax_headers = pax
    return info.tobuf(tarfile.PAX_FORMAT)


def member(name, data, kind=b"0", size=None, **pax):
    filled = data + bytes(-len(data) % 512)
    return header(name, len(data) if size is None else size, kind, **pax) + filled


def archive(found=None, order=ORDER, extra=b"", before=b""):
    found = parts() if found is None else found
    return before + b"".join(member(name, found[name]) for name in order) + extra + bytes(1024)


def instead(name, raw):
    """A good archive with another member, header and all, in one place."""
    good = parts()
    return b"".join(raw if n == name else member(n, good[n]) for n in ORDER) + bytes(1024)


def with_field(name, start, raw, *, sealed=True):
    """A good archive with other bytes in one header."""
    block = bytearray(header(name, len(parts()[name])))
    block[start : start + len(raw)] = raw
    if sealed:
        block[148:156] = b" " * 8
        block[148:156] = f"{sum(block):06o}\0 ".encode()
    data = parts()[name]
    return instead(name, bytes(block) + data + bytes(-len(data) % 512))


def pax(records, then=b""):
    return member("././@PaxHeader", records, b"x") + then


def line(key, value):
    body = f" {key}={value}\n"
    length = len(body) + 1
    while len(str(length)) + len(body) != length:
        length += 1
    return f"{length}{body}".encode()


STORAGES = parts()["storages"]
KINDS = {"symlink": b"2", "hard link": b"1", "directory": b"5", "device": b"3", "fifo": b"6"}
KINDS |= {"contiguous": b"7", "sparse": b"S", "long name": b"L", "long link": b"K", "other": b"Z"}

REFUSED = [
    *((f"{what} as storages", instead("storages", member("storages", STORAGES, kind)), FormatError)
      for what, kind in KINDS.items()),
    ("storages twice", archive(extra=member("storages", STORAGES)), LayoutError),
    ("a pickle twice", archive(extra=member("pickle", pickled(EVIL))), LayoutError),
    ("a member of another name", archive(extra=member("x.py", b"x")), FormatError),
    ("a member that is a path", archive(extra=member("../pickle", b"x")), FormatError),
    *((f"no {name}", archive(order=[n for n in ORDER if n != name]), TruncatedFile)
      for name in ORDER[1:]),
    ("a size beyond", instead("storages", member("storages", STORAGES, size=10**9)), TruncatedFile),
    ("a size in no digits", with_field("storages", 124, b"99999999999\0"), LayoutError),
    ("a size with a sign", with_field("storages", 124, b"-0000000001\0"), LayoutError),
    ("a size of 88 bits", with_field("storages", 124, b"\x80" + b"\xff" * 11), LayoutError),
    ("a negative binary size", with_field("storages", 124, b"\xff" * 12), LayoutError),
    ("a wrong checksum", with_field("storages", 0, b"X", sealed=False), FormatError),
    ("another magic", with_field("storages", 257, b"xstar"), FormatError),
    ("a directory in front", with_field("storages", 345, b"etc"), FormatError),
    ("a pax path", archive(before=pax(line("path", "pickle"))), FormatError),
    ("a pax link", archive(before=pax(line("linkpath", "/etc/passwd"))), FormatError),
    ("a pax sparse map", archive(before=pax(line("GNU.sparse.map", "0,1"))), FormatError),
    ("a pax charset", archive(before=pax(line("hdrcharset", "BINARY"))), FormatError),
    ("a pax size twice", archive(before=pax(line("size", 5) + line("size", 6))), FormatError),
    ("a pax size beyond", archive(before=pax(line("size", 10**17))), TruncatedFile),
    ("a pax size that is none", archive(before=pax(line("size", "-1"))), LayoutError),
    ("a pax size of 5,000 digits", archive(before=pax(line("size", "9" * 5000))), LayoutError),
    ("a pax line without end", archive(before=pax(b"30 mtime=1\n")), LayoutError),
    ("a pax line of no length", archive(before=pax(b"0 mtime=1\n")), LayoutError),
    ("pax of a megabyte", archive(before=pax(line("comment", "x" * 10**6))), LayoutError),
    ("global pax", archive(before=member("g", line("mtime", 1), b"g")), FormatError),
    ("cut off in a header", archive()[:700], TruncatedFile),
    ("cut off in a member", archive()[: 3 * 1024 + 600], TruncatedFile),
    ("code in the system information", archive(parts(sys_info=pickled(EVIL))), HeaderError),
    ("code in the count of storages", archive(parts(storages=pickled(EVIL))), LayoutError),
    ("code in the count of tensors", archive(parts(tensors=pickled(EVIL))), LayoutError),
    ("code as a storage", archive(parts(storages=storages(pickled(EVIL)))), LayoutError),
    ("code as a class", archive(parts(storages=storages(storage_record(kind=SYSTEM)))), LayoutError),
    ("code as views", archive(parts(storages=storages(storage_record(), views=pickled(EVIL)))),
     LayoutError),
    ("a storage too many", archive(parts(storages=storages(storage_record(), count=2))), FormatError),
    ("a storage too few", archive(parts(storages=storages(storage_record(), count=0))), LayoutError),
    ("minus one storage", archive(parts(storages=storages(storage_record(), count=-1))), LayoutError),
    ("2**62 storages", archive(parts(storages=storages(storage_record(), count=2**62))),
     LimitExceeded),
    ("2**62 tensors", archive(parts(tensors=tensors(tensor_record(), count=2**62))), LimitExceeded),
    ("a tensor too many", archive(parts(tensors=tensors(tensor_record(), count=2))), FormatError),
    ("a tensor too few", archive(parts(tensors=tensors(tensor_record(), count=0))), LayoutError),
    ("more elements than bytes", archive(parts(storages=storages(storage_record(elements=99)))),
     TruncatedFile),
    ("fewer elements than bytes", archive(parts(storages=storages(storage_record(elements=3)))),
     FormatError),
    ("minus one element", archive(parts(storages=storages(storage_record(elements=-1)))), LayoutError),
    ("2**62 elements", archive(parts(storages=storages(storage_record(elements=2**62)))), LayoutError),
    ("a storage twice", archive(parts(storages=storages(storage_record(), storage_record()))),
     LayoutError),
    ("a tensor twice", archive(parts(tensors=tensors(tensor_record(), tensor_record()))), LayoutError),
    ("a tensor with a storage's key", archive(parts(tensors=tensors(tensor_record(key=1)))),
     LayoutError),
    ("a storage that is not there", archive(parts(tensors=tensors(tensor_record(root=7)))),
     LayoutError),
    ("a tensor of another type", archive(parts(tensors=tensors(tensor_record(kind="LongTensor")))),
     LayoutError),
    ("65 dimensions", archive(parts(tensors=tensors(tensor_record(ndim=65)))), LayoutError),
    ("-1 dimensions", archive(parts(tensors=tensors(tensor_record(ndim=-1)))), LayoutError),
    ("2**31-1 dimensions", archive(parts(tensors=tensors(tensor_record(ndim=2**31 - 1)))),
     LayoutError),
    ("a size beyond its storage", archive(parts(tensors=tensors(tensor_record(size=(5,))))),
     LayoutError),
    ("an offset beyond", archive(parts(tensors=tensors(tensor_record(offset=1)))), LayoutError),
    ("a negative offset", archive(parts(tensors=tensors(tensor_record(offset=-1)))), LayoutError),
    ("a negative stride", archive(parts(tensors=tensors(tensor_record(stride=(-1,))))), LayoutError),
    ("a view beyond", archive(parts(storages=storages(
        storage_record(), views=pickled(row(tup(num(9), num(1), num(2), num(3))))))), LayoutError),
    ("a view before", archive(parts(storages=storages(
        storage_record(), views=pickled(row(tup(num(9), num(1), num(-1), num(3))))))), LayoutError),
    ("a view of itself", archive(parts(storages=storages(
        storage_record(), views=pickled(row(tup(num(9), num(9), num(0), num(1))))))), LayoutError),
    ("an object that is not there", archive(parts(pickle=pickled(by_key("3")))), LayoutError),
    ("an object named by text", archive(parts(pickle=pickled(by_key("../2")))), LayoutError),
    ("an object named by other digits", archive(parts(pickle=pickled(by_key("\u0662")))), LayoutError),
    ("an object named by a list", archive(parts(pickle=pickled(row() + BINPERSID))), LayoutError),
    ("a tensor as a storage", archive(parts(pickle=pickled(call(
        glob("torch._utils", "_rebuild_tensor_v2"), by_key(), num(0), tup(num(1)), tup(num(1)))))),
     LayoutError),
    ("bytes after the object", archive(parts(pickle=parts()["pickle"] + b"x")), LayoutError),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _imported():
    """Whatever reading imports when it is first needed is there before anything is watched."""
    weighlock.open(archive())["w"].load()


def look(content):
    """What opening gives: values, or the error."""
    modules = set(sys.modules)
    with watched() as seen:
        try:
            catalog = weighlock.open(content)
            found = catalog, {name: ref.load().tolist() for name, ref in catalog.items()}
        except (FormatError, LimitExceeded) as error:
            found = error
    assert seen == []
    assert set(sys.modules) == modules
    return found


@pytest.mark.parametrize(("content", "kind"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_refused(content, kind):
    error = look(content)
    assert isinstance(error, kind), error
    assert len(str(error)) < 1000
    assert str(error).isprintable()


def test_the_good_one_is_read():
    for content in (archive(), archive(before=pax(line("mtime", "1.5"))), archive()[:-1024]):
        _, values = look(content)
        assert values == {"w": [1.0, 2.0, 3.0, 4.0]}


def test_torch_reads_the_good_one_too(tmp_path):
    torch = pytest.importorskip("torch")
    (tmp_path / "m.pt").write_bytes(archive())
    assert torch.load(tmp_path / "m.pt", weights_only=False)["w"].tolist() == [1.0, 2.0, 3.0, 4.0]


def test_code_beside_a_tensor_is_told_and_not_run():
    content = archive(parts(pickle=pickled(table(("w", by_key()), ("x", EVIL)))))
    catalog, values = look(content)
    assert values == {"w": [1.0, 2.0, 3.0, 4.0]}
    assert SYSTEM in catalog.globals


@pytest.mark.parametrize("name", ORDER)
def test_scan_finds_code_in_every_member(name):
    for raw in (pickled(EVIL), pickled(EVIL)[:-1], parts()[name] + pickled(EVIL)):
        found = []
        error = None
        try:
            for finding in scan_source(BytesSource(archive(parts(**{name: raw})))):
                found.append((finding.place, finding.module, finding.name))
        except FormatError as raised:
            error = raised
        # Bytes behind the object are never unpickled; anything else is found.
        assert (name, *SYSTEM) in found or error is not None or raw.startswith(parts()[name])


def test_scan_refuses_what_torch_would_see_otherwise():
    for _, content, _ in REFUSED[: len(KINDS) + 2]:
        with pytest.raises(FormatError):
            list(scan_source(BytesSource(content)))
    old = bytearray(archive(parts(sys_info=pickled(EVIL))))
    old[257:265] = bytes(8)  # as tar was before it had a magic
    old[148:156] = b" " * 8
    old[148:156] = f"{sum(old[:512]):06o}\0 ".encode()
    with tarfile.open(fileobj=io.BytesIO(bytes(old))) as tar:
        assert "sys_info" in tar.getnames()
    with pytest.raises(FormatError):
        list(scan_source(BytesSource(bytes(old))))


def test_scan_is_quiet_about_other_archives():
    content = member("readme.txt", b"hello") + member("d", b"", b"5") + bytes(1024)
    assert list(scan_source(BytesSource(content))) == []


def test_limits():
    content = archive(parts(storages=storages(storage_record(), storage_record(key=3))))
    with pytest.raises(LimitExceeded):
        weighlock.open(content, limits=Limits(tensors=1))
    with pytest.raises(LimitExceeded):
        weighlock.open(content, limits=Limits(pickle_bytes=20))


def test_every_cut_and_many_changes_give_a_catalog_or_an_error_of_ours():
    good = archive()
    for end in range(0, len(good), 97):
        look(good[:end])
    drawn = np.random.default_rng(5)
    busy = [n for n, byte in enumerate(good) if byte]
    for _ in range(600):
        changed = bytearray(good)
        for _ in range(int(drawn.integers(1, 4))):
            changed[int(drawn.choice(busy))] = int(drawn.integers(256))
        # Behind a sound checksum: what is in the members is looked at, too.
        for at in range(0, len(changed), 512):
            if good[at + 257 : at + 262] == b"ustar":
                changed[at + 148 : at + 156] = b" " * 8
                changed[at + 148 : at + 156] = f"{sum(changed[at : at + 512]):06o}\0 ".encode()
        look(bytes(changed))


def test_a_member_that_is_cut_off_in_what_fills_its_last_block_is_told_with_both_numbers():
    whole = archive()
    numbers = []
    for end in range(513, len(whole), 97):
        try:
            weighlock.open(whole[:end])
        except TruncatedFile as error:
            told = re.search(r"ends at byte ([\d,]+), the file has ([\d,]+)", str(error))
            if told:
                wanted, there = (int(number.replace(",", "")) for number in told.groups())
                assert wanted > there == end
                numbers.append(wanted)
        except FormatError:
            continue
    assert numbers  # some cuts are inside members
