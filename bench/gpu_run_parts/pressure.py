"""What umem does about pressure, beside plain memory, without asking for more than there is.

Pools are limited, pages are moved to the host first, and umem is told of less VRAM than the GPU
has. All managed memory stays within the budget of gpu_guard.py. Each returns seconds (the least of
some rounds), bytes, and whether results have the bits of plain memory's.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

import umem
from gpu_run_parts.calls import Calls, Given
from umem.units import MIB

CALLS = call = Calls()
CHAINER = ("chainer", "scipy")
ROUNDS, LEARNED = 5, 2


def sized(given: Given, full: int, quick: int) -> int:
    """Choose how much, in MiB; in bytes."""
    return (quick if given.quick or given.device.simulated else full) * MIB


def seconds(given: Given, action: Callable[[], Any]) -> float:
    """Time an action until the GPU has finished it."""
    given.device.synchronize()
    start = time.perf_counter()
    action()
    given.device.synchronize()
    return time.perf_counter() - start


def digest(*arrays: Any) -> str:
    """Name the bits of arrays."""
    return hashlib.sha1(b"".join(array.get().tobytes() for array in arrays)).hexdigest()


@contextlib.contextmanager
def as_if_vram_were(given: Given, nbytes: int) -> Iterator[None]:
    """Have umem plan for a smaller GPU: on a large one everything has room, and nothing moves."""
    driver = given.device.driver
    before = driver.vram_bytes
    driver.vram_bytes = nbytes
    try:
        yield
    finally:
        driver.vram_bytes = before


def work(given: Given, nbytes: int) -> str:
    """Compute with what reads in order, at random, and in tiles; its bits."""
    xp = given.xp
    x = xp.arange(nbytes // 16, dtype="f4").reshape(-1, 256) % 251
    y = x[::-1] * 3 + x
    order = (xp.arange(len(x)) * 7919) % len(x)
    return digest(y[order], xp.sort(x[:64], axis=1), x[:1024] @ x[:256].T, y.sum(axis=0))


@call(seconds=30)
def results(given: Given) -> Any:
    """Every mode computes what plain memory computes, with its pages on the host first, too."""
    nbytes = sized(given, 512, 8)
    wanted = work(given, nbytes)
    modes: dict[str, Callable[[], Any]] = {
        "unmanaged": umem.unmanaged,
        "managed": umem.managed,
        "managed, prefetch": partial(umem.managed, prefetch=True),
        "hybrid": umem.hybrid,
    }
    for name, mode in modes.items():
        with mode():
            assert work(given, nbytes) == wanted, name
    with umem.managed():
        x = given.xp.arange(nbytes // 4, dtype="u4")
        for _ in range(2):
            umem.prefetch(x, "cpu")
            x += 1
            umem.prefetch(x)
        assert np.array_equal(x.get(), np.arange(nbytes // 4, dtype="u4") + 2)
    return {"bytes": nbytes, "modes": list(modes)}


@call(needs=("click",), seconds=30)
def bandwidth(given: Given) -> Any:
    """Copies, prefetches and faults each way, in bytes a second, as bench/cuda_constants.py."""
    import cuda_constants

    bench = cuda_constants.Bench(given.device, sized(given, 256, 8))
    rows = cuda_constants.measure(bench, 3)
    keys = ("nbytes", "bytes_per_second", "repeat_seconds")
    return {row["name"]: {key: row[key] for key in keys} for row in rows}


def swept(given: Given, way: str, count: int, nbytes: int) -> dict[str, Any]:
    """Smooth a vector in blocks, in rounds: resident, faulted in, or with its order told."""
    xp, found = given.xp, []
    with umem.managed():
        old, new = ([xp.arange(nbytes // 4, dtype="f4") % 13 for _ in range(count)] for _ in "ab")
        given.device.synchronize()
        room = given.device.usage().reserved_bytes * (100 if way != "told" else 2) // 3
        with as_if_vram_were(given, room):
            look: Any = umem.lookahead()

            def round_() -> None:
                for i in range(count):
                    if way == "told":
                        look.uses(old[i - 1], old[i], new[i])
                    xp.multiply(old[i], 0.5, out=new[i])
                    new[i][:1] += old[i - 1][-1:]
                look.step()

            for _ in range(ROUNDS):
                if way == "faults":
                    umem.prefetch([old, new], "cpu")
                found.append(seconds(given, round_))
        return {
            "seconds": min(found[LEARNED:]),
            "all_seconds": found,
            "digest": digest(*new),
            "to_gpu_bytes": look.fetched_bytes,
            "to_host_bytes": look.sent_bytes,
            "off": look.off,
        }


@call(seconds=40)
def lookahead(given: Given) -> Any:
    """A loop over managed blocks; told, umem keeps to two thirds of what the blocks take."""
    count, nbytes = (6, 2 * MIB) if given.quick or given.device.simulated else (24, 32 * MIB)
    found = {way: swept(given, way, count, nbytes) for way in ("resident", "faults", "told")}
    assert len({one["digest"] for one in found.values()}) == 1, found
    assert found["told"]["off"] is None and found["told"]["to_gpu_bytes"] > 0, found
    return found


def training(given: Given) -> tuple[Any, Callable[[], float]]:
    """Make a network with saved tensors of some size; a step of it gives its loss."""
    from gpu_run_parts.chainer_calls import batch, chainer, network

    small = given.quick or given.device.simulated
    width, rows = (64, 2048) if small else (1024, 16384)
    model = network(width, 6)
    optimizer = chainer().optimizers.MomentumSGD(0.01).setup(model)
    x, t = batch(rows, width)

    def step() -> float:
        optimizer.update(model, x, t)
        return float(model.loss.array)

    return model, step


def trained(given: Given, block: Any, between: Callable[[Any], None] | None = None) -> Any:
    """Train in a block; seconds a step, losses, and the most that CuPy's pool has used."""
    model, step = training(given)
    pool = given.xp.get_default_memory_pool()
    losses: list[float] = []
    times: list[float] = []
    with block:
        for number in range(ROUNDS + 2):
            if between is not None:
                between(model)
            if number == 1:
                pool.free_all_blocks()
            times.append(seconds(given, lambda: losses.append(step())))
    return {
        "seconds": min(times[LEARNED:]),
        "all_seconds": times,
        "losses": losses,
        "reserved_bytes": pool.total_bytes(),
        "weights": digest(*(p.array for _, p in sorted(model.namedparams()))),
    }


