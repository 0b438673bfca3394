"""Choice of the optimizer states that have 8 bits, and of their memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from chainer import links

from umem.errors import SizeError

LEAST_SIZE = 4096
"""Elements of the smallest parameter with 8-bit states: the default of bitsandbytes, the library of
the paper's authors (``min_8bit_size``)."""


@dataclass(frozen=True)
class StatePolicy:
    """Decides which states are 8-bit, and in which memory they are; see `Adam8bit`."""

    keep: Sequence[str] = ()
    least_size: int = LEAST_SIZE
    embeddings: bool = False
    paged: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.keep, str) or not all(isinstance(name, str) for name in self.keep):
            raise TypeError(f"keep must be a sequence of names of parameters; got {self.keep!r}")
        if isinstance(self.least_size, bool) or not isinstance(self.least_size, int):
            raise TypeError(f"least_size must be a number of elements; got {self.least_size!r}")
        if self.least_size < 0:
            raise SizeError(f"least_size must be at least 0 elements; got {self.least_size}")


def kept_in_32_bits(policy: StatePolicy, link: Any) -> list[Any]:
    """List a model's parameters whose states stay float32 whatever their size.

    Raises:
        ValueError: a name matches no parameter.
    """
    kept: dict[int, Any] = {}
    for pattern in policy.keep:
        found = {id(p): p for name, p in link.namedparams() if fnmatchcase(name, pattern)}
        if not found:
            names = ", ".join(name for name, _ in link.namedparams())
            raise ValueError(f"keep has {pattern!r}, which is no parameter of the model: {names}")
        kept |= found
    if not policy.embeddings:
        embeddings = (one for one in link.links() if isinstance(one, links.EmbedID))
        kept |= {id(p): p for one in embeddings for p in one.params(include_uninit=True)}
    return list(kept.values())
