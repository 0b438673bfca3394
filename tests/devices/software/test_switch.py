"""UMEM_SOFTWARE_GPU and pytest --software-gpu: early, and inherited by every process."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from glob import glob
from pathlib import Path
from typing import Any

import pytest
from project import ROOT
from software_programs import is_installed, needs_cupy, needs_software_gpu

import umem
from umem import host_cuda
from umem.errors import SizeError
from umem.host_cuda import requirements
from umem_software_gpu import VARIABLE, Waiting, parsed, plugin

NAME = "import cupy; print(cupy.cuda.runtime.getDeviceProperties(0)['name'].decode())"
GPU = "t4,vram=64MiB,force"


def started(*words: str, cache: Path, cwd: Path | None = None, **variables: str) -> Any:
    """A Python process, and what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    environment |= {"XDG_CACHE_HOME": str(cache), "CUPY_CACHE_DIR": str(cache)}
    environment |= {"PYTEST_ADDOPTS": "-p no:cacheprovider"}
    return subprocess.run(
        [sys.executable, *words],
        env=environment | variables,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_umem_knows_the_variable_and_the_finder_without_importing_the_package() -> None:
    assert host_cuda.VARIABLE == VARIABLE
    assert Waiting("t4").opens_software_gpu


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("t4", {}),
        ("t4,vram=8GiB", {"vram": "8GiB"}),
        ("t4, model=off ,checked", {"model": False, "checked": True}),
        ("t4,devices=2", {"devices": 2}),
        ("t4,not-strict", {"strict": False}),
        ("t4,sticky=off", {"sticky": False}),
        ("t4,sticky=on", {"sticky": True}),
        ("t4,kernel-seconds=2.5", {"kernel_seconds": 2.5}),
        ("t4,seed=3,force,model=on", {"stream_seed": 3, "force": True, "model": True}),
    ],
)
def test_options_are_those_of_software_gpu(text: str, given: dict[str, Any]) -> None:
    assert parsed(text) == ("t4", given)


@pytest.mark.parametrize(
    "option",
    [
        "",
        "vram",
        "vram=",
        "model=maybe",
        "checked=1",
        "not-strict=1",
        "sticky",
        "sticky=0",
        "strict",
        "seed=x",
        "kernel-seconds",
        "kernel-seconds=-1",
        "x",
        "devices=two",
        "devices=-1",
    ],
)
def test_an_unknown_option_is_named_with_those_that_there_are(option: str) -> None:
    with pytest.raises(ValueError, match=r"not an option of the software GPU: GPU\[,vram=SIZE\]"):
        parsed(f"t4,{option}")


@pytest.mark.parametrize(
    "options", ["vram=8GiB,vram=4GiB", "checked,checked", "model=on,model=off"]
)
def test_an_option_that_is_given_twice_is_refused(options: str) -> None:
    with pytest.raises(ValueError, match="is given more than once for the software GPU"):
        parsed(f"t4,{options}")


@needs_software_gpu
def test_too_little_vram_is_refused_before_cupy_is_imported() -> None:
    with pytest.raises(SizeError, match=r"vram must be at least one block of 2\.0 MiB; got 8 B"):
        requirements("t4", "8", force=True)


@pytest.mark.parametrize("seed", ["x", -1, 1.5, True])
def test_a_seed_of_streams_is_a_whole_number(seed: Any) -> None:
    with pytest.raises(SizeError, match="stream_seed must be a whole number of at least 0"):
        umem.software_gpu("t4", stream_seed=seed)


