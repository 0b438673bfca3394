"""Reports as text for a terminal of any width, with colour or without.

``umem report`` prints them; other commands make their tables by `umem.reports.text.lines`.

    step.py         writes the analysis of a trace
    comparison.py   writes the comparison of two traces
    rank_report.py  writes a run of several ranks: their peaks and the bytes that they sent
    lines.py        makes tables that drop columns rather than overflow, and wraps text
"""
