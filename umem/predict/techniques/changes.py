"""Changes of a step other than recomputation, and the trace of the changed step."""

from __future__ import annotations

from dataclasses import dataclass

from umem.predict.techniques.half_widths import in_half
from umem.predict.techniques.micro_batches import SHOWN, accumulated
from umem.predict.techniques.small_states import with_small_states
from umem.trace.analysis.capping import under_cap
from umem.trace.axes import StepSize, batch_of, with_batch
from umem.trace.trace import Trace


@dataclass(frozen=True)
class Changes:
    """Techniques that change the allocations of a step, any of them together.

    Attributes:
        micro_batch: the size of a micro-batch; None: the batch is not split.
        small_states: whether the optimizer's states have 8 bits.
        half: whether parameters and activations have 16 bits.
        cap_bytes: a cap on the workspace of convolutions and poolings; None: no cap.
        shown: the most micro-batches of a step that the trace has; the others are left out.
    """

    micro_batch: int | None = None
    small_states: bool = False
    half: bool = False
    cap_bytes: int | None = None
    shown: int = SHOWN

    def of(self, recorded: Trace, size: StepSize | None) -> Trace:
        """Return the step with all changes but half precision, which `on_device` makes.

        Raises:
            ScalingError, SizeError: see `Trace.at`. StateError: a change has nothing to change.
        """
        trace = recorded if size is None else recorded.at(size)
        if self.micro_batch is not None:
            micro = self.micro_batch if size is None else with_batch(size, self.micro_batch)
            passes = min(self.shown, self.passes(size))
            trace = accumulated(recorded.at(micro), trace, passes)
        if self.small_states:
            trace = with_small_states(trace)
        return trace if self.cap_bytes is None else under_cap(trace, self.cap_bytes)

    def on_device(self, trace: Trace) -> Trace:
        """Return a changed step in half precision if asked for; as it is otherwise.

        Args:
            trace: from `of`, corrected for the device that it runs on.

        Raises:
            StateError: no parameter could have 16 bits.
        """
        return in_half(trace) if self.half else trace

    def passes(self, size: StepSize | None) -> int:
        """Return the number of micro-batches of a step."""
        if self.micro_batch is None or size is None:
            return 1
        return -(-batch_of(size) // self.micro_batch)
