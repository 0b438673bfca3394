"""`umem.status`: the mode in force, the features of this machine, and the memory in use."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from umem.devices import Device, Feature, current_device
from umem.errors import DeviceNotFoundError
from umem.memory.process import active_policy, why_on
from umem.units import format_bytes

WIDTH = 80
_COLUMN = 14
_PACKAGES = ("umem", "python", "numpy", "chainer", "scipy", "cupy", "cuda-core")
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Status:
    """The state of umem: the mode in force, the device's features, and the memory in use.

    ``str()`` formats it for a person, at most 80 columns wide. None is "unknown".

    ``factor`` is reserved bytes, managed and unmanaged, over VRAM. ``features`` tells for each
    feature whether it is on, and why. ``versions`` has None for packages that are not installed.
    ``set_over`` is the allocator that the program has set since; the mode then has no effect.
    """

    on: bool = False
    mode: str = "none"
    device: str | None = None
    simulated: bool = False
    why_not: str | None = None
    set_over: str | None = None
    limit_bytes: int | None = None
    headroom_bytes: int = 0
    vram_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_bytes: int | None = None
    managed_bytes: int | None = None
    factor: float | None = None
    resident_bytes: int | None = None
    paging: str = "unknown"
    features: tuple[Feature, ...] = field(default=(), repr=False)
    versions: dict[str, str | None] = field(default_factory=dict, repr=False, compare=False)

    def __str__(self) -> str:
        return "\n".join([self.table(), *([""] if self.features else []), *self._feature_lines()])

    def table(self) -> str:
        """Format the figures, one a line."""
        return columns(self._rows())

    def feature(self, name: str) -> Feature | None:
        """Return the feature of a name; None if there is none."""
        return next((feature for feature in self.features if feature.name == name), None)

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values; sizes are in bytes."""
        return asdict(self)

    def _rows(self) -> list[tuple[str, str]]:
        """Return the table's rows of name and text."""
        if self.device is None:
            return [("umem", "off"), ("device", "none"), ("why", self.why_not or "unknown")]
        simulated = " (simulated)" if self.simulated else ""
        limit = f", limit {format_bytes(self.limit_bytes)}" if self.limit_bytes else ""
        if self.headroom_bytes:
            limit += f", {format_bytes(self.headroom_bytes)} of VRAM left free"
        return [
            ("umem", "on" if self.on else "off"),
            ("mode", f"{self.mode}{limit}"),
            *([("allocator", self._allocator())] if self.set_over else []),
            ("device", f"{self.device}{simulated}"),
            ("managed", f"refused: {self.why_not}" if self.why_not else "supported"),
            ("VRAM", format_bytes(self.vram_bytes)),
            (
                "reserved",
                f"{format_bytes(self.reserved_bytes)}, at most {format_bytes(self.peak_bytes)}",
            ),
            ("factor", "unknown" if self.factor is None else f"{self.factor:.2f}"),
            (
                "resident",
                f"{format_bytes(self.resident_bytes)}{simulated}{self._unknown('resident bytes')}",
            ),
            ("paging", f"{self.paging}{self._unknown('paging')}"),
        ]

    def _allocator(self) -> str:
        return f"{self.set_over}, which the program has set since: the mode has no effect"

    def _unknown(self, name: str) -> str:
        feature = self.feature(name)
        return "" if feature is None or feature.on else f": {feature.why}"

    def _feature_lines(self) -> Iterator[str]:
        words = {True: "on", False: "off", None: "unknown"}
        for feature in self.features:
            yield columns([(feature.name, f"{words[feature.on]}: {feature.why}")], _FEATURE_COLUMN)


_FEATURE_COLUMN = 20


def columns(rows: Iterable[tuple[str, str]], width: int = _COLUMN) -> str:
    """Format rows of name and text within 80 columns; only words without spaces may be longer."""
    return "\n".join(line for name, text in rows for line in _wrapped(name, text, width))


def _wrapped(name: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        f"{name:<{width - 1}} {text}",
        WIDTH,
        subsequent_indent=" " * width,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    )


def status() -> Status:
    """Return the mode in force in this thread, the device, its features and its memory in use.

    Takes about a millisecond: some file reads and, on CUDA, some calls to the driver. Never raises:
    values that cannot be read are None or "unknown", and a feature tells why.
    """
    try:
        device = current_device()
    except Exception as error:  # also a driver's failure for which CuPy has no error
        return _without_device(error)
    return _of(device)


def _without_device(error: Exception) -> Status:
    why = str(error) if isinstance(error, DeviceNotFoundError) else _reason(error)
    return Status(why_not=why, features=_framework_features(), versions=dict(versions()))


def _framework_features() -> tuple[Feature, ...]:
    """Return a feature for each framework or cache that has a report."""
    from umem.trace import framework_notes

    return tuple(Feature(name, True, text) for name, text in framework_notes().items())


def _of(device: Device) -> Status:
    """Read a device's `Status`; values that cannot be read become features that tell why."""
    problems: list[Feature] = []
    policy = active_policy(device)
    nothing: tuple[Feature, ...] = ()
    unreadable: str | None = "it cannot be read"
    no_versions: dict[str, str | None] = {}
    features = _tried("features", device.features, nothing, problems)
    why_not = _tried("modes", lambda: device.why_not("managed"), unreadable, problems)
    usage = _tried("usage", device.usage, None, problems)
    vram = _tried("VRAM", lambda: device.vram_bytes, None, problems)
    found = _tried("versions", device.versions, no_versions, problems)
    status = Status(
        on=policy is not None,
        mode="unmanaged" if policy is None else policy.mode,
        device=device.name,
        simulated=device.simulated,
        why_not=why_not,
        set_over=_tried("allocator", device.set_over, None, problems),
        limit_bytes=None if policy is None else policy.limit_bytes,
        headroom_bytes=0 if policy is None else policy.headroom_bytes,
        vram_bytes=vram,
        features=(
            Feature("mode", policy is not None, why_on(device)),
            *features,
            *_framework_features(),
            *problems,
        ),
        versions={**versions(), **found},
    )
    if usage is None:
        return status
    factor = usage.reserved_bytes / vram if vram else None
    return replace(status, factor=factor, **asdict(usage))


def _tried(
    name: str, read: Callable[[], _Answer], default: _Answer, problems: list[Feature]
) -> _Answer:
    try:
        return read()
    except Exception as error:
        problems.append(Feature(name, None, _reason(error)))
        return default


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


@functools.cache
def versions() -> dict[str, str | None]:
    """Return the versions of umem, Python and the libraries; None for those not installed."""
    from umem._common.extras import installed_version

    return {name: installed_version(name) for name in _PACKAGES}
