"""One HTML page of an analysis, with everything in it: no network, no other file.

The page's parts are in page_parts/: the shell, the style and the scripts. Data from the trace is in
the page as JSON only, so that no name in it is read as HTML.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import IO, Any

from umem._common.as_json import json_text
from umem.reports.outputs import ReportRequest
from umem.reports.plain_values import summary
from umem.trace import Alloc, Op
from umem.trace.analysis import KINDS, Analysis, Bands, Tensor, Vram, bands, kind_curves

PARTS = Path(__file__).parent / "page_parts"
SCRIPTS = ("model", "show", "chart", "marks", "pointer", "tables", "page")
"""The page's scripts, in order."""


def step_page(
    analysis: Analysis, name: str, provenance: Mapping[str, str], vram: Vram | None = None
) -> str:
    """Return the page, in ASCII.

    Args:
        name: the trace's name.
        provenance: facts about the page's source, in this order.
        vram: the VRAM, drawn as a line.
    """
    content = {
        **summary(analysis, name, vram),
        **_drawing(analysis),
        "provenance": [[key, value] for key, value in provenance.items()],
    }
    page = _part("shell.html")
    script = "\n".join(_part(f"{script}.js") for script in SCRIPTS)
    for place, part in (
        ("@style@", _part("style.css")),
        ("@script@", script),
        ("@data@", embedded(content)),
    ):
        page = page.replace(place, part, 1)
    return page


def write(request: ReportRequest, file: IO[bytes]) -> None:
    """Write the requested page."""
    analysis, name, vram, provenance = request
    file.write(step_page(analysis, name, provenance, vram).encode("ascii"))


def embedded(content: Any) -> str:
    """Encode JSON for a script element: in ASCII, without any text that ends the element."""
    text = json_text(content, compact=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _part(name: str) -> str:
    return (PARTS / name).read_text(encoding="ascii").rstrip("\n")


# -- the chart's data --------------------------------------------------------------------------


class _Table:
    """Repeated values, each stored once and named by its index."""

    def __init__(self) -> None:
        self._places: dict[Hashable, int] = {}

    def place(self, value: Hashable) -> int:
        return self._places.setdefault(value, len(self._places))

    def values(self) -> list[Any]:
        return list(self._places)


def _drawing(analysis: Analysis) -> dict[str, Any]:
    """Collect the data that the page's scripts draw."""
    reading = analysis.reading
    parts = bands(reading)
    names, op_names, stacks = _Table(), _Table(), _Table()
    used = kind_curves(reading)
    return {
        "kinds": KINDS,
        "kinds_used": [number for number, kind in enumerate(KINDS) if kind in used],
        "steps": reading.steps,
        "before_count": _before_count(analysis),
        "tensors": [_row(analysis, t, names, op_names, stacks) for t in parts.drawn],
        "folded": _folded(parts),
        "ops": _ops(analysis, op_names),
        "workspace": _workspace(analysis),
        "names": names.values(),
        "op_names": op_names.values(),
        "stacks": stacks.values(),
    }


def _before_count(analysis: Analysis) -> int:
    """Return the number of leading events that only list what existed before the recording."""
    events = enumerate(analysis.trace.events)
    first = (n for n, e in events if not (isinstance(e, Alloc) and e.uploaded))
    return next(first, len(analysis.trace))


def _row(
    analysis: Analysis, tensor: Tensor, names: _Table, op_names: _Table, stacks: _Table
) -> list[int]:
    """Return a tensor's numbers for the page."""
    maker = None if tensor.maker is None else analysis.reading.op(tensor.maker)
    return [
        tensor.nbytes,
        KINDS.index(tensor.kind),
        names.place(tensor.label),
        tensor.birth,
        -1 if tensor.death is None else tensor.death,
        tensor.step,
        -1 if maker is None else op_names.place((maker.name, maker.phase)),
        int(tensor.uploaded),
        -1 if tensor.last_use is None else tensor.last_use,
        stacks.place(tensor.stack) if tensor.stack else -1,
    ]


def _folded(parts: Bands) -> list[int]:
    """Return triples of events since the last one, kind, bytes."""
    found: list[int] = []
    last = 0
    for event, kind, nbytes in parts.folded:
        found += (event - last, kind, nbytes)
        last = event
    return found


def _ops(analysis: Analysis, op_names: _Table) -> list[int]:
    """Return triples of events since the last one, name and phase, microseconds."""
    found: list[int] = []
    last = 0
    for index, event in enumerate(analysis.trace.events):
        if isinstance(event, Op):
            micros = round(1e6 * (event.host_seconds or 0))
            found += (index - last, op_names.place((event.name, event.phase)), micros)
            last = index
    return found


def _workspace(analysis: Analysis) -> list[int]:
    """Return pairs of an operation's event and its workspace."""
    extra = analysis.reading.total - analysis.reading.live
    return [int(value) for event in extra.nonzero()[0] for value in (event, extra[event])]
