"""A stand-in of cupti-python: the calls that umem makes, by its recorded interface."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class Cupti:
    """The calls of cupti-python that umem makes, with records that a test adds."""

    ActivityKind = SimpleNamespace(UNIFIED_MEMORY_COUNTER=25)
    ActivityUnifiedMemoryCounterScope = SimpleNamespace(PROCESS_SINGLE_DEVICE=1)
    ActivityUnifiedMemoryCounterKind = SimpleNamespace(
        BYTES_TRANSFER_HTOD=1, BYTES_TRANSFER_DTOH=2, CPU_PAGE_FAULT_COUNT=3, GPU_PAGE_FAULT=4
    )

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.records: list[Any] = []
        self.nanoseconds = 1_000
        self.error: Exception | None = None
        self.configs: list[Any] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Be what ``cupti.cupti`` is imported as."""
        module: Any = ModuleType("cupti")
        module.cupti = self
        monkeypatch.setitem(sys.modules, "cupti", module)
        monkeypatch.setitem(sys.modules, "cupti.cupti", self)  # type: ignore[arg-type]

    def ActivityUnifiedMemoryCounterConfig(self, count: int) -> Any:
        self.configs = [SimpleNamespace(kind=None) for _ in range(count)]

        class Configs:
            ptr = 4096
            __getitem__ = staticmethod(self.configs.__getitem__)

        return Configs()

    def get_timestamp(self) -> int:
        self.nanoseconds += 1_000
        return self.nanoseconds

    def activity_register_callbacks(self, requested: Any, completed: Any) -> None:
        self.requested, self.completed = requested, completed

    def activity_configure_unified_memory_counter(self, pointer: int, count: int) -> None:
        if self.error is not None:
            raise self.error
        self.calls.append(("configure", pointer, count))

    def activity_enable(self, kind: int) -> None:
        self.calls.append(("enable", kind))

    def activity_disable(self, kind: int) -> None:
        self.calls.append(("disable", kind))

    def activity_flush_all(self, flag: int) -> None:
        self.calls.append(("flush", flag))
        self.completed(self.records)

    def add(self, kind: int, value: int, address: int, cause: int = 0) -> None:
        self.records.append(
            SimpleNamespace(
                counter_kind=kind, value=value, start=self.get_timestamp(), address=address,
                flags_=cause,
            )
        )  # fmt: skip
