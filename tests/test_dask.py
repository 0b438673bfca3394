"""`umem.dask`: real workers on software GPUs, and the exchange of CuPy's arrays between them."""

from __future__ import annotations

import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from processes import printed_quietly, python
from software_programs import is_installed, lines, needs_software_gpu

# Not imported here: it changes how errors are pickled, in the whole process.
pytestmark = pytest.mark.skipif(find_spec("distributed") is None, reason="there is no distributed")
CLUSTER = """
import os, sys
import cupy as cp, numpy as np, dask.array as da
from distributed import Client, LocalCluster
import umem, umem.dask

def status():
    import umem
    return umem.status()

async def beat(dask_worker):
    await dask_worker.heartbeat()

with (
    LocalCluster(
        n_workers=2, threads_per_worker=1, processes={processes}, protocol="tcp",
        host="127.0.0.1", dashboard_address=None, memory_limit=None,
    ) as cluster,
    Client(cluster, timeout=60) as client,
):
"""
MATRIX = """
def part(block_info=None):
    (r0, r1), (c0, c1) = block_info[None]["array-location"]
    return cp.asarray(np.random.default_rng([r0, c0]).random((r1 - r0, c1 - c0)))

chunks = (1024,) * 4
x = da.map_blocks(part, chunks=(chunks, chunks), dtype="f8", meta=cp.empty((0, 0)))
whole = np.block([
    [np.random.default_rng([r, c]).random((1024, 1024)) for c in range(0, 4096, 1024)]
    for r in range(0, 4096, 1024)
])
expected = (whole * whole.T).sum()
"""
"""An array of four times a worker's VRAM; a product with its transpose has workers exchange it."""


def on_software_gpu(test: Any) -> Any:
    """Mark a test that needs processes with a software GPU."""
    return is_installed(needs_software_gpu(test))


def in_cluster(program: str, cache: Path, *words: str, processes: bool = True) -> list[str]:
    """The lines that a program prints which has two workers, each with 32 MiB of VRAM.

    What dask logs is shown when the program fails.
    """
    text = CLUSTER.format(processes=processes) + textwrap.indent(program, "    ")
    gpu, path = "t4,vram=32MiB,force", str(cache)
    done = python(
        "-c", text, *words,
        UMEM_SOFTWARE_GPU=gpu, XDG_CACHE_HOME=path, CUPY_CACHE_DIR=path, timeout=120,
    )  # fmt: skip
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout.splitlines()


@on_software_gpu
@pytest.mark.parametrize("mode", ["managed", "hybrid"])
def test_an_array_of_four_times_the_vram_of_a_worker(mode: str, kernel_cache: Path) -> None:
    program = """
mode, limit = sys.argv[1], 192 << 20
given = limit if mode == "managed" else "32MiB"  # of hybrid, of the part in VRAM
client.register_plugin(umem.dask.Plugin(mode, limit=given))
x = x.persist()
found = (x * x.T).sum().compute()
print(type(found) is cp.ndarray, abs(float(found) - expected) < 1e-9 * expected)
print(np.array_equal(x[1000:1500, 900:2000].compute().get(), whole[1000:1500, 900:2000]))
print(client.submit(lambda a: int(a.sum()), client.scatter(cp.arange(5))).result() == 10)
client.run(beat)
reserved = 0
for worker in client.scheduler_info()["workers"].values():
    metrics = worker["metrics"]
    figures = metrics["umem"]
    reserved += figures["reserved_bytes"]
    print({type(value) for value in figures.values()} == {int})
    print(0 < figures["used_bytes"] <= figures["reserved_bytes"] <= figures["peak_bytes"] <= limit)
    print(metrics["umem_used_bytes"] == figures["used_bytes"])
    print(figures["managed_bytes"] > 0)  # hybrid has spilled
print(reserved >= 128 << 20)
print(all(s.on and s.mode == mode for s in client.run(status).values()))
"""
    assert in_cluster(MATRIX + program, kernel_cache, mode) == [
        "True True",
        *["True"] * (2 + 2 * 4 + 2),
    ]


