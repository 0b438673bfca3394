"""One call of a forward pass, with its backward: what a planning problem is made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CallFacts:
    """One call of a forward pass, and its backward.

    Attributes:
        label: the function's name.
        nbytes: bytes of the memory that its outputs lie in, as far as it has made it.
        cost: what running it once more costs.
        grad_bytes: bytes of the gradient of its outputs.
        alias: the call whose output its output is a view of.
        stash_bytes: what it keeps on itself for its backward, and could make again.
        drawn_bytes: what it has drawn at random and keeps on itself: it is never drawn again.
        mask_bytes, packed_bytes: those of them that are a dropout's mask, and what it takes as
            one bit an element.
        again: whether it may run twice; if not, nothing that it makes is ever dropped.
        workspace_bytes, backward_workspace_bytes: what it needs only while it runs.
        stays_bytes: gradients of parameters that its backward is the first to make.
        needs: the calls whose outputs its backward reads.
        dead: whether backward does not come to it.
    """

    label: str
    nbytes: int
    cost: float
    grad_bytes: int
    alias: int | None = None
    stash_bytes: int = 0
    drawn_bytes: int = 0
    mask_bytes: int = 0
    packed_bytes: int = 0
    again: bool = True
    workspace_bytes: int = 0
    backward_workspace_bytes: int = 0
    stays_bytes: int = 0
    needs: tuple[int, ...] = ()
    dead: bool = False
