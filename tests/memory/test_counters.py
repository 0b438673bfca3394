"""Watching allocations, on the virtual GPU and on the real CuPy over host memory."""

from __future__ import annotations

import gc
import importlib.util
import inspect
import io
import json
import re
import sys
import threading
import weakref
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import python
from project import ROOT

import umem
from umem.errors import DeviceNotFoundError, LeakError, LimitError, SizeError, StateError
from umem.trace import Access, Alloc, Free, Op

HERE = (
    str(Path(__file__).relative_to(Path.cwd()))
    if Path(__file__).is_relative_to(Path.cwd())
    else __file__
)
KIB, MIB = 1 << 10, 1 << 20
BLOCKS = {"managed": umem.managed, "hybrid": umem.hybrid, "unmanaged": umem.unmanaged}
NAMES = ("current_bytes", "peak_bytes", "total_bytes", "current_count", "peak_count", "total_count")


def host_gpu(monkeypatch):
    """umem's CUDA device on the real CuPy, with host memory in the place of VRAM."""
    pytest.importorskip("cupy")
    from cuda_host_driver import HostDriver

    from umem.devices.cuda import CudaDevice

    driver = HostDriver()
    found = CudaDevice(driver)
    monkeypatch.setattr("umem.devices.cuda.open_cuda", lambda: found)
    return found


@pytest.fixture
def cuda(monkeypatch):
    cupy = pytest.importorskip("cupy")
    before = cupy.cuda.get_allocator()
    gpu = host_gpu(monkeypatch)
    with cupy.cuda.using_allocator(gpu.driver.default_pool.malloc):  # CuPy's own needs a GPU
        yield gpu
    assert cupy.cuda.get_allocator() is before


@pytest.fixture
def virtual():
    with umem.virtual_gpu("v100-16gb", vram="64MiB") as gpu:
        yield gpu


@pytest.fixture(params=["virtual", "cuda"])
def device(request):
    return request.getfixturevalue(request.param)


def make(device, nbytes):
    return device.xp.empty(nbytes, "u1")


def needs_chainer():
    if importlib.util.find_spec("chainer") is None:
        pytest.skip("Chainer is not installed")


def allocator():
    """What allocates: who is told, outermost first, and last the pool's method."""
    from tests.support.allocators import in_force

    found = [in_force()]
    while getattr(found[-1], "__name__", "") == "malloc_watched":
        inside = inspect.getclosurevars(found.pop()).nonlocals
        found += [inside["allocated"], inside["malloc"]]
    return found


def here():
    """The line that calls this."""
    return sys._getframe(1).f_lineno


# -- statistics ----------------------------------------------------------------------------------


def test_bytes_and_counts_of_a_block(device):
    with umem.statistics() as s:
        a = make(device, 1000)
        b = make(device, 500)
        del a
        c = make(device, 200)
        assert s.summary() == dict(zip(NAMES, (700, 1500, 1700, 2, 2, 3), strict=True))
        del b, c
    assert s.summary() == dict(zip(NAMES, (0, 1500, 1700, 0, 2, 3), strict=True))
    assert [getattr(s, name) for name in NAMES] == list(s.summary().values())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-8, 5000), max_size=40), st.sampled_from(["virtual", "cuda"]))
def test_any_order_of_allocations_and_frees_is_counted(steps, kind):
    """The oracle keeps every live size in a list and adds them up anew at each step."""
    with ExitStack() as stack:
        if kind == "virtual":
            device = stack.enter_context(umem.virtual_gpu("v100-16gb"))
        else:
            device = host_gpu(stack.enter_context(pytest.MonkeyPatch.context()))
            stack.enter_context(umem.managed())
        live, sizes, made = [], [], []
        history = [(0, 0)]
        with umem.statistics() as s:
            for step in steps:
                if step >= 0:
                    live.append(make(device, step))
                    sizes.append(step)
                    made += [step] if step else []
                elif live:
                    del live[step % len(live)], sizes[step % len(sizes)]
                history.append((sum(sizes), sum(size > 0 for size in sizes)))
            found = s.summary()
        expected = (
            history[-1][0],
            max(b for b, _ in history),
            sum(made),
            history[-1][1],
            max(n for _, n in history),
            len(made),
        )
        assert tuple(found.values()) == expected


