"""`finish_in_background`: the caller goes on, the file appears whole or the error is not lost.

Disks that wait for a word make the moments that matter; nothing here waits for time to pass.
"""

import contextlib
import errno
import os
import subprocess
import sys
import threading

import pytest

import weighlock
from crash.disks import Around, FailingDisk, NamedDisk
from crash.saves import NEW, beside, put_old, seen, specs_of
from weighlock.disk.effects import PosixDisk
from weighlock.errors import DiskError, LayoutError, NoSpace, NotDurable

PATIENCE_S = 60


class WaitingDisk(Around):
    """One operation says that it was reached and waits until it may go on."""

    def __init__(self, disk, operation):
        super().__init__(disk, operation)
        self.reached = threading.Event()
        self.may_go_on = threading.Event()

    def instead(self, real, *arguments):
        self.reached.set()
        assert self.may_go_on.wait(PATIENCE_S)
        return real(*arguments)


def filled(path, disk=None, tensors=NEW):
    writer = weighlock.Writer(path, specs_of(tensors), disk=disk)
    for name, array in tensors.items():
        writer.write(name, array)
    return writer


@pytest.fixture(params=["posix", "named"])
def kind(request):
    return {"posix": PosixDisk, "named": NamedDisk}[request.param]


def test_the_file_is_in_place_when_the_result_is(tmp_path, no_leaks, kind):
    put_old(tmp_path / "model")
    finish = filled(tmp_path / "model", kind()).finish_in_background()
    finish.result()
    assert finish.done()
    assert seen(tmp_path / "model") == "new"
    assert beside(tmp_path / "model") == []
    finish.result()  # again, and the same


def test_the_caller_goes_on_while_the_disk_syncs(tmp_path, no_leaks, kind):
    put_old(tmp_path / "model")
    disk = WaitingDisk(kind(), "sync")
    finish = filled(tmp_path / "model", disk).finish_in_background()
    assert disk.reached.wait(PATIENCE_S)
    assert not finish.done()
    assert seen(tmp_path / "model") == "old"
    with pytest.raises(TimeoutError):
        finish.result(0)
    disk.may_go_on.set()
    finish.result(PATIENCE_S)
    assert seen(tmp_path / "model") == "new"


def test_arrays_may_change_as_soon_as_it_returned(tmp_path, no_leaks):
    tensors = {name: array.copy() for name, array in NEW.items()}
    disk = WaitingDisk(PosixDisk(), "sync")
    finish = filled(tmp_path / "model", disk, tensors).finish_in_background()
    for array in tensors.values():
        array.fill(77)
    disk.may_go_on.set()
    finish.result(PATIENCE_S)
    assert seen(tmp_path / "model") == "new"


@pytest.mark.parametrize(
    ("operation", "n", "number", "kind_of_error", "found"),
    [
        ("sync", 1, errno.EIO, NotDurable, "old"),
        ("sync", 2, errno.EIO, NotDurable, "new"),
        ("rename", 1, errno.EACCES, DiskError, "old"),
        ("rename", 1, errno.ENOSPC, NoSpace, "old"),
        ("link", 1, errno.EDQUOT, NoSpace, "old"),
        ("close", 1, errno.EIO, DiskError, "old"),
    ],
)
def test_what_the_disk_says_is_raised_by_the_result_each_time_it_is_asked_for(
    tmp_path, no_leaks, operation, n, number, kind_of_error, found
):
    put_old(tmp_path / "model")
    disk = FailingDisk(PosixDisk(), operation, n, number)
    finish = filled(tmp_path / "model", disk).finish_in_background()
    for _ in range(2):
        with pytest.raises(kind_of_error) as raised:
            finish.result()
        assert raised.value.errno == number
    assert finish.done()
    assert seen(tmp_path / "model") == found
    assert beside(tmp_path / "model") == []


def test_what_is_wrong_with_the_tensors_is_raised_at_once(tmp_path, no_leaks):
    writer = weighlock.Writer(tmp_path / "model", specs_of(NEW))
    with pytest.raises(LayoutError, match="weight"):
        writer.finish_in_background()
    assert os.listdir(tmp_path) == []