def test_the_wheel_has_the_file_that_python_reads_as_it_starts(tmp_path: Path) -> None:
    path = ROOT / "scripts/build_backend.py"
    spec = importlib.util.spec_from_file_location("build_backend", path)
    assert spec is not None and spec.loader is not None
    backend = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(backend)
    with zipfile.ZipFile(tmp_path / "umem-0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("umem/__init__.py", "")
        wheel.writestr("umem-0.dist-info/RECORD", "umem/__init__.py,sha256=x,0\n")
    backend._with_line(str(tmp_path), "umem-0-py3-none-any.whl")
    with zipfile.ZipFile(tmp_path / "umem-0-py3-none-any.whl") as wheel:
        line = wheel.read("umem_software_gpu.pth")
        record = wheel.read("umem-0.dist-info/RECORD").decode().splitlines()
        assert wheel.read("umem/__init__.py") == b""
    assert line.count(b"\n") == 1 and line.startswith(b"import ")  # else Python takes it for a path
    digest = base64.urlsafe_b64encode(hashlib.sha256(line).digest()).decode().rstrip("=")
    rows = {row[0]: row[1:] for row in csv.reader(record)}
    assert rows["umem_software_gpu.pth"] == [f"sha256={digest}", str(len(line))]


@is_installed
@pytest.mark.parametrize("variables", [{}, {VARIABLE: "0"}, {VARIABLE: ""}])
def test_nothing_is_imported_where_nobody_asks(tmp_path: Path, variables: dict[str, str]) -> None:
    program = "import sys; print([name for name in sys.modules if 'umem' in name])"
    assert started("-c", program, cache=tmp_path, **variables).stdout == "[]\n"


@is_installed
@needs_cupy
def test_a_look_for_cupy_opens_nothing(tmp_path: Path) -> None:
    program = (
        "import sys; from importlib.util import find_spec; spec = find_spec('cupy'); "
        "print(spec.origin.endswith('__init__.py'), 'cupy' in sys.modules, 'umem' in sys.modules)"
    )
    found = started("-c", program, cache=tmp_path, UMEM_SOFTWARE_GPU=GPU)
    assert found.stdout == "True False False\n", found.stderr


@is_installed
@needs_cupy
def test_a_wrong_value_is_said_at_each_import_of_cupy(tmp_path: Path) -> None:
    program = """
for _ in range(2):
    try:
        import cupy
    except Exception as error:
        print(type(error).__name__, error)
"""
    found = started("-c", program, cache=tmp_path, UMEM_SOFTWARE_GPU="t44,force")
    first, second = found.stdout.splitlines()
    assert first == second and first.startswith("UnknownGpuError no GPU named 't44'")


@is_installed
@needs_software_gpu
def test_a_random_seed_is_drawn_and_said_and_is_that_of_children(kernel_cache: Path) -> None:
    child = "import os, cupy; print(os.environ['UMEM_SOFTWARE_GPU'], flush=True)"
    program = f"{child}; import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    texts = set()
    for _ in range(2):
        found = started("-c", program, cache=kernel_cache, UMEM_SOFTWARE_GPU="t4,seed=random,force")
        own, other = found.stdout.splitlines()
        assert own == other and re.fullmatch(r"t4,seed=\d+,force", own), found.stderr
        assert found.stderr == f"umem: UMEM_SOFTWARE_GPU={own} repeats this run\n"
        texts.add(own)
    assert len(texts) == 2


@is_installed
@needs_software_gpu
def test_every_process_has_the_gpu(kernel_cache: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"""
import multiprocessing, subprocess, sys
def name(_):
    import cupy
    return cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
if __name__ == "__main__":
    for how in ("spawn", "forkserver", "fork"):  # nothing was used here before the fork
        with multiprocessing.get_context(how).Pool(1) as pool:
            print(pool.map(name, [0])[0])
    print(subprocess.run([sys.executable, "-c", {NAME!r}], capture_output=True, text=True).stdout)
    import umem
    gpu = umem.software_gpu("v100-16gb", force=True)  # a program that asks itself has what it asks
    print(name(0), gpu.name)
    import cupy, importlib.util
    print(cupy.__spec__.origin == cupy.__file__, importlib.util.find_spec("cupy") is cupy.__spec__)
""")
    found = started(str(script), cache=kernel_cache, UMEM_SOFTWARE_GPU=GPU)
    *children, own, spec = [line for line in found.stdout.splitlines() if line]
    assert len(children) == 4 and len({*children}) == 1, found.stderr
    assert "T4" in children[0] and "simulated" in children[0]
    assert "V100" in own and spec == "True True"


@is_installed
@needs_software_gpu
def test_processes_of_a_dry_program_are_dry_and_a_forked_loader_works(
    kernel_cache: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text("""
import multiprocessing
import numpy
def total(_):
    import cupy
    return float(cupy.ones(1 << 30, "f").sum())  # 4 GiB; known, were it small
def batch(number):
    return numpy.full(4, number)
if __name__ == "__main__":
    import cupy
    model = cupy.ones(3 << 30, "f")  # 12 GiB, before anything is forked
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(*[cupy.asarray(loaded).sum() for loaded in pool.map(batch, range(3))])
    for how in ("spawn", "forkserver"):
        with multiprocessing.get_context(how).Pool(1) as pool:
            print(pool.map(total, [0]))
    print(model.shape)
""")
    found = started(
        "-W", "ignore", str(script), cache=kernel_cache, UMEM_SOFTWARE_GPU="t4,dry,force"
    )
    assert found.stdout.splitlines() == ["0 4 8", "[0.0]", "[0.0]", "(3221225472,)"], found.stderr
    assert found.stderr == "umem: a dry GPU: values are zeros, but files are really written\n"


WORKERS = {
    "joblib": """
import joblib
print(joblib.Parallel(n_jobs=2)([joblib.delayed(name)(0)] * 2))
""",
    "distributed": """
from distributed import Client, LocalCluster
with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
    with Client(cluster) as client:
        print(client.gather(client.map(name, range(2), pure=False)))
""",
    "concurrent.futures": """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
for how in ("spawn", "forkserver"):
    with ProcessPoolExecutor(1, multiprocessing.get_context(how)) as pool:
        print([*pool.map(name, [0])])
""",
}


@is_installed
@needs_software_gpu
@pytest.mark.parametrize("package", WORKERS)
def test_workers_have_the_gpu(kernel_cache: Path, tmp_path: Path, package: str) -> None:
    pytest.importorskip(package)
    lines = WORKERS[package].strip().replace("\n", "\n    ")
    script = tmp_path / "script.py"
    script.write_text(f"""
def name(_):
    {NAME.replace("print", "return ")}
if __name__ == "__main__":
    {lines}
""")
    found = started(str(script), cache=kernel_cache, UMEM_SOFTWARE_GPU=GPU)
    assert found.stdout.count("(simulated)") == 2, found.stdout + found.stderr


@is_installed
@needs_software_gpu
def test_processes_of_a_script_under_umem_run_have_its_gpu(
    kernel_cache: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {NAME!r}])")
    words = ("-m", "umem", "run", "--software", "t4", "--vram", "64MiB", str(script))
    found = started(*words, cache=kernel_cache)
    assert "T4" in found.stdout and "simulated" in found.stdout, found.stderr


# -- pytest ----------------------------------------------------------------------------------------

TEST = """
import subprocess, sys, pytest
cupy = pytest.importorskip("cupy")
def test_here():
    assert int(cupy.arange(4).sum()) == 6
def test_child():
    assert b"simulated" in subprocess.check_output([sys.executable, "-c", {name!r}])
"""


def pytest_run(folder: Path, *words: str, cache: Path, **variables: str) -> Any:
    (folder / "test_it.py").write_text(TEST.format(name=NAME))
    words = ("-m", "pytest", "-W", "error", "--rootdir", str(folder), *words)
    return started(*words, cache=cache, cwd=folder, **variables)


@is_installed
@needs_software_gpu
def test_pytest_runs_tests_of_cupy(kernel_cache: Path, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("import cupy")
    found = pytest_run(tmp_path, "--software-gpu", GPU, cache=kernel_cache)
    assert "2 passed" in found.stdout, found.stdout + found.stderr
    assert f"software GPU: {GPU} (umem; VRAM, pages and time are simulated)" in found.stdout
    found = pytest_run(tmp_path, "-n", "2", cache=kernel_cache, UMEM_SOFTWARE_GPU=GPU)
    assert "2 passed" in found.stdout, found.stdout + found.stderr


DRY_TESTS = """
import pytest
import umem.chainer
import chainer
import cupy
def test_memory():
    kept = [cupy.ones(1 << 28, "f") for _ in range(14)]
    with pytest.raises(MemoryError):
        kept += [cupy.ones(1 << 28, "f") for _ in range(16)]
    with umem.managed():
        kept += [cupy.ones(1 << 28, "f") for _ in range(16)]
    assert sum(array.nbytes for array in kept) == 30 << 30
def test_training():
    model = chainer.links.Classifier(chainer.links.Linear(4096, 1000))
    model.to_device("@cupy:0")
    optimizer = chainer.optimizers.Adam().setup(model)
    optimizer.update(model, cupy.ones((512, 4096), "f"), cupy.zeros(512, "i"))
    assert optimizer.t == 1 and model.loss.shape == ()
def test_small():
    assert int(cupy.arange(4).sum()) == 6
def test_large():
    assert float(cupy.full(1 << 24, 2, "f").sum()) == 2 << 24
def test_write():
    open("written", "w").write(str(cupy.arange(4)))
"""


@is_installed
@needs_software_gpu
def test_pytest_runs_dry(kernel_cache: Path, tmp_path: Path) -> None:
    pytest.importorskip("umem.chainer")
    (tmp_path / "test_dry.py").write_text(DRY_TESTS)
    words = ("-p", "no:warnings", "--rootdir", str(tmp_path), "--software-gpu", "t4,dry,force")
    found = started("-m", "pytest", *words, cache=kernel_cache, cwd=tmp_path)
    assert "1 failed, 4 passed" in found.stdout, found.stdout + found.stderr
    assert "assert 0.0 == (2 << 24)" in found.stdout  # a value that is not computed
    assert (tmp_path / "written").read_text() == "[0 1 2 3]"
    assert "\ndry: values are zeros, but files are really written\n" in found.stdout


@is_installed
@needs_software_gpu
def test_pytest_starts_again_where_a_plugin_has_imported_cupy(
    kernel_cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "early.py").write_text("import cupy")
    given = {"cache": kernel_cache, "PYTHONPATH": str(tmp_path)}
    found = pytest_run(tmp_path, "-p", "early", "--software-gpu", GPU, **given)
    assert "2 passed" in found.stdout, found.stdout + found.stderr
    assert found.stderr.count("by the plugin early: pytest starts again") == 1
    (tmp_path / "main.py").write_text(
        f"import pytest, sys; sys.exit(pytest.main(['-p', 'early', '--software-gpu', '{GPU}']))"
    )
    found = started("main.py", cwd=tmp_path, **given)  # it is not known what else the program did
    assert found.returncode == 4, found.stdout
    assert f"by the plugin early: set {VARIABLE}={GPU} in the environment" in found.stderr


@pytest.mark.thorough
@is_installed
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("t44", "no GPU named 't44'"),
        ("t4,fast", "'fast' is not an option of the software GPU"),
        ("t4,chekced", "Did you mean 'checked'"),
        ("t4,vram=lots", "vram must be a size"),
        ("t4,vram=8", "vram must be at least one block"),
        ("t4,force", "finds no C++ compiler"),
    ],
)
@needs_cupy
def test_pytest_ends_with_a_sentence(tmp_path: Path, text: str, said: str) -> None:
    for words, variables in ((("--software-gpu", text), {}), ((), {VARIABLE: text})):
        found = pytest_run(tmp_path, *words, cache=tmp_path, PATH=str(tmp_path), **variables)
        assert found.returncode == 4 and found.stderr.startswith("ERROR: umem: ")
        assert said in found.stderr and "Traceback" not in found.stderr


