"""More managed memory than is free: on a card of one's own only, and only where it is asked for.

Plain memory takes all VRAM but a little, so that a few hundred MiB are too much already, on a card
of any size. Refused where somebody else holds memory of the card, or the host has too little.
"""

from __future__ import annotations

from typing import Any

import gpu_guard

import umem
from gpu_run_parts.calls import Calls, Given
from gpu_run_parts.pressure import digest, seconds
from umem.errors import DeviceError, LimitError
from umem.units import GIB, MIB, format_bytes

CALLS = call = Calls()
OVER = 1.5
PIECE_BYTES = 8 * GIB


def refuse_where_shared(given: Given, nbytes: int) -> None:
    """Raise where the card is not ours alone, or the host could not take it all.

    Raises:
        DeviceError: the card is not ours alone. LimitError: the host has too little memory.
    """
    who = gpu_guard.others(given.device)
    if who is not None:
        raise DeviceError(f"not oversubscribed: {who}")
    host = given.device.host_available_bytes()
    if host is not None and host < 4 * nbytes:
        raise LimitError(f"not oversubscribed: the host has {format_bytes(host)} left")


@call(seconds=60)
def oversubscribed(given: Given) -> Any:
    """A sum and a change of 1.5 times what is free, beside the same in pieces that fit."""
    small = given.quick or given.device.simulated
    left = 64 * MIB if small else 2 * GIB
    nbytes = int(OVER * left)
    refuse_where_shared(given, nbytes)
    xp = given.xp
    xp.get_default_memory_pool().free_all_blocks()
    ballast = []
    while (most := given.device.free_bytes - left) > 0:
        ballast.append(xp.cuda.Memory(min(most, PIECE_BYTES)))
    found: dict[str, Any] = {"free_bytes": given.device.free_bytes, "bytes": nbytes}
    count = 24
    for way in ("pieces", "managed", "lookahead"):
        with umem.managed():
            number = 1 if way == "pieces" else count
            chunks = [xp.arange(nbytes // count // 4, dtype="u4") for _ in range(number)]
            found[way] = rounds(given, chunks * (count // number), way)
            del chunks
        given.device.give_back()
    del ballast
    assert len({found[way]["digest"] for way in ("managed", "lookahead")}) == 1, found
    assert found["managed"]["sums"] == found["lookahead"]["sums"], found
    return found


def rounds(given: Given, chunks: list[Any], way: str) -> dict[str, Any]:
    """Go over the chunks four times; pages are counted in the last round where they can be."""
    look: Any = umem.lookahead(chunks) if way == "lookahead" else chunks
    sums: list[int] = []
    times = []

    def turn() -> None:
        for number, chunk in enumerate(look):
            chunk += number
            sums.append(int(chunk.sum()))

    for _ in range(4):
        times.append(seconds(given, turn))
    try:
        with umem.paging() as pages:
            turn()
        moved: Any = pages.to_json()
    except umem.UmemError as error:
        moved = str(error)
    return {"all_seconds": times, "pages": moved, "sums": sums, "digest": digest(*chunks)}
