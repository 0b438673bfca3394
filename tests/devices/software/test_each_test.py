"""pytest --software-gpu: late streams, a seed for each test, and what CI reads at the end."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from software_programs import GOES_ON, is_installed, lines, needs_software_gpu

from tests.devices.software.test_switch import started
from umem.errors import DeviceError
from umem.host_cuda.faults import Finding, KernelFault
from umem_software_gpu import VARIABLE, faults, parsed, with_seed
from umem_software_gpu.faults import Fault, Known, fault_of
from umem_software_gpu.seeds import name_of, resolved, seed_of
from umem_software_gpu.summary import annotation

# -- seeds -----------------------------------------------------------------------------------------


def test_a_seed_is_drawn_where_none_is_said() -> None:
    found = {resolved("t4,checked", {}) for _ in range(20)}
    assert len(found) > 1 and all(re.fullmatch(r"t4,checked,seed=\d+", text) for text in found)


@pytest.mark.parametrize(
    ("text", "environ", "expected"),
    [
        ("t4", {"CI": "true"}, "t4,seed=0"),
        ("t4,seed=7,checked", {"CI": "true"}, "t4,seed=7,checked"),
        ("t4,seed=off", {"CI": "true"}, "t4,seed=off"),
        ("t4,dry", {}, "t4,dry"),
        ("t4,dry,seed=off", {}, "t4,dry"),
        ("t4,dry,seed=3", {}, "t4,dry,seed=3"),  # which is refused with a sentence
        ("t4", {VARIABLE: "t4,seed=9"}, "t4,seed=9"),  # a worker, or a pytest in a test
        ("t4", {VARIABLE: "h200,seed=9", "CI": "1"}, "t4,seed=0"),
        ("t4", {VARIABLE: "t4,nonsense", "CI": "1"}, "t4,seed=0"),
        ("t4", {VARIABLE: "t4,seed=off", "CI": "1"}, "t4,seed=0"),
    ],
)
def test_the_base_seed(text: str, environ: dict[str, str], expected: str) -> None:
    assert resolved(text, environ) == expected


@pytest.mark.parametrize("value", ["", "0", "false", "False"])
def test_random_is_drawn_in_ci_too_and_not_every_value_is_ci(value: str) -> None:
    assert len({resolved("t4,seed=random", {"CI": "true"}) for _ in range(20)}) > 1
    assert len({resolved("t4", {"CI": value}) for _ in range(20)}) > 1


@pytest.mark.parametrize("text", ["t4,seed=1,seed=random", "t4,seed=off,seed=1", "t4,seed=Off"])
def test_a_wrong_seed_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"more than once|not an option of the software GPU"):
        resolved(text, {})


def test_the_text_of_a_seed() -> None:
    assert parsed("t4,seed=off") == ("t4", {"stream_seed": None})
    assert with_seed("t4, seed=3,checked", None) == "t4,checked"
    assert with_seed("t4", 5) == "t4,seed=5"


def test_a_tests_seed_is_of_its_name_and_the_base() -> None:
    one = seed_of(0, "tests/test_it.py::test_a[x/y]")
    assert one == seed_of(0, "test_it.py::test_a[x/y]") != seed_of(1, "test_it.py::test_a[x/y]")
    assert one != seed_of(0, "test_it.py::test_a[z/y]")


@pytest.mark.parametrize(
    ("node", "mark", "expected"),
    [
        ("test_it.py::test_a@group", True, "test_it.py::test_a"),
        ("test_it.py::test_a[x@y]@group", True, "test_it.py::test_a[x@y]"),
        ("test_it.py::test_a[x@y]", True, "test_it.py::test_a[x@y]"),
        ("test_it.py::test_a[x]@y", False, "test_it.py::test_a[x]@y"),
    ],
)
def test_a_group_of_workers_is_no_part_of_the_name(node: str, mark: bool, expected: str) -> None:
    marker = object() if mark else None
    assert name_of(
        SimpleNamespace(nodeid=node, get_closest_marker={"xdist_group": marker}.get)
    ) == (expected)


# -- faults ----------------------------------------------------------------------------------------

KERNELS = r'''
module = cp.RawModule(code="""
extern "C" __global__ void shift(float* y, const float* x, long long n) {
    y[threadIdx.x] = x[threadIdx.x + n];
}
extern "C" __global__ void before(float* y, long long n) { y[threadIdx.x - n] = 1; }
extern "C" __global__ void odd(float* y, int n) { *(double*)(y + n) = y[0]; }
extern "C" __global__ void race(float* y) {
    __shared__ float held[64];
    held[threadIdx.x] = threadIdx.x;
    y[threadIdx.x] = held[(threadIdx.x + 40) % 64];
}
extern "C" __global__ void waits(float* y) {
    if (threadIdx.x < 3) __syncthreads(); else { y[1] = 2; __syncthreads(); }
}
extern "C" __global__ void claim(float* y) { assert(y[0] > 100); }
""")
x, y, host = cp.arange(10, dtype="f4"), cp.zeros(64, "f4"), np.zeros(8, "f4")

def fault(name, threads, *arguments):
    try:
        module.get_function(name)((1,), (threads,), arguments)
        cp.cuda.Device().synchronize()
        print("nothing")
    except umem.errors.DeviceError as error:
        print(error.finding and tuple(error.finding))
'''


@needs_software_gpu
def test_faults_have_the_names_of_compute_sanitizers_tools(kernel_cache: Path) -> None:
    program = """
