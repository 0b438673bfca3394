"""Compiled kernels on disk: each compiled once, whoever asks at once, and kept within a size."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest
from software_programs import needs_compiler, needs_software_gpu

from umem.errors import DeviceError, SizeError
from umem.host_cuda import compile_lock, kernel_cache, processors, toolchain
from umem.host_cuda.kernels import KernelCompiler
from umem.host_cuda.toolchain import Toolchain

SOURCE = "int f(void) { return 7; }"
ASKS = f"""
import ctypes, sys
from pathlib import Path
from umem.host_cuda.toolchain import Toolchain
path = Toolchain(Path(sys.argv[1])).shared_object({SOURCE!r}, "c")
assert ctypes.CDLL(str(path)).f() == 7
"""


@pytest.fixture
def compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that a compiler writes a line to whenever it compiles."""
    return counting(tmp_path, monkeypatch)


def counting(folder: Path, monkeypatch: pytest.MonkeyPatch, does: str = "") -> Path:
    count, script = folder / "count", folder / "cxx"
    count.touch()
    real = shutil.which("g++")
    script.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] || echo compiles >> {count}\n{does}\nexec {real} "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return count


def until(path: Path, process: subprocess.Popen[bytes]) -> None:
    while not path.read_text():
        assert process.poll() is None
        threading.Event().wait(0.01)


# -- one compiles for all ----------------------------------------------------------------------


@pytest.mark.thorough
@needs_compiler
def test_two_hundred_processes_compile_a_kernel_once(tmp_path: Path, compiles: Path) -> None:
    program = f"""
import os, sys
program = {ASKS!r}
compiled = compile(program, "asks", "exec")
import umem.host_cuda.toolchain
begin, ready = os.pipe()
children = []
for _ in range(200):
    if not (child := os.fork()):
        os.close(ready)
        os.read(begin, 1)  # all begin at once
        try:
            exec(compiled)
        except BaseException:
            os._exit(1)
        os._exit(0)
    children.append(child)
os.close(ready)
assert [os.waitpid(child, 0)[1] for child in children] == [0] * 200
"""
    folder = tmp_path / "cache"
    subprocess.run([sys.executable, "-c", program, str(folder)], check=True)
    assert compiles.read_text() == "compiles\n"
    assert [path.suffix for path in folder.iterdir()] == [".so"]


@pytest.mark.slow
@needs_software_gpu
def test_two_hundred_processes_open_the_gpu_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, program = tmp_path / "asked", tmp_path / "program.py"
    counting(tmp_path, monkeypatch, f'echo "$*" >> {asked}')
    for variable in ("XDG_CACHE_HOME", "CUPY_CACHE_DIR", "TMPDIR"):
        monkeypatch.setenv(variable, str(tmp_path))
    program.write_text("""
import os
import umem.devices.software.opening  # before the forks
begin, ready = os.pipe()
children = []
for _ in range(200):
    if not (child := os.fork()):
        os.close(ready)
        os.read(begin, 1)  # all begin at once
        umem.software_gpu("t4", "64MiB", force=True)
        import cupy
        os._exit(int(cupy.arange(4).sum()) != 6)
    children.append(child)
os.close(ready)
assert [os.waitpid(child, 0)[1] for child in children] == [0] * 200
""")
    subprocess.run([sys.executable, program], check=True)
    made = re.findall(r"-o (\S+)\.part-", asked.read_text())
    assert made and len({*made}) == len(made)


@needs_compiler
def test_threads_compile_a_kernel_once(tmp_path: Path, compiles: Path) -> None:
    tools, start, found = Toolchain(tmp_path / "cache"), threading.Barrier(8), []

    def ask() -> None:
        start.wait()
        found.append(tools.shared_object(SOURCE, "c"))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({*found}) == 1 and len(found) == 8
    assert compiles.read_text() == "compiles\n"


@needs_compiler
def test_another_compiles_where_a_worker_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = f'[ "$1" = --version ] || [ -e {tmp_path}/go ] || sleep 600'
    count, cache = counting(tmp_path, monkeypatch, hangs), tmp_path / "cache"
    asked = [sys.executable, "-c", ASKS, str(cache)]
    worker = subprocess.Popen(asked, start_new_session=True)
    try:
        until(count, worker)
        waits = subprocess.Popen(asked)
        worker.kill()
        worker.wait()
        (tmp_path / "go").touch()
        assert waits.wait(timeout=300) == 0
    finally:
        os.killpg(worker.pid, signal.SIGKILL)  # its compiler
    assert count.read_text() == "compiles\n" * 2
    whole = [path for path in cache.iterdir() if kernel_cache.UNFINISHED not in path.name]
    assert [path.suffix for path in whole] == [".so"]
    (left,) = {*cache.iterdir()} - {*whole}
    whole[0].unlink()
    os.utime(left, (0, 0))
    Toolchain(cache).shared_object(SOURCE, "c")
    assert [*cache.iterdir()] == whole


