"""One mend of Chainer: a module, the versions that need it, and texts to replace."""

from __future__ import annotations

from dataclasses import dataclass

from umem.errors import CompatError


@dataclass(frozen=True)
class Replacement:
    """One exact text of a module and its replacement.

    ``old`` must occur exactly ``count`` times, and ``new`` must have as many lines, so that every
    line number in a traceback still points at the file on disk.
    """

    old: str
    new: str
    count: int = 1

    def __post_init__(self) -> None:
        if self.old.count("\n") != self.new.count("\n"):
            raise ValueError(f"replacement changes the number of lines: {self.old!r}")


@dataclass(frozen=True)
class Shim:
    """One break and its mend.

    Attributes:
        name: short and unique; tests and the table of ``umem compat --check`` use it.
        module: the module whose source is changed.
        symptom: the error that a user sees without the mend.
        link: the announcement of the change that broke the module.
        replacements: the texts, applied in order.
        versions: the requirement under which the mend is applied ("numpy>=2.0"); "any" is always.
        until: when the mend can be removed.
    """

    name: str
    module: str
    symptom: str
    link: str
    replacements: tuple[Replacement, ...]
    versions: str = "any"
    until: str = "Chainer 7.8 is no longer supported here"

    def check(self, source: str, version: str) -> None:
        """Raise CompatError if a text does not occur in ``source`` as often as stated."""
        for item in self.replacements:
            found = source.count(item.old)
            if found != item.count:
                raise CompatError(self._mismatch(item, found, version))

    def apply(self, source: str, version: str) -> str:
        """Return ``source`` with every replacement made.

        Raises:
            CompatError: a text does not occur as often as stated; nothing was replaced.
        """
        self.check(source, version)
        for item in self.replacements:
            source = source.replace(item.old, item.new)
        return source

    def _mismatch(self, item: Replacement, found: int, version: str) -> str:
        line = next(part for part in item.old.splitlines() if part.strip()).strip()
        return (
            f"the mend {self.name!r} does not fit {self.module} of Chainer {version}: "
            f"{line!r} was found {found} times instead of {item.count}. "
            "The installed file differs from the release; reinstall chainer==7.8.1."
        )