fault("shift", 10, y, x, 0)
fault("shift", 10, y, x, 1)
fault("shift", 10, y, x, 1 << 40)
fault("shift", 10, y, np.uint64(0), 0)
fault("before", 1, y, 1)
fault("odd", 1, y, 1)
fault("odd", 1, host.ctypes.data, 0)
fault("race", 64, y)
fault("waits", 64, y)
fault("claim", 1, y)
"""
    start = GOES_ON.replace("force=True", "force=True, checked=True")
    assert lines(program, kernel_cache, start=start + KERNELS) == [
        "nothing",
        "('memcheck', 'shift', '1 (const float* x)')",
        "('memcheck', 'shift', '')",
        "('memcheck', 'shift', '1 (const float* x)')",
        "('memcheck', 'before', '0 (float* y)')",
        "('memcheck', 'odd', '0 (float* y)')",
        "('memcheck', 'odd', '0 (float* y)')",
        "('racecheck', 'race', '')",
        "('synccheck', 'waits', '')",
        "None",
    ]


def test_an_error_tells_of_its_fault_or_of_that_of_another() -> None:
    finding = Finding("memcheck", "f", "2 (T (*y)[3])")
    expected = Fault("memcheck", "f", "2 (T (*y)[3])")
    error = KernelFault(700, "the kernel f reads ...", finding)
    assert fault_of(error) == expected
    assert fault_of(KernelFault(710, "the kernel f: the assertion x > 0 failed")) is None
    assert fault_of(DeviceError("g++ refuses a kernel")) is fault_of(None) is None
    of_driver = type("CUDADriverError", (RuntimeError,), {})("CUDA_ERROR: ...")
    of_driver.finding = finding  # type: ignore[attr-defined]
    assert fault_of(of_driver) == expected
    wrapped = RuntimeError("other")
    wrapped.__cause__ = error
    assert fault_of(wrapped) == expected


KNOWN = Known("test_it.py::test_a[é, 1]", Fault("memcheck", "shift<int, 3>", '0 ("x")'))


def test_known_faults_are_read_as_they_were_written(tmp_path: Path) -> None:
    for some in (set(), {KNOWN}, {KNOWN, KNOWN._replace(test="other")}):
        faults.write(tmp_path / "known.json", some)
        assert faults.read(tmp_path / "known.json") == some


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Expecting value"),
        ('{"version": 2, "faults": []}', "version 2; this umem reads 1"),
        ('{"faults": []}', "'version' is missing"),
        ('{"version": 1, "faults": [{"test": "x"}]}', "'fault' is missing"),
        ('{"version": 1, "faults": [3]}', "not subscriptable"),
        ("[]", "list indices"),
        (
            '{"version": 1, "faults": [{"test": 1, "fault": "", "kernel": "", "argument": ""}]}',
            "a value is not a string",
        ),
        (None, "No such file"),
    ],
)
def test_a_broken_file_of_known_faults_is_said(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "known.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}.*--software-gpu-new-b") as caught:
        faults.read(path)
    assert said in str(caught.value)


def test_an_annotation_is_one_line_escaped_as_github_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))

    def entry(path: str, line: int) -> Any:
        return SimpleNamespace(reprfileloc=SimpleNamespace(path=path, lineno=line))

    entries = [
        entry("a,b:c.py", 7),
        entry(str(tmp_path / "sub/helper.py"), 3),
        entry("/usr/lib/cupy.py", 9),
        SimpleNamespace(),
    ]
    longrepr = SimpleNamespace(
        reprcrash=SimpleNamespace(message="50%\r\n::error::no"),
        reprtraceback=SimpleNamespace(reprentries=entries),
    )
    report = SimpleNamespace(
        nodeid="a,b:c.py::test", location=("a,b:c.py", 4, "test"), longrepr=longrepr
    )
    root = tmp_path / "sub"
    said = "::a,b:c.py::test: 50%25%0D%0A::error::no"
    assert annotation(report, root) == f"::error file=sub/helper.py,line=3{said}"
    del entries[1]
    assert annotation(report, root) == f"::error file=sub/a%2Cb%3Ac.py,line=7{said}"
    entries.clear()
    assert annotation(report, root) == f"::error file=sub/a%2Cb%3Ac.py,line=5{said}"


# -- runs ------------------------------------------------------------------------------------------

TESTS = '''
import os, threading
import numpy as np
import pytest
import cupy

BEHIND = cupy.RawKernel("""extern "C" __global__ void shift(const float* x, float* y, int n) {
    int i = threadIdx.x;
    if (i < n) y[i] = x[i + 1];
}""", "shift")

def fault():
    x, y = cupy.zeros(100, "f4"), cupy.zeros(100, "f4")
    BEHIND((1,), (128,), (x, y, np.int32(100)))

def test_a_missing_wait():
    x = cupy.zeros(64, "f4")
    one, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    cupy.cuda.Device().synchronize()
    with one:
        x += 1
    found = cupy.asnumpy(x, stream=other)
    one.synchronize()
    assert found[0] == 1

def test_right():
    assert int(cupy.arange(4).sum()) == 6

def test_seed():
    print("SEED", os.environ["UMEM_SOFTWARE_GPU"])

def test_fault():
    fault()

@pytest.fixture
def begins():
    fault()

@pytest.fixture
def ends():
    yield
    fault()

def test_begins(begins):
    pass

def test_ends(ends):
    pass

def test_thread():
    thread = threading.Thread(target=lambda: (fault(), cupy.cuda.Device().synchronize()))
    thread.start()
    thread.join()

def test_caught():
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="the kernel shift"):
        fault()
        cupy.cuda.Device().synchronize()

def test_behind_faults():
    assert int(cupy.arange(4).sum()) == 6

@pytest.mark.needs_gpu("times a kernel")
def test_hardware():
    assert False

def test_absent():
    cupy.cuda.compiler.compile_using_nvcc("")

def test_forks():
    child = os.fork()
    if not child:
        try:
            cupy.zeros(3)
        except cupy.cuda.runtime.CUDARuntimeError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
'''
IN_THREADS = "ignore::pytest.PytestUnhandledThreadExceptionWarning"
"""Without umem such an error would be no more than this warning."""
PLAIN = {"CI": "", "GITHUB_ACTIONS": ""}


class Run:
    """A run of the tests above: what it printed, and each test's outcome and properties."""

    def __init__(self, folder: Path, cache: Path, *words: str, **variables: str) -> None:
        (folder / "test_it.py").write_text(TESTS)
        path = folder / "report.xml"
        given = (
            "-m",
            "pytest",
            "-Werror",
            f"-W{IN_THREADS}",
            "--strict-markers",
            "-rA",
            "-ojunit_family=xunit1",
            f"--junitxml={path}",
        )
        found = started(*given, *words, cache=cache, cwd=folder, **{**PLAIN, **variables})
        self.text, self.said = found.stdout, found.stdout + found.stderr
        self.ends: dict[str, str] = {}
        self.properties: dict[str, dict[str, str]] = {}
        for case in ElementTree.parse(path).iter("testcase"):
            name = case.attrib["name"]
            kinds = [
                kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None
            ]
            self.ends[name] = " ".join(kinds) or "passed"
            pairs = [(each.attrib["name"], each.attrib["value"]) for each in case.iter("property")]
            assert len(pairs) == len({*pairs}), pairs
            self.properties[name] = dict(pairs)


