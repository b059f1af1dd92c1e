"""Who made a temporary: enough of a process to tell later whether it still lives.

Knows processes by number, start time and boot; not what they made.
"""

import os

__all__ = ["MARK", "temporary_name"]

MARK = ".part-"
"""In the name of every temporary that lies beside a destination."""


def temporary_name(destination: str) -> str:
    """A new hidden name beside a destination: whose it is, and 64 random bits.

    A process number comes back into use; together with the start time and the boot it does not, so
    that what a dead process left can be told from what a living one is writing.
    """
    owner = f"{os.getpid()}-{_start_time()}-{_boot()}"
    # 255 bytes is the longest name: the readable part is what may be cut.
    readable = os.fsdecode(os.fsencode(destination)[:120])
    return f".{readable}{MARK}{owner}-{os.urandom(8).hex()}"


def _start_time() -> str:
    """Clock ticks from boot to this process's start."""
    try:
        with open("/proc/self/stat", "rb") as status:
            # The second field is the program's name in brackets and may hold anything.
            return status.read().rpartition(b")")[2].split()[19].decode()
    except OSError:
        return "0"


def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return boot.read(8)
    except OSError:
        return "0"
