"""Replays of traces, each made once for every GPU that it serves."""

from __future__ import annotations

from collections.abc import Iterable

from umem.devices.base import Mode
from umem.devices.cost import StepCost
from umem.devices.specs import GpuSpec
from umem.devices.virtual import VirtualGPU
from umem.devices.virtual.layout import Layout, lay_out
from umem.predict.stepping import SettledStep, has_room, settled_steps
from umem.trace.trace import Trace
from umem.units import BLOCK_BYTES, format_bytes

_Key = tuple[int, Mode, bool]


class Replays:
    """Settled steps on some GPUs; a replay serves all with the same VRAM, side by side.

    Where VRAM has room for all that a trace reserves, one serves all GPUs of which that holds.
    What is asked for is remembered, and its trace with it. Not thread-safe.

    Args:
        gpus: those that will be asked for; others are replayed on their own.
    """

    def __init__(self, gpus: Iterable[GpuSpec] = ()) -> None:
        self._gpus = tuple(dict.fromkeys(gpus))
        self._steps: dict[_Key, dict[GpuSpec, SettledStep]] = {}
        self._traces: dict[int, Trace] = {}  # kept, so that no other gets its number
        self._peaks: dict[int, int] = {}
        self._layouts: dict[int, Layout | None] = {}

    def step(
        self,
        trace: Trace,
        gpu: GpuSpec,
        mode: Mode,
        *,
        prefetch: bool = False,
        hintless: Trace | None = None,
    ) -> SettledStep:
        """The settled step of a trace on a GPU; see `umem.predict.stepping.settled_steps`.

        ``hintless`` is the trace without its hints, where it is that of another with hints.
        """
        key = id(trace), mode, prefetch
        self._traces[id(trace)] = trace
        if hintless is not None and id(trace) not in self._layouts:
            layout = self.layout(hintless)
            self._layouts[id(trace)] = layout and layout.with_hints(trace.events)
        steps = self._steps.setdefault(key, {})
        if gpu not in steps:
            reason = self._why_not(trace, gpu, mode)
            if reason is None:
                steps.update(self._replayed(trace, gpu, mode, prefetch))
            else:
                steps[gpu] = SettledStep(StepCost(), reason)
        return steps[gpu]

    def layout(self, trace: Trace) -> Layout | None:
        """Where a trace's tensors lie where memory is never full; None: see `lay_out`."""
        self._traces[id(trace)] = trace
        if id(trace) not in self._layouts:
            self._layouts[id(trace)] = lay_out(trace.events)
        return self._layouts[id(trace)]

    def peak_bytes(self, trace: Trace) -> int:
        """The most bytes alive at once, workspace included."""
        self._traces[id(trace)] = trace
        if id(trace) not in self._peaks:
            self._peaks[id(trace)] = trace.peak_bytes
        return self._peaks[id(trace)]

    def forget(self, kept: Iterable[Trace]) -> None:
        """Let go of all traces but these, and of their steps."""
        self._traces = {id(trace): trace for trace in kept}
        self._steps = {key: steps for key, steps in self._steps.items() if key[0] in self._traces}
        self._peaks = {n: peak for n, peak in self._peaks.items() if n in self._traces}
        self._layouts = {n: found for n, found in self._layouts.items() if n in self._traces}

    def _why_not(self, trace: Trace, gpu: GpuSpec, mode: Mode) -> str | None:
        """What can be said without a replay."""
        if mode != "unmanaged":
            return VirtualGPU(gpu).why_not(mode)
        peak = self.peak_bytes(trace)
        if peak > gpu.usable_bytes:
            vram = format_bytes(gpu.usable_bytes)
            return f"it needs {format_bytes(peak)}, and {vram} of VRAM are usable"
        return None

    def _replayed(
        self, trace: Trace, gpu: GpuSpec, mode: Mode, prefetch: bool
    ) -> dict[GpuSpec, SettledStep]:
        layout = self.layout(trace)
        if layout is not None and has_room(gpu, layout):
            gpus = [other for other in self._gpus if has_room(other, layout)]
        else:
            gpus = [other for other in self._gpus if _room(other) == _room(gpu)]
        if mode != "unmanaged":
            gpus = [other for other in gpus if other.host_in_bandwidth is not None]
        gpus = gpus if gpu in gpus else [gpu]
        steps = settled_steps(trace, gpus, mode, prefetch=prefetch, layout=layout)
        return dict(zip(gpus, steps, strict=True))


def _room(gpu: GpuSpec) -> int:
    """Blocks of VRAM."""
    return gpu.usable_bytes // BLOCK_BYTES
