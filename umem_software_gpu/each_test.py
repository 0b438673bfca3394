"""Sets up each test on the software GPU: its seed, its errors, its properties."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Generator
from typing import Any

import pytest
from _pytest.runner import runtestprotocol  # as plugins do that run a test again; it has no hook

from umem_software_gpu import VARIABLE, arm, is_armed, parsed, with_seed
from umem_software_gpu.faults import Known, fault_of
from umem_software_gpu.seeds import name_of, seed_of

OPENING, FAULTS = "umem.devices.software.opening", "umem.host_cuda.faults"
"""Modules of umem that are imported once the software GPU is open."""
HIDDEN = ("umem.host_cuda", "umem.devices.software", "umem_software_gpu")
"""Modules whose frames say nothing of the program. Here, `_fail_of_late_work` is seen."""
Phase = Generator[None, Any, Any]


def opened() -> Any:
    """Return this process's software GPU, if it is open and can be used."""
    module = sys.modules.get(OPENING)
    gpu = None if module is None else module.opened()
    return None if gpu is None or gpu.is_refused else gpu


def drain() -> tuple[BaseException | None, bool]:
    """Run all queued work, and revive devices whose context a fault has ended.

    Returns the error of that work, and whether a device was revived.
    """
    gpu, error = opened(), None
    if gpu is None:
        return None, False
    try:
        gpu.finish()
    except Exception as found:
        error = found.with_traceback(None)  # which leads through umem alone
    return error, bool(sys.modules[FAULTS].revive())


def empty_pools() -> None:
    """Give back what CuPy's pools keep: no run may find there what another has computed."""
    gpu = opened()
    if gpu is None:
        return
    import cupy

    for number in range(len(gpu.devices)):
        with cupy.cuda.Device(number):
            cupy.get_default_memory_pool().free_all_blocks()
    cupy.get_default_pinned_memory_pool().free_all_blocks()


def hide_frames() -> None:
    """Have pytest leave out the frames of umem's CUDA, but with ``--full-trace``."""
    for name, module in [*sys.modules.items()]:  # of which some are imported late
        if name.startswith(HIDDEN) and name != __name__:
            vars(module)["__tracebackhide__"] = True


