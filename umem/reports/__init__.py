"""Reports on traces and results, for people and for other tools: text, pictures, pages.

The commands of cli print and write them; chainer's `Recompute` draws a step before and after a
plan. Reports use traces and results, and never allocators.

    text/             writes reports for a terminal
    pictures/         draws them with matplotlib
    page/             writes one HTML page
    outputs.py        lists the files that ``umem report`` can write, and registers others
    plain_values.py   turns an analysis or a comparison into plain values, for JSON and for the page
    perfetto.py       writes a trace as Chrome trace events, which Perfetto shows
    side_by_side.py   shows modes side by side, and a step before and after a plan
    paging_report.py  is `paging`: the pages that moved in a block, by the line that allocated them
    page_owners.py    divides moves of pages among the arrays in those pages

- `paging` is here and not in memory, because it draws.
- The moves come from devices/virtual/residency.py or, on a GPU, from CUPTI by
  devices/cuda/cupti.py, which has never run on one.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from umem.reports.outputs import OUTPUTS, Output, ReportRequest, register_output
    from umem.reports.paging_report import paging
    from umem.reports.pictures.drawing import finish, new_figure
    from umem.reports.plain_values import comparison_json, ranks_json, step_json
    from umem.reports.side_by_side import draw_modes, draw_steps, mode_table
    from umem.reports.text.comparison import comparison_text
    from umem.reports.text.lines import Column, code_lines, table, wrapped
    from umem.reports.text.rank_report import ranks_text
    from umem.reports.text.step import step_text
else:
    from umem._common.faces import face

    __all__, __getattr__ = face(
        __name__,
        outputs="OUTPUTS Output ReportRequest register_output",
        paging_report="paging",
        pictures__drawing="finish new_figure",
        side_by_side="draw_modes draw_steps mode_table",
        plain_values="comparison_json ranks_json step_json",
        text__comparison="comparison_text",
        text__lines="Column code_lines table wrapped",
        text__rank_report="ranks_text",
        text__step="step_text",
    )
