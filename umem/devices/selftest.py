"""A small test of the device features that umem needs.

The same code tests a real GPU and a model of one. It holds at most 16 MiB at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from umem.devices.base import MODES, Advice, Device, Mode, Place, Policy
from umem.errors import UmemError
from umem.units import MIB, format_bytes

HINT_BYTES = 8 * MIB
MODE_BYTES = 1 * MIB
_VALUE = 7
_ADVICE: tuple[tuple[Advice, bool], ...] = (
    ("read_mostly", False),
    ("preferred_location", True),
    ("accessed_by", False),
)
"""Each advice, and whether it names the host instead of the GPU."""


@dataclass(frozen=True)
class Check:
    """The result of one test; ``ok`` is None if an earlier failure left nothing to test."""

    name: str
    ok: bool | None
    detail: str


class _Failed(Exception):
    """A test got a wrong answer."""


def run_selftest(device: Device) -> tuple[Check, ...]:
    """Test every mode, then every hint on one managed array, and free everything.

    Takes well under a second on a GPU that CuPy has used before. Affects the calling thread only.
    Raises nothing: each check reports its failure. Most checks fail inside a stream capture.
    """
    checks = [_check(f"{mode} memory", partial(_try_mode, device, mode)) for mode in MODES]
    managed = checks[MODES.index("managed")]
    if not managed.ok:
        return (*checks, Check("hints", None, "not tried: there is no managed memory"))
    with _in_mode(device, Policy("managed")):
        return (*checks, *_try_hints(device))


def _check(name: str, attempt: Callable[[], str]) -> Check:
    try:
        return Check(name, True, attempt())
    except (UmemError, _Failed) as error:
        return Check(name, False, str(error))
    except Exception as error:
        return Check(name, False, f"{type(error).__name__}: {error}")


@contextmanager
def _in_mode(device: Device, policy: Policy) -> Iterator[None]:
    restore = device.install(policy, everywhere=False)
    try:
        yield
    finally:
        restore()


def _try_mode(device: Device, mode: Mode) -> str:
    """Allocate, write and read in a mode; returns a sentence.

    Raises:
        _Failed: the mode is not supported, or the contents or the pool are wrong.
    """
    reason = device.why_not(mode)
    if reason is not None:
        raise _Failed(reason)
    limit_bytes = MODE_BYTES if mode == "hybrid" else None  # so that half of it spills
    with _in_mode(device, Policy(mode, limit_bytes)):
        arrays = [_filled(device, MODE_BYTES) for _ in range(2)]
        for array in arrays:
            _expect_contents(array)
    if mode == "managed" and device.usage().managed_bytes < 2 * MODE_BYTES:
        raise _Failed("the arrays are not in managed memory")
    return f"{format_bytes(2 * MODE_BYTES)} written and read"


def _try_hints(device: Device) -> Iterator[Check]:
    """Test allocation, prefetch, advice and free of one managed array, with a check for each."""
    held: list[Any] = []
    nbytes = min(HINT_BYTES, device.vram_bytes // 2)
    allocated = _check("allocate", partial(_allocate, device, held, nbytes))
    yield allocated
    if not held:
        return
    places: tuple[tuple[str, Place], ...] = (("to the GPU", device.ordinal), ("to the host", "cpu"))
    for name, place in places:
        yield _check(f"prefetch {name}", partial(_prefetch, device, held[0], place))
    yield _check("contents", partial(_expect_contents, held[0]))
    for advice, on_host in _ADVICE:
        place = "cpu" if on_host else device.ordinal
        yield _check(f"advise {advice}", partial(_advise, device, held[0], advice, place))
    yield _check("free", partial(_free, device, held))


def _filled(device: Device, nbytes: int) -> Any:
    return device.xp.full(nbytes, _VALUE, "uint8")


def _expect_contents(array: Any) -> str:
    smallest, largest = int(array.min()), int(array.max())
    if (smallest, largest) != (_VALUE, _VALUE):
        raise _Failed(f"every byte should be {_VALUE}, but they are {smallest} to {largest}")
    return "as they were written"


def _allocate(device: Device, held: list[Any], nbytes: int) -> str:
    array = _filled(device, nbytes)
    _expect_contents(array)
    held.append(array)
    return f"{format_bytes(nbytes)} of managed memory"


def _prefetch(device: Device, array: Any, place: Place) -> str:
    moved = device.prefetch(array, place, None)
    device.synchronize()
    _expect(moved, array.nbytes, "bytes prefetched")
    _expect(device.location(array).last_prefetch, place, "the last prefetch read back")
    return f"{format_bytes(moved)}, and the place was read back"


def _advise(device: Device, array: Any, advice: Advice, place: Place) -> str:
    """Set, read back and unset one advice.

    Raises:
        _Failed: the advice read back differs.
    """
    before = _advised(device, array, advice)
    try:
        device.advise(array, advice, place, unset=False)
        expected = {"read_mostly": True, "preferred_location": place, "accessed_by": (place,)}
        _expect(_advised(device, array, advice), expected[advice], "the advice read back")
    finally:
        device.advise(array, advice, place, unset=True)
    _expect(_advised(device, array, advice), before, "the advice read back after unsetting it")
    return "set, read back, and unset"


def _advised(device: Device, array: Any, advice: Advice) -> Any:
    location = device.location(array)
    found = {
        "read_mostly": location.read_mostly,
        "preferred_location": location.preferred,
        "accessed_by": location.accessed_by,
    }
    return found[advice]


def _free(device: Device, held: list[Any]) -> str:
    nbytes, before = held[0].nbytes, device.usage().reserved_bytes
    held.clear()
    again = _filled(device, nbytes)
    grown = device.usage().reserved_bytes - before
    del again
    if grown > 0:
        raise _Failed(f"the memory was not reused: {format_bytes(grown)} more are reserved")
    return "the pool reused the memory"


def _expect(found: Any, expected: Any, what: str) -> None:
    if found != expected:
        raise _Failed(f"{what} should be {expected!r}, but is {found!r}")