runs = [is_installed, needs_software_gpu]


def under(marks: list[Any]) -> Any:
    def decorated(test: Any) -> Any:
        for mark in marks:
            test = mark(test)
        return test

    return decorated


def summary(run: Run) -> str:
    (line,) = [line for line in run.text.splitlines() if line.startswith("software GPU t4")]
    return line


@under(runs)
def test_faults_and_missing_waits_belong_to_their_tests(kernel_cache: Path, tmp_path: Path) -> None:
    given = ("--software-gpu", "t4,checked,force,seed=5", "-n", "2")
    variables = {"GITHUB_ACTIONS": "true", "GITHUB_WORKSPACE": str(tmp_path)}
    new = tmp_path / "known.json"
    run = Run(tmp_path, kernel_cache, *given, f"--software-gpu-new-baseline={new}", **variables)
    assert run.ends == {
        "test_a_missing_wait": run.ends["test_a_missing_wait"],  # by the seed
        "test_right": "passed",
        "test_seed": "passed",
        "test_fault": "failure",
        "test_begins": run.ends["test_begins"],
        "test_ends": "error",
        "test_thread": "failure",
        "test_caught": "passed",
        "test_behind_faults": "passed",
        "test_hardware": "skipped",
        "test_absent": "failure",
        "test_forks": "passed",
    }, run.said
    assert run.ends["test_begins"] in ("failure", "error")  # late or not
    gpu = {"gpu": "t4,checked,force", "seed": "5"}
    fault = {"fault": "memcheck", "kernel": "shift", "argument": "0 (const float* x)"}
    for name in ("test_fault", "test_begins", "test_ends", "test_thread"):
        assert run.properties[name] == {**gpu, **fault}
        assert f"--software-gpu t4,checked,force,seed=5 'test_it.py::{name}' repeats it" in run.text
    assert run.properties["test_right"] == gpu
    line = summary(run)
    count = 11 - (run.ends["test_begins"] == "error")
    assert line.startswith(
        f"software GPU t4,checked,force: seed 5, {count} tests late, {count} tests checked, "
    )
    assert "MiB of VRAM in use (simulated), 1 test skipped (needs a real GPU), " in line
    assert "1 test caught a fault that ends the context, " in line
    assert line.endswith("not there: nvcc (cupy.cuda.compiler)")
    marked = re.findall(r"^::error file=test_it.py,line=\d+::test_it.py::(\w+): ", run.text, re.M)
    assert sorted(marked) == sorted(
        name for name, end in run.ends.items() if end not in ("passed", "skipped")
    )
    known = json.loads(new.read_text())["faults"]
    assert [each["test"] for each in known] == [
        "test_it.py::test_begins", "test_it.py::test_ends", "test_it.py::test_fault",
        "test_it.py::test_thread",
    ]  # fmt: skip

    again = Run(tmp_path, kernel_cache, *given, "--software-gpu-baseline=known.json")
    not_passed = {name for name, end in again.ends.items() if end != "passed"}
    assert not_passed == {name for name, end in run.ends.items() if end != "passed"}
    assert {again.ends[each["test"].partition("::")[2]] for each in known} == {"skipped"}
    assert "known faults: 4 found again, 0 gone" in again.text.splitlines()
    assert again.ends["test_a_missing_wait"] == run.ends["test_a_missing_wait"]
    assert "::error" not in again.text


