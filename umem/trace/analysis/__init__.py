"""The figures of a trace: its peak, the tensors alive then, its operations, its leaks.

Reports, predict, planner and chainer take their figures from here. All functions are pure, and none
runs a step.

    analysis.py     computes the peak, the totals of operations, and the figures behind every report
    tensors.py      lists every tensor: its kind, its lifetime, and its first and last operations
    leaks.py        finds tensors that outlive their step
    explain.py      explains the peak in a sentence, and names the memory missing from it
    capping.py      finds the workspace in the peak that a cap on workspace would lower
    live_bands.py   makes bands and curves of memory over a trace
    differences.py  compares two analyses
    rank_traces.py  reads the traces of all ranks of a run, and makes a row of figures for each
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from umem.trace.analysis.analysis import Analysis, OpTotal, Vram, analyse
    from umem.trace.analysis.capping import CAPPED, CONVOLUTIONS, NORMALIZATIONS, advice
    from umem.trace.analysis.differences import (
        Comparison,
        Difference,
        OpDifference,
        compare,
        vram_share,
    )
    from umem.trace.analysis.explain import missing, why_peak
    from umem.trace.analysis.leaks import Leak
    from umem.trace.analysis.live_bands import Bands, Curve, bands, kind_curves, thinned
    from umem.trace.analysis.rank_traces import RankedTraces, RankRow, rank_files, ranked
    from umem.trace.analysis.tensors import KINDS, Tensor, what_fails
else:
    from umem._common.faces import face

    __all__, __getattr__ = face(
        __name__,
        analysis="Analysis OpTotal Vram analyse",
        capping="CAPPED CONVOLUTIONS NORMALIZATIONS advice",
        differences="Comparison Difference OpDifference compare vram_share",
        explain="missing why_peak",
        leaks="Leak",
        live_bands="Bands Curve bands kind_curves thinned",
        rank_traces="RankRow RankedTraces rank_files ranked",
        tensors="KINDS Tensor what_fails",
    )
