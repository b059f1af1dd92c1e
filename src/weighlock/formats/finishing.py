"""A file being put in place while its maker goes on. Knows threads; not what is done in them."""

import logging
import threading
from collections.abc import Callable

__all__ = ["Finish"]


class Finish:
    """A file being put in place in the background. The interpreter does not exit before it is."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._error: BaseException | None = None
        # Not a daemon: interpreter exit joins it, so that what was written is not lost.
        self._thread: threading.Thread | None = threading.Thread(
            target=self._run, name="weighlock-finish"
        )
        try:
            self._thread.start()
        except RuntimeError:  # the system has no more threads
            self._thread = None
            self._run()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error
            # Nobody may ever ask for the result.
            logging.getLogger("weighlock").error("not in place: %s", error)  # noqa: TRY400

    def done(self) -> bool:
        """Whether the file is in place, or has failed to be."""
        return self._thread is None or not self._thread.is_alive()

    def result(self, timeout_s: float | None = None) -> None:
        """Wait until the file is in place; raise what went wrong if it is not going to be.

        Raises:
            TimeoutError: it is neither in place nor failed after so many seconds.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
        if not self.done():
            raise TimeoutError(f"the file is not in place after {timeout_s} s")
        if self._error is not None:
            raise self._error