@under(runs)
def test_a_missing_wait_is_found_and_its_seed_finds_it_again(
    kernel_cache: Path, tmp_path: Path
) -> None:
    given = ("--software-gpu", "t4,force", "-k", "wait or right or seed", "--software-gpu-seeds")
    run = Run(tmp_path, kernel_cache, *given, "20", CI="true")
    assert run.ends == {
        "test_a_missing_wait": "failure", "test_right": "passed", "test_seed": "passed"
    }, run.said  # fmt: skip
    assert "streams run late: --software-gpu t4,force,seed=0 repeats this run" in run.text
    assert summary(run).startswith("software GPU t4,force: seeds 0 to 19, 3 tests late, ")
    assert "SEED t4,force,seed=19" in run.text and run.properties["test_right"]["seed"] == "19"
    seed = run.properties["test_a_missing_wait"]["seed"]
    found = re.search(r"pytest (--software-gpu \S+) '(\S+)' repeats it", run.text)
    assert found is not None and found[1].endswith(f"seed={seed}")
    for workers in ("0", "2"):
        again = Run(tmp_path, kernel_cache, *found[1].split(), found[2], "-n", workers)
        assert again.ends == {"test_a_missing_wait": "failure"}, again.said


@under(runs)
@pytest.mark.parametrize("options", ["t4,seed=off", "t4,dry"])
def test_what_is_not_late_is_at_once(kernel_cache: Path, tmp_path: Path, options: str) -> None:
    given = ("--software-gpu", f"{options},force", "-k", "right or missing_wait or seed")
    run = Run(tmp_path, kernel_cache, *given)
    assert set(run.ends.values()) == {"passed"}, run.said
    assert f"SEED {options},force" in run.text
    assert summary(run).startswith(f"software GPU {with_seed(options, None)},force: at once, ")
    is_dry = "dry" in options
    assert run.properties["test_right"].get("seed") == (None if is_dry else "off")
    assert ("streams do their work at once (seed=off)" in run.text) is not is_dry


