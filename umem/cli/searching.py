"""The part of ``umem choose`` that waits: a line for each result as it comes, and what is left."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.status import Status
from rich.text import Text

from umem.choosing import Search
from umem.cli import saying
from umem.devices.specs import GpuSpec
from umem.reports.choice_found import found_of_gpu, found_of_technique
from umem.techniques.options import Option
from umem.techniques.registry import TECHNIQUES

INTERRUPTED = 130
"""The exit status after Ctrl-C, as shells have it."""
Say = Callable[[Text], None]


def carry_out(search: Search, say: Say | None, width: int) -> bool:
    """Try everything, telling ``say`` of each result as it comes; whether it came to its end.

    Ctrl-C ends it: what is left is said on standard error.
    """
    status = _Progress(search, say, width)
    try:
        with status:
            for gpu, option in search.found():
                status.on(gpu, option)
    except KeyboardInterrupt:
        saying.say(f"\nInterrupted: {_left(search)}", err=True)
        return False
    return True


def _left(search: Search) -> str:
    if len(search.gpus) > 1:
        left = [gpu.name for gpu in search.gpus if not search.is_done(gpu)]
        counted = f"{len(left)} of {len(search.gpus)} GPUs"
        said = f"not everything was tried on {counted}: {', '.join(left)}."
        return said if left else "everything was tried."
    done = {option.name for option in search.tried(search.gpus[0])}
    left = [technique.name for technique in TECHNIQUES if technique.name not in done]
    said = f"{len(left)} of {len(TECHNIQUES)} techniques were not tried: {'; '.join(left)}."
    return said if left else "everything was tried."


class _Progress:
    """A line that moves where standard error is a terminal, and lines of results above it."""

    def __init__(self, search: Search, say: Say | None, width: int) -> None:
        self._search, self._say, self._width = search, say, width
        self._is_one = len(search.gpus) == 1
        self._count = 0
        self._status: Status = Console(stderr=True).status(self._text())

    def __enter__(self) -> None:
        self._status.start()

    def __exit__(self, *exc: object) -> None:
        self._status.stop()

    def on(self, gpu: GpuSpec, option: Option) -> None:
        """Something was found."""
        self._count += 1
        self._status.update(self._text())
        line = self._line(gpu, option)
        if line is not None and self._say is not None:
            self._status.stop()  # or it would catch what is meant for standard output
            self._say(line)
            self._status.start()

    def _line(self, gpu: GpuSpec, option: Option) -> Text | None:
        """For one GPU each technique; of several each GPU, as soon as something is sure."""
        if self._is_one:
            return found_of_technique(option, self._width)
        if option.name == TECHNIQUES[0].name:
            return found_of_gpu(gpu.name, option, self._width) if option.reason is None else None
        choice = self._search.choice(gpu)
        fits_as_it_is = any(found.name == TECHNIQUES[0].name for found in choice.options)
        if fits_as_it_is or not self._search.is_done(gpu):
            return None
        return found_of_gpu(gpu.name, choice.best, self._width)

    def _text(self) -> str:
        total = len(self._search.gpus) * len(TECHNIQUES)
        where = "" if self._is_one else f" on {len(self._search.gpus)} GPUs"
        return f"Trying every technique{where}: {self._count} of {total} (Ctrl-C ends it)"
