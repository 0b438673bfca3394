"""A background thread that writes while training continues, one piece of work at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable


class BackgroundWriter:
    """Runs one piece of work at a time, each in its own thread.

    The interpreter waits for the work at exit. Call the methods only from the thread that made it.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Start a piece of work after waiting for the previous one.

        Raises:
            any exception of the previous work; this one was not started.
        """
        self.wait()
        self._thread = threading.Thread(target=self._do, args=(work,), name="umem-snapshot")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the current work.

        Raises:
            any exception of the work, once.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error.with_traceback(None)  # a traceback would keep the arrays alive