@under(runs)
def test_without_other_plugins_it_works_and_without_it_nothing_does(
    kernel_cache: Path, tmp_path: Path
) -> None:
    without = [word for name in ("xdist", "cacheprovider", "threadexception", "logging")
               for word in ("-p", f"no:{name}")]  # fmt: skip
    run = Run(tmp_path, kernel_cache, "--software-gpu", "t4,force", "-k", "right", *without)
    assert run.ends == {"test_right": "passed"}, run.said
    words = ("-m", "pytest", "-p", "no:umem", "--software-gpu", "t4")
    found = started(*words, cache=kernel_cache, cwd=tmp_path)
    assert found.returncode == 4 and "unrecognized arguments: --software-gpu" in found.stderr


@pytest.mark.thorough
@under(runs)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("t4,seed=x",), "'seed=x' is not an option of the software GPU"),
        (("t4,seed=1,seed=2",), "'seed' is given more than once"),
        (("t4,dry,seed=3",), "a dry run computes nothing to check, to run late or to limit"),
        (("t4,dry,checked",), "a dry run computes nothing to check, to run late or to limit"),
        (("t4,dry,kernel-seconds=1",), "a dry run computes nothing to check"),
        (("t4,kernel-seconds=0",), "kernel_seconds=0.0: the processor time that a kernel may take"),
        (("t4", "--software-gpu-seeds=0"), "--software-gpu-seeds 0: a whole number of at least 1"),
        (("t4,seed=off", "--software-gpu-seeds=2"), "needs streams that run late"),
        (("t4", "--software-gpu-new-baseline=none/known.json"), "cannot be a file"),
        (("t4", "--software-gpu-baseline=none.json"), "No such file or directory; --software-gpu-"),
    ],
)
def test_wrong_options_end_with_a_sentence(
    kernel_cache: Path, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    gpu, *more = words
    found = started(
        "-m", "pytest", "--software-gpu", f"{gpu},force", *more, cache=kernel_cache, cwd=tmp_path
    )
    assert found.returncode == 4 and said in found.stderr and "Traceback" not in found.stderr


MODULE = """
import pytest
import unittest
LOG = []
@pytest.fixture(scope="module", autouse=True)
def module():
    LOG.append("module")
    yield
    print("LOG", *LOG, "end")
@pytest.fixture
def own():
    LOG.append("own")
    yield
    LOG.append("end")
def test_a(own, tmp_path, monkeypatch, caplog, record_property):
    record_property("mine", 1)
    assert not [*tmp_path.iterdir()]
class Case(unittest.TestCase):
    def setUp(self):
        LOG.append("setUp")
    def test_b(self):
        LOG.append("b")
def test_last(own):
    LOG.append("last")
    assert LOG.count("last") < 2
"""


@under(runs)
def test_fixtures_of_a_test_are_made_again_under_each_seed(
    kernel_cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "test_module.py").write_text(MODULE)
    given = ("--software-gpu", "t4,force", "--software-gpu-seeds", "2", "test_module.py")
    run = Run(tmp_path, kernel_cache, *given)
    assert run.ends == {"test_a": "passed", "test_b": "passed", "test_last": "failure"}, run.said
    assert "LOG module own end own end setUp b setUp b own last end own last end end" in run.text
    assert run.properties["test_a"]["mine"] == "1"


@under(runs)
@pytest.mark.parametrize("words", [(), ("--full-trace",)])
def test_umems_own_frames_are_in_a_full_trace_alone(
    kernel_cache: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    given = ("--software-gpu", "t4,checked,force,seed=off", "-k", "test_fault or absent", *words)
    run = Run(tmp_path, kernel_cache, *given)
    assert run.ends == {"test_fault": "failure", "test_absent": "failure"}, run.said
    assert run.text.count("BEHIND((1,), (128,)") and run.text.count("compile_using_nvcc(")
    for name in ("driver.py", "allocations.py", "installing.py"):
        assert (f"host_cuda/{name}:" in run.text) is bool(words)


PINNED = """
import cupy, cupyx
import pytest
@pytest.mark.parametrize("n", range(10))
def test_copy(n):
    found = cupyx.empty_pinned(4, "f4")
    (cupy.arange(4, dtype="f4") * n).get(out=found, blocking=False)
    assert found.tolist() == [0, n, 2 * n, 3 * n]
"""


@under(runs)
def test_no_run_finds_what_another_has_left_in_memory(kernel_cache: Path, tmp_path: Path) -> None:
    (tmp_path / "test_pinned.py").write_text(PINNED)
    given = ("--software-gpu", "t4,force,seed=0", "--software-gpu-seeds", "20", "test_pinned.py")
    run = Run(tmp_path, kernel_cache, *given)
    assert {*run.ends.values()} == {"failure"} and len(run.ends) == 10, run.said
