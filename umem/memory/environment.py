"""The environment variables: defaults of the arguments of `umem.enable` and ``umem run``.

====================  =============================================================
``UMEM_MODE``         ``managed``, ``hybrid`` or ``unmanaged``; off: `enable` without
                      a mode changes nothing
``UMEM_LIMIT``        as the argument ``limit``; off: no limit
``UMEM_PREFETCH``     ``1``, ``true``, ``on`` or ``yes``; off: no prefetch
====================  =============================================================

``0``, ``false``, ``off``, ``no`` and an empty value (``UMEM_LIMIT=``) mean off; case and
surrounding spaces do not matter. An argument takes precedence over its variable, a variable over
the default. Variables are read when they are needed, never at import. Blocks such as
`umem.managed` do not read them.
"""

from __future__ import annotations

import os
from typing import Literal

from umem.devices import MODES, Mode
from umem.errors import StateError
from umem.memory.limits import Limit, parse_limit

MODE, LIMIT, PREFETCH = MEMORY_VARIABLES = ("UMEM_MODE", "UMEM_LIMIT", "UMEM_PREFETCH")
OFF = ("0", "false", "off", "no", "")
ON = ("1", "true", "on", "yes")


def mode_of_environment() -> Mode | Literal["off"] | None:
    """Read ``UMEM_MODE``: a mode, ``"off"``, or None if it is not set.

    Raises:
        StateError: the value is neither a mode nor off.
    """
    value = _value(MODE)
    if value is None:
        return None
    if value in OFF:
        return "off"
    for known in MODES:
        if value == known:
            return known
    raise StateError(
        f"{MODE} must be {', '.join(MODES)}, or off ({_listed(OFF)}); got {os.environ[MODE]!r}"
    )


def limit_of_environment() -> Limit | None:
    """Read ``UMEM_LIMIT``; None if it is not set or off.

    Raises:
        SizeError: the value is not a limit.
    """
    value = _value(LIMIT)
    if value is None or value in OFF:
        return None
    return parse_limit(os.environ[LIMIT], LIMIT)


def prefetch_of_environment() -> bool | None:
    """Read ``UMEM_PREFETCH``; None if it is not set.

    Raises:
        StateError: the value is neither on nor off.
    """
    value = _value(PREFETCH)
    if value is None:
        return None
    if value in ON or value in OFF:
        return value in ON
    raise StateError(
        f"{PREFETCH} must be on ({_listed(ON)}) or off ({_listed(OFF)}); "
        f"got {os.environ[PREFETCH]!r}"
    )


def _value(name: str) -> str | None:
    value = os.environ.get(name)
    return None if value is None else value.strip().lower()


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(name or "nothing" for name in names)
