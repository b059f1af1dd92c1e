"""D5, D8: forks and the end of the interpreter, with everything open."""

import pytest

FORKED = """
import os, sys
import numpy as np
import weighlock
from weighlock.errors import LocalProtocolError

ending = sys.argv[1]
tensors = {"a": np.arange(1000)}
with weighlock.Server() as server:
    share = server.share(
        tensors, receivers=("x", "y"), on_done=lambda outcome: print("done", outcome.reason)
    )
    lazy = weighlock.open(share.url_for("x"))
    child = os.fork()
    if child == 0:
        for forbidden in (lambda: share.wait(), lambda: server.share(tensors)):
            try:
                forbidden()
            except LocalProtocolError:
                pass
            else:
                os._exit(3)
        lazy["a"].load()  # refs work in a child
        repr(share), repr(server), share.outcome, share.ended
        if ending == "_exit":
            os._exit(0)
        with share, lazy:
            share.revoke()
            lazy.close()
            server.close()
            if ending == "error":
                raise ZeroDivisionError
        sys.exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == (1 if ending == "error" else 0), status
    assert share.ended is None
    assert share.receivers["x"].state == "waiting", share.receivers
    weighlock.fetch(share.url_for("y"))
    lazy.close()
    assert share.wait(20).landed == ("x", "y")
print("over")
"""


@pytest.mark.parametrize("ending", ["exit", "_exit", "error"])
def test_d5_a_forked_child_harms_no_share_of_its_parent(run_python, ending):
    result = run_python(FORKED, ending)
    assert result.stdout == "done settled\nover\n"
    assert ("ZeroDivisionError" in result.stderr) is (ending == "error")
    assert "another" not in result.stderr


LEFT = """
import os, socket
import weighlock

hold, let_go = os.pipe()
server = weighlock.Server()
if os.fork() == 0:  # and it does not exec: a worker of multiprocessing, say
    os.close(let_go)
    os.read(hold, 1)
    os._exit(0)
server.close()
try:
    socket.create_connection(("127.0.0.1", server.port), 20).close()
    print("left waiting")
except ConnectionRefusedError:
    print("refused")
weighlock.Server(port=server.port).close()
os.close(let_go)
os.wait()
print("over")
"""


def test_d5_a_forked_child_does_not_keep_the_port_of_a_closed_server(run_python):
    assert run_python(LEFT).stdout == "refused\nover\n"


OPEN = """
import sys, threading
import numpy as np
import weighlock

tensors = {name: np.arange(3_000_000) for name in "abc"}
server = weighlock.Server()
share = server.share(tensors, receivers=("x", "y", "z"))
other = server.share(tensors, idle_s=None)
lazy = weighlock.open(share.url_for("x"))
lazy["a"].load()
stream = weighlock.stream(other.url)
next(stream)
named = weighlock.stream(share.url_for("z"))
next(named)
began = threading.Event()
threading.Thread(
    target=weighlock.fetch,
    args=(share.url_for("y"),),
    kwargs={"limit_rate": 1_000_000, "progress": lambda *_: began.set()},
    daemon=True,
).start()
began.wait(20)
threading.Thread(target=share.wait, daemon=True).start()
if sys.argv[1] == "_exit":
    import os
    os._exit(0)
if sys.argv[1] == "error":
    raise SystemExit(7)
"""


@pytest.mark.parametrize("ending", ["end", "_exit", "error"])
def test_d8_an_interpreter_ends_with_everything_open(run_python, ending):
    result = run_python(OPEN, ending, check=False)
    assert result.returncode == (7 if ending == "error" else 0)
    assert result.stderr == ""
