"""Explain a step's peak in one sentence, and name the memory missing from it in another.

The bytes alive at the peak are summed by owner: a parameter, its gradient and its optimizer state
belong to the function that uses the parameter, every other tensor to the operation that made it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from umem._common.printable import quoted
from umem.trace.analysis.tensors import read_tensors
from umem.trace.events import Alloc, Mark, Op
from umem.trace.frameworks import names
from umem.trace.trace import Trace

_PLURALS = {
    "parameter": "parameters",
    "input": "input",
    "activation": "outputs",
    "stash": "saved arrays",
    "gradient": "gradients",
    "state": "statistics",
    "array": "arrays",
}
_SINGULAR = ("input", "state", "workspace")
ENOUGH = 0.5
"""An owner with at least this share of the peak explains it alone. A choice."""
MINOR = 0.1
"""Parts below this share of an owner's bytes are not named. A choice."""


class Share(NamedTuple):
    """The bytes of one owner at the peak, by kind, largest first."""

    owner: str
    parts: tuple[tuple[str, int], ...]

    @property
    def total_bytes(self) -> int:
        """Return the sum."""
        return sum(nbytes for _, nbytes in self.parts)


def why_peak(trace: Trace) -> str | None:
    """Return a sentence such as ``'EmbedID' gradients and Adam state are 61% of the peak``.

    Names the owner of the most bytes, and the next one if the first holds less than half. None for
    a trace without allocations.
    """
    held = peak_shares(trace)
    peak = sum(share.total_bytes for share in held)
    if not peak:
        return None
    first = _named(held[0])
    verb = "is" if first.endswith(_SINGULAR) and " and " not in first else "are"
    text = f"{first} {verb} {_percent(held[0], peak)} of the peak"
    if held[0].total_bytes < ENOUGH * peak and len(held) > 1:
        text += f", {_named(held[1])} {_percent(held[1], peak)}"
    return text


def missing(trace: Trace) -> str | None:
    """Return sentences on memory that a trace's peak leaves out; None if it is complete."""
    return _together(missing_workspace(trace), unseen(trace), _missing_beginning(trace))


def unseen(trace: Trace) -> str | None:
    """Return a sentence if operations of CuPy on a GPU are not in a trace; None otherwise."""
    if trace.backend != "cupy":
        return None
    used = {access.tensor for op in trace.ops for access in (*op.reads, *op.writes)}
    if all(event.tensor in used for event in trace.events if isinstance(event, Alloc)):
        return None
    is_of_network = any(op.phase != "array" for op in trace.ops)
    where = f" outside of {names()}'s functions" if is_of_network else ""
    return (
        "On a GPU, CuPy reports allocations but no kernels and copies. Operations"
        f"{where} have no time here. To see their time, record on a software GPU: "
        "umem run --software t4 --record."
    )


def _together(*sentences: str | None) -> str | None:
    return " ".join(filter(None, sentences)) or None


def _missing_beginning(trace: Trace) -> str | None:
    """Return a sentence if a single step was recorded without the previous step's gradients."""
    if trace.step_count != 1 or Mark("start") in trace.events:
        return None
    if not any(isinstance(event, Alloc) and event.kind == "gradient" for event in trace.events):
        return None
    return "The trace leaves out what the previous step kept during forward, such as gradients."


def missing_workspace(trace: Trace) -> str | None:
    """Return a sentence if workspace was not measured everywhere; None otherwise."""
    count, unmeasured = sum(1 for _ in trace.ops), trace.unmeasured_count
    if not unmeasured:
        return None
    if unmeasured == count:
        return "Workspace was not measured. The real peak is higher."
    unmeasured_text = f"{unmeasured:,} of {count:,} operations"
    return f"The workspace of {unmeasured_text} was not measured. The real peak may be higher."


def _percent(share: Share, peak: int) -> str:
    return f"{sum(nbytes for _, nbytes in _major(share)) / peak:.0%}"


def _major(share: Share) -> list[tuple[str, int]]:
    least = MINOR * share.total_bytes
    return [part for part in share.parts if part[1] >= least][:3]


def _named(share: Share) -> str:
    *before, last = [what for what, _ in _major(share)]
    text = f"{', '.join(before)} and {last}" if before else last
    return f"{quoted(share.owner)} {text}"


def peak_shares(trace: Trace) -> list[Share]:
    """Return the bytes alive at the first peak by owner, largest first."""
    belongs = _owners(trace)
    held: dict[str, Counter[str]] = {}
    for owner, what, nbytes in _held(trace, belongs):
        held.setdefault(owner, Counter())[what] += nbytes
    shares = [Share(owner, tuple(counts.most_common())) for owner, counts in held.items()]
    return sorted(shares, key=lambda share: -share.total_bytes)


def _held(trace: Trace, belongs: dict[int, tuple[str, str]]) -> Iterator[tuple[str, str, int]]:
    """Yield owner, kind and bytes of each tensor and of the workspace at the peak."""
    reading = read_tensors(trace)
    if not reading.total.any():
        return
    at = int(reading.total.argmax())
    for tensor in reading.tensors:
        if tensor.alive(at):
            alloc = _alloc(trace, tensor.birth)
            plain = _short(alloc.label.partition(".")[0]), _PLURALS[alloc.kind]
            yield (*belongs.get(tensor.birth, plain), alloc.nbytes)
    op = trace.events[at]
    if isinstance(op, Op) and op.workspace_bytes:
        by_im2col = op.kernels is not None and op.kernels.piece_bytes > 0
        yield _short(op.name), "im2col workspace" if by_im2col else "workspace", op.workspace_bytes


def _owners(trace: Trace) -> dict[int, tuple[str, str]]:
    """Map births to owner and kind, for parameters and the other tensors of their updates."""
    births: dict[int, int] = {}
    users: dict[int, str] = {}
    found: dict[int, tuple[str, str]] = {}
    for index, event in enumerate(trace.events):
        if isinstance(event, Alloc):
            births[event.tensor] = index
        elif isinstance(event, Op):
            touched = {births[a.tensor] for a in (*event.reads, *event.writes)}
            kinds = {birth: _alloc(trace, birth).kind for birth in touched}
            for birth in (birth for birth, kind in kinds.items() if kind == "parameter"):
                owner = users.setdefault(birth, _short(event.name))
                found[birth] = owner, "parameters"
                if event.phase == "update":
                    for other, kind in kinds.items():
                        word = f"{event.name} state" if kind == "state" else _PLURALS[kind]
                        found[other] = owner, word
    return found


def _alloc(trace: Trace, birth: int) -> Alloc:
    alloc = trace.events[birth]
    assert isinstance(alloc, Alloc)
    return alloc


def _short(name: str) -> str:
    """Drop "Function" from a name, as people call Chainer's ``LinearFunction`` "Linear"."""
    return name.removesuffix("Function") or name
