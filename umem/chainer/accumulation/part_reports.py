"""Values that a loss function reports, combined over the parts of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import chainer
from chainer import reporter


class PartReport:
    """The values reported in one part, and the part's shares of samples and loss."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.samples = 0.0
        self.losses: list[tuple[Any, float | None]] = []

    def weigh(self, samples: float, losses: list[tuple[Any, float | None]]) -> None:
        """Set the part's share of the samples, and of the whole loss by its array."""
        self.samples, self.losses = samples, losses

    def share_of(self, array: Any, factor: float) -> float:
        """Return the share by which a value of the part counts."""
        for loss, share in self.losses:
            if loss is array and share is not None:
                return share * factor
        return self.samples


class PartReports:
    """Combines reports of parts: the loss by its own share, other values by samples."""

    def __init__(self) -> None:
        self._parts: list[PartReport] = []

    @contextmanager
    def part(self) -> Iterator[PartReport]:
        """Capture the values reported in the block as one part's; no other observer sees them."""
        part = PartReport()
        self._parts.append(part)
        scope: AbstractContextManager[Any] = nullcontext()
        with suppress(IndexError):  # there is no reporter
            scope = reporter.get_current_reporter().scope(part.values)
        with scope:  # outside of the handler of that error, whose frames an error here would hold
            yield part

    def report(self, factor: float) -> None:
        """Report the combined values, if there is a reporter; ``factor``: see `LossShares`."""
        names = {name: None for part in self._parts for name in part.values}
        if not names:
            return
        observation = reporter.get_current_reporter().observation
        for name in names:
            observation[name] = self._whole(name, factor)

    def _whole(self, name: str, factor: float) -> Any:
        """Combine one value over the parts; an array of several elements is the last part's."""
        total: Any = None
        for part in self._parts:
            if name not in part.values:
                continue
            value = part.values[name]
            array = value.array if isinstance(value, chainer.Variable) else value
            if getattr(array, "size", 1) != 1 or isinstance(array, str):
                return self._parts[-1].values.get(name, value)
            value = array * part.share_of(array, factor)
            total = value if total is None else total + value
        return total
