"""One at a time in a directory: who is kept out, and by whom."""

import threading

import pytest

from weighlock.abort import Abort
from weighlock.disk.exclusion import exclusively
from weighlock.errors import Aborted, DiskError

pytestmark = pytest.mark.usefixtures("no_leaks")

FORKED = """
import fcntl, os, sys
from weighlock.disk.exclusion import exclusively

where, how = sys.argv[1:]
gate, opened = os.pipe()
with exclusively(where):
    pid = os.fork()
    if pid == 0:
        os.close(opened)
        if how == "leaves":
            sys.exit()  # through the block
        os.read(gate, 1)  # as long as the parent needs
        os._exit(0)
    if how == "leaves":
        os.waitpid(pid, 0)
        other = os.open(where, os.O_RDONLY)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("held")
if how == "stays":
    with exclusively(where):
        print("had")
    os.close(opened)
    os.waitpid(pid, 0)
"""


@pytest.mark.parametrize(("how", "said"), [("stays", "had"), ("leaves", "held")])
def test_a_forked_child_neither_keeps_the_lock_nor_lets_go_of_it(tmp_path, run_python, how, said):
    assert run_python(FORKED, tmp_path, how).stdout.split() == [said]


def test_who_waits_comes_in_when_the_other_has_left(tmp_path):
    seen = []

    def come():
        with exclusively(str(tmp_path)):
            seen.append("in")

    with exclusively(str(tmp_path)):
        thread = threading.Thread(target=come)
        thread.start()
        seen.append("first")
    thread.join()
    assert seen == ["first", "in"]


def test_who_waits_hears_an_abort(tmp_path):
    abort, raised = Abort(), []

    def come():
        try:
            with exclusively(str(tmp_path), abort):
                raised.append(None)
        except Aborted as error:
            raised.append(error)

    with exclusively(str(tmp_path)):
        thread = threading.Thread(target=come)
        thread.start()
        abort.set("enough")
        thread.join()
    assert [error.reason for error in raised] == ["enough"]


def test_a_directory_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(DiskError, match="cannot be locked"), exclusively(str(tmp_path / "none")):
        pass