class EachTest:
    """A plugin of pytest.

    Each test has its own seed, derived from the base seed and its node id, so that it runs alike
    alone and among others. Its queued work is run when it ends, so that an error is its own.

    Args:
        text: the GPU, with the base seed.
        count: the number of consecutive base seeds that each test runs under.
        known: known faults, which fail no test.

    Attributes:
        is_over: whether the test runs under no further seed.
    """

    def __init__(self, text: str, count: int, known: set[Known]) -> None:
        self.text, self.count, self.known = text, count, known
        self.base: int | None = parsed(text)[1].get("stream_seed")
        self.gpu = with_seed(text, None)
        self.is_over = True
        self._late: BaseException | None = None  # beside an error of the phase's own
        self._is_caught = False
        self._outer_hook: Callable[[Any], object] = threading.excepthook
        self._of_threads: list[BaseException] = []

    def text_of(self, base: int | None) -> str:
        """Return the GPU with a base seed; None runs streams at once."""
        if base is None:
            return self.text
        return with_seed(self.text, base)

    # -- the phases of a test --------------------------------------------------------------
    # Inside of pytest's own wrappers: what late kernels print is captured as the test's.

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_setup(self, item: Any) -> Phase:
        """Set a test's seed, and note it and the GPU in its properties, before fixtures begin."""
        __tracebackhide__ = True
        name = name_of(item)
        _set(item, "gpu", self.gpu)
        if not parsed(self.text)[1].get("dry"):
            _set(item, "seed", "off" if self.base is None else str(self.base))
        if self.base is not None:
            _reseed(self.text_of(self.base), seed_of(self.base, name))
        return (yield from self._phase(item, "setup"))

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: Any) -> Phase:
        __tracebackhide__ = True
        return (yield from self._phase(item, "call"))

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_teardown(self, item: Any) -> Phase:
        __tracebackhide__ = True
        return (yield from self._phase(item, "teardown"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_make_collect_report(self, collector: Any) -> Phase:
        """Run the work that a module queued at its import, so that an error is the module's."""
        report = yield
        error, _ = drain()
        if error is not None and report.passed:
            report.outcome = "failed"
            report.longrepr = f"{collector.nodeid}: {type(error).__name__}: {error}"
        return report

    def _phase(self, item: Any, phase: str) -> Phase:
        """Run the work that a phase has queued, except a setup, whose work the test continues.

        The phase's own error takes precedence, then an uncaught one of a thread.
        """
        __tracebackhide__ = True
        self._outer_hook = before = threading.excepthook
        threading.excepthook = self._excepthook
        try:
            result = yield
        except (KeyboardInterrupt, pytest.exit.Exception):
            raise
        except BaseException:
            late, _ = drain()
            self._late = self._of_threads.pop(0) if self._of_threads else late
            self._of_threads.clear()
            if self._late is not None:
                message = f"{type(self._late).__name__}: {self._late}"
                item.add_report_section(phase, "software GPU", message)
            raise
        finally:
            threading.excepthook = before
        if phase == "setup":
            return result
        late, has_ended = drain()
        late = self._of_threads.pop(0) if self._of_threads else late
        self._of_threads.clear()
        if late is not None:
            _fail_of_late_work(late)
        self._is_caught = self._is_caught or has_ended
        return result

    def _excepthook(self, given: Any, /) -> None:
        """Keep a fault that ends a thread, because pytest only warns of a thread's error."""
        if fault_of(given.exc_value) is not None:
            self._of_threads.append(given.exc_value.with_traceback(None))
        self._outer_hook(given)

    # -- reports ---------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Phase:
        """Add the software GPU's properties to a test's report, and let known faults pass."""
        if call.excinfo is not None:
            hide_frames()
        report = yield
        self.is_over = self.is_over or not report.passed
        gpu, is_called = opened(), report.when == "call"
        is_open = gpu is not None and is_called
        report.umem = {"late": is_open and gpu.is_late, "checked": is_open and gpu.is_checked}
        error = None if call.excinfo is None else call.excinfo.value
        late, self._late = self._late, None
        own = fault_of(error)
        fault = (own or fault_of(late)) if report.failed else None
        if report.when == "teardown":
            report.umem["caught"], self._is_caught = self._is_caught, False
        if fault is not None:
            known = Known(name_of(item), fault)
            report.umem["fault"] = [known.test, *fault]
            for name, value in zip(("fault", "kernel", "argument"), fault, strict=True):
                _set(item, name, value) if value else None
            if known in self.known and own is not None:
                report.outcome = "skipped"
                report.wasxfail = f"a known fault: {error}"
        elif isinstance(error, NotImplementedError) and "software GPU" in str(error):
            report.umem["absent"] = str(error)
        report.user_properties = list(item.user_properties)
        if report.failed and self.base is not None:
            again = f"pytest --software-gpu {self.text_of(self.base)} '{name_of(item)}'"
            report.sections.append(("software GPU", f"{again} repeats it"))
        return report

    # -- several seeds ---------------------------------------------------------------------

    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> bool | None:
        """Run a test under several seeds, until it fails or is skipped; one result is reported."""
        first = self.base
        if self.count == 1 or first is None:
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        properties = [*item.user_properties]
        try:
            for number in range(self.count):
                self.base, self.is_over = first + number, number == self.count - 1
                empty_pools()
                item.user_properties[:] = properties
                del item._report_sections[:]  # what the last run has printed
                after: Any = _NextItem(self, item, nextitem)
                reports = runtestprotocol(item, False, after)
                if not all(report.passed for report in reports):
                    _end_others(item, nextitem, reports[-1])
                    break
        finally:
            self.base = first
            os.environ[VARIABLE] = self.text
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True


class _NextItem:
    """The next item of a test: its parent, if it runs again, so that only its own fixtures end.

    This is known only when its fixtures are about to end.
    """

    def __init__(self, each: EachTest, item: Any, nextitem: Any) -> None:
        self._each, self._item, self._next = each, item, nextitem

    def listchain(self) -> list[Any]:
        """Return the nodes that stay set up, as pytest's nodes do."""
        after = self._next if self._each.is_over else self._item.parent
        return [] if after is None else list(after.listchain())


def _end_others(item: Any, nextitem: Any, report: Any) -> None:
    """End fixtures that the next test does not need, if a test failed as its own fixtures ended."""
    try:
        item.session._setupstate.teardown_exact(nextitem)
    except Exception as error:
        report.sections.append(("software GPU", f"behind it: {type(error).__name__}: {error}"))


def _set(item: Any, name: str, value: str) -> None:
    """Set a property of a test, for JUnit's XML."""
    others = [pair for pair in item.user_properties if pair[0] != name]
    item.user_properties[:] = [*others, (name, value)]


def _reseed(text: str, seed: int) -> None:
    """Begin a test: set its seed here, and the base seed for the processes that it starts."""
    os.environ[VARIABLE] = text
    if is_armed():
        arm(with_seed(text, seed))
    gpu = opened()
    if gpu is not None and gpu.has_seeds:
        gpu.reseed(seed)


def _fail_of_late_work(error: BaseException) -> None:
    raise error  # of what the test has queued; the line that did is not known by now
