"""The largest batch of a program that fits, and half of each size, by the program's arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from threading import Event
from typing import Any, NamedTuple

from umem._common.as_json import named
from umem._common.printable import quoted
from umem.choosing.child import DryProgram, DryResult, run_dry
from umem.choosing.choosing import RunDry, check_uses_gpu, two_at_a_time
from umem.choosing.technique_rows import TECHNIQUES
from umem.errors import DryRunError, SizeError


class NumberArgument(NamedTuple):
    """A whole number among a program's arguments.

    Attributes:
        name: the user's name for it: a place in ``sys.argv``, or an option.
        place: its index in the arguments, from 0.
        prefix: the text before the number in that argument: empty, or ``--batch=``.
    """

    name: str
    place: int
    prefix: str
    value: int

    def given(self, arguments: Sequence[str], value: int) -> tuple[str, ...]:
        """Return the arguments with another number."""
        return (*arguments[: self.place], f"{self.prefix}{value}", *arguments[self.place + 1 :])


def number_argument(arguments: Sequence[str], name: str) -> NumberArgument:
    """Find the number in one of a program's arguments.

    Args:
        arguments: the program's arguments.
        name: the argument's place in ``sys.argv``, from 1, or an option of the program, such as
            ``--batch``, for ``--batch 64`` and ``--batch=64``; if repeated, the last counts.

    Raises:
        SizeError: there is no such argument, or it is not a whole number above zero.
    """
    found = _place(arguments, name)
    if found is None:
        shown = " ".join(arguments) or "none"
        raise SizeError(f"SCRIPT has no argument {name}; its arguments are: {shown}")
    place, prefix = found
    text = arguments[place][len(prefix) :]
    if not (text.isdecimal() and int(text)):
        raise SizeError(
            f"the argument {name} is {quoted(text)}. The search starts from it, so give a whole "
            "number above zero"
        )
    return NumberArgument(name, place, prefix, int(text))


def _place(arguments: Sequence[str], name: str) -> tuple[int, str] | None:
    """Return the index of an argument's number, and the text before the number."""
    if name.isdecimal():
        place = int(name) - 1
        return (place, "") if 0 <= place < len(arguments) else None
    for place in reversed(range(len(arguments))):
        if arguments[place].startswith(f"{name}="):
            return place, f"{name}="
        if place and arguments[place - 1] == name:
            return place, ""
    return None


@dataclass(frozen=True)
class TriedSize:
    """A program with a number for an argument (simulated)."""

    value: int
    result: DryResult

    simulated = True

    @property
    def fits(self) -> bool:
        """Tell whether the program ran within the GPU's memory."""
        return self.result.why_not is None

    @property
    def seconds(self) -> float | None:
        """Return the time of a step; None if the program does not fit."""
        return self.result.seconds[-1] if self.fits else None

    @property
    def sample_seconds(self) -> float | None:
        """Return the time of a step over ``value``; None if the program does not fit."""
        return None if self.seconds is None else self.seconds / self.value

    def to_json(self) -> dict[str, Any]:
        """Return it for JSON."""
        found = self.result
        return {
            **named(self, ("value", "simulated", "fits", "seconds", "sample_seconds")),
            **named(found, ("peak_bytes", "reserved_peak_bytes", "why_not", "missing_bytes")),
        }


@dataclass(frozen=True)
class BatchSearch:
    """The result of the search for the largest batch (simulated).

    Attributes:
        argument: the changed argument, with its original value.
        tried: each size that ran, in increasing order.
        is_maximum: whether the search stopped at the maximum.
    """

    argument: NumberArgument
    title: str
    vram_bytes: int
    tried: tuple[TriedSize, ...]
    is_maximum: bool

    simulated = True

    @property
    def largest(self) -> TriedSize | None:
        """Return the largest size that fits; None if not even 1 does."""
        return next((one for one in reversed(self.tried) if one.fits), None)

    @property
    def quickest(self) -> TriedSize | None:
        """Return the tried size with the least time a sample; None if none fits."""
        fitting = [one for one in self.tried if one.fits]
        return min(fitting, key=lambda one: one.sample_seconds or 0.0, default=None)

    def to_json(self) -> dict[str, Any]:
        """Return it for JSON."""
        keys = ("simulated", "title", "vram_bytes", "largest", "quickest", "is_maximum", "tried")
        return {"argument": self.argument.name, **named(self, keys)}


