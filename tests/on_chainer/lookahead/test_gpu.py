"""LookaheadPrefetch on a GPU: moves on a stream of their own, and the results stay."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import numpy as np
import pytest
from gpu_fixtures import OnGpu, needs_module

import umem
from umem.errors import LookaheadWarning

umem_chainer = needs_module("umem.chainer")

pytestmark = pytest.mark.gpu


class TestLookahead(OnGpu):
    """The demo's graph network, as if half of what it reserves were all the VRAM there is."""

    def test_arrays_are_moved_ahead_and_losses_stay(self, hints, cupy, monkeypatch):
        from umem.chainer.demo_workload import Workload

        work = Workload.generate(4000, 5)

        def losses(help_with):
            with umem.managed():
                steps = work.train(lambda step: None)
                first = next(steps)  # which also sets up what the others have
                with help_with, warnings.catch_warnings():
                    warnings.simplefilter("ignore", LookaheadWarning)
                    return [first, *steps]

        plain = losses(nullcontext())
        # On a large card all of it has room, and nothing would be moved.
        monkeypatch.setattr(hints.driver, "vram_bytes", hints.usage().reserved_bytes // 2)
        lookahead = umem_chainer.LookaheadPrefetch(2)
        helped = losses(lookahead)
        report = lookahead.report()
        print(report)
        assert report.off is None and report.fetched_bytes > 0
        # The first one begins behind what reads the loss of the step before, where that is seen.
        assert report.followed_count >= report.iteration_count - 2 >= 2
        np.testing.assert_allclose(helped, plain, rtol=1e-4)
