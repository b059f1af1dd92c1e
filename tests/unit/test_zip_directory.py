"""The directory of a ZIP archive: what zipfile writes is read, what is ambiguous is refused."""

import io
import struct
import warnings
import zipfile
import zlib

import pytest

from weighlock.errors import FormatError, LimitExceeded, TruncatedFile
from weighlock.formats.heads import Heads
from weighlock.formats.zip_directory import data_span, inflated, read_directory
from weighlock.limits import Limits
from weighlock.sources.local import BytesSource

CONTENT = {"a/data.pkl": b"pickle" * 9, "a/data/0": bytes(range(256)) * 4, "a/empty": b""}

CRC_OF_X = zlib.crc32(b"x")


def archive(content=None, *, method=zipfile.ZIP_STORED, comment=b""):
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zipfile warns of names that are there twice
        with zipfile.ZipFile(file, "w", method) as made:
            pairs = (content or CONTENT).items() if not isinstance(content, list) else content
            for name, data in pairs:
                made.writestr(zipfile.ZipInfo(name), data, method)
            made.comment = comment
    return bytearray(file.getvalue())


def members_of(raw, limits=None):
    source = BytesSource(bytes(raw))
    members = read_directory(source, limits or Limits())
    return {name: inflated(source, member, 1 << 20) for name, member in members.items()}


def places(raw, signature):
    found, at = [], raw.find(signature)
    while at >= 0:
        found.append(at)
        at = raw.find(signature, at + 1)
    return found


def changed(offset, new, signature=b"PK\1\2", which=0, **options):
    """An archive with some bytes of a directory entry, local header or end record replaced."""
    raw = archive(**options)
    at = places(raw, signature)[which] + offset
    raw[at : at + len(new)] = new
    return raw


class TestReading:
    @pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
    @pytest.mark.parametrize("comment", [b"", b"a comment", b"c" * 65_535])
    def test_what_zipfile_writes(self, method, comment):
        assert members_of(archive(method=method, comment=comment)) == CONTENT

    def test_members_written_to_a_stream(self):
        class Stream(io.RawIOBase):
            """Cannot seek, so that sizes come behind the data."""

            def __init__(self):
                self.data = bytearray()

            def writable(self):
                return True

            def write(self, piece):
                self.data += piece
                return len(piece)

        stream = Stream()
        with zipfile.ZipFile(stream, "w") as made:
            for name, data in CONTENT.items():
                made.writestr(name, data)
        assert members_of(stream.data) == CONTENT

    def test_members_with_sizes_of_64_bits(self):
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as made:
            for name, data in CONTENT.items():
                with made.open(name, "w", force_zip64=True) as member:
                    member.write(data)
        assert members_of(file.getvalue()) == CONTENT

    def test_many_members(self):
        names = [f"a/data/{n}" for n in range(70_000)]  # 16 bits do not count so far
        locals_, entries, at = [], [], 0
        for name in map(str.encode, names):
            facts = struct.pack("<HHHHHIIIHH", 20, 0, 0, 0, 0, CRC_OF_X, 1, 1, len(name), 0)
            locals_.append(b"PK\3\4" + facts + name + b"x")
            entries.append(b"PK\1\2\x14\0" + facts + struct.pack("<HHHII", 0, 0, 0, 0, at) + name)
            at += len(locals_[-1])
        directory = b"".join(entries)
        counts = (len(names), len(names), len(directory), at)
        wide = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, *counts)
        locator = struct.pack("<4sIQI", b"PK\6\7", 0, at + len(directory), 1)
        end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 65535, 65535, len(directory), at, 0)
        raw = b"".join(locals_) + directory + wide + locator + end
        with zipfile.ZipFile(io.BytesIO(raw)) as theirs:
            assert theirs.read(names[-1]) == b"x"
        source = BytesSource(raw)
        members = read_directory(source, Limits())
        assert list(members) == names
        assert inflated(source, members[names[-1]], 10) == b"x"

    def test_names_beyond_ascii(self):
        content = {"größe/data.pkl": b"1", "größe/数": b"2"}
        assert members_of(archive(content)) == content

    def test_the_span_is_where_the_bytes_are(self):
        raw = bytes(archive())
        source = BytesSource(raw)
        for name, member in read_directory(source, Limits()).items():
            span = data_span(Heads(source), member, "archive")
            assert raw[span.offset : span.end] == CONTENT[name]

    def test_bytes_between_members_are_nobody_s(self):
        """Members may be padded, as torch pads them; nothing says what the padding is."""
        raw = archive()
        members = read_directory(BytesSource(bytes(raw)), Limits())
        limits = [member.limit for member in members.values()]
        assert limits == sorted(limits)
        assert limits[-1] == places(raw, b"PK\1\2")[0]


