"""What every test shares: gpu tests skip themselves without a device, and nothing leaks."""

from __future__ import annotations

import gc
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is.
settings.register_profile("umem", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("umem")
collect_ignore = ["conformance"]  # scripts, and other projects' tests: run by name
QUICK = "host_cuda/test_starting.py"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option by which CI runs a sample of each test with many cases."""
    parser.addoption(
        "--cases", type=int, metavar="N", help="of each thorough test run N cases at most"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Sample after the hook below: it marks tests."""
    if config.option.cases:
        config.pluginmanager.register(_Sample(config.option.cases))


class _Sample:
    """Leaves out thorough cases beyond so many of a test: keeps the first, the last, some between.

    A test marked ``thorough(every_case=True)`` keeps all.
    """

    def __init__(self, most: int) -> None:
        self.most = most

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        cases: dict[str, list[pytest.Item]] = {}
        for item in items:
            mark = item.get_closest_marker("thorough")
            if mark and not mark.kwargs.get("every_case"):
                cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
        left_out: set[pytest.Item] = set()
        for found in cases.values():
            last = len(found) - 1
            kept = {round(at * last / max(1, self.most - 1)) for at in range(self.most)}
            left_out.update(
                item for at, item in enumerate(found) if at not in kept and last >= self.most
            )
        if left_out:
            config.hook.pytest_deselected(items=list(left_out))
            items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the gpu group where there is no device; asks for one only when the group is there.

    What compiles kernels takes minutes in all: only one file of it is among the quick tests.
    """
    for item in items:
        if "kernel_cache" in getattr(item, "fixturenames", ()) and not item.path.match(QUICK):
            item.add_marker("thorough")
    chosen = [item for item in items if item.get_closest_marker("gpu")]
    if not chosen:
        return
    from umem.devices.cuda import cuda_reason

    reason = cuda_reason()
    if reason is not None:
        for item in chosen:
            item.add_marker(pytest.mark.skip(reason=f"no CUDA device: {reason}"))
        return
    from umem.devices.cuda import open_cuda

    if open_cuda().simulated:
        for item in chosen:
            mark = item.get_closest_marker("hardware")
            if mark is not None:
                item.add_marker(pytest.mark.skip(reason=f"hardware: {mark.args[0]}"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m gpu`` read only the files that have such tests: the others are many."""
    if config.option.markexpr != "gpu" or collection_path.suffix != ".py":
        return None
    return True if "mark.gpu" not in collection_path.read_text("utf-8") else None


def pytest_collection_finish() -> None:
    """Have collections of garbage leave alone what was imported, so that each is quick.

    Each worker imports all tests, and some tests collect a thousand times.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _nothing_stays_on() -> object:
    """A test leaves nothing enabled, no block open, no recorder active and no subscriber behind."""
    before = _subscribers()
    yield
    from umem._common import scopes
    from umem.memory import enabled

    assert (enabled(), scopes.inside()) == (None, ())
    left = [one for one in _subscribers() if not any(one is other for other in before)]
    assert not left, f"subscribers of umem.chainer.tap are left: {left}"


def _subscribers() -> list[object]:
    """Who is told of Chainer's calls; umem.chainer is not imported for it.

    On a software GPU the time of Chainer's Python is followed for as long as the process lives.
    """
    tap = sys.modules.get("umem.chainer.tap")
    found = [] if tap is None else vars(tap)["_subscribers"]
    return [one for one in found if type(one).__name__ != "PythonTime"]


@pytest.fixture
def ctrl_c() -> object:
    """Programs that the test starts heed Ctrl-C, also where the tests were started in the
    background: a shell ignores it there, and programs inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def kernel_cache(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where programs on a software GPU keep what they compile: the same for all workers, and from
    run to run. A kernel's name is a digest of all that it depends on."""
    if getattr(pytestconfig, "cache", None) is not None:  # none with -p no:cacheprovider
        return Path(pytestconfig.cache.mkdir("software-gpu"))
    base = tmp_path_factory.getbasetemp()
    return (base.parent if base.name.startswith("popen-") else base) / "kernels"
