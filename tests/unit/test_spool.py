"""Spools: what they look like on disk, what counts, and when things go."""

import errno
import gc
import itertools
import os
import pickle
import stat
import threading
import warnings

import numpy as np
import pytest

import weighlock
from conftest import open_descriptors
from weighlock.abort import Abort
from weighlock.disk.effects import PosixDisk
from weighlock.disk.handover import placed
from weighlock.disk.mounts import file_system
from weighlock.errors import (
    Aborted,
    DiskError,
    LayoutError,
    LocalProtocolError,
    NoSpace,
    NotDurable,
    SourceChanged,
    SourceError,
    SpoolClosed,
)
from weighlock.formats.spooled import open_landed
from weighlock.sources.leased import LeasedSource

WEIGHTS = {"w": np.arange(5000, dtype=np.float32), "b": np.ones(3, np.int8)}

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


@pytest.fixture
def spool(root):
    with weighlock.Spool(root) as spool:
        yield spool
    assert os.listdir(root) == []


def mode_of(path):
    return stat.S_IMODE(os.stat(path).st_mode)


def files_of(spool):
    return sorted(set(os.listdir(spool.path)) - {"owner"})


def test_a_spool_is_for_its_owner_alone(spool, root):
    catalog = weighlock.save(spool, WEIGHTS)
    assert mode_of(root) == mode_of(spool.path) == 0o700
    assert {mode_of(os.path.join(spool.path, name)) for name in os.listdir(spool.path)} == {0o600}
    (name,) = files_of(spool)
    assert len(name) == 32
    catalog.close()


def test_no_two_spools_have_one_name(root):
    spools = [weighlock.Spool(root) for _ in range(20)]
    assert len({spool.path for spool in spools}) == 20
    for spool in spools:
        spool.close()


def test_it_says_whose_it_is(spool):
    with open(os.path.join(spool.path, "owner")) as owner:
        pid, started, boot = owner.read().split()
    assert int(pid) == os.getpid()
    with open("/proc/self/stat") as status:
        assert status.read().rpartition(")")[2].split()[19] == started
    with open("/proc/sys/kernel/random/boot_id") as file:
        assert file.read().startswith(boot)


def test_what_is_saved_reads_back_and_goes_with_its_last_ref(spool):
    catalog = weighlock.save(spool, WEIGHTS)
    ref = catalog["w"]
    del catalog
    assert spool.used_bytes > 20_000
    np.testing.assert_array_equal(ref.load(), WEIGHTS["w"])
    del ref
    assert (spool.used_bytes, files_of(spool)) == (0, [])


def test_closing_a_catalog_removes_its_file_at_once(spool):
    with weighlock.save(spool, WEIGHTS) as catalog:
        ref = catalog["w"]
    assert (spool.used_bytes, files_of(spool)) == (0, [])
    with pytest.raises(SourceError, match="used after it was closed"):
        ref.load()


def test_parts_of_a_catalog_keep_its_file(spool):
    part = weighlock.save(spool, WEIGHTS).select("b").rename({"b": "bias"})
    gc.collect()
    assert part["bias"].load().tolist() == [1, 1, 1]


def test_a_spool_nobody_holds_lives_as_long_as_what_landed_in_it(root):
    catalog = weighlock.save(weighlock.Spool(root), WEIGHTS)
    gc.collect()
    np.testing.assert_array_equal(catalog["w"].load(), WEIGHTS["w"])
    del catalog
    assert os.listdir(root) == []


def test_cycles_are_freed_by_the_collector_and_without_it_at_close(spool):
    gc.disable()
    try:
        cycle = [weighlock.save(spool, WEIGHTS)]
        cycle.append(cycle)
        del cycle
        assert len(files_of(spool)) == 1
        gc.collect()
        assert files_of(spool) == []
        cycle = [weighlock.save(spool, WEIGHTS)]
        cycle.append(cycle)
        del cycle
        spool.close()
        assert not os.path.exists(spool.path)
    finally:
        gc.enable()


