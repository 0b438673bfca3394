"""What a loss function reports, for the whole batch instead of the last part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import chainer
from chainer import reporter


class PartReport:
    """What was reported in one part, and how much of the whole that is."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.samples = 0.0
        self.loss: Any = None
        self.share: float | None = None

    def weigh(self, samples: float, loss: Any, share: float | None) -> None:
        """Say that it has this share of the samples, and the loss that of the whole's loss."""
        self.samples, self.loss, self.share = samples, loss, share


class PartReports:
    """Reports of parts: the loss goes by its own share, other figures by samples."""

    def __init__(self) -> None:
        self._parts: list[PartReport] = []

    @contextmanager
    def part(self) -> Iterator[PartReport]:
        """While it is on, what is reported belongs to a part, and nobody else sees it."""
        part = PartReport()
        self._parts.append(part)
        scope: AbstractContextManager[Any] = nullcontext()
        with suppress(IndexError):  # nobody listens
            scope = reporter.get_current_reporter().scope(part.values)
        with scope:  # outside of what handles that error, whose frames an error here would hold
            yield part

    def report(self, factor: float) -> None:
        """Report the whole's, where somebody listens; ``factor`` as of `LossShares`."""
        names = {name: None for part in self._parts for name in part.values}
        if not names:
            return
        observation = reporter.get_current_reporter().observation
        for name in names:
            observation[name] = self._whole(name, factor)

    def _whole(self, name: str, factor: float) -> Any:
        total: Any = None
        for part in self._parts:
            if name not in part.values:
                continue
            value = part.values[name]
            array = value.array if isinstance(value, chainer.Variable) else value
            if getattr(array, "size", 1) != 1 or isinstance(array, str):
                return self._parts[-1].values.get(name, value)
            share = part.samples
            if part.share is not None and array is part.loss:
                share = part.share * factor
            total = array * share if total is None else total + array * share
        return total
