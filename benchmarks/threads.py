"""Work of several threads, of which none may fail unnoticed: who does less is done sooner."""

from concurrent.futures import ThreadPoolExecutor

__all__ = ["at_once"]


def at_once(work, givens):
    """Call `work` with each of the givens, all at the same time; raises what one of them raised."""
    givens = list(givens)
    with ThreadPoolExecutor(len(givens)) as threads:
        for begun in [threads.submit(work, given) for given in givens]:
            begun.result()