def test_after_closing_refs_say_so(root):
    spool = weighlock.Spool(root)
    catalog = weighlock.save(spool, WEIGHTS)
    spool.close()
    spool.close()
    assert os.listdir(root) == []
    for use in (catalog["w"].load, lambda: catalog["w"][:3], lambda: list(catalog["w"].pieces())):
        with pytest.raises(SpoolClosed, match="the spool was closed"):
            use()
    for use in (spool.file, lambda: weighlock.save(spool, WEIGHTS), lambda: catalog.keep("x")):
        with pytest.raises(SpoolClosed):
            use()
    catalog.close()


def test_a_load_under_way_completes_when_the_spool_closes(root):
    spool = weighlock.Spool(root)
    catalog = weighlock.save(spool, {"w": np.arange(300_000.0)})
    pieces = catalog["w"].pieces(800_000)
    source = catalog["w"].source
    with source.descriptor() as fd:
        spool.close()
        assert len(os.pread(fd, 100, 0)) == 100  # still this file's number
    with pytest.raises(SpoolClosed):
        next(pieces)


def test_closing_gives_the_disk_its_space_back(root):
    spool = weighlock.Spool(root)
    catalog = weighlock.save(spool, WEIGHTS)
    spool.close()
    assert not [to for to in open_descriptors().values() if str(root) in to]
    assert len(catalog) == 2


def test_the_quota_is_checked_before_the_first_byte(root):
    with weighlock.Spool(root, quota_bytes=1000) as spool:
        with spool.file(600) as file:
            with pytest.raises(
                NoSpace, match="401 bytes are needed, 400 of its quota of 1,000"
            ) as e:
                spool.file(401)
            assert (e.value.wanted_bytes, e.value.free_bytes) == (401, 400)
            assert len(files_of(spool)) == 1
            spool.file(400).discard()
            assert spool.used_bytes == 600
            with pytest.raises(NoSpace):
                file.write(900, memoryview(bytes(101)))
            file.write(900, memoryview(bytes(100)))
            assert spool.used_bytes == 1000
        assert (spool.used_bytes, files_of(spool)) == (0, [])
        with pytest.raises(NoSpace):
            weighlock.save(spool, WEIGHTS)
        with pytest.raises(NoSpace):
            weighlock.save(spool, iter(WEIGHTS.items()))
        assert (spool.used_bytes, files_of(spool)) == (0, [])


def test_more_than_the_disk_has_is_refused_before_the_first_byte(spool):
    with pytest.raises(NoSpace, match="bytes are free"):
        spool.file(1 << 60)
    with pytest.raises(NoSpace):
        spool.reserve(1 << 60)
    assert (spool.used_bytes, files_of(spool)) == (0, [])


def test_a_quota_cannot_be_negative(root):
    with pytest.raises(LocalProtocolError, match="-1"):
        weighlock.Spool(root, quota_bytes=-1)


def test_a_file_is_landed_in_any_order_and_read_while_it_is_held(spool):
    content = bytes(range(200)) * 10
    file = spool.file(2000)
    file.write(1000, memoryview(content[1000:]))
    file.write(0, memoryview(content[:1000]))
    back = bytearray(100)
    assert file.read_into(950, memoryview(back))
    assert bytes(back) == content[950:1050]
    lease = file.finish()
    with open(lease.path, "rb") as landed:
        assert landed.read() == content
    with pytest.raises(DiskError, match="already committed"):
        file.write(0, memoryview(b"x"))
    del file
    assert spool.used_bytes == 2000
    lease.release()
    lease.release()
    assert (spool.used_bytes, files_of(spool)) == (0, [])


def test_a_file_nobody_finished_goes(spool):
    with spool.file(10) as file:
        file.write(0, memoryview(b"0123456789"))
    with pytest.raises(DiskError):
        file.finish()
    spool.file(10)
    with pytest.raises(ZeroDivisionError), spool.file(10):
        raise ZeroDivisionError
    assert (spool.used_bytes, files_of(spool)) == (0, [])


