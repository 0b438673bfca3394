"""Recording of a script's step at parts of its batch, so that its trace scales to other sizes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import umem
from umem.chainer.dial.as_it_was import as_it_was
from umem.chainer.dial.diets import batch_of
from umem.chainer.tap import Proceed, Subscriber, subscribe, unsubscribe
from umem.errors import ScalingError, UmemError
from umem.trace.recording.kept_steps import Kept
from umem.trace.trace import Trace


class TwoSizes(Subscriber):
    """Records the first update at parts of its batch, before the update itself runs.

    Everything that the recorded updates change is restored, so that the script trains as without.

    Args:
        sizes: in samples, taken from the beginning of the batch; see `umem.record_at`.

    Attributes:
        complete: called once with the recording, if there is one, before the update itself.
    """

    place = -6  # around all that an update does

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes, self._process = tuple(sizes), os.getpid()
        self._is_over = False
        self._kept: Kept | None = None
        self._why_not = "no optimizer of Chainer's updated"
        self.complete: Callable[[Kept], None] | None = None

    def start(self) -> None:
        """Watch for the first update from now on."""
        subscribe(self)

    def finish(self) -> Kept | None:
        """Stop watching and return the recording; None in a forked child process.

        Raises:
            ScalingError: nothing was recorded; names the reason.
        """
        unsubscribe(self)
        if os.getpid() != self._process:
            return None
        if self._kept is None:
            raise ScalingError(
                f"nothing was recorded: {self._why_not}. Record the script at two of its own batch "
                "sizes instead, one run each, and give both to umem choose --sizes 4,8"
            )
        return self._kept

    def step(self, proceed: Proceed, method: Any, *args: Any, **kwargs: Any) -> None:
        """Handle an update: record it first if it is the first one, then run it."""
        if not self._is_over:
            self._is_over = True
            self._record(method, *args, **kwargs)
            if self._kept is not None and self.complete is not None:
                self.complete(self._kept)
        proceed(method, *args, **kwargs)

    def _record(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Record an update at the sizes, and restore the model and the optimizer.

        Where that fails, nothing is raised: the reason is kept for `finish`.
        """
        size = 0 if kwargs else batch_of(args)
        if size < max(self._sizes):
            given = f"a batch of {size}" if size else "no batch"
            self._why_not = (
                f"the first update is given {given}, where optimizer.update(lossfun, *arrays) has "
                f"one of at least {max(self._sizes)}"
            )
            return
        try:
            trace = recorded_at_parts(optimizer, args, self._sizes)
        except UmemError as error:
            self._why_not = str(error).rstrip(".")
            return
        except Exception as error:  # the script's own: it may need its whole batch
            what = f"{type(error).__name__}: {error}"
            self._why_not = f"the loss does not take a part of the batch ({what})"
            return
        self._kept = Kept(trace, f"at sizes {', '.join(map(str, self._sizes))}")


def recorded_at_parts(optimizer: Any, args: Sequence[Any], sizes: Sequence[int]) -> Trace:
    """Record an update at parts of its batch; the model and the optimizer are as before then.

    Args:
        args: those of the update, a loss function and the batch's arrays.
        sizes: how many samples each part has.

    Raises what `umem.record_at` and the update raise.
    """
    loss, *arrays = args

    def step(part: int) -> None:
        optimizer.update(loss, *(array[:part] for array in arrays))

    with as_it_was(optimizer.target, optimizer):
        if any(param.array is None for param in optimizer.target.params()):
            step(sizes[0])  # makes them: on CuPy the recordings would differ by where that happens
        return umem.record_at(step, sizes)