@on_software_gpu
def test_a_limit_is_each_workers_own(kernel_cache: Path) -> None:
    program = """
client.register_plugin(umem.dask.Plugin("managed", limit="80MiB"))
def fill(dask_worker):
    try:
        dask_worker.held = [*getattr(dask_worker, "held", []), cp.zeros(60 << 20, "u1")]
    except umem.OutOfMemoryError as error:
        return type(error).__name__
print(*client.run(fill).values(), *client.run(fill).values())
"""
    assert in_cluster(program, kernel_cache) == ["None None LimitError LimitError"]


@on_software_gpu
def test_a_worker_that_dies_in_the_middle_starts_again_with_the_plugin(
    kernel_cache: Path, tmp_path: Path
) -> None:
    program = """
path = sys.argv[1]
def deadly(block, block_id=None):
    if block_id == (2, 2):
        try:
            open(path, "x").close()
            os._exit(1)
        except FileExistsError:
            pass
    return block
client.register_plugin(umem.dask.Plugin("managed"))
before = set(client.run(os.getpid).values())
x = x.persist()
died = x.map_blocks(deadly, dtype="f8", meta=cp.empty((0, 0)))
found = float((died * x.T).sum().compute())
print(os.path.exists(path), abs(found - expected) < 1e-9 * expected)
client.wait_for_workers(2, timeout=60)
print(len(before & set(client.run(os.getpid).values())))
print([(s.on, s.mode) for s in client.run(status).values()])
"""
    assert in_cluster(MATRIX + program, kernel_cache, str(tmp_path / "died")) == [
        "True True",
        "1",
        "[(True, 'managed'), (True, 'managed')]",
    ]


PLUGINS = """
def on():
    client.run(beat)
    workers = client.scheduler_info()["workers"].values()
    modes = {s.mode if s.on else "off" for s in client.run(status).values()}
    return modes, {"umem" in worker["metrics"] for worker in workers}
def program(mode):
    umem.enable(mode, limit="1GiB") if mode else umem.disable()
one, two = (umem.dask.Plugin("managed", limit="1GiB") for _ in range(2))
other = umem.dask.Plugin("hybrid", limit="1GiB")
for plugin in (one, two, one):
    client.register_plugin(plugin)
"""


@on_software_gpu
@pytest.mark.parametrize("processes", [True, False], ids=["processes", "threads"])
def test_plugins_that_agree_disable_what_they_enabled(kernel_cache: Path, processes: bool) -> None:
    program = """
try:
    client.register_plugin(other)
except umem.errors.StateError as error:
    print(one.name in str(error), two.name in str(error), other.name in str(error), *on())
for plugin in (other, one, two):
    client.unregister_worker_plugin(plugin.name)
    print(*on())
"""
    assert in_cluster(PLUGINS + program, kernel_cache, processes=processes) == [
        "True True True {'managed'} {True}",
        "{'managed'} {True}",
        "{'managed'} {True}",
        "{'off'} {False}",
    ]


@on_software_gpu
def test_what_the_program_enabled_stays_on(kernel_cache: Path) -> None:
    program = """
for plugin in (one, two):
    client.unregister_worker_plugin(plugin.name)
client.run(program, "hybrid")
client.register_plugin(other)
print(*on())
client.unregister_worker_plugin(other.name)
print(*on())
client.run(program, None)
client.register_plugin(one)
client.restart(timeout=60)
print(*on())
"""
    assert in_cluster(PLUGINS + program, kernel_cache) == [
        "{'hybrid'} {True}",
        "{'hybrid'} {False}",
        "{'managed'} {True}",
    ]


START = """
import sys
{hidden}
import dask, numpy as np
import umem, umem.dask
gpu = umem.software_gpu("t4", "64MiB", force=True, stream_seed={seed})
import cupy as cp
from distributed.protocol import deserialize, deserialize_bytes, serialize, serialize_bytes
def equal(a, b):
    assert type(a) is type(b) is cp.ndarray and a.dtype == b.dtype and a.shape == b.shape
    return np.array_equal(a.get(), b.get())
def same(a, b):  # also in Fortran's order where it was
    return equal(a, b) and a.flags.f_contiguous >= b.flags.f_contiguous
"""
HIDDEN = "sys.modules['numba'] = sys.modules['rmm'] = None"