class TestRefusing:
    def test_cut_off_anywhere(self):
        raw = archive()
        for length in range(len(raw)):
            with pytest.raises(FormatError):
                members_of(raw[:length])

    def test_no_end_record(self):
        with pytest.raises(TruncatedFile, match="no end record"):
            members_of(b"PK\3\4" + bytes(1000))

    @pytest.mark.parametrize("second", ["a/data/0", "A/DATA/0", "a/Data/0"])
    def test_a_member_twice(self, second):
        with pytest.raises(FormatError, match="twice"):
            members_of(archive([("a/data/0", b"1"), (second, b"2")]))

    def test_two_end_records(self):
        inner = archive()[-22:]
        raw = archive(comment=bytes(inner))
        with pytest.raises(FormatError):
            members_of(raw)

    def test_bytes_before_the_archive(self):
        with pytest.raises(FormatError):
            members_of(b"prefix" + archive())

    def test_bytes_after_the_archive(self):
        with pytest.raises(FormatError):
            members_of(archive() + b"x")

    @pytest.mark.parametrize(
        ("offset", "new"),
        [
            (0, b"PK\1\3"),
            (8, b"\x01\x00"),
            (8, b"\x40\x00"),
            (10, b"\x0c\x00"),
            (10, b"\x08\x00"),
            (16, b"\xde\xad\xbe\xef"),
            (20, b"\x00\x00\x00\x00"),
            (24, b"\x01\x00\x00\x00"),
            (20, b"\xff\xff\xff\xff"),
            (28, b"\x01\x00"),
            (28, b"\xff\xff"),
            (30, b"\x01\x00"),
            (32, b"\xff\xff"),
            (34, b"\x02\x00"),
            (42, b"\x01\x00\x00\x00"),
            (42, b"\xff\xff\xff\x7f"),
            (46, b"b"),
            (46, b"\x00"),
        ],
    )
    def test_a_directory_entry_that_is_wrong(self, offset, new):
        with pytest.raises(FormatError):
            members_of(changed(offset, new))

    @pytest.mark.parametrize(
        ("offset", "new"),
        [
            (0, b"PK\3\5"),
            (6, b"\x01\x00"),
            (8, b"\x08\x00"),
            (14, b"\xde\xad\xbe\xef"),
            (18, b"\x01\x00\x00\x00"),
            (22, b"\x01\x00\x00\x00"),
            (26, b"\x01\x00"),
            (26, b"\x00\x00"),
            (26, b"\xff\xff"),
            (28, b"\xff\xff"),
            (30, b"b"),
        ],
    )
    def test_a_local_header_that_says_otherwise(self, offset, new):
        with pytest.raises(FormatError):
            members_of(changed(offset, new, b"PK\3\4"))

    @pytest.mark.parametrize(
        ("offset", "new"),
        [
            (4, b"\x01\x00"),
            (6, b"\x01\x00"),
            (8, b"\x02\x00"),
            (10, b"\x02\x00"),
            (10, b"\x04\x00"),
            (12, b"\x01\x00\x00\x00"),
            (12, b"\xff\xff\xff\xff"),
            (16, b"\x01\x00\x00\x00"),
            (16, b"\xff\xff\xff\xff"),
            (20, b"\x01\x00"),
        ],
    )
    def test_an_end_record_that_is_wrong(self, offset, new):
        with pytest.raises(FormatError):
            members_of(changed(offset, new, b"PK\5\6"))

    def test_overlapping_members(self):
        raw = archive()
        first, second, _ = places(raw, b"PK\1\2")
        raw[second + 42 : second + 46] = raw[first + 42 : first + 46]
        with pytest.raises(FormatError):
            members_of(raw)

    def test_damaged_bytes(self):
        raw = archive()
        raw[raw.index(b"pickle")] ^= 1
        with pytest.raises(FormatError, match="checksum"):
            members_of(raw)

    def test_damaged_deflated_bytes(self):
        raw = archive(method=zipfile.ZIP_DEFLATED)
        start = places(raw, b"PK\3\4")[0] + 30 + len("a/data.pkl")
        raw[start] ^= 0xFF
        with pytest.raises(FormatError):
            members_of(raw)

    def test_a_deflated_member_longer_than_it_says(self):
        raw = archive({"a": bytes(100_000)}, method=zipfile.ZIP_DEFLATED)
        for signature, offset in ((b"PK\1\2", 24), (b"PK\3\4", 22)):
            at = places(raw, signature)[0] + offset
            raw[at : at + 4] = struct.pack("<I", 100)
        with pytest.raises(FormatError, match="another length"):
            members_of(raw)

    def test_limits(self):
        with pytest.raises(LimitExceeded):
            members_of(archive(), Limits(tensors=2))
        with pytest.raises(FormatError, match="directory"):
            members_of(archive(), Limits(header_bytes=20))
        source = BytesSource(bytes(archive()))
        member = read_directory(source, Limits())["a/data/0"]
        with pytest.raises(FormatError, match="1,023 are allowed"):
            inflated(source, member, 1023)