def test_a_full_disk_that_shows_in_the_header_is_raised_at_once(tmp_path, no_leaks):
    class FullForHeaders(Around):
        def instead(self, real, fd, data, offset):
            if offset == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(fd, data, offset)

    writer = filled(tmp_path / "model", FullForHeaders(PosixDisk(), "write"))
    with pytest.raises(NoSpace):
        writer.finish_in_background()
    assert os.listdir(tmp_path) == []


def test_leaving_the_block_afterwards_does_not_disturb_it(tmp_path, no_leaks):
    disk = WaitingDisk(PosixDisk(), "sync")
    with weighlock.Writer(tmp_path / "model", disk=disk) as writer:
        for name, array in NEW.items():
            writer.write(name, array)
        finish = writer.finish_in_background()
    disk.may_go_on.set()
    finish.result(PATIENCE_S)
    assert seen(tmp_path / "model") == "new"


def test_nothing_can_be_written_or_finished_afterwards(tmp_path, no_leaks):
    disk = WaitingDisk(PosixDisk(), "sync")
    writer = filled(tmp_path / "model", disk)
    finish = writer.finish_in_background()
    with pytest.raises(LayoutError):
        writer.write("more", NEW["bias"])
    with pytest.raises(LayoutError):
        writer.finish()
    disk.may_go_on.set()
    finish.result(PATIENCE_S)
    assert seen(tmp_path / "model") == "new"


@pytest.mark.parametrize("operation", ["sync", "close", "rename"])
def test_an_exception_after_it_began_leaves_the_old_or_the_new_file_and_the_truth(
    tmp_path, no_leaks, kind, operation
):
    """The block is left by an exception while the file is being put in place."""
    put_old(tmp_path / "model")
    disk = WaitingDisk(kind(), operation)
    finishes = []

    def leave():
        with weighlock.Writer(tmp_path / "model", disk=disk) as writer:
            for name, array in NEW.items():
                writer.write(name, array)
            finishes.append(writer.finish_in_background())
            assert disk.reached.wait(PATIENCE_S)
            disk.may_go_on.set()
            raise ValueError("something else")

    with pytest.raises(ValueError, match="something else"):
        leave()
    try:
        finishes[0].result(PATIENCE_S)
    except DiskError:
        assert seen(tmp_path / "model") == "old"
    else:
        assert seen(tmp_path / "model") == "new"
    assert beside(tmp_path / "model") == []


# --- threads ---


@pytest.mark.parametrize("operation", ["write", "copy", "sync"])
def test_a_file_is_not_closed_while_another_thread_is_using_it(tmp_path, operation):
    """A closed number is soon another file's: what is still being written would go there."""
    weighlock.save(tmp_path / "source.safetensors", NEW)
    waiting = WaitingDisk(PosixDisk(), operation)
    closed = []

    class Watching(Around):
        def instead(self, real, fd):
            closed.append((fd, waiting.reached.is_set() and not waiting.may_go_on.is_set()))
            real(fd)

    writer = weighlock.Writer(tmp_path / "model", disk=Watching(waiting, "close"))
    catalog = weighlock.open(tmp_path / "source.safetensors")

    def use():
        try:
            if operation == "copy":
                writer.copy_all([catalog["weight"]])
            else:
                writer.write("weight", NEW["weight"])
                writer.finish()
        except weighlock.WeighlockError:
            pass  # the other one has given up

    thread = threading.Thread(target=use)
    thread.start()
    assert waiting.reached.wait(PATIENCE_S)
    give_up = threading.Thread(target=writer.discard)
    give_up.start()
    give_up.join(1)  # it may also wait for the other one
    under_way = [fd for fd, busy in closed if busy]
    waiting.may_go_on.set()
    thread.join(PATIENCE_S)
    give_up.join(PATIENCE_S)
    catalog.close()
    assert under_way == []
    assert os.listdir(tmp_path) in (["source.safetensors"], ["model", "source.safetensors"])