@needs_software_gpu
@pytest.mark.parametrize("hidden", ["", HIDDEN], ids=["with numba", "without"])
def test_every_array_comes_back(hidden: str, kernel_cache: Path) -> None:
    """Of any type, shape and strides, split into frames or not, alone or in containers."""
    program = """
from hypothesis import given, settings, strategies as st
umem.dask.serialize_by_host_copies()
FIELDS = np.dtype([("a", "i4"), ("b", "f8")], align=True)  # CuPy copies no others
TYPES = ["?", "i1", "u2", "f2", "f4", "f8", "c8", "c16", FIELDS, "V3"]
@st.composite
def arrays(draw):
    dtype = np.dtype(draw(st.sampled_from(TYPES)))
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    size = int(np.prod(shape)) * dtype.itemsize
    content = np.random.default_rng(draw(st.integers(0, 9))).integers(0, 2, size, "u1")
    array = cp.asarray(np.ndarray(shape, dtype, content, order=draw(st.sampled_from("CF"))))
    array = array.transpose(draw(st.permutations(range(array.ndim))))
    steps = st.sampled_from([slice(None), slice(None, None, -1), slice(1, None, 2)])
    array = array[tuple(draw(st.lists(steps, max_size=array.ndim)))]
    return cp.broadcast_to(array, (2, *array.shape)) if draw(st.booleans()) else array
@settings(max_examples=300, deadline=None, database=None)
@given(arrays())
def comes_back(x):
    assert same(deserialize(*serialize(x)), x)
    listed, = deserialize(*serialize({"a": [x, 1]}))["a"][:1]
    assert same(listed, x) and same(deserialize_bytes(serialize_bytes(x)), x)
    assert equal(deserialize(*serialize((lambda: x)))(), x)  # by cloudpickle and CuPy
comes_back()
with dask.config.set({"distributed.comm.shard": "1MiB"}):
    big = cp.arange(5 << 18).reshape(5, -1).T
    print(same(deserialize_bytes(serialize_bytes(big)), big))
import cupyx.scipy.sparse as sparse
matrix = sparse.random(50, 40, 0.2, "csr")
print(np.array_equal(deserialize(*serialize(matrix)).toarray().get(), matrix.toarray().get()))
print(same(deserialize(*serialize(big[:3])), big[:3]))  # registered still
"""
    found = lines(program, kernel_cache, start=START.format(hidden=hidden, seed=None))
    assert found == ["True"] * 3


@needs_software_gpu
def test_distributeds_own_form_is_read_and_replaced(kernel_cache: Path) -> None:
    program = """
import distributed.protocol.cupy as theirs
from distributed.protocol import dask_deserialize
x = cp.arange(12.0).reshape(3, 4).T
sent = theirs.dask_serialize_cupy_ndarray(x)
umem.dask.serialize_by_host_copies()
print(same(dask_deserialize.dispatch(cp.ndarray)(*sent), x), same(deserialize(*serialize(x)), x))
header, _ = serialize(x)
print({"shape", "strides", "typestr"} <= set(header["sub-header"]))
"""
    pytest.importorskip("numba")
    found = lines(program, kernel_cache, start=START.format(hidden="", seed=None))
    assert found == ["True True", "True"]


@needs_software_gpu
def test_work_of_another_stream_is_waited_for(kernel_cache: Path) -> None:
    program = """
umem.dask.serialize_by_host_copies()
for turn in range(60):
    gpu.reseed(turn // 20)
    with cp.cuda.Stream(non_blocking=True):
        x = cp.zeros(1000)
        x += 1
        x *= 3
    y = deserialize(*serialize(x))
    with cp.cuda.Stream(non_blocking=True) as stream:
        total = y.sum()
    stream.synchronize()
    assert float(total) == 3000
"""
    assert lines(program, kernel_cache, start=START.format(hidden="", seed=0)) == []