def no_cupy(folder: Path) -> str:
    """A plugin after which CuPy is not there; why there is no GPU then."""
    (folder / "without.py").write_text("import sys; sys.modules['cupy'] = None")
    return "the software GPU runs the real CuPy. CuPy for CUDA 12: pip install 'cupy-cuda12x"


def old_cupy(folder: Path) -> str:
    """A CuPy of an old version; why there is no GPU then."""
    libraries = folder / "cupy_backends/cuda/libs"
    for place in (libraries, folder / "cupy", folder / "cupy_cuda12x-12.3.0.dist-info"):
        place.mkdir(parents=True)
    (folder / "cupy/__init__.py").write_text("raise AssertionError('it is not imported')")
    (libraries / "cublas.so").write_bytes(b"libcublas.so.12")
    about = folder / "cupy_cuda12x-12.3.0.dist-info/METADATA"
    about.write_text("Metadata-Version: 2.1\nName: cupy-cuda12x\nVersion: 12.3.0\n")
    (folder / "without.py").write_text("")
    return "the software GPU supports CuPy 13.6 for CUDA 11, 13.6 and 14 for CUDA 12"


@pytest.mark.thorough
@is_installed
@pytest.mark.parametrize("cupy", [no_cupy, old_cupy])
def test_pytest_says_which_cupy_it_needs(tmp_path: Path, cupy: Callable[[Path], str]) -> None:
    said, path = cupy(tmp_path), str(tmp_path)
    words = ("-p", "without", "--software-gpu", "t4,force")
    found = pytest_run(tmp_path, *words, cache=tmp_path, PYTHONPATH=path)
    assert found.returncode == 4 and found.stderr.startswith(f"ERROR: umem: {said}"), found.stderr