def test_what_is_no_catalog_is_removed(spool):
    with spool.file(9) as file:
        file.write(0, memoryview(b"something"))
        with pytest.raises(weighlock.WeighlockError):
            open_landed(file.finish())
    assert (spool.used_bytes, files_of(spool)) == (0, [])


def test_aborting_ends_landings_and_leaves_what_has_landed(spool):
    catalog = weighlock.save(spool, WEIGHTS)
    file = spool.file(10)
    spool.abort("not needed")
    assert len(files_of(spool)) == 1
    for use in (lambda: file.write(0, memoryview(b"x")), file.finish):
        with pytest.raises(Aborted, match="not needed"):
            use()
    np.testing.assert_array_equal(catalog["w"].load(), WEIGHTS["w"])
    again = weighlock.save(spool, WEIGHTS)  # the spool goes on
    assert again["b"].load().sum() == 3
    catalog.close(), again.close()


def test_a_spool_whose_landings_cannot_be_told_is_closed_all_the_same(root):
    spool = weighlock.Spool(root)
    catalog = weighlock.save(spool, WEIGHTS)

    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), spool.aborting(Abort()) as either, either.waking(fail):
        spool.close()
    assert os.listdir(root) == []
    with pytest.raises(SpoolClosed):
        catalog["w"].load()
    catalog.close()


def test_a_landing_in_a_spool_that_closes_says_so(root):
    spool = weighlock.Spool(root)
    file = spool.file(10)
    spool.close()
    with pytest.raises(SpoolClosed):
        file.write(0, memoryview(b"x"))
    with pytest.raises(SpoolClosed):
        file.finish()


def test_pickles_hold_no_lease(spool):
    catalog = weighlock.save(spool, WEIGHTS)
    again = pickle.loads(pickle.dumps(catalog))
    ref = pickle.loads(pickle.dumps(catalog["w"]))
    np.testing.assert_array_equal(again["w"].load(), WEIGHTS["w"])
    with pytest.raises(LocalProtocolError):
        again.keep("x")
    del catalog
    assert files_of(spool) == []
    for other in (again["w"], ref):
        with pytest.raises(SourceError, match="No such file"):
            other.load()
    with pytest.raises(TypeError, match="belongs to this process"):
        pickle.dumps(spool)


def test_a_part_cannot_be_kept_nor_what_is_no_spool_s(spool, tmp_path):
    catalog = weighlock.save(spool, WEIGHTS)
    weighlock.save(tmp_path / "a.safetensors", WEIGHTS)
    with weighlock.open(tmp_path / "a.safetensors") as plain:
        for other in (catalog.select("w"), plain):
            with pytest.raises(LocalProtocolError, match="cannot keep"):
                other.keep(tmp_path / "x")
    with pytest.raises(LayoutError, match="one file"):
        weighlock.save(spool, WEIGHTS, max_shard_bytes=100)
    catalog.close()


def test_a_kept_file_is_an_ordinary_one(spool, tmp_path):
    target = tmp_path / "kept.safetensors"
    target.write_bytes(b"old")
    catalog = weighlock.save(spool, WEIGHTS, metadata={"round": "3"})
    ref = catalog["w"]
    inode = os.stat(ref.source.path).st_ino
    kept = catalog.keep(target)
    umask = os.umask(0)
    os.umask(umask)
    assert mode_of(target) == 0o666 & ~umask
    assert os.stat(target).st_ino == inode  # renamed, not copied
    assert (spool.used_bytes, files_of(spool)) == (0, [])
    assert kept.metadata["round"] == "3"
    with pytest.raises(DiskError, match="already handed over"):
        catalog.keep(tmp_path / "twice")
    spool.close()
    for found in (ref, kept["w"], pickle.loads(pickle.dumps(ref))):
        np.testing.assert_array_equal(found.load(), WEIGHTS["w"])
    del catalog, ref
    gc.collect()
    assert os.listdir(tmp_path / "root") == []
    assert os.stat(target).st_nlink == 1
    kept.close()


