"""A choice of techniques as text of any width; all of it simulated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from umem.predict.choosing import Choice, Option
from umem.reports.text.lines import Column, code_lines, table, wrapped
from umem.trace.axes import size_text
from umem.units import format_bytes, format_seconds


def choice_text(choice: Choice, width: int, *, every: bool = False) -> Iterator[Text]:
    """Format a choice for one GPU.

    Args:
        width: cells of a line; none is wider, but for code that cannot be broken.
        every: also what does not fit, with the reasons.
    """
    if not choice.options:
        yield from _nothing_fits(choice, width)
        yield from _others(width)
        return
    title = (
        f"What makes the step fit a {_of(choice)}, shortest step first. All figures are simulated."
    )
    yield from _bold(title, width)
    yield from _caveat(choice, width)
    numbers = range(1, len(choice.options) + 1)
    names = [f"{n:>2} {option.name}" for n, option in zip(numbers, choice.options, strict=True)]
    yield from _table([Column(" # technique", names)], choice.options, width)
    yield from _moving(choice.options, width)
    bound = [option for option in choice.options[:1] if option.is_host_bound]
    yield from _host_bound(f"{choice.options[0].name!r} is", bound, width)
    yield Text()
    yield from _bold("To turn it on", width)
    for number, option in enumerate(choice.options, 1):
        yield from map(Text, _code(number, option, width))
    yield from _dropped(choice.dropped, width, every=every)
    yield from _others(width)


def gpus_text(choices: Sequence[Choice], width: int) -> Iterator[Text]:
    """Format a choice among GPUs; those that cannot run the step come last."""
    best = [(choice, choice.best) for choice in choices]
    found = [(choice, option) for choice, option in best if option is not None]
    size = "" if choices[0].size is None else f" at size {size_text(choices[0].size)}"
    title = f"Which GPU runs the step{size}, shortest step first. All figures are simulated."
    yield from _bold(title, width)
    yield from _caveat(choices[0], width)
    if found:
        options = [option for _, option in found]
        columns = [
            Column("GPU", [choice.gpu for choice, _ in found]),
            Column("with", [option.name for option in options], left=True),
        ]
        yield from _table(columns, options, width)
        bound = [option for option in options if option.is_host_bound]
        who = "All are" if len(bound) == len(options) else f"{len(bound)} of {len(options)} are"
        yield from _host_bound(who, bound, width)
        yield from map(Text, wrapped(_BASIS, width))
    else:
        yield from map(Text, wrapped("None does.", width))
    cannot = [choice for choice, option in best if option is None]
    if cannot:
        yield from _bold("Cannot run it", width)
        for choice in cannot:
            yield from _why(choice.gpu, _nearest(choice), width)


def _of(choice: Choice) -> str:
    size = "" if choice.size is None else f" at size {size_text(choice.size)}"
    return f"{choice.title} ({format_bytes(choice.vram_bytes)} usable){size}"


def _bold(title: str, width: int) -> Iterator[Text]:
    yield from (Text(line, style="bold") for line in wrapped(title, width))


def _caveat(choice: Choice, width: int) -> Iterator[Text]:
    for said in (choice.caveat, choice.cap_advice):
        if said is not None:
            yield from map(Text, wrapped(said, width))


MUCH = 3
"""More moves than this many times the missing bytes are explained; out and in again are two."""
_BASIS = (
    "The order rests on datasheets: fp32 peak and memory bandwidth, the same share of both on "
    "every GPU. CuPy leaves TF32 off; with CUPY_TF32=1 GPUs from Ampere on are faster than here, "
    "and not all alike."
)
"""The basis on which GPUs are compared."""
_OTHER_MODELS = (
    "Another model, whose results are others, needs less: umem.chainer.slimmer makes layers "
    "smaller, quantize weights of 8 bits for inference, DistillingUpdater trains a smaller one."
)
_MEANINGS = {
    "range": "range: every cost of the model at the quick, and at the slow end of its own",
    "peak": "peak: what tensors and workspace hold at once",
    "host": "host: the host memory needed for what has no room in VRAM; make sure of as much",
    "moved": "moved: bytes over the bus in a step",
}


def _table(first: Sequence[Column], options: Sequence[Option], width: int) -> Iterator[Text]:
    """Format the options with their figures; returns also the column names, and which did not
    fit.
    """
    figures = _figures(options)
    lines = table([*first, *figures], width)
    shown = lines[0].split()
    yield from map(Text, lines)
    meant = [text for title, text in _MEANINGS.items() if title in shown]
    if all(option.exact for option in options):
        meant.append("training gives the same bits")
    yield from map(Text, wrapped("; ".join(meant) + ".", width))
    absent = [column.title for column in figures if column.title not in shown]
    if absent:
        said = f"A wider terminal also shows {', '.join(absent)}; --json has all."
        yield from map(Text, wrapped(said, width))


def _figures(options: Sequence[Option]) -> list[Column]:
    """Format times with ranges, and bytes; ranges are dropped first if space is short."""
    found = [
        Column("step", [format_seconds(option.seconds) for option in options]),
        Column("range", list(map(_range, options)), drop=4),
        Column("peak", [format_bytes(option.peak_bytes) for option in options], drop=1),
        Column("moved", [format_bytes(option.moved_bytes) for option in options], drop=3),
    ]
    if any(option.host_bytes for option in options):
        host = [format_bytes(option.host_bytes) for option in options]
        found.insert(-1, Column("host", host, drop=2))
    if not all(option.exact for option in options):
        found.append(Column("exact", [_exactness(option) for option in options], left=True))
    return found


def _exactness(option: Option) -> str:
    return "yes" if option.exact else f"no: {option.tolerance}" if option.tolerance else "no"


def _range(option: Option) -> str:
    low, high = format_seconds(option.seconds_low), format_seconds(option.seconds_high)
    number, _, unit = low.rpartition(" ")
    is_one = " " not in number and high.partition(" ")[2] == unit
    return f"{number if is_one else low} - {high}"


def _moving(options: Sequence[Option], width: int) -> Iterator[Text]:
    """Explain why more is moved than is missing, if it is."""
    for option in options:
        moved, absent = option.moved_bytes or 0, option.host_bytes or 0
        if moved > MUCH * absent > 0:
            said = (
                f"{option.name!r} moves {format_bytes(moved)} though only {format_bytes(absent)} "
                "have no room: what gives way is what came first, and it is needed again each step."
            )
            yield from map(Text, wrapped(said, width))
            return


def _host_bound(who: str, bound: Sequence[Option], width: int) -> Iterator[Text]:
    """Return a sentence if a faster GPU would not help, as the host limits the step."""
    for option in bound[:1]:
        each = (option.host_seconds or 0.0) / max(1, option.op_count or 0)
        said = f"the host needs about {format_seconds(each)} to issue an operation, on any GPU"
        yield from map(Text, wrapped(f"{who} limited by the host: {said}.", width))


def _code(number: int, option: Option, width: int) -> list[str]:
    """Format the lines of code that turn an option on, wrapped to the width."""
    first, found = f"{number:>2} ", list[str]()
    for line in (option.line or "nothing is to be done").splitlines():
        found += code_lines(first, line, width)
        first = " " * len(first)
    return found


def _dropped(dropped: Sequence[Option], width: int, *, every: bool) -> Iterator[Text]:
    """List the techniques that do not fit or do not help."""
    if not dropped:
        return
    yield Text()
    if not every:
        said = f"{len(dropped)} more do not fit or have nothing to offer; --all says why."
        yield from map(Text, wrapped(said, width))
        return
    yield from _bold("What does not fit, or has nothing to offer", width)
    for option in dropped:
        yield from _why(option.name, str(option.reason), width)


def _others(width: int) -> Iterator[Text]:
    yield Text()
    yield from map(Text, wrapped(_OTHER_MODELS, width))


def _why(name: str, reason: str, width: int) -> Iterator[Text]:
    yield from map(Text, wrapped(f"{name}:", width))
    yield from map(Text, wrapped(reason, width, "   "))


def _nothing_fits(choice: Choice, width: int) -> Iterator[Text]:
    yield from _bold(f"Nothing makes the step fit a {_of(choice)} (simulated).", width)
    yield from _caveat(choice, width)
    yield from map(Text, wrapped(f"Closest comes {_nearest(choice)}.", width))
    yield from _dropped(choice.dropped, width, every=True)


def _nearest(choice: Choice) -> str:
    nearest = choice.nearest
    if nearest is None:
        return "nothing: see the reasons"
    return f"{nearest.name!r}: {nearest.reason}"
