"""Reports on traces and results, for people and for other tools: text, pictures, pages."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from umem.reports.outputs import JSON, OUTPUTS, TEXT, Output, ReportRequest, register_output
    from umem.reports.paging_report import paging
    from umem.reports.pictures.drawing import finish, new_figure
    from umem.reports.side_by_side import draw_modes, draw_steps, mode_table
    from umem.reports.text.lines import Column, code_lines, table, wrapped
    from umem.reports.text.step import step_text
else:
    from umem._common.faces import face

    __all__, __getattr__ = face(
        __name__,
        outputs="JSON OUTPUTS Output ReportRequest TEXT register_output",
        paging_report="paging",
        pictures__drawing="finish new_figure",
        side_by_side="draw_modes draw_steps mode_table",
        text__lines="Column code_lines table wrapped",
        text__step="step_text",
    )