def test_what_was_there_before_does_not_count_alive_or_dead(device):
    old = make(device, 4000)
    with umem.statistics() as s:
        new = make(device, 100)
        old[:10]
        del old
        assert (s.current_bytes, s.total_count) == (100, 1)
    del new


def test_blocks_nest_and_each_sees_its_own(device):
    with umem.statistics() as outer:
        a = make(device, 100)
        with umem.statistics() as first:
            b = make(device, 20)
            del a
        with umem.statistics() as second:
            c = make(device, 3)
            del b
    assert (outer.current_bytes, outer.peak_bytes, outer.total_bytes) == (3, 120, 123)
    assert (first.current_bytes, first.total_bytes) == (20, 20)
    assert (second.current_bytes, second.total_bytes) == (3, 3)
    del c


def test_an_array_without_bytes_does_not_count(device):
    with umem.statistics() as s, umem.track() as t:
        empty = make(device, 0)
        assert s.total_count == 0 and t.outstanding() == []
    del empty


def test_arrays_outlive_the_block_and_the_figures_stay(device):
    with umem.statistics() as s, umem.track() as t:
        array = make(device, 1000)
    before = s.summary(), t.outstanding()
    assert array.nbytes == 1000
    assert device.simulated or array.device.id == 0
    with umem.statistics() as later:
        del array
        gc.collect()
    assert (s.summary(), t.outstanding()) == before
    assert s.current_bytes == 1000 and later.current_bytes == 0


def test_memory_may_be_freed_in_another_thread(device):
    with umem.statistics() as s, umem.track() as t:
        held = [make(device, 1000)]
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        assert (s.current_bytes, s.total_bytes, t.outstanding()) == (0, 1000, [])


def test_other_threads_are_not_watched(cuda):
    def work():
        with umem.managed():
            make(cuda, 1000)

    with umem.statistics() as s:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert s.total_count == 0


