"""Predictions: replays of a trace on models of GPUs; all of it simulated.

`umem.replay`, ``umem replay``, ``umem demo`` and onnx use it to predict the cost of a step on a
given GPU in each memory mode.

    replaying.py  replays a trace on a virtual GPU: times, peaks and moves, without arithmetic
    comparing.py  makes a row of a comparison of modes
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from umem.predict.comparing import ModeRow, replayed_row, simulated_row
    from umem.predict.replaying import Replay, ranged_clocks, replay, replay_on
else:
    from umem._common.faces import face

    __all__, __getattr__ = face(
        __name__,
        comparing="ModeRow replayed_row simulated_row",
        replaying="Replay ranged_clocks replay replay_on",
    )