def test_keeping_on_another_file_system_copies(tmp_path, root):
    if os.stat("/dev/shm").st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("needs two file systems")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        other = weighlock.Spool("/dev/shm")
    with other:
        catalog = weighlock.save(other, WEIGHTS)
        kept = catalog.keep(tmp_path / "kept.safetensors")
        np.testing.assert_array_equal(kept["w"].load(), WEIGHTS["w"])
        np.testing.assert_array_equal(catalog["w"].load(), WEIGHTS["w"])
        catalog.close()
        assert other.used_bytes == 0
    np.testing.assert_array_equal(kept["w"].load(), WEIGHTS["w"])
    kept.close()


@pytest.mark.parametrize("where", ["missing/kept", "directory"])
def test_what_cannot_be_kept_stays(spool, tmp_path, where):
    (tmp_path / "directory").mkdir()
    catalog = weighlock.save(spool, WEIGHTS)
    with pytest.raises(DiskError):
        catalog.keep(tmp_path / where)
    np.testing.assert_array_equal(catalog["w"].load(), WEIGHTS["w"])
    assert [mode_of(os.path.join(spool.path, name)) for name in files_of(spool)] == [0o600]
    catalog.close()


class Around(PosixDisk):
    """The machine's disk, that does something else at one operation, from its n-th call on."""

    def __init__(self, operation, instead, n=1):
        real, calls = getattr(self, operation), itertools.count(1)

        def call(*arguments):
            if next(calls) >= n:
                instead()
            return real(*arguments)

        setattr(self, operation, call)


def raising(number):
    def fail():
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("operation", ["sync", "link", "rename"])
def test_refs_can_be_loaded_after_a_keep_that_failed(spool, tmp_path, operation):
    catalog = weighlock.save(spool, WEIGHTS)
    disk = Around(operation, raising(errno.EIO))
    with pytest.raises(DiskError):
        placed(catalog["w"].source.lease, tmp_path / "kept", disk=disk)
    np.testing.assert_array_equal(catalog["w"].load(), WEIGHTS["w"])
    assert [mode_of(os.path.join(spool.path, name)) for name in files_of(spool)] == [0o600]
    assert not (tmp_path / "kept").exists()
    catalog.close()


def test_refs_can_be_loaded_when_keeping_turns_out_to_be_copying(spool, tmp_path):
    """Two mounts of one file system look like one place, until a link is asked for."""
    catalog = weighlock.save(spool, WEIGHTS)
    disk = Around("link", raising(errno.EXDEV))
    disk.create_unnamed = lambda directory: None  # the copy needs no link then
    assert not placed(catalog["w"].source.lease, tmp_path / "kept", disk=disk)
    for found in (catalog, weighlock.open(tmp_path / "kept")):
        np.testing.assert_array_equal(found["w"].load(), WEIGHTS["w"])
        found.close()


def test_refs_can_be_loaded_while_their_file_is_kept(spool, tmp_path):
    catalog = weighlock.save(spool, WEIGHTS)
    loaded = []
    for operation in ("sync", "rename"):
        disk = Around(operation, lambda: loaded.append(catalog["w"].load()))
        assert placed(catalog["w"].source.lease, tmp_path / operation, disk=disk)
    assert len(loaded) >= 2
    assert all(np.array_equal(found, WEIGHTS["w"]) for found in loaded)
    catalog.close()


