"""Bytes alive and operations run so far, from a recorder's events."""

from __future__ import annotations

from umem.trace.events import Alloc, Event, Free, Mark, Op

GROUPS = {
    "parameter": "parameters",
    "gradient": "gradients",
    "state": "state",
    "activation": "activations",
    "stash": "activations",
    "array": "activations",
    "input": "inputs",
}
"""What each kind of tensor is counted with."""
NAMES = tuple(dict.fromkeys(GROUPS.values()))


class Tally:
    """Counts the events that it is told; ``at_peak`` is what was alive, by group, at the peak.

    Bytes are of arrays: what an operation needs only while it runs is not among them. The
    figures may be read from any thread.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[str, int]] = {}
        self.current = dict.fromkeys(NAMES, 0)
        self.at_peak = dict(self.current)
        self.current_bytes = 0
        self.peak_bytes = 0
        self.op_count = 0
        self.step_count = 0

    def on_event(self, event: Event) -> None:
        """Count one event."""
        if isinstance(event, Op):
            self.op_count += 1
        elif isinstance(event, Alloc):
            self._hold(event.tensor, GROUPS[event.kind], event.nbytes)
        elif isinstance(event, Free):
            group, nbytes = self._sizes.pop(event.tensor)
            self.current[group] -= nbytes
            self.current_bytes -= nbytes
        elif event == Mark("step"):
            self.step_count += 1

    def _hold(self, tensor: int, group: str, nbytes: int) -> None:
        self._sizes[tensor] = group, nbytes
        self.current[group] += nbytes
        self.current_bytes += nbytes
        if self.current_bytes > self.peak_bytes:
            self.peak_bytes = self.current_bytes
            self.at_peak = dict(self.current)