@is_installed
def test_an_import_of_an_unknown_cupy_says_which_are_known(tmp_path: Path) -> None:
    said = old_cupy(tmp_path)
    given = {"cache": tmp_path, "PYTHONPATH": str(tmp_path), VARIABLE: "t4,force"}
    for _ in range(2):
        found = started("-c", "import cupy", **given)
        assert found.returncode == 1 and f"DeviceError: {said}" in found.stderr


@is_installed
@needs_software_gpu
def test_workers_share_a_cache_on_a_drive_without_locks(kernel_cache: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("""
import errno, fcntl
def flock(*_):
    raise OSError(errno.ENOLCK, "No locks available")
fcntl.flock = flock
""")
    given = {"cache": tmp_path / "cache", "PYTHONPATH": str(tmp_path)}
    for _ in range(2):
        found = pytest_run(tmp_path, "-n", "2", "--software-gpu", GPU, **given)
        assert "2 passed" in found.stdout, found.stdout + found.stderr


@pytest.mark.thorough
@is_installed
def test_pytest_can_turn_it_off(tmp_path: Path) -> None:
    found = pytest_run(tmp_path, "--software-gpu", "0", cache=tmp_path, UMEM_SOFTWARE_GPU="t44")
    assert "software GPU:" not in found.stdout and found.returncode != 4


HINT = "CuPy without a GPU: pytest --software-gpu t4 runs CuPy's tests on host memory (umem)"


@pytest.mark.thorough
@is_installed
@needs_cupy
@pytest.mark.skipif(any(map(glob, plugin.DEVICES)), reason="there may be a GPU")
def test_pytest_says_how_to_run_where_cupy_has_no_gpu(tmp_path: Path) -> None:
    """It is said in a line, and CuPy is not imported for it."""
    (tmp_path / "test_it.py").write_text(
        "import sys\ndef test_it(): assert 'cupy' not in sys.modules"
    )
    found = started("-m", "pytest", cwd=tmp_path, cache=tmp_path)
    assert found.returncode == 0 and HINT in found.stdout.splitlines(), found.stdout
    for words in (("--software-gpu", "0"), ("-q",)):
        found = started("-m", "pytest", *words, cwd=tmp_path, cache=tmp_path)
        assert found.returncode == 0 and HINT not in found.stdout, found.stdout


@pytest.mark.parametrize(
    ("device", "cupy", "variable", "lines"),
    [
        ("", "cupy", "", [HINT]),
        ("", "cupy", "0", []),
        ("", "no_such_cupy", "", []),
        ("nvidia0", "cupy", "", []),
    ],
)
def test_the_hint_is_for_cupy_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, cupy: str, variable: str,
    lines: list[str],
) -> None:  # fmt: skip
    (tmp_path / device).touch() if device else None
    monkeypatch.setattr(plugin, "DEVICES", (f"{tmp_path}/nvidia[0-9]*",))
    monkeypatch.setattr(plugin, "find_spec", {"cupy": object()}.get if cupy == "cupy" else {}.get)
    monkeypatch.setenv(VARIABLE, variable)
    assert plugin.pytest_report_header(None) == lines


def test_the_header_of_a_dry_gpu_says_that_writes_are_real(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "t4,dry")
    first, second = plugin.pytest_report_header(None)
    assert "simulated" in first and second == "dry: values are zeros, but files are really written"
