"""Whether something is left over. Knows owners and kinds of file systems; looks at nothing itself.

Who sweeps and who takes up an unfinished file ask the same: is its maker provably dead?
"""

from typing import Literal, TypeAlias

from weighlock.disk.mounts import LOCAL
from weighlock.disk.owner import NOBODY, UNKNOWN_BOOT, Owner

__all__ = ["Verdict", "judge"]

Verdict: TypeAlias = Literal["dead", "alive", "unsure"]


def judge(
    owner: Owner | None,
    *,
    is_locked: bool,
    holds_nothing: bool,
    here: Owner,
    started: str,
    kind: str,
) -> tuple[Verdict, str]:
    """Whether something is left over, and why.

    Args:
        owner: whom it names, if it can be read.
        is_locked: somebody holds its lock, or it cannot be had.
        holds_nothing: nothing would be lost with it.
        here: this process.
        started: when the process of the owner's number started, "0" if there is none.
        kind: the file system it lies on.
    """
    is_same_boot = owner is not None and owner.boot == here.boot != UNKNOWN_BOOT
    if owner is not None and is_same_boot and started == owner.started:
        return "alive", f"process {owner.pid} is alive"
    if is_locked:
        # By a forked child, by a process of another container, or there are no locks here.
        return "unsure", "its lock is held, or cannot be had"
    if owner is None and holds_nothing:
        # Its maker, if it lives, is just about to say whose it is, and makes another one instead.
        return "dead", "it is empty, and says not whose it is"
    if owner is None:
        return "unsure", "it does not say whose it is"
    if owner == NOBODY:
        return "dead", "its owner let go of it"
    if UNKNOWN_BOOT in (owner.boot, here.boot):
        return "unsure", f"nothing is known of process {owner.pid}"
    if is_same_boot:
        return "dead", f"process {owner.pid} is gone"
    if kind in LOCAL:
        return "dead", f"process {owner.pid} ran before the machine was restarted"
    where = kind or "a file system that is not known"
    return "unsure", f"process {owner.pid} ran before a restart, or on another machine: {where}"
