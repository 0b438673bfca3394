"""Reports as one HTML page, which needs no network and no other file.

``umem report --html`` writes it.

    step_page.py  writes the page of an analysis
    page_parts/   has its shell, its style and its scripts

Data from the trace is in the page as JSON only, so that no name in it is read as HTML.
"""