def beside_plain(given: Given, **blocks: Callable[[], Any]) -> dict[str, Any]:
    """Train plainly and in each block; all have to learn the same bits."""
    found = {"plain": trained(given, contextlib.nullcontext())}
    for name, block in blocks.items():
        given.xp.get_default_memory_pool().free_all_blocks()
        made = block()
        found[name] = trained(given, made)
        report = getattr(made, "report", None)
        found[name]["report"] = None if report is None else str(report())
        assert found[name]["weights"] == found["plain"]["weights"], name
    return found


@call(needs=CHAINER, seconds=40)
def lookahead_prefetch(given: Given) -> Any:
    """Training in managed memory: resident, faulted in, by plan, and by plan without discards.

    What operations wait for discards is the difference of the last two.
    """
    from gpu_run_parts.chainer_calls import chainer

    chainer()
    from umem.devices.cuda import Arena
    from umem.errors import LookaheadWarning

    found = {}
    for way in ("resident", "faults", "plan", "plan, no discards"):
        discards = Arena.discard_free
        with umem.managed(), warnings.catch_warnings():
            warnings.simplefilter("ignore", LookaheadWarning)
            if way in ("resident", "faults"):
                to_host = (lambda model: umem.prefetch(model, "cpu")) if way == "faults" else None
                found[way] = trained(given, contextlib.nullcontext(), to_host)
                reserved = given.device.usage().reserved_bytes
            else:
                if way != "plan":
                    Arena.discard_free = lambda *_: 0  # type: ignore[method-assign]
                ahead = umem.chainer.LookaheadPrefetch()
                try:
                    with as_if_vram_were(given, reserved // 2):
                        found[way] = trained(given, ahead)
                finally:
                    Arena.discard_free = discards  # type: ignore[method-assign]
                found[way]["report"] = vars(ahead.report())
        given.device.give_back()
    assert len({one["weights"] for one in found.values()}) == 1, found
    return found


@call(seconds=20)
def hybrid_spill(given: Given) -> Any:
    """What has no room lies on the host and is read there: by a headroom, and by a pool's limit."""
    nbytes, everything = sized(given, 256, 8), given.device.vram_bytes - MIB
    modes: dict[str, Callable[[], Any]] = {
        "plain": umem.unmanaged,
        "host": partial(umem.hybrid, headroom=everything),
        "migrate": partial(umem.hybrid, spill="migrate", headroom=everything),
        "pool limit": partial(limited, given, nbytes // 2),
    }
    found: dict[str, Any] = {}
    for name, mode in modes.items():
        with mode():
            parts = [given.xp.arange(nbytes // 16, dtype="u4") for _ in range(4)]
            total = sum(int(part.sum()) for part in parts)
            is_managed = given.device.driver.is_managed
            spilled = sum(part.nbytes for part in parts if is_managed(part.data.ptr))
            times = [seconds(given, partial(sums, parts)) for _ in range(3)]
            parts.clear()
        found[name] = {"seconds": min(times), "spilled_bytes": spilled, "total": total}
        given.device.give_back()
    assert len({one["total"] for one in found.values()}) == 1, found
    wanted = {"plain": 0, "host": nbytes, "migrate": nbytes, "pool limit": nbytes // 2}
    assert all(found[name]["spilled_bytes"] >= least for name, least in wanted.items()), found
    return found


def sums(parts: list[Any]) -> list[Any]:
    """Read all of some arrays."""
    return [part.sum() for part in parts]


@contextlib.contextmanager
def limited(given: Given, nbytes: int) -> Iterator[None]:
    """Hybrid for the process, with a limit on the pool that a program asks CuPy for."""
    umem.enable("hybrid")
    try:
        given.xp.get_default_memory_pool().set_limit(size=nbytes)
        yield
    finally:
        umem.disable()


@call(needs=CHAINER, seconds=40)
def recompute(given: Given) -> Any:
    """Training under a budget, beside plain."""
    from gpu_run_parts.chainer_calls import chainer

    chainer()
    return beside_plain(
        given,
        budget=lambda: umem.chainer.Recompute("80%"),
        offload=lambda: umem.chainer.Recompute("80%", offload=True),
    )


@call(needs=CHAINER, seconds=30)
def offload(given: Given) -> Any:
    """Training whose saved tensors go to pinned memory, beside plain."""
    from gpu_run_parts.chainer_calls import chainer

    chainer()
    return beside_plain(given, offload=umem.chainer.Offload)


@call(seconds=30)
def blocks(given: Given) -> Any:
    """A map over a host array in blocks, beside copies of the whole."""
    xp = given.xp
    x = np.arange(sized(given, 1024, 16) // 4, dtype="f4").reshape(-1, 1024) % 31
    y, z = np.empty_like(x), np.empty_like(x)

    def in_blocks() -> None:
        for block, to in umem.blocks(x, out=y, room="8MiB" if given.quick else "512MiB"):
            xp.multiply(block, 2, out=to)

    def whole() -> None:
        xp.multiply(xp.asarray(x), 2).get(out=z)

    found = {
        "bytes": x.nbytes,
        "blocks_seconds": min(seconds(given, in_blocks) for _ in range(3)),
        "whole_seconds": min(seconds(given, whole) for _ in range(3)),
    }
    assert np.array_equal(y, x * 2) and np.array_equal(y, z)
    return found


@call(seconds=20)
def counts(given: Given) -> Any:
    """CUPTI's counts of a program whose pages move, beside the model's of the same program."""
    nbytes = sized(given, 64, 8)
    found = {}
    with umem.managed():
        found["here"] = counted(given.xp, nbytes)
    with umem.virtual_gpu("t4"), umem.managed() as memory:
        found["model"] = counted(memory.xp, nbytes)
    return {"simulated": given.device.simulated, "bytes": nbytes, **found}


def counted(xp: Any, nbytes: int) -> dict[str, int]:
    """Fault an array in twice, prefetch it in once, and out three times."""
    x = xp.ones(nbytes // 4, "f4")
    total = float(x.sum())
    with umem.paging() as pages:
        for number in range(3):
            umem.prefetch(x, "cpu")
            if number == 2:
                umem.prefetch(x)
            assert float((x * 1).sum()) == total
    return {key: value for key, value in pages.to_json().items() if isinstance(value, int)}
