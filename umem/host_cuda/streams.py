"""Streams, events and captures, for streams that run their work at once.

A capture takes a stream's work instead of running it. Models: the streams of a capture, the calls
that it forbids, and the calls that end it early. Does not model: graphs; captured work is dropped,
and launching it is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import get_ident
from typing import Any

from umem._common.specs import GpuSpec
from umem.host_cuda.allocations import HostMemory
from umem.host_cuda.device_state import DeviceState, DriverCalls
from umem.host_cuda.faults import Fault
from umem.host_cuda.observer import Observer
from umem.host_cuda.strictness import refuse

DEFAULT_STREAMS = (0, 1, 2)
"""The default streams: legacy, with two handles, and one for each thread."""
NON_BLOCKING = 1
"""cudaStreamNonBlocking, from driver_types.h."""
THREAD_LOCAL, RELAXED = 1, 2
"""Values of cudaStreamCaptureMode; 0 is global."""
NO_TIMING = 2
"""cudaEventDisableTiming."""
INVALID_HANDLE, ILLEGAL_STATE, UNSUPPORTED, INVALIDATED, UNMATCHED = 400, 401, 900, 901, 903
ISOLATION, IMPLICIT, CAPTURED_EVENT = 905, 906, 907
"""Values of cudaError about states and captures."""
FIRST_HANDLE = 1 << 12


@dataclass(eq=False)
class Capture:
    """A stream capture: its first stream, mode and thread, and whether it is still valid."""

    origin: int
    mode: int
    thread: int
    is_broken: bool = False

    @property
    def forbids(self) -> bool:
        """Tell whether the calling thread must not make potentially unsafe calls now.

        Follows the documentation of cudaThreadExchangeStreamCaptureMode for a thread with the
        default mode.
        """
        return self.mode != RELAXED and (self.mode != THREAD_LOCAL or self.thread == get_ident())


class HostStreams(HostMemory):
    """Functions of CuPy's runtime on streams, events and captures, which run work at once.

    Args:
        spec, count, observer: see `HostMemory`.

    Attributes:
        captures: by stream, the capture of its work.
    """

    def __init__(self, spec: GpuSpec, count: int = 1, observer: Observer | None = None) -> None:
        super().__init__(spec, count, observer)
        self.captures: dict[int, Capture] = {}
        self._homes: dict[int, int] = {}  # streams and events, by device
        self._captured_events: dict[int, Capture] = {}
        self._blocking: set[int] = set()
        self._non_blocking: set[int] = set()
        self._events: set[int] = set()
        self._untimed: set[int] = set()
        self._handle = FIRST_HANDLE
        self._recorded: dict[int, float] = {}  # events, by simulated seconds

    @property
    def calls(self) -> DriverCalls:
        """Return the counts of calls so far on the current device."""
        return self.here.calls

    def home_of(self, handle: int) -> int:
        """Return the device of a stream or event; default streams belong to the current device."""
        return self._homes.get(handle, self.device_here)

    def refuse_strange(self, stream: int, *others: int) -> None:
        """Raise if a stream and another object belong to different devices."""
        if any(self.home_of(other) != self.home_of(stream) for other in others):
            self.fail(INVALID_HANDLE)

    def device_of(self, handle: int) -> DeviceState:
        """Return the device of a stream or event."""
        return self.devices[self.home_of(handle)]

    def new_handle(self) -> int:
        """Return a new handle for a stream, event or module."""
        self._handle += 1
        return self._handle

    def forget_faults(self) -> tuple[Fault, ...]:
        ended = [d.ordinal for d in self.devices if d.fault is not None]
        self.captures = {s: c for s, c in self.captures.items() if self.home_of(s) not in ended}
        events = self._captured_events.items()
        self._captured_events = {e: c for e, c in events if self.home_of(e) not in ended}
        return super().forget_faults()

    # -- captures --------------------------------------------------------------------------

    def is_captured(self, stream: int) -> bool:
        """Tell whether a stream is being captured; raises if its capture is broken."""
        if not self.captures:
            return False
        if stream in DEFAULT_STREAMS[:2]:
            self._refuse_implicit()
        capture = self.captures.get(stream)
        if capture is not None and capture.is_broken:
            self.fail(INVALIDATED)
        return capture is not None

    def _refuse_implicit(self) -> None:
        """Raise if the legacy default stream would wait for a captured stream."""
        blocking = [c for stream, c in self.captures.items() if stream in self._blocking]
        for capture in blocking:
            capture.is_broken = True
        if blocking:
            self.fail(IMPLICIT)

    def refuse_captured(self, stream: int) -> None:
        """Break the capture and raise, for a call that a graph cannot contain."""
        if self.is_captured(stream):
            self._break([self.captures[stream]])

    def refuse_unsafe(self) -> None:
        """Raise if a capture forbids a call that may wait for the device, such as an allocation."""
        self._break([c for c in self.captures.values() if c.forbids])

    def _refuse_wait(self, stream: int | None = None) -> None:
        """Raise if the host would wait for a captured stream; None is the whole device."""
        for_all = stream is None or stream in DEFAULT_STREAMS[:2]
        self._break([c for each, c in self.captures.items() if for_all or each == stream])

    def _break(self, captures: list[Capture]) -> None:
        for capture in captures:
            capture.is_broken = True
        if captures:
            self.fail(UNSUPPORTED)

    def streamBeginCapture(self, stream: int, mode: int = RELAXED) -> None:
        if stream in DEFAULT_STREAMS[:2]:
            self.fail(UNSUPPORTED)
        if stream in self.captures:
            self.fail(ILLEGAL_STATE)
        self.captures[stream] = Capture(stream, mode, get_ident())

    def streamEndCapture(self, stream: int) -> int:
        """End a capture; returns the graph's handle."""
        capture = self.captures.get(stream)
        if capture is None:
            self.fail(ILLEGAL_STATE)
        if capture.origin != stream:
            self.fail(UNMATCHED)
        self.captures = {each: c for each, c in self.captures.items() if c is not capture}
        events = self._captured_events.items()
        self._captured_events = {event: c for event, c in events if c is not capture}
        if capture.is_broken:
            self.fail(INVALIDATED)
        return self.new_handle()

    def streamIsCapturing(self, stream: int) -> int:
        if stream in DEFAULT_STREAMS[:2] and any(each in self._blocking for each in self.captures):
            self.fail(IMPLICIT)
        capture = self.captures.get(stream)
        return 0 if capture is None else 1 + capture.is_broken

    def graphInstantiate(self, graph: int) -> int:
        return self.new_handle()

    def graphLaunch(self, graph: int, stream: int) -> None:
        raise NotImplementedError("the software GPU has no CUDA graphs: it cannot launch one")

    def graphUpload(self, graph: int, stream: int) -> None:
        raise NotImplementedError("the software GPU has no CUDA graphs: it cannot upload one")

    # -- streams ---------------------------------------------------------------------------

    def streamCreate(self) -> int:
        return self.streamCreateWithFlags(0)

    def streamCreateWithFlags(self, flags: int) -> int:
        handle = self.new_handle()
        self._homes[handle] = self.device_here
        (self._non_blocking if flags & NON_BLOCKING else self._blocking).add(handle)
        return handle

    def streamCreateWithPriority(self, flags: int, priority: int) -> int:
        return self.streamCreateWithFlags(flags)

    def streamGetFlags(self, stream: int) -> int:
        return 0 if stream in (*DEFAULT_STREAMS, *self._blocking) else NON_BLOCKING

    def streamGetPriority(self, stream: int) -> int:
        return 0

    def streamDestroy(self, stream: int) -> None:
        self._blocking.discard(stream)
        self._non_blocking.discard(stream)
        self._homes.pop(stream, None)

    def _known(self, stream: int, event: int | None = None) -> None:
        """Fail for a stream or event that does not exist."""
        is_there = (
            stream in DEFAULT_STREAMS or stream in self._blocking or stream in self._non_blocking
        )
        if not is_there or (event is not None and event not in self._events):
            self.fail(INVALID_HANDLE)

    def streamSynchronize(self, stream: int) -> None:
        self.wait_for_stream(stream)
        self.calls.wait_count += 1

    def wait_for_stream(self, stream: int) -> None:
        """Make the host wait for a stream."""
        self._known(stream)
        self._refuse_wait(stream)
        self.observer.host_waited(self.home_of(stream))

    def streamQuery(self, stream: int) -> int:
        self._known(stream)
        self._refuse_wait(stream)
        return 0

    def deviceSynchronize(self) -> None:
        self.wait_for_all()
        self.calls.wait_count += 1

    def wait_for_all(self) -> None:
        """Make the host wait for the device."""
        self._refuse_wait()
        self.observer.host_waited(self.device_here)

    def launchHostFunc(self, stream: int, function: Any, argument: int) -> None:
        if not self.is_captured(stream):
            function(argument)

    def streamAddCallback(self, stream: int, function: Any, argument: int, flags: int = 0) -> None:
        if not self.is_captured(stream):
            function(stream, 0, argument)

    # -- events ----------------------------------------------------------------------------

    def eventCreate(self) -> int:
        return self.eventCreateWithFlags(0)

    def eventCreateWithFlags(self, flags: int) -> int:
        event = self.new_handle()
        self._homes[event] = self.device_here
        self._events.add(event)
        if flags & NO_TIMING:
            self._untimed.add(event)
        return event

    def eventDestroy(self, event: int) -> None:
        self._events.discard(event)
        self._untimed.discard(event)
        self._homes.pop(event, None)
        self._recorded.pop(event, None)
        self._captured_events.pop(event, None)

    def eventRecord(self, event: int, stream: int) -> None:
        if not self.takes_record(event, stream):
            self._recorded[event] = self.observer.seconds_of(stream, self.home_of(stream))

    def takes_record(self, event: int, stream: int) -> bool:
        """Tell whether an event's recording is captured."""
        self._known(stream, event)
        self.refuse_strange(stream, event)
        self._captured_events.pop(event, None)
        if not self.is_captured(stream):
            return False
        self._captured_events[event] = self.captures[stream]
        return True

    def streamWaitEvent(self, stream: int, event: int, flags: int = 0) -> None:
        if not self.takes_wait(stream, event):
            self._tell_wait(stream, event)

    def _tell_wait(self, stream: int, event: int) -> None:
        """Report that a stream waits for an event."""
        seconds = self._recorded.get(event, 0.0)
        self.observer.stream_waited(stream, self.home_of(stream), seconds)

    def takes_wait(self, stream: int, event: int) -> bool:
        """Tell whether a stream's wait for an event is captured; it then joins the capture."""
        self._known(stream, event)
        capture = self._captured_events.get(event)
        if capture is None:
            if not self.is_captured(stream):
                return False
            self.captures[stream].is_broken = True
            self.fail(ISOLATION)
        self.captures.setdefault(stream, capture)
        return True

    def restart(self) -> None:
        """Restart counts and times at zero, with all recorded events complete."""
        self._recorded = dict.fromkeys(self._recorded, 0.0)
        for device in self.devices:
            device.calls = DriverCalls()

    def eventQuery(self, event: int) -> int:
        self._refuse_captured(event)
        self._refuse_event_in_capture("asks")
        return 0

    def eventSynchronize(self, event: int) -> None:
        self._refuse_captured(event)
        self._refuse_event_in_capture("waits")
        seconds = self._recorded.get(event, 0.0)
        self.observer.host_waited_until(self.home_of(event), seconds)
        self.calls.wait_count += 1

    def _refuse_captured(self, event: int) -> None:
        self._known(DEFAULT_STREAMS[0], event)
        if event in self._captured_events:
            self._captured_events[event].is_broken = True
            self.fail(CAPTURED_EVENT)

    def _refuse_event_in_capture(self, does: str) -> None:
        """Break the capture and raise, if the host must not query an event."""
        if self.captures and self.is_strict:
            found = [c for c in self.captures.values() if c.forbids]
            for capture in found:
                capture.is_broken = True
            if found:
                why = f"the host {does} for an event in a capture that is not relaxed"
                refuse(self.fail, UNSUPPORTED, why)

    def refuse_untimed(self, start: int, end: int) -> None:
        """Raise for events without timing."""
        if start not in self._recorded or end not in self._recorded:
            self.fail(INVALID_HANDLE)
        self.refuse_strange(start, end)
        if self.is_strict and (start in self._untimed or end in self._untimed):
            refuse(self.fail, INVALID_HANDLE, "an event was made with disable_timing=True")

    def eventElapsedTime(self, start: int, end: int) -> float:
        self.refuse_untimed(start, end)
        return 1000 * (self._recorded[end] - self._recorded[start])

    def nothing(self, *args: Any) -> None:
        """Do nothing, because the host needs nothing here."""

    graphDestroy = graphExecDestroy = nothing
