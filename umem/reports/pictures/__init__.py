"""Reports as pictures, drawn with matplotlib (extra ``plot``).

``umem report`` writes the timeline, and `umem.paging` draws moves.

    timeline.py       draws memory over a trace: bytes of each kind, the peak, the VRAM
    moves_picture.py  draws moves of pages over time, a band for each line that allocated memory
    drawing.py        makes the figure and writes the PNG for both, and for
                      `umem.reports.side_by_side`
"""
