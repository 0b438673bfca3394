"""What recorders, and with them a virtual GPU, hear of arrays that are sent away and fetched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from umem.trace.events import Access, Hint
from umem.trace.recording.recorder import Measured, Reach, Recorder, active


class KnownAs(NamedTuple):
    """What an array was to recorders, as that is what it is again when it comes back."""

    kind: str = "activation"
    label: str = "array"


def hear_send(array: Any) -> KnownAs:
    """Tell that an array begins to be copied to the host; returns what it is to the first."""
    known = []
    for recorder in active():
        reach = recorder.find([array])[0] or recorder.access(array, *KnownAs())
        known.append(KnownAs(*reach[3:5]))
        _emit(recorder, "send", reach)
    return known[0] if known else KnownAs()


def hear_fetch(array: Any, known: KnownAs) -> None:
    """Tell of a new array, and that its contents begin to come from the host.

    Raises:
        OutOfMemoryError: a virtual GPU has no room for it.
    """
    for recorder in active():
        _emit(recorder, "fetch", recorder.follow([array], *known)[0])


def _emit(recorder: Recorder, action: str, reach: Reach) -> None:
    recorder.emit(Hint(action, (Access(*reach[:3]),), overlap=True))


@contextmanager
def unheard() -> Iterator[None]:
    """Have nobody hear of the copies themselves, which are told in other words."""
    if not active():
        yield
        return
    measured = Measured()
    try:
        yield
    finally:
        measured.close()