def test_what_is_kept_again_where_it_is_already_leaves_no_other_name(spool, tmp_path):
    """The first attempt ended when it was in place: its directory could not be synced."""
    catalog = weighlock.save(spool, WEIGHTS)
    lease = catalog["w"].source.lease
    with pytest.raises(NotDurable, match="is in place"):
        placed(lease, tmp_path / "kept", disk=Around("sync", raising(errno.EIO), n=2))
    catalog.keep(tmp_path / "kept").close()
    assert sorted(os.listdir(tmp_path)) == ["kept", "root"]
    assert os.stat(tmp_path / "kept").st_nlink == 1
    np.testing.assert_array_equal(catalog["w"].load(), WEIGHTS["w"])
    catalog.close()


def test_a_name_that_is_too_long_is_refused_before_anything_is_done(spool, tmp_path):
    catalog = weighlock.save(spool, WEIGHTS)
    with pytest.raises(DiskError, match="File name too long"):
        catalog.keep(tmp_path / ("x" * 300))
    with pytest.raises(DiskError, match="File name too long"):
        weighlock.Writer(tmp_path / ("x" * 300))
    np.testing.assert_array_equal(catalog["w"].load(), WEIGHTS["w"])
    catalog.close()


def test_a_file_somebody_took_away_cannot_be_kept(spool, tmp_path):
    catalog = weighlock.save(spool, WEIGHTS)
    os.unlink(catalog["w"].source.path)
    with pytest.raises(DiskError, match="cannot be opened") as caught:
        catalog.keep(tmp_path / "kept")
    assert caught.value.errno == errno.ENOENT
    catalog.close()


def test_memory_that_poses_as_a_disk_is_warned_about():
    directory = os.open("/dev/shm", os.O_RDONLY)
    kind = file_system(directory)
    os.close(directory)
    if kind != "tmpfs":
        pytest.skip("needs a tmpfs at /dev/shm")
    with pytest.warns(RuntimeWarning, match="lies on tmpfs: what lands there takes memory"):
        spool = weighlock.Spool("/dev/shm")
    spool.close()


def test_a_root_others_can_write_to_is_refused(tmp_path):
    loose = tmp_path / "loose"
    loose.mkdir()
    loose.chmod(0o777)
    with pytest.raises(DiskError, match="no sticky bit"):
        weighlock.Spool(loose)
    assert os.listdir(loose) == []
    loose.chmod(0o1777)
    weighlock.Spool(loose).close()


@pytest.mark.parametrize("root", ["file", "file/below", "nul\0", "/proc/nothing"])
def test_a_root_that_cannot_be_is_refused(tmp_path, root):
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError):
        weighlock.Spool(os.path.join(tmp_path, root))


def test_threads_land_side_by_side(spool):
    catalogs = []

    def land(n):
        catalogs.append((n, weighlock.save(spool, {"n": np.full(1000, n)})))

    threads = [threading.Thread(target=land, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(files_of(spool)) == 8
    assert all((catalog["n"].load() == n).all() for n, catalog in catalogs)
    catalogs.clear()
    assert spool.used_bytes == 0


@pytest.mark.parametrize("hold", [True, False])
@pytest.mark.parametrize("end", ["spool closes", "catalog closes", "kept"])
def test_a_read_under_way_is_not_harmed(root, tmp_path, hold, end):
    with weighlock.Spool(root) as spool, spool.file(10) as file:
        file.write(0, memoryview(b"0123456789"))
        lease = file.finish()
        source = LeasedSource(lease, hold=hold)
        with source.descriptor() as fd:
            if end == "kept":
                assert placed(lease, tmp_path / "kept", durable=False)
                lease.moved(str(tmp_path / "kept"))
            else:
                {"spool closes": spool.close, "catalog closes": source.close}[end]()
            assert os.pread(fd, 10, 0) == b"0123456789"
        assert spool.used_bytes == 0
        source.close()


def test_a_file_changed_behind_our_back_is_noticed(spool):
    catalog = weighlock.save(spool, WEIGHTS)
    with open(catalog["w"].source.path, "r+b") as file:
        file.write(b"x")
    with pytest.raises(SourceChanged):
        catalog["w"].load()
    catalog.close()
