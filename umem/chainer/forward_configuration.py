"""Chainer's configuration as it was in forward, for what runs a second time."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import chainer
from chainer import configuration

NOT_CARRIED = frozenset((
    "enable_backprop", "in_recomputing", "_will_recompute", "debug", "warn_nondeterministic",
    "keep_graph_on_report", "schedule_func", "use_static_graph",
))  # fmt: skip
"""What a second run takes from where it happens, or sets itself."""


def configuration_now() -> dict[str, Any]:
    """Every entry of the calling thread's configuration."""
    # Chainer offers no list of entries: a thread's own are in config._local, over global_config.
    return {**vars(chainer.global_config), **vars(configuration.config._local)}


def as_in_forward(then: dict[str, Any]) -> list[AbstractContextManager[Any]]:
    """Contexts in which the configuration is what it was; entries that were not there are None."""
    now = configuration_now()
    return [
        configuration.using_config("in_recomputing", True),
        *(
            configuration.using_config(key, then.get(key))
            for key in {*then, *now} - NOT_CARRIED
            if key not in now or now[key] is not then.get(key)
        ),
    ]