def test_a_file_is_not_finished_while_another_thread_is_writing_to_it(tmp_path):
    """Finishing may wait for the other thread or be refused; what appears is whole."""

    class HoldsTheLast(WaitingDisk):
        def instead(self, real, fd, parts, offset):
            if b"".join(parts) != NEW["codes"].tobytes():
                return real(fd, parts, offset)
            return super().instead(real, fd, parts, offset)

    def finish():
        with contextlib.suppress(weighlock.WeighlockError):
            writer.finish()

    disk = HoldsTheLast(PosixDisk(), "write")
    writer = weighlock.Writer(tmp_path / "model", specs_of(NEW), disk=disk)
    for name in [name for name in NEW if name != "codes"]:
        writer.write(name, NEW[name])
    writing = threading.Thread(target=writer.write, args=("codes", NEW["codes"]))
    writing.start()
    assert disk.reached.wait(PATIENCE_S)
    finishing = threading.Thread(target=finish)
    finishing.start()
    finishing.join(1)  # it may also wait for the other one
    early = (tmp_path / "model").exists()
    disk.may_go_on.set()
    writing.join(PATIENCE_S)
    finishing.join(PATIENCE_S)
    assert not early
    assert seen(tmp_path / "model") in ("new", "absent")


@pytest.mark.parametrize("header_bytes", [1024 * 1024, 64], ids=["with room", "moved"])
def test_a_tensor_that_comes_while_the_file_is_finished_is_refused(tmp_path, header_bytes):
    """Its place would be in the header that is being written, and its bytes would not."""

    class HoldsTheHeader(WaitingDisk):
        def instead(self, real, fd, data, offset):
            if offset:
                return real(fd, data, offset)
            return super().instead(real, fd, data, offset)

    disk = HoldsTheHeader(PosixDisk(), "write")
    writer = weighlock.Writer(tmp_path / "model", header_bytes=header_bytes, disk=disk)
    for name, array in NEW.items():
        writer.write(name, array)
    finishing = threading.Thread(target=writer.finish)
    finishing.start()
    assert disk.reached.wait(PATIENCE_S)
    try:
        with pytest.raises(LayoutError, match="'late' came after the file was finished"):
            writer.write("late", NEW["codes"])
    finally:
        disk.may_go_on.set()
        finishing.join(PATIENCE_S)
    assert seen(tmp_path / "model") == "new"


# --- the end of the interpreter ---

UNTIL_TOLD = """
import sys
import numpy as np
import weighlock
from weighlock.disk.effects import PosixDisk

class WaitingDisk(PosixDisk):
    def sync(self, fd):
        sys.stdin.readline()
        if sys.argv[2] == "fails":
            raise OSError(5, "Input/output error")
        super().sync(fd)

writer = weighlock.Writer(sys.argv[1], disk=WaitingDisk())
writer.write("weight", np.arange(5))
finish = writer.finish_in_background()
del writer
if sys.argv[2] == "raises":
    print("main is over", flush=True)
    raise SystemExit(3)
print("main is over", flush=True)
"""


@pytest.mark.parametrize(("how", "code"), [("ends", 0), ("raises", 3)])
def test_the_interpreter_does_not_end_before_the_file_is_in_place(tmp_path, how, code):
    path = tmp_path / "model"
    with subprocess.Popen(
        [sys.executable, "-c", UNTIL_TOLD, path, how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "main is over\n"
        assert not path.exists()
        assert process.poll() is None
        process.stdin.write("\n\n")
        process.stdin.close()
        assert process.wait(PATIENCE_S) == code
    with weighlock.open(path) as catalog:
        assert catalog["weight"].load().tolist() == [0, 1, 2, 3, 4]
    assert os.listdir(tmp_path) == ["model"]


def test_a_failure_nobody_asked_about_is_not_silent(tmp_path):
    """The interpreter ends without anybody having called `result`: at least stderr says it."""
    path = tmp_path / "model"
    result = subprocess.run(
        [sys.executable, "-c", UNTIL_TOLD, path, "fails"],
        input="\n\n",
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert not path.exists()
    assert "syncing failed" in result.stderr
