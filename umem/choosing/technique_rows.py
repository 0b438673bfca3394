"""Every technique that `umem.choose` tries; a new one of the library is one line here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, Literal

from umem.choosing.technique import Technique
from umem.errors import StateError
from umem.memory import enable, preset

CAP = "16MiB"
"""The cap on workspace: the largest of the caps that ``umem report`` proposes (64, 16, 4 and 1 MiB)
that does not add to the peak of ResNet50 at 224 px."""


def _chainer() -> Any:
    """Return `umem.chainer`, which imports Chainer."""
    return import_module("umem.chainer")


def nothing(stack: ExitStack) -> None:
    """Turn nothing on."""


def mode(
    stack: ExitStack, name: Literal["managed", "hybrid"], prefetch: bool | None = None
) -> None:
    """Turn a mode on, as ``umem run --mode`` does."""
    stack.enter_context(enable(name, prefetch=prefetch))


def recompute(stack: ExitStack, budget: str, **options: Any) -> None:
    """Turn recomputation on, as ``umem run --recompute`` does."""
    stack.enter_context(_chainer().Recompute(budget, **options))


def workspace(stack: ExitStack, budget: str) -> None:
    """Turn on a cap on workspace, and recomputation if a step exceeds a budget."""
    stack.callback(_chainer().workspace(CAP).enable().disable)
    recompute(stack, budget)


def streaming(stack: ExitStack) -> None:
    """Keep large arrays in managed memory on the host, where the GPU reads them."""
    from umem.devices.cuda import LargeArrays  # imports CuPy

    mode(stack, "managed")
    stack.enter_context(LargeArrays(lambda array: preset(array, "streaming")))


def offload(stack: ExitStack) -> None:
    """Offload all saved tensors."""
    stack.enter_context(_chainer().Offload())


def lookahead(stack: ExitStack) -> None:
    """Prefetch managed memory by a plan."""
    mode(stack, "managed")
    stack.enter_context(_chainer().LookaheadPrefetch())


def half(stack: ExitStack) -> None:
    """Train in half precision, from each ``optimizer.setup`` on."""
    convert = _chainer().half_precision
    stack.enter_context(_chainer().AtSetup(lambda optimizer, link: convert(link, optimizer)))


def eight_bit(stack: ExitStack) -> None:
    """Keep states in 8 bits, from each ``optimizer.setup`` on."""
    convert = _chainer().optimizers.quantize_states
    stack.enter_context(_chainer().AtSetup(lambda optimizer, link: convert(optimizer)))


def accumulate(stack: ExitStack) -> None:
    """Accumulate the gradients of two halves of each batch."""
    stack.enter_context(_chainer().HalvedBatches())


def together(stack: ExitStack, parts: tuple[Callable[[ExitStack], None], ...]) -> None:
    """Turn several techniques on, one after another."""
    for turn_on in parts:
        turn_on(stack)


_least = partial(recompute, budget="min")
_managed = partial(mode, name="managed")
_paging = partial(Technique, is_paging=True)
_RUN, _MIN = "umem run", "umem run --recompute min"
_HALF = "umem.chainer.half_precision(model, optimizer)"
_SMALL = "umem.chainer.optimizers.quantize_states(optimizer)"
_LOOK = "with umem.chainer.LookaheadPrefetch():"

TECHNIQUES = [
    Technique("nothing", _RUN, nothing, needs_chainer=False),
    Technique(
        "workspace, recompute card", f"{_RUN} --workspace {CAP} --recompute card",
        partial(workspace, budget="card"),
    ),
    Technique("recompute card", f"{_RUN} --recompute card", partial(recompute, budget="card")),
    Technique("recompute 50%", f"{_RUN} --recompute 50%", partial(recompute, budget="50%")),
    Technique("recompute min", _MIN, _least),
    Technique(
        "recompute min, offload",
        'with umem.chainer.Recompute("min", offload=True):',
        partial(recompute, budget="min", offload=True),
    ),
    Technique("offload", "with umem.chainer.Offload():", offload),
    Technique("half precision", _HALF, half),
    Technique("8-bit states", _SMALL, eight_bit),
    Technique(
        "accumulate", "umem.chainer.accumulate(optimizer, micro_batch=BATCH // 2)", accumulate
    ),
    _paging("managed", f"{_RUN} --mode managed", _managed, needs_chainer=False),
    _paging(
        "managed, prefetch",
        f"{_RUN} --mode managed --prefetch",
        partial(mode, name="managed", prefetch=True),
        needs_chainer=False,
    ),
    _paging(
        "managed, streaming",
        f'{_RUN} --mode managed  # umem.preset(x, "streaming") of large arrays',
        streaming,
        needs_chainer=None,
    ),
    _paging("lookahead", f"{_RUN} --mode managed  # {_LOOK}", lookahead),
    _paging("hybrid", f"{_RUN} --mode hybrid", partial(mode, name="hybrid"), needs_chainer=False),
    Technique(
        "8-bit states, recompute min", f"{_MIN}  # {_SMALL}",
        partial(together, parts=(eight_bit, _least)),
    ),
    _paging(
        "recompute min, managed", f"{_MIN} --mode managed",
        partial(together, parts=(_managed, _least)),
    ),
    _paging(
        "recompute min, lookahead", f"{_MIN} --mode managed  # {_LOOK}",
        partial(together, parts=(lookahead, _least)),
    ),
    Technique(
        "8-bit, half, recompute min", f"{_MIN}  # {_HALF}, {_SMALL}",
        partial(together, parts=(eight_bit, half, _least)),
    ),
]  # fmt: skip
"""All techniques, the least work for the user first: rows of equal times keep this order."""


def within(budget: str) -> list[Technique]:
    """Return the techniques that keep a program within a budget of VRAM on a larger GPU.

    Recomputation that fits the card is made to fit the budget. Managed memory is left out, because
    it uses all of the VRAM.

    Args:
        budget: such as "8GiB".
    """
    on_card = {"workspace, recompute card": workspace, "recompute card": recompute}
    return [
        replace(
            row,
            name=row.name.replace("card", budget),
            line=row.line.replace("card", budget),
            turn_on=partial(on_card[row.name], budget=budget),
        )
        if row.name in on_card
        else row
        for row in TECHNIQUES
        if not row.is_paging
    ]


def register_technique(technique: Technique) -> None:
    """Add a technique for `umem.choose` and ``umem choose``, which try it after all others.

    Raises:
        StateError: a technique with this name is already registered; the list is unchanged.
    """
    if any(known.name == technique.name for known in TECHNIQUES):
        raise StateError(f"technique {technique.name!r} is already registered: choose another name")
    TECHNIQUES.append(technique)