def largest_batch(
    program: DryProgram,
    name: str,
    maximum: int | None = None,
    on_tried: Callable[[TriedSize], object] = lambda one: None,
    run_dry: RunDry = run_dry,
) -> BatchSearch:
    """Find the largest value of an argument with which a program fits: by doubling, then bisection.

    Each size runs dry in a process of its own, which takes seconds.

    Args:
        program: the program and the GPU.
        name: the argument's name; see `number_argument`.
        maximum: the largest number to try.
        on_tried: called with each size that has run.
        run_dry: makes a dry run.

    Raises:
        SizeError: see `number_argument`; or the argument's number is above the maximum.
        DryRunError: with the argument's number the program fails for another reason than memory,
            or does not use the GPU; or a doubled number does not raise the peak.
    """
    argument = number_argument(program.arguments, name)
    if maximum is not None and argument.value > maximum:
        raise SizeError(f"the argument {name} is {argument.value}, above the maximum {maximum}")
    tried: dict[int, TriedSize] = {}
    stop = Event()

    def fits(value: int) -> bool:
        one = replace(program, arguments=argument.given(program.arguments, value))
        tried[value] = TriedSize(value, run_dry(one, TECHNIQUES[0], stop))
        on_tried(tried[value])
        return tried[value].fits

    low, high = 0, argument.value
    if fits(high):
        check_uses_gpu(program, tried[high].result)
        low, high = high, 0
        while high == 0 and low != maximum:
            value = 2 * low if maximum is None else min(2 * low, maximum)
            if not fits(value):
                high = value
            else:
                _check_grows(name, tried[low], tried[value])
                low = value
    else:
        check_uses_gpu(program, tried[high].result)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    first = tried[argument.value].result
    rows = tuple(tried[value] for value in sorted(tried))
    return BatchSearch(argument, first.title, first.vram_bytes, rows, high == 0)


def _check_grows(name: str, less: TriedSize, more: TriedSize) -> None:
    """Refuse an argument that does not affect memory, which would be doubled without end.

    Raises:
        DryRunError: the peak does not grow.
    """
    if more.result.peak_bytes <= less.result.peak_bytes:
        raise DryRunError(
            f"the argument {name} seems not to be the batch size: the peak is "
            f"{more.result.peak_bytes:,} bytes with {less.value} and with {more.value}"
        )


@dataclass(frozen=True)
class HalvedArguments:
    """A program as it is, and with half of each argument in turn (simulated).

    Attributes:
        arguments: the halved arguments, with their original values.
        whole: the program as it is.
        halves: for each argument, the program with half of it.
    """

    arguments: tuple[NumberArgument, ...]
    title: str
    vram_bytes: int
    whole: DryResult
    halves: tuple[TriedSize, ...]

    simulated = True

    @property
    def fits(self) -> bool:
        """Tell whether the program fits as it is, or with one of the halves."""
        return self.whole.why_not is None or any(one.fits for one in self.halves)

    def rows(self) -> Iterator[tuple[NumberArgument, TriedSize]]:
        """Yield each argument with the program that has half of it."""
        yield from zip(self.arguments, self.halves, strict=True)

    def to_json(self) -> dict[str, Any]:
        """Return it for JSON."""
        halves = [
            {"argument": argument.name, "from": argument.value, **half.to_json()}
            for argument, half in self.rows()
        ]
        whole = TriedSize(1, self.whole).to_json()
        for name in ("value", "sample_seconds"):
            del whole[name]
        keys = ("simulated", "title", "vram_bytes", "fits")
        return {**named(self, keys), "whole": whole, "halves": halves}


def halve_each(
    program: DryProgram,
    names: Sequence[str],
    on_tried: Callable[[str], object] = lambda name: None,
    run_dry: RunDry = run_dry,
) -> HalvedArguments:
    """Find the savings from halving each of a program's arguments, by dry runs, two at a time.

    Args:
        program: the program and the GPU.
        names: the arguments' names; see `number_argument`.
        on_tried: called with the name of each argument that has been halved.
        run_dry: makes a dry run.

    Raises:
        SizeError: see `number_argument`; or a number is 1, or an argument is named twice.
        DryRunError: the unchanged program fails for another reason than memory, or does not use
            the GPU.
    """
    found = [number_argument(program.arguments, name) for name in names]
    if len({one.place for one in found}) < len(found):
        raise SizeError("an argument is named twice")
    for one in found:
        if one.value == 1:
            raise SizeError(f"the argument {one.name} is 1 and cannot be halved")
    stop = Event()
    whole = run_dry(program, TECHNIQUES[0], stop)
    check_uses_gpu(program, whole)
    halved = [
        replace(program, arguments=one.given(program.arguments, one.value // 2)) for one in found
    ]
    halves = []
    with two_at_a_time(stop) as executor:
        results = [executor.submit(run_dry, each, TECHNIQUES[0], stop) for each in halved]
        for one, future in zip(found, results, strict=True):
            halves.append(TriedSize(one.value // 2, future.result()))
            on_tried(one.name)
    return HalvedArguments(tuple(found), whole.title, whole.vram_bytes, whole, tuple(halves))
