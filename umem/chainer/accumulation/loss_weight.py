"""The argument ``weight=``: the user's own divisor of a loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from umem.chainer.accumulation.splitting import Arguments
from umem.errors import AccumulationError, UnsupportedError

Weight = Callable[..., Any] | float | None


def checked_weight(weight: Weight) -> Weight:
    """Check and return the argument ``weight=``.

    Raises:
        UnsupportedError: it is neither None, a function nor a finite number.
    """
    is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
    if weight is None or callable(weight) or (is_number and math.isfinite(weight)):
        return weight
    raise UnsupportedError(f"weight= is a function or a finite number, not {weight!r}")


def weighed(weight: Any, given: Arguments) -> float:
    """Return the divisor of a part's loss, as ``weight=`` gives it.

    Raises:
        AccumulationError: it is not a number, negative, or not finite.
    """
    value = weight(*given.args, **given.kwargs)
    try:
        count = math.nan if isinstance(value, str) else float(getattr(value, "array", value))
    except (TypeError, ValueError):
        count = math.nan
    if not (math.isfinite(count) and count >= 0):
        raise AccumulationError(f"weight= must give a number of 0 or more, not {value!r}")
    return count