@needs_compiler
def test_a_drive_without_locks_compiles_without(
    tmp_path: Path, compiles: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuses)
    path = Toolchain(tmp_path / "cache").shared_object(SOURCE, "c")
    assert ctypes.CDLL(str(path)).f() == 7
    assert [*path.parent.iterdir()] == [path]


@needs_compiler
def test_nobody_waits_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / "made.so"
    monkeypatch.setattr(compile_lock, "WAIT_SECONDS", 0.05)
    with compile_lock.only_maker(made) as first, compile_lock.only_maker(made) as second:
        assert first and second
    assert not list(tmp_path.iterdir())


@needs_compiler
def test_a_cache_that_cannot_be_written_is_read(
    tmp_path: Path, compiles: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    path = Toolchain(cache).shared_object(SOURCE, "c")
    takes = toolchain.takes_files
    monkeypatch.setattr(toolchain, "takes_files", lambda at: at != cache and takes(at))
    tools = Toolchain(cache)
    assert tools.shared_object(SOURCE, "c") == path and tools.folder != cache
    assert tools.shared_object("int other;", "c").parent == tools.folder
    assert compiles.read_text() == "compiles\n" * 2


# -- what a kernel is known by, and what is in it -----------------------------------------------


@pytest.mark.thorough
@needs_software_gpu
def test_caches_share_precompiled_headers_and_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    spec = find_spec("cupy")
    assert spec is not None and spec.origin is not None
    source = '#include <cupy/carray.cuh>\nextern "C" __global__ void f(float* x) { x[0] = 1; }'
    names = []
    for cache in (tmp_path / "one", tmp_path / "two"):
        compiler = KernelCompiler(Toolchain(cache), Path(spec.origin).parent, 12090)
        path, _ = compiler.compile(source, ())
        names.append(path.name)
        assert {found.suffix for found in cache.iterdir()} == {".so"}
    assert names[0] == names[1]
    headers = tmp_path / f"umem-headers-{os.getuid()}"
    assert [p.suffix for p in headers.iterdir()].count(".gch") == 1
    listed = subprocess.run(["nm", "-C", path], capture_output=True, text=True, check=True).stdout
    assert "umem_run_f" in listed
    for unused in ("atomicMax", "_floor_divide", "umem_divided", "umem_run_block"):
        assert unused not in listed
    with pytest.raises(DeviceError, match="atomicMax"):  # CuPy's, whose header is not included
        compiler.compile('extern "C" __global__ void f(float* x) { atomicMax(x, 1.f); }', ())


@needs_compiler
def test_a_portable_kernel_is_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native = Toolchain(tmp_path).shared_object(SOURCE, "c")
    monkeypatch.setenv(processors.TARGET_VARIABLE, "portable")
    tools = Toolchain(tmp_path)
    portable = tools.shared_object(SOURCE, "c")
    assert native.name.startswith("native-") and portable.name.startswith("portable-")
    monkeypatch.setattr(
        processors, "this_processor", lambda: " ".join(["other", *processors.NEEDED])
    )
    assert Toolchain(tmp_path).shared_object(SOURCE, "c") == portable
    monkeypatch.setenv(processors.TARGET_VARIABLE, "native")
    assert Toolchain(tmp_path).shared_object(SOURCE, "c") not in (native, portable)


def test_a_target_that_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(processors.TARGET_VARIABLE, "avx10")
    with pytest.raises(DeviceError, match="TARGET must be native or portable, not avx10"):
        processors.Processors.wanted()
    monkeypatch.setenv(processors.TARGET_VARIABLE, "portable")
    monkeypatch.setattr(processors.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(processors, "this_processor", lambda: "flags: avx fma bmi1 bmi2 f16c movbe")
    with pytest.raises(DeviceError, match="x86-64-v3 needs avx2, which this processor lacks"):
        processors.Processors.wanted()


# -- its size ------------------------------------------------------------------------------------


def kernels(folder: Path, count: int) -> list[Path]:
    """Files of 100 bytes, the first used the longest ago."""
    paths = [folder / f"{number}.so" for number in range(count)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes(100))
        os.utime(path, (1000 + number, 1000))
    return paths


def test_the_least_recently_used_kernels_go_first(tmp_path: Path) -> None:
    paths = kernels(tmp_path, 4)
    kernel_cache.mark_used(paths[0])
    assert kernel_cache.trim_kernels(tmp_path, 250) == paths[1:3]
    assert kernel_cache.trim_kernels(tmp_path, 0) == [paths[3]]  # the first was used just now
    assert [*tmp_path.iterdir()] == [paths[0]]
    assert kernel_cache.trim_kernels(tmp_path / "none", 0) == []


@needs_compiler
def test_compiling_keeps_the_cache_within_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = kernels(tmp_path, 2)
    monkeypatch.setenv(kernel_cache.VARIABLE, "100")
    path = Toolchain(tmp_path).shared_object(SOURCE, "c")
    assert [*tmp_path.iterdir()] == [path] and path not in old
    monkeypatch.setenv(kernel_cache.VARIABLE, "plenty")
    with pytest.raises(SizeError, match="UMEM_KERNEL_CACHE_SIZE"):
        Toolchain(tmp_path)