@needs_software_gpu
def test_only_ucx_with_managed_memory_is_warned_of(kernel_cache: Path) -> None:
    """By workers that are none: UCX needs a card."""
    program = """
import warnings
from types import SimpleNamespace
for mode in ("managed", "hybrid", "unmanaged"):
    for protocol in ("ucx", "ucxx", "tcp", "tls", "inproc"):
        plugin, worker = umem.dask.Plugin(mode), SimpleNamespace(metrics={})
        worker.address = f"{protocol}://127.0.0.1:1"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plugin.setup(worker)
        plugin.teardown(worker)
        print(mode, protocol, *(w.category.__name__ for w in caught), worker.metrics)
"""
    found = lines(program, kernel_cache, start=START.format(hidden="", seed=None))
    assert [line for line in found if "Warning" in line] == [
        f"{mode} {protocol} DaskWarning {{}}"
        for mode in ("managed", "hybrid")
        for protocol in ("ucx", "ucxx")
    ]
    assert len(found) == 15 and all(line.endswith("{}") for line in found)


@needs_software_gpu
def test_a_device_memory_limit_of_dask_cuda_is_warned_of(kernel_cache: Path) -> None:
    """By workers that are none: dask-cuda needs a card."""
    program = """
import warnings
from types import SimpleNamespace as Made
import zict
stored = Made(device_buffer=zict.Buffer({}, {}, 8 << 20))
proxies = Made(manager=Made(_device_memory_limit=9 << 20))
for data in (stored, proxies, {}, Made(device_buffer=None)):
    for mode in ("hybrid", "unmanaged"):
        plugin = umem.dask.Plugin(mode)
        worker = Made(metrics={}, address="tcp://127.0.0.1:1", data=data)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plugin.setup(worker)
        plugin.teardown(worker)
        print(mode, *(f"{w.category.__name__} {w.message}" for w in caught))
"""
    found = lines(program, kernel_cache, start=START.format(hidden="", seed=None))
    assert [" ".join(line.split()[:2]) for line in found] == [
        *["hybrid DaskWarning", "unmanaged"] * 2, *["hybrid", "unmanaged"] * 2,
    ]  # fmt: skip
    assert "above 8.0 MiB of VRAM" in found[0] and "above 9.0 MiB of VRAM" in found[2]
    assert "device_memory_limit=None" in found[0]


def test_what_makes_no_sense_is_refused_where_it_is_made() -> None:
    program = """
import umem.dask
for given in ({"mode": "paged"}, {"limit": "much"}):
    try:
        umem.dask.Plugin(**given)
    except (umem.errors.StateError, umem.errors.SizeError) as error:
        print(error)
"""
    mode, limit = printed_quietly("-c", program).splitlines()
    assert mode == "mode must be one of unmanaged, managed, hybrid; got 'paged'"
    assert limit.startswith("limit")


def test_errors_of_umem_reach_the_client_as_what_they_are() -> None:
    """distributed has all errors that are defined by then pickled by tblib."""
    program = """
import pickle
import umem.dask, umem.errors
for error in vars(umem.errors).values():
    if isinstance(error, type) and issubclass(error, umem.errors.UmemError):
        copy = pickle.loads(pickle.dumps(error("it's why")))
        print(type(copy) is error and str(copy) == "it's why")
"""
    found = printed_quietly("-c", program).splitlines()
    assert len(found) > 20 and set(found) == {"True"}


def test_without_distributed_it_says_what_to_install() -> None:
    program = """
import sys
sys.modules["distributed"] = None
try:
    import umem.dask
except ImportError as error:
    print(type(error).__name__, error)
"""
    (line,) = printed_quietly("-c", program).splitlines()
    assert line.startswith("MissingDependencyError umem.dask: ")
    assert "pip install 'distributed>=" in line


def test_a_plugin_of_the_scheduler_is_refused() -> None:
    program = """
import logging
from distributed import LocalCluster
import umem.dask
logging.disable()
try:
    LocalCluster(
        n_workers=0, processes=False, protocol="tcp", host="127.0.0.1", dashboard_address=None,
        scheduler_kwargs={"plugins": [umem.dask.Plugin()]},
    )
except Exception as error:
    while error:
        print(error)
        error = error.__cause__
"""
    assert printed_quietly("-c", program).splitlines()[-1] == (
        "umem.dask.Plugin is for workers: client.register_plugin(plugin)"
    )
