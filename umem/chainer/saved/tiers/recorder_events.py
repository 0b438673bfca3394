"""Events by which recorders, and so a virtual GPU, learn that arrays are offloaded and fetched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from umem.trace import Access, Hint
from umem.trace.recording import Measured, Reach, Recorder, active


class KnownAs(NamedTuple):
    """The kind and label of an array in recordings, which it gets again when fetched."""

    kind: str = "activation"
    label: str = "array"


def record_send(array: Any) -> KnownAs:
    """Emit to all recorders that an array's copy to the host begins; return its kind and label."""
    known = []
    for recorder in active():
        reach = recorder.find([array])[0] or recorder.access(array, *KnownAs())
        known.append(KnownAs(*reach[3:5]))
        _emit(recorder, "send", reach)
    return known[0] if known else KnownAs()


def record_fetch(array: Any, known: KnownAs) -> None:
    """Emit to all recorders that a new array is allocated and its fetch from the host begins.

    Raises:
        OutOfMemoryError: a virtual GPU has no room for the array.
    """
    for recorder in active():
        _emit(recorder, "fetch", recorder.follow([array], *known)[0])


def _emit(recorder: Recorder, action: str, reach: Reach) -> None:
    recorder.emit(Hint(action, (Access(*reach[:3]),), overlap=True))


@contextmanager
def unrecorded() -> Iterator[None]:
    """Hide the block's own copies from recorders; `record_send` and `record_fetch` emit them."""
    if not active():
        yield
        return
    measured = Measured()
    try:
        yield
    finally:
        measured.close()
