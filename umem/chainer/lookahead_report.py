"""What lookahead prefetch has done, for a person and for a program."""

from __future__ import annotations

from dataclasses import dataclass

from umem.units import format_bytes


class LookaheadWarning(UserWarning):
    """Lookahead prefetch does not help for a while, or any more; results are not concerned."""


@dataclass(frozen=True)
class LookaheadReport:
    """What `LookaheadPrefetch` has done so far.

    Attributes:
        iteration_count: updates seen.
        followed_count: iterations that took an order that was known.
        mismatch_count: iterations that took another, and were not helped from there on.
        fetched_bytes, sent_bytes: asked to be on the GPU, and on the host.
        off: why it has stopped for good; None while it has not.
        simulated: whether on a virtual GPU.
    """

    simulated: bool = False
    iteration_count: int = 0
    followed_count: int = 0
    mismatch_count: int = 0
    fetched_bytes: int = 0
    sent_bytes: int = 0
    off: str | None = None

    def __str__(self) -> str:
        simulated = " (simulated)" if self.simulated else ""
        lines = [
            f"iterations   {self.iteration_count}: {self.followed_count} in a known order, "
            f"{self.mismatch_count} that left it",
            f"to the GPU   {format_bytes(self.fetched_bytes)}{simulated}",
            f"to the host  {format_bytes(self.sent_bytes)}{simulated}",
        ]
        return "\n".join(lines if self.off is None else [*lines, f"off          {self.off}"])
