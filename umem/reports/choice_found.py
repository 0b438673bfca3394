"""A line for each result of a choice as it is found; all of it simulated."""

from __future__ import annotations

from rich.text import Text

from umem.choosing import Choice, Option
from umem.reports.lines import clipped, wrapped
from umem.units import format_bytes, format_seconds

NAME_WIDTH = 26
GPU_WIDTH = 18


def heading(choice: Choice, gpu_count: int, width: int) -> list[Text]:
    """What the lines below it are."""
    size = "" if choice.size is None else f" at size {choice.size}"
    who = f"a {choice.title} ({format_bytes(choice.vram_bytes)} usable)"
    where = who if gpu_count == 1 else f"{gpu_count} GPUs"
    said = f"A step{size} on {where}, as it is found; all figures are simulated."
    return [Text(line, style="bold") for line in wrapped(said, width)]


def found_of_technique(option: Option, width: int) -> Text:
    """What a technique came to."""
    return _line(option.name, NAME_WIDTH, _figure(option), width)


def found_of_gpu(gpu: str, best: Option | None, width: int) -> Text:
    """What a GPU came to: as the step is, or with the best that there is."""
    if best is None:
        return _line(gpu, GPU_WIDTH, "nothing makes it fit", width)
    time = format_seconds(best.seconds)
    said = f"{time} as it is" if best.line is None else f"{time} with {best.name}"
    return _line(gpu, GPU_WIDTH, said, width)


def _figure(option: Option) -> str:
    if option.reason is None:
        return format_seconds(option.seconds)
    if option.fits:
        return "no better than another"
    return "has nothing to offer" if option.peak_bytes is None else "does not fit"


def _line(name: str, name_width: int, said: str, width: int) -> Text:
    return Text(clipped(f"   {name:<{name_width}}  {said}", width))
