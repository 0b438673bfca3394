"""What one call of a pass takes, and whether that may go."""

from __future__ import annotations

from umem.chainer.recompute.below import What
from umem.chainer.recompute.online.late_call import LateCall
from umem.chainer.saved.tiers.tier import Tier


class CallBytes:
    """One call's bytes.

    Attributes:
        call: the call.
        group: the call whose memory its outputs are on: its own number, or that of the one that
            made what they are views of.
        near: the values that it is made of.
        cost: seconds to make it again, of those.
        read_rank: of the function that backward reads it for first; -1: for none.
        views: the calls whose outputs are on its memory.
        output_bytes, stash_bytes: what they take while they are there; of a stash, what can go.
        is_kept: whether backward reads its outputs, or a view of them.
        is_there: whether its outputs are.
        has_stash: whether its stash is.
        coming_bytes: what is on its way back of it.
    """

    __slots__ = (
        "call", "coming_bytes", "cost", "group", "has_stash", "is_kept", "is_there", "near",
        "output_bytes", "read_rank", "stash_bytes", "views",
    )  # fmt: skip

    def __init__(self, call: LateCall, near: tuple[int, ...], cost: float) -> None:
        self.call, self.near, self.cost = call, near, cost
        self.group = call.index
        self.views: list[LateCall] = []
        self.output_bytes = self.stash_bytes = self.coming_bytes = 0
        self.read_rank = -1
        self.is_kept = self.is_there = self.has_stash = False

    def made(self, output_bytes: int, stash_bytes: int) -> None:
        """It has run."""
        self.output_bytes, self.stash_bytes = output_bytes, stash_bytes
        self.is_there, self.has_stash = True, stash_bytes > 0
        self.coming_bytes = 0

    @property
    def nbytes(self) -> int:
        """What is there of it, or about to be."""
        outputs = self.output_bytes if self.is_there else 0
        return outputs + (self.stash_bytes if self.has_stash else 0) + self.coming_bytes

    @property
    def holds_outputs(self) -> bool:
        """True where its outputs are not gone once no variable holds them."""
        return self.is_kept or not self.call.again

    @property
    def may_run_again(self) -> bool:
        """True where it may run a second time, and what is on its memory."""
        return self.call.again and self.may_move

    @property
    def may_move(self) -> bool:
        """True where what is on its memory may run a second time."""
        return not self.views or all(view.again for view in self.views)

    @property
    def is_held(self) -> bool:
        """True where the user holds its outputs as variables."""
        return self.call.is_held() or any(view.is_held() for view in self.views)

    def keep(self) -> None:
        """Backward reads it."""
        self.is_kept = True

    def read(self, rank: int) -> None:
        """A function of this rank reads it in backward."""
        self.read_rank = max(self.read_rank, rank)

    def outputs_died(self) -> None:
        """Nobody holds its outputs."""
        self.is_there = False

    def join(self, group: CallBytes) -> None:
        """Its outputs are on the memory of another."""
        self.group = group.group

    def view(self, call: LateCall) -> None:
        """A call has made a view of its outputs."""
        self.views.append(call)

    def drop(self) -> None:
        """Let all go."""
        for call in (self.call, *self.views):
            call.drop()
        self.call.drop_stash()
        self.call.pack()
        self.is_there = self.has_stash = False

    def send(self, tier: Tier) -> bool:
        """Have a tier below take what is there of it, and let that go; whether it has taken all."""
        call = self.call
        if not call.has_func:
            return False
        whats: list[What] = ["value"] if self.is_there and self.holds_outputs else []
        if self.has_stash and not call.kind.draws:
            whats.append("stash")
        for what in whats:
            call.send(tier, what)
        if not all(what in call.below for what in whats):
            return False
        for what in whats:
            call.leave(what)
        self.drop()
        return True

    def fetch(self) -> None:
        """Begin to bring back what was sent."""
        for what in self.call.below:
            self.call.fetch(what)
        self.coming_bytes = self.below_bytes

    def came_up(self) -> None:
        """What was sent is back."""
        self.is_there = self.is_there or "value" in self.call.below
        self.has_stash = self.has_stash or "stash" in self.call.below
        self.coming_bytes = 0

    @property
    def below_bytes(self) -> int:
        """What has to come back of it."""
        below = self.call.below
        outputs = self.output_bytes if "value" in below and not self.is_there else 0
        return outputs + (self.stash_bytes if "stash" in below and not self.has_stash else 0)
