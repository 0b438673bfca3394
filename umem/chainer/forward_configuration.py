"""Chainer's configuration as it was in forward, for what runs a second time."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import chainer
from chainer import configuration

from umem.chainer.chunking.capped import cap_here, under

NOT_CARRIED = frozenset((
    "enable_backprop", "in_recomputing", "_will_recompute", "debug", "warn_nondeterministic",
    "keep_graph_on_report", "schedule_func", "use_static_graph",
))  # fmt: skip
"""Entries that a recomputation takes from its surroundings, or sets itself."""
_CAP = "umem.chainer.workspace"
"""Extra entry beside Chainer's own: the cap on workspace, on which bits depend."""


def configuration_now() -> dict[str, Any]:
    """Return the calling thread's Chainer configuration, and its cap on workspace."""
    # Chainer offers no list of entries: a thread's own are in config._local, over global_config.
    of_thread = vars(configuration.config._local)
    return {**vars(chainer.global_config), **of_thread, _CAP: cap_here()}


def as_in_forward(then: dict[str, Any]) -> list[AbstractContextManager[Any]]:
    """Return contexts that restore a saved configuration; entries that were absent are None."""
    now = configuration_now()
    return [
        configuration.using_config("in_recomputing", True),
        *(
            _restored(key, then.get(key))
            for key in {*then, *now} - NOT_CARRIED
            if key not in now or now[key] is not then.get(key)
        ),
    ]


def _restored(key: str, value: Any) -> AbstractContextManager[Any]:
    return under(value) if key == _CAP else configuration.using_config(key, value)
