"""The seeds of tests: one base seed a run, from which each test's seed is derived.

Neither NumPy nor umem is imported, as pytest loads this everywhere.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from umem_software_gpu import OFF, VARIABLE, parsed, with_seed

MOST_DRAWN = 1_000_000
"""Drawn base seeds are below this, so that they are short to type again."""
RANDOM = "seed=random"
NOT_CI = ("", "0", "false")
"""Values of the variable CI that mean no CI."""


def resolved(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return a GPU's text with the base seed of its tests; a dry GPU has no seed.

    A missing seed is taken from an outer pytest on the same GPU, is 0 in CI, and is drawn
    elsewhere. ``seed=random`` always draws one.

    Raises:
        ValueError: an option is unknown, given twice, or has an invalid value.
    """
    seeds = [word.strip() for word in text.split(",")[1:] if _is_seed(word)]
    text = with_drawn(text)
    given = parsed(text)[1]
    if given.get("dry") and given.get("stream_seed") is None:
        return with_seed(text, None)
    if seeds:
        return text
    outer = environ.get(VARIABLE, "")
    if outer not in OFF and with_seed(outer, None) == text and _base(outer) is not None:
        return outer
    return f"{text},seed=0" if is_ci(environ) else with_drawn(f"{text},{RANDOM}")


def with_drawn(text: str) -> str:
    """Return a GPU's text with a drawn seed in place of ``seed=random``."""
    drawn = f"seed={random.SystemRandom().randrange(MOST_DRAWN)}"
    return ",".join(drawn if word.strip() == RANDOM else word for word in text.split(","))


def _is_seed(word: str) -> bool:
    return word.strip().partition("=")[0] == "seed"


def _base(text: str) -> int | None:
    try:
        found: int | None = parsed(text)[1].get("stream_seed")
    except ValueError:
        return None
    return found


def is_ci(environ: Mapping[str, str]) -> bool:
    """Tell whether this is CI, where the same commit must give the same result."""
    return environ.get("CI", "").lower() not in NOT_CI


def seed_of(base: int, test: str) -> int:
    """Return a test's own seed, the same alone, in any order and in any worker.

    Folders are ignored, because the names that pytest gives files depend on its options.
    """
    file, colons, rest = test.partition("::")
    text = f"{base} {file.rpartition('/')[2]}{colons}{rest}"
    return int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "big")


def name_of(item: Any) -> str:
    """Return a test's node id, without the group that pytest-xdist appends (loadgroup)."""
    name = str(item.nodeid)
    has_group = item.get_closest_marker("xdist_group") is not None
    place = name.rfind("@")
    return name[:place] if has_group and place > name.rfind("]") else name
