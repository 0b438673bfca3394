"""The files that ``umem report`` can write; a new one in the library is one entry here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any, NamedTuple

from umem.errors import StateError
from umem.trace.analysis import Analysis, Vram


class ReportRequest(NamedTuple):
    """An analysis to report, and the options of the report.

    Attributes:
        analysis: the trace's analysis.
        name: the trace's name.
        vram: the VRAM to compare with the peak.
        provenance: facts about the report's source, in this order.
    """

    analysis: Analysis
    name: str
    vram: Vram | None
    provenance: Mapping[str, str]


@dataclass(frozen=True)
class Output:
    """A kind of file that ``umem report`` can write.

    Attributes:
        name: the name in its option, ``--name FILE`` or ``--export name FILE``.
        help: its use, in a few words.
        write: writes the file.
        is_export: whether it uses ``--export``, rather than an option of its own.
        then: a sentence on using the file; or empty.
    """

    name: str
    help: str
    write: Callable[[ReportRequest, IO[bytes]], None]
    is_export: bool = True
    then: str = ""

    def option(self, path: Path) -> list[str | Path]:
        """Return the command-line option that requests it."""
        return ["--export", self.name, path] if self.is_export else [f"--{self.name}", path]


def _later(module: str) -> Callable[..., Any]:
    """Return a function that imports its module's ``write`` when it is called."""

    def call(*arguments: Any, **options: Any) -> Any:
        return import_module(f"umem.reports.{module}").write(*arguments, **options)

    return call


OUTPUTS = [
    Output(
        "html",
        "Write one page to explore in a browser. It needs no network.",
        _later("page.step_page"),
        is_export=False,
        then="Open it in a browser. It needs no network.",
    ),
    Output("png", "Write a picture.", _later("pictures.timeline"), is_export=False),
    Output(
        "perfetto",
        "for ui.perfetto.dev and chrome://tracing.",
        _later("perfetto"),
        then="Open it at ui.perfetto.dev or chrome://tracing.",
    ),
]


def register_output(output: Output) -> None:
    """Register a kind of file for ``umem report --export``.

    Raises:
        StateError: the name is already registered, or ``is_export`` is False: the loaded command
            cannot add an option. Nothing has changed.
    """
    if any(known.name == output.name for known in OUTPUTS):
        raise StateError(f"output {output.name!r} is already registered: choose another name")
    if not output.is_export:
        raise StateError(f"a registered output uses --export {output.name} FILE: keep is_export")
    OUTPUTS.append(output)
