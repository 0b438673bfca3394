"""Running totals of live bytes, operations and steps, from a recorder's events."""

from __future__ import annotations

from umem.trace.events import Event, Mark, Op
from umem.trace.recording.meter import Meter, of_gpu
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

    Bytes are tensors' bytes. Workspace is included only in the peak of a GPU's pools, which their
    meter measures. Any thread may read the figures.

    Attributes:
        current: live bytes by group, see `GROUPS`.
        at_peak: live bytes by group, at the peak.
        peak_bytes: the most live bytes so far.
        pools_peak_bytes: the most bytes that arrays used in CuPy's pools up to the last operation,
            workspace included; None if they are not measured.
        op_count, step_count: operations and steps so far.
    """

    def __init__(self) -> None:
        self._alive = Alive()
        self.current = dict.fromkeys(NAMES, 0)
        self.at_peak = dict(self.current)
        self.peak_bytes = 0
        self.pools_peak_bytes: int | None = None
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
            for meter in of_gpu:
                self._look(meter, event.workspace_bytes)
            return
        alloc = self._alive.follow(event)
        if alloc is None:
            self.step_count += event == Mark("step")
            return
        self.current[GROUPS[alloc.kind]] += alloc.nbytes if alloc is event else -alloc.nbytes
        if self.current_bytes > self.peak_bytes:
            self.peak_bytes = self.current_bytes
            self.at_peak = dict(self.current)

    def rename(self, tensor: int, kind: str) -> None:
        """Count a live tensor with the group of another kind from now on."""
        alloc = self._alive.tensors[tensor]
        self.current[GROUPS[alloc.kind]] -= alloc.nbytes
        self.current[GROUPS[kind]] += alloc.nbytes
        self._alive.tensors[tensor] = alloc._replace(kind=kind)

    def _look(self, meter: Meter, workspace_bytes: int | None) -> None:
        """Add a meter's peak; nested operations have reset it."""
        if not meter.is_blind:
            held = meter.held()
            peak = max(held.peak, held.live + (workspace_bytes or 0))
            self.pools_peak_bytes = max(self.pools_peak_bytes or 0, peak)
