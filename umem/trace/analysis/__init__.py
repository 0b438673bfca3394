"""The figures of a trace: its peak, what is alive then, its operations, what outlives its step."""

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
