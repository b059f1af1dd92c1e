"""What each process has for itself."""

import os
import threading

from weighlock.per_process import PerProcess


def test_threads_get_the_same():
    mine, barrier, seen = PerProcess(object), threading.Barrier(8), []

    def ask():
        barrier.wait()
        seen.append(mine())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 8
    assert len(set(map(id, seen))) == 1


def test_a_forked_child_has_its_own_and_so_has_its_child():
    lock = PerProcess(threading.Lock)
    with lock():
        child = os.fork()
        if child == 0:
            is_free = lock().acquire(timeout=0)
            grandchild = os.fork()
            if grandchild == 0:
                os._exit(0 if lock().acquire(timeout=0) else 1)
            code = os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1])
            os._exit(0 if is_free and code == 0 and len(list(lock)) == 2 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert lock().locked()