def test_threads_watch_each_their_own(cuda):
    import cupy

    found = {}

    def work(size):
        with cupy.cuda.using_allocator(cuda.pools.malloc("managed")), umem.statistics() as s:
            for _ in range(50):
                make(cuda, size)
        found[size] = s.total_bytes, s.peak_bytes, s.current_bytes

    threads = [threading.Thread(target=work, args=(size,)) for size in (10, 200, 3000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {size: (50 * size, size, 0) for size in (10, 200, 3000)}


def test_another_thread_may_read_the_figures(device):
    errors, done = [], threading.Event()

    def watch():
        try:
            while not done.is_set():
                found = s.summary()
                assert found["current_bytes"] == 100 * found["current_count"]
                assert 0 <= found["current_count"] <= found["peak_count"] <= 1
                t.outstanding()
        except BaseException as error:
            errors.append(error)

    with umem.statistics() as s, umem.track() as t:
        thread = threading.Thread(target=watch)
        thread.start()
        for _ in range(500):
            make(device, 100)
        done.set()
        thread.join()
    assert not errors
    assert (s.total_count, s.current_count) == (500, 0)


def test_a_death_never_waits_for_a_lock(device):
    """The garbage collector may run in the middle of a count, in the thread that holds the lock."""
    with umem.statistics() as s, umem.track() as t:
        held = [make(device, 10)]
        thread = threading.Thread(target=held.clear)
        with s._lock, t._lock:
            thread.start()
            thread.join(300)
            assert not thread.is_alive()
        assert s.current_count == 0


def test_what_does_not_fit_is_not_counted(device):
    with umem.managed(limit="4MiB"), umem.statistics() as s, umem.track() as t:
        with pytest.raises(LimitError):
            make(device, 8 * MIB)
        kept = make(device, MIB)
    assert (s.total_bytes, s.peak_bytes, len(t.outstanding())) == (MIB, MIB, 1)
    del kept


def test_workspace_is_part_of_the_peak(virtual):
    with umem.statistics() as s, umem.track() as t:
        virtual.on_event(Alloc(900, 1000, "array", "x"))
        write = (Access(900, 0, 1000),)
        virtual.on_event(Op("conv", "forward", (), write, workspace_bytes=5000))
        virtual.on_event(Free(900))
    assert s.summary() == dict(zip(NAMES, (0, 6000, 6000, 0, 2, 2), strict=True))
    assert t.outstanding() == []


def test_the_virtual_gpu_counts_the_same_peak(virtual):
    with umem.statistics() as s:
        xp = virtual.xp
        a = xp.ones((300, 100))
        for _ in range(3):
            a = (a + 1) * 2
    assert s.peak_bytes == virtual.figures.peak_bytes
    assert s.current_bytes == a.nbytes


def test_a_step_of_chainer_gives_everything_back_but_what_it_keeps(virtual):
    needs_chainer()
    import umem.chainer  # isort: skip  (before Chainer, which it makes ready)
    import chainer
    import chainer.functions as F

    model = chainer.links.Linear(40, 30)
    x = np.ones((20, 40), "f")
    with umem.statistics() as s:
        loss = F.sum(F.relu(model(x)))
        loss.backward()
        assert s.peak_bytes > 2 * 20 * 30 * 4
        del loss
    gradients = [p.grad.nbytes for p in model.params()]
    data = [p.array.nbytes for p in model.params()] + [x.nbytes]
    assert s.current_bytes == sum(gradients) + sum(data)


# -- off means free, and back --------------------------------------------------------------------


@pytest.mark.parametrize("limit", [None, "24GiB"])
def test_without_a_watcher_managed_is_the_pools_own_method(cuda, limit):
    bare = cuda.pools.malloc("managed")
    with umem.managed(limit):
        assert allocator() == [bare]
        with umem.statistics() as s, umem.track() as t:
            assert allocator() == [t.allocated, s.allocated, bare]
        assert allocator() == [bare]


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(
        st.just([]),
        lambda inner: st.lists(
            st.tuples(st.sampled_from([*BLOCKS, "statistics", "track"]), st.booleans(), inner),
            max_size=3,
        ),
        max_leaves=12,
    ),
    st.sampled_from(["virtual", "cuda"]),
)
def test_any_nesting_counts_right_and_restores_each_level(tree, kind):
    """Every block makes one array of a size of its own; the oracle adds up the tree."""
    numbers = iter(range(1, 1000))

    def visit(blocks):
        total = 0
        for name, fails, inner in blocks:
            before = now()
            size = next(numbers)
            block = BLOCKS.get(name) or getattr(umem, name)
            try:
                with block() as entered:
                    kept.append(make(device, size))
                    below = visit(inner)
                    if fails:
                        raise KeyError
            except KeyError:
                assert fails
            assert now() == before
            if name == "statistics":
                assert entered.total_bytes == entered.current_bytes == size + below
            elif name == "track":
                assert sum(h.nbytes for h in entered.outstanding()) == size + below
            total += size + below
        return total

    kept = []
    with ExitStack() as stack:
        if kind == "virtual":
            device = stack.enter_context(umem.virtual_gpu("v100-16gb"))
        else:
            device = host_gpu(stack.enter_context(pytest.MonkeyPatch.context()))
            pool = device.driver.default_pool
            stack.enter_context(sys.modules["cupy"].cuda.using_allocator(pool.malloc))

        def now():
            if kind == "virtual":
                return device.watches, device.policy
            return allocator(), device.policy

        start = now()
        visit(tree)
        assert now() == start


def test_a_watch_around_a_users_own_allocator_sees_it(cuda):
    import cupy

    pool = cuda.driver.make_pool(cuda.driver.allocate)
    with cupy.cuda.using_allocator(pool.malloc), umem.statistics() as s:
        array = make(cuda, 700)
        assert pool.used_bytes() == 1024
    assert s.current_bytes == 700
    del array
    assert pool.used_bytes() == 0


def test_memory_of_a_watched_array_is_the_pools(cuda):
    with umem.managed(), umem.statistics(), umem.track():
        array = make(cuda, 700)
        assert array.data.mem.size == 700 and array.device.id == 0
        assert cuda.usage().managed_bytes == 1024
        address = array.data.ptr
        del array
        again = make(cuda, 700)
        assert again.data.ptr == address
    del again
    assert cuda.pools.used_bytes("managed") == 0


def test_enable_is_for_outside_on_a_real_gpu(cuda):
    import cupy

    before = cupy.cuda.get_allocator()
    with umem.statistics(), pytest.raises(StateError, match="Leave the block first"):
        umem.enable()
    assert cupy.cuda.get_allocator() is before and not umem.status().on


# -- misuse --------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [umem.statistics, umem.track])
def test_a_block_is_used_once(device, block):
    watch = block()
    with watch:
        with pytest.raises(StateError, match="used before"), watch:
            pass
    with pytest.raises(StateError, match="make a new one"), watch:
        pass
    with pytest.raises(StateError, match="left before"):
        watch.__exit__(None, None, None)


@pytest.mark.parametrize("block", [umem.statistics, umem.track])
def test_what_another_thread_leaves_is_over_for_the_one_that_entered_it(device, block):
    watch = block()
    watch.__enter__()
    kept = [make(device, 10)]
    thread = threading.Thread(target=lambda: watch.__exit__(None, None, None))
    thread.start()
    thread.join()
    found = watch.to_json()
    kept.append(make(device, 10))
    assert watch.to_json() == found
    del kept


def test_one_that_is_left_out_of_order_ends_alone(device):
    outer, inner = umem.statistics(), umem.statistics()
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    kept = make(device, 10)
    inner.__exit__(None, None, None)
    assert (outer.total_count, inner.total_count) == (0, 1)
    del kept


@pytest.mark.parametrize("block", [umem.statistics, umem.track])
def test_without_a_device_both_ways_out_are_named(block):
    from umem.devices.cuda import cuda_reason

    if cuda_reason() is None:
        pytest.skip("there is a CUDA device")
    watch = block()
    with pytest.raises(DeviceNotFoundError, match=r"umem\.virtual_gpu"), watch:
        raise AssertionError("entered")
    with umem.virtual_gpu("v100-16gb"), watch:  # nothing was used up
        pass


# -- what is shown -------------------------------------------------------------------------------


def test_the_table_of_statistics_line_by_line(virtual, capsys):
    with umem.statistics() as s:
        a = make(virtual, 3 * MIB)
        b = make(virtual, 512)
        del b
    s.print_report()
    assert capsys.readouterr().out.splitlines() == [
        "allocations on v100-16gb (simulated)",
        "               bytes     count",
        "current      3.0 MiB         1",
        "peak         3.0 MiB         2",
        "total        3.0 MiB         2",
    ]
    text = io.StringIO()
    s.print_report(file=text, unit="KiB")
    assert text.getvalue().splitlines()[3] == "peak      3072.5 KiB         2"
    assert repr(s) == "<statistics of 2 allocations: 3.0 MiB now, 3.0 MiB at most>"
    del a


def test_a_real_gpu_is_not_called_simulated(cuda, capsys):
    with umem.statistics() as s:
        pass
    s.print_report()
    assert capsys.readouterr().out.startswith("allocations on Host GPU\n")


def test_the_report_of_a_tracker_line_by_line(virtual, capsys):
    kept = []
    with umem.track() as t:
        for _ in range(2):
            kept.append(make(virtual, MIB))
        kept.append(make(virtual, KIB))
        kept.append(make(virtual, 512))
    t.print_report(count=2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["2.0 MiB held on v100-16gb (simulated)", "2.0 MiB in 2: empty array"]
    assert re.fullmatch(rf"    {re.escape(HERE)}:\d+ make", lines[2])
    assert lines[-1] == "512 B held by 1 more place"
    t.print_report(unit="B", count=1)
    assert capsys.readouterr().out.splitlines()[1] == "2097152 B in 2: empty array"
    assert repr(t) == "<tracker: 2.0 MiB held by 3 places>"


def test_an_unknown_unit_is_refused(virtual):
    with umem.statistics() as s, umem.track() as t:
        kept = make(virtual, 10)
    for watch in (s, t):
        with pytest.raises(SizeError, match="'auto' or one of B, KiB, MiB, GiB, TiB; got 'KB'"):
            watch.print_report(file=io.StringIO(), unit="KB")
    del kept


def test_both_become_json(device):
    with umem.statistics() as s, umem.track() as t:
        line, kept = here(), make(device, 100)
    read = json.loads(json.dumps([s.to_json(), t.to_json()]))
    about = {"device": device.name, "simulated": device.simulated}
    assert read[0] == {**about, **s.summary()}
    (holding,) = read[1]["outstanding"]
    assert {key: read[1][key] for key in about} == about
    assert (holding["nbytes"], holding["count"]) == (100, 1)
    frame = {"file": __file__, "line": line, "function": "test_both_become_json"}
    assert frame in holding["stack"]
    del kept


# -- who holds what ------------------------------------------------------------------------------


def test_holdings_are_grouped_by_stack_and_the_largest_comes_first(device):
    kept = []

    def small():
        kept.append(make(device, 10))

    def large():
        kept.append(make(device, 1000))

    with umem.track() as t:
        line = here() + 1
        small(), small(), small()
        large()
        found = t.outstanding()
        assert [(h.nbytes, h.count) for h in found] == [(1000, 1), (30, 3)]
        places = [[(frame.line, frame.function) for frame in h.stack[1:3]] for h in found]
        test = sys._getframe().f_code.co_name
        assert places[0] == [(large.__code__.co_firstlineno + 1, "large"), (line + 1, test)]
        assert places[1] == [(small.__code__.co_firstlineno + 1, "small"), (line, test)]
        del kept[1]
        assert [(h.nbytes, h.count) for h in t.outstanding()] == [(1000, 1), (20, 2)]
        kept.clear()
        assert t.outstanding() == []


def test_the_inner_end_of_a_stack_is_the_users(device):
    with umem.track() as t:
        if device.simulated:
            line, array = here(), np.square(device.xp.ones(100))
        else:
            line, array = here(), device.xp.ndarray((100,))
    assert [str(h.stack[0]) for h in t.outstanding()] == [
        f"{HERE}:{line} test_the_inner_end_of_a_stack_is_the_users"
    ]
    del array


def test_frames_inside_chainer_are_left_out(virtual):
    needs_chainer()
    import umem.chainer  # isort: skip  (before Chainer, which it makes ready)
    import chainer
    import chainer.functions as F

    x = chainer.Variable(np.ones((50, 50), "f"))
    with umem.track() as t:
        line, y = here(), F.relu(F.sigmoid(x))
        y.grad = np.ones_like(y.array)
        y.backward(retain_grad=True)
        back = here() - 1
    held = {h.stack[0].line: h for h in t.outstanding()}
    assert all(h.stack[0].file == __file__ for h in held.values())
    assert set(held) == {line, back}
    assert "Sigmoid activation" in held[line].label and "ReLU activation" in held[line].label
    assert "gradient" in held[back].label


def test_without_stacks_the_label_says_what_is_known(device):
    with umem.managed(), umem.track(stacks=False) as t:
        kept = [make(device, 100), make(device, 200)]
        with umem.unmanaged():
            kept.append(make(device, 5))
    found = [(h.nbytes, h.count, h.label, h.stack) for h in t.outstanding()]
    if device.simulated:
        assert found == [(305, 3, "empty array", ())]
    else:
        assert found == [(300, 2, "managed memory", ()), (5, 1, "unmanaged memory", ())]
    del kept


def test_many_labels_in_one_place_are_cut_short(virtual):
    with umem.track() as t:
        for n in range(5):
            virtual.on_event(Alloc(900 + n, 10, "array", f"x{n}"))
    (holding,) = t.outstanding()
    assert holding.label == "x0 array, x1 array, x2 array, ..." and holding.count == 5
    for n in range(5):
        virtual.on_event(Free(900 + n))


def test_a_deep_stack_keeps_its_inner_frames(device):
    from umem._common.stacks import STACK_DEPTH

    def down(depth):
        return make(device, 10) if not depth else down(depth - 1)

    with umem.track() as t:
        kept = down(100)
    (holding,) = t.outstanding()
    names = [frame.function for frame in holding.stack]
    assert names == ["make"] + ["down"] * (STACK_DEPTH - 1)
    del kept


def test_a_stack_of_libraries_alone_is_kept_whole(device, monkeypatch):
    from umem._common import stacks

    monkeypatch.setattr(stacks, "_is_library", lambda file: True)
    with umem.track() as t:
        kept = make(device, 10)
    (holding,) = t.outstanding()
    assert holding.stack[0].file.startswith(str(Path(umem.__file__).parent))
    del kept


def test_a_tracker_keeps_no_variables_alive(device):
    class Thing:
        pass

    def work():
        thing = Thing()
        return make(device, 10), weakref.ref(thing)

    with umem.track() as t:
        kept, thing = work()
        assert thing() is None and len(t.outstanding()) == 1
    del kept


def test_no_array_keeps_a_watch_that_is_over(cuda):
    with umem.track() as t:
        kept = make(cuda, 10)
    ref = weakref.ref(t)
    del t
    assert ref() is None
    del kept


# -- the leak check ------------------------------------------------------------------------------


def test_a_leak_raises_with_the_stack_that_made_it(device):
    kept = []
    with pytest.raises(LeakError) as caught, umem.track(check=True) as t:
        make(device, 10)
        line = here() + 1
        kept.append(make(device, 3 * MIB))
    message = str(caught.value)
    assert message.startswith(f"3.0 MiB in 1 allocation on {device.name}")
    assert ("(simulated)" in message) is device.simulated
    assert f"{HERE}:{line} test_a_leak_raises_with_the_stack_that_made_it" in message
    assert kept[0].nbytes == 3 * MIB and len(t.outstanding()) == 1
    with umem.track(check=True):  # what is held from before is not this block's
        make(device, 10)


def test_a_message_names_five_places_and_counts_the_rest(device):
    kept = []
    with pytest.raises(LeakError, match="held by 2 more places"), umem.track(check=True):
        kept.append(make(device, 1))
        kept.append(make(device, 2))
        for line in range(5):
            exec(compile("\n" * line + "kept.append(make(device, 99))", "made up", "exec"))


def test_garbage_in_cycles_is_no_leak(device):
    gc.disable()
    try:
        with umem.track(check=True):
            cycle = [make(device, 10)]
            cycle.append(cycle)
            del cycle
    finally:
        gc.enable()


def test_an_exception_goes_before_a_leak(device):
    with pytest.raises(ZeroDivisionError), umem.track(check=True):
        kept = make(device, 10)
        raise ZeroDivisionError
    del kept


def test_after_a_leak_everything_is_as_before(cuda):
    before = allocator()
    with umem.managed():
        inside = allocator()
        with pytest.raises(LeakError), umem.track(check=True, stacks=False):
            kept = make(cuda, 10)
        assert allocator() == inside
    assert allocator() == before
    del kept


# -- what it costs -------------------------------------------------------------------------------


def test_the_benchmark_runs_and_hybrid_adds_less_than_a_microsecond(tmp_path):
    pytest.importorskip("cupy")
    args = ["--device", "stub", "--quick", "--json", str(tmp_path / "report.json")]
    done = python(ROOT / "bench/allocation.py", *args, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    added = {row["allocation"]: row["added_us"] for row in report["rows"] if row["pool"] == "stub"}
    assert {"unmanaged", "managed", "managed, limit", "managed, track"} <= added.keys()
    assert added["hybrid, before pressure"] < report["wanted_hybrid_added_us"] == 1
    assert added["managed, statistics"] > added["hybrid, before pressure"]
    assert "microsecond" in done.stdout.lower()
