"""Running totals of live bytes, operations and steps, from a recorder's events."""

from __future__ import annotations

from umem.trace.events import Event, Mark, Op
from umem.trace.walk import Alive

GROUPS = {
    "parameter": "parameters",
    "gradient": "gradients",
    "state": "state",
    "activation": "activations",
    "stash": "activations",
    "array": "activations",
    "input": "inputs",
}
"""The group that each kind of tensor is counted with."""
NAMES = tuple(dict.fromkeys(GROUPS.values()))


class Tally:
    """Counts events: live bytes by group, their peak, operations and steps.

    Bytes are of tensors: the workspace of operations is not included. The figures may be read from
    any thread.

    Attributes:
        current: live bytes by group, see `GROUPS`.
        at_peak: live bytes by group, at the peak.
        peak_bytes: the most live bytes so far.
        op_count, step_count: operations and steps so far.
    """

    def __init__(self) -> None:
        self._alive = Alive()
        self.current = dict.fromkeys(NAMES, 0)
        self.at_peak = dict(self.current)
        self.peak_bytes = 0
        self.op_count = 0
        self.step_count = 0

    @property
    def current_bytes(self) -> int:
        """Return the live bytes of all groups."""
        return self._alive.nbytes

    def on_event(self, event: Event) -> None:
        """Add one event to the figures."""
        if isinstance(event, Op):
            self.op_count += 1
            return
        alloc = self._alive.follow(event)
        if alloc is None:
            self.step_count += event == Mark("step")
            return
        self.current[GROUPS[alloc.kind]] += alloc.nbytes if alloc is event else -alloc.nbytes
        if self.current_bytes > self.peak_bytes:
            self.peak_bytes = self.current_bytes
            self.at_peak = dict(self.current)
