"""``umem run SCRIPT``: the script cannot tell that it is not Python's own."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import umem
from umem.cli import main
from umem.cli.run_script import advice
from umem.compat import find_package
from umem.devices.cuda import cuda_reason

ROOT = Path(umem.__file__).parent.parent
VIRTUAL = ("--virtual", "t4", "--vram", "64MiB")
NAMES = ("UMEM_MODE", "UMEM_LIMIT", "UMEM_PREFETCH")

CHAINER = pytest.mark.skipif(find_package() is None, reason="Chainer is not installed")

Process = subprocess.CompletedProcess[str]
Run = Callable[..., Process]


def execute(*command: str, cwd: Path, stdin: str = "", **environment: str) -> Process:
    variables = {name: value for name, value in os.environ.items() if name not in NAMES}
    variables["NO_COLOR"] = "1"
    path = os.environ.get("PYTHONPATH")
    folders = [ROOT, *map(os.path.abspath, path.split(os.pathsep) if path else [])]
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        input=stdin,
        timeout=300,
        env={**variables, "PYTHONPATH": os.pathsep.join(map(str, folders)), **environment},
    )


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run code as a script, with options of ours before it and arguments of its own after."""

    def run(
        code: str, *options: str, arguments: tuple[str, ...] = (), stdin: str = "", **variables: str
    ) -> Process:
        (tmp_path / "script.py").write_text(textwrap.dedent(code))
        command = ("-m", "umem", "run", *options, "script.py", *arguments)
        return execute(*command, cwd=tmp_path, stdin=stdin, **variables)

    return run


def lines(result: Process) -> list[str]:
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


# -- the same as Python ------------------------------------------------------------------------

SAME = {
    "main": '''"""What it is."""
import inspect, pickle, sys
class A: pass
def f(x: 1 + 1): pass
print(sys.argv, sys.path[0], sys.stdin.read(), sys.stdin.isatty())
print(__name__, __file__, __package__, __spec__, __doc__, __loader__.get_filename("__main__"))
print({"__annotations__", "__cached__"}.union(globals()) == {"__annotations__", "__cached__"} | set(
    "A f inspect pickle sys __builtins__ __doc__ __file__ __loader__ __name__ __package__ "
    "__spec__".split()))
print(sys.modules["__main__"].__dict__ is globals(), inspect.getsource(f), f.__annotations__)
print(type(pickle.loads(pickle.dumps(A()))) is A)
import script
print(script.__name__)
if __name__ == "__main__": sys.exit(None)
''',
    "encoding": "# coding: latin-1\nprint(len('\xe4'))",
    "exit 7": "import sys; sys.exit(7)",
    "exit text": "import sys; sys.exit('that went wrong')",
    "exit tuple": "raise SystemExit((1, 2))",
    "error": "def f():\n    1 / 0\nf()",
    "chain": "try:\n    1 / 0\nexcept Exception as e:\n    raise KeyError('b') from e",
    "context": "def f():\n    try: int('x')\n    finally: {}['y']\nf()",
    "syntax": "x = (1,\nprint('never')",
    "hook": "import sys\nsys.excepthook = lambda *e: print('mine', e[0].__name__)\n1 / 0",
    "interrupt": "raise KeyboardInterrupt",
    "atexit": "import atexit\nx = 3\natexit.register(lambda: print(x, __name__))\nprint('first')",
    "thread": "import threading, time\n"
    "threading.Thread(target=lambda: (time.sleep(.2), print('last'))).start()\nprint('first')",
    "fork": "import os\nif not os.fork():\n    print('child', flush=True); os._exit(0)\nos.wait()",
    "warnings": "import warnings; warnings.warn('look')",
}


@pytest.mark.thorough
@pytest.mark.parametrize("code", SAME.values(), ids=SAME)
def test_a_script_does_what_it_does_without_umem(tmp_path: Path, run: Run, code: str) -> None:
    (tmp_path / "script.py").write_bytes(code.encode("latin-1" if "latin" in code else "utf-8"))
    arguments = ("--flag", "x", "-h", "--limit", "5", "--", "--mode")
    ours = execute("-m", "umem", "run", "script.py", *arguments, cwd=tmp_path, stdin="a b")
    plain = execute("script.py", *arguments, cwd=tmp_path, stdin="a b")
    expected = 130 if plain.returncode == -signal.SIGINT else plain.returncode
    assert (ours.returncode, ours.stdout) == (expected, plain.stdout)
    assert ours.stderr == plain.stderr


MODULES = {
    "pkg/__init__.py": "",
    "pkg/other.py": "",
    "pkg/__main__.py": "print(__package__, __spec__.name)",
    "pkg/bad.py": "import nothere",
    "pkg/broken/__init__.py": "1 / 0",
    "pkg/mod.py": """
import inspect, pickle, sys
from . import other
class A: pass
print(sys.argv, sys.path[0], sys.stdin.read())
print(__name__, __package__, __file__, __spec__.name, __doc__, __cached__, __loader__.name)
print(type(pickle.loads(pickle.dumps(A()))) is A, len(inspect.getsource(A)))
sys.exit(7)
""",
}


def modules(tmp_path: Path) -> None:
    for name, text in MODULES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)


@pytest.mark.parametrize(
    "name",
    ["pkg.mod", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("pkg", "pkg.bad"))],
)
def test_a_module_does_what_it_does_under_python_m(tmp_path: Path, name: str) -> None:
    modules(tmp_path)
    words = ("-m", name, "--limit", "5", "-m", "x")
    ours = execute("-m", "umem", "run", *words, cwd=tmp_path, stdin="a b")
    plain = execute(*words, cwd=tmp_path, stdin="a b")
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout)
    assert ours.stderr.splitlines()[-2:] == plain.stderr.splitlines()[-2:]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name, said",
    [
        ("pkg.nope", "ImportError: the module pkg.nope does not exist, or has no code to run"),
        ("pkg.broken.x", "broken/__init__.py"),
        ("nope", "Python finds no module nope from here"),
        ("pkg/mod.py", "pkg/mod.py is not the name of a module"),
    ],
)
def test_what_is_no_module_is_refused_by_name(tmp_path: Path, name: str, said: str) -> None:
    modules(tmp_path)
    found = execute("-m", "umem", "run", "-m", name, cwd=tmp_path)
    assert found.returncode in (1, 2) and said in " ".join(found.stderr.split())


def test_the_folder_of_the_script_is_first_on_the_path_also_through_a_link(tmp_path: Path) -> None:
    real, elsewhere = tmp_path / "real", tmp_path / "elsewhere"
    real.mkdir()
    elsewhere.mkdir()
    (real / "script.py").write_text("import beside; print(beside.x)")
    (real / "beside.py").write_text("x = 'found'")
    (elsewhere / "script.py").symlink_to(real / "script.py")
    result = execute("-m", "umem", "run", "elsewhere/script.py", cwd=tmp_path)
    assert lines(result) == lines(execute("elsewhere/script.py", cwd=tmp_path)) == ["found"]


def test_a_safe_path_stays_safe(tmp_path: Path, run: Run) -> None:
    if sys.version_info < (3, 11):
        pytest.skip("python -P came with 3.11")
    run("import sys; print(sys.path)")
    command = ("-P", "-m", "umem", "run", "script.py")
    assert str(tmp_path) not in lines(execute(*command, cwd=tmp_path))[0]


def test_the_traceback_has_no_line_of_umem_but_where_umem_is_called(run: Run) -> None:
    result = run("import umem\nwith umem.virtual_gpu('t4'):\n    umem.disable()\n")
    text = result.stderr
    assert result.returncode == 1
    assert text.splitlines()[1].endswith('script.py", line 3, in <module>')
    assert "umem/cli" not in text and "click" not in text and "runpy" not in text
    assert text.splitlines()[-1].startswith("umem.errors.StateError: umem is not enabled")


TOO_MUCH = """
import umem
def step(xp):
    return xp.ones(80 << 20, "u1")
gpu = umem.devices.current_device()
step(gpu.xp)
"""


@pytest.mark.thorough
def test_the_traceback_of_an_error_of_umems_ends_at_the_scripts_own_line(run: Run) -> None:
    result = run(TOO_MUCH, "--virtual", "t4", "--vram", "64MiB")
    text = result.stderr.splitlines()
    last = max(number for number, line in enumerate(text) if line.startswith("  File "))
    assert text[last].endswith("line 4, in step") and "script.py" in text[last]
    assert any(line.startswith("umem.errors.OutOfMemoryError: needs 80.0 MiB") for line in text)
    assert "arrays.py" not in result.stderr


@pytest.mark.thorough
def test_the_whole_traceback_is_shown_where_it_is_asked_for(run: Run) -> None:
    result = run(TOO_MUCH, "--traceback", "--virtual", "t4", "--vram", "64MiB")
    assert "arrays.py" in result.stderr and "OutOfMemoryError" in result.stderr


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_is_the_scripts_own(tmp_path: Path, run: Run) -> None:
    (tmp_path / "script.py").write_text("import time; print('on', flush=True); time.sleep(60)")
    process = subprocess.Popen(
        [sys.executable, "-m", "umem", "run", "script.py"],
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None and process.stdout.readline() == "on\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, text = process.communicate(timeout=300)
    assert process.returncode == 130
    assert text.splitlines()[-1] == "KeyboardInterrupt" and "umem" not in text


# -- what umem adds ----------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_mode_is_on_for_the_script_and_its_own_enable_agrees(run: Run) -> None:
    code = """
        import umem
        status = umem.status()
        print(status.mode, status.limit_bytes, status.device)
        with umem.enable() as handle:
            print(handle.policy.mode, handle.policy.prefetch)
        print(umem.status().on)
    """
    result = run(code, *VIRTUAL, "--mode", "hybrid", "--limit", "0.5x", "--prefetch")
    assert lines(result) == [f"hybrid {32 << 20} t4", "hybrid True", "False"]


@pytest.mark.thorough
def test_the_environment_is_the_default_of_the_options(run: Run) -> None:
    code = "import umem; s = umem.status(); print(s.mode, s.limit_bytes)"
    variables = {"UMEM_MODE": "hybrid", "UMEM_LIMIT": "8MiB"}
    assert lines(run(code, *VIRTUAL, **variables)) == [f"hybrid {8 << 20}"]
    both = run(code, *VIRTUAL, "--mode", "managed", "--limit", "9MiB", **variables)
    assert lines(both) == [f"managed {9 << 20}"]
    assert lines(run(code, *VIRTUAL, "--limit", "7MiB", **variables)) == [f"hybrid {7 << 20}"]
    assert lines(run(code, *VIRTUAL, UMEM_MODE="off", UMEM_LIMIT="8MiB")) == ["unmanaged None"]


@pytest.mark.thorough
def test_the_script_finds_the_options_in_its_environment(run: Run) -> None:
    code = f"import os; print([os.environ.get(name) for name in {NAMES}])"
    result = run(code, *VIRTUAL, "--mode", "managed", UMEM_LIMIT="8MiB")
    assert lines(result) == ["['managed', '8MiB', None]"]


@pytest.mark.thorough
def test_a_report_follows_the_script_also_when_it_fails(run: Run) -> None:
    code = """
        import umem
        from umem.devices import current_device
        a = current_device().xp.ones(8 << 20, "u1")
        raise SystemExit(3)
    """
    result = run(code, *VIRTUAL, "--mode", "managed", "--report")
    assert result.returncode == 3
    for text in ("mode          managed", "t4 (simulated)", "peak          8.0 MiB", "time"):
        assert text in result.stderr
    failed = run("1 / 0", *VIRTUAL, "--report")
    assert failed.returncode == 1
    assert failed.stderr.index("ZeroDivisionError") < failed.stderr.index("(simulated)")


@pytest.mark.thorough
def test_paging_is_reported_also_of_a_script_that_sets_allocators(run: Run) -> None:
    pytest.importorskip("cupy")
    code = """
        import umem
        umem.enable()
        import cupy
        for _ in range(2):
            print(float(cupy.ones((32, 1 << 20), "f4").sum()))
        umem.disable()
        cupy.cuda.set_allocator(cupy.cuda.MemoryPool(cupy.cuda.malloc_managed).malloc)
        cupy.ones((20, 1 << 20), "f4").sum()
        1 / 0
    """
    result = run(code, "--software", "t4", "--vram", "64MiB", "--paging")
    assert result.returncode == 1 and result.stdout.split() == ["33554432.0"] * 2
    assert "pages on T4 (simulated): " in result.stderr
    assert result.stderr.count("script.py") >= 3  # two lines, and the traceback


def test_a_report_without_a_device_says_so(run: Run) -> None:
    if cuda_reason() is None:
        pytest.skip("there is a CUDA device")
    result = run("x = b'1' * (256 << 20)", "--report")
    assert result.returncode == 0
    assert "no CUDA device" in result.stderr
    host, most, unit, *_ = result.stderr.splitlines()[-1].split()
    assert (host, unit) == ("host", "MiB") and 256 < float(most) < 1024


@pytest.mark.thorough
def test_a_child_that_comes_to_the_end_of_the_script_reports_nothing(run: Run) -> None:
    result = run("import os\nif os.fork(): os.wait()", "--report", *VIRTUAL)
    assert result.returncode == 0
    assert result.stderr.count("device ") == 1


@pytest.mark.thorough
@CHAINER
def test_the_virtual_gpu_follows_a_chainer_script(run: Run) -> None:
    code = """
        import chainer, numpy as np, umem
        from umem.devices import current_device
        x = chainer.Variable(np.ones((512, 512), "f"))
        chainer.functions.sum(chainer.functions.relu(x))
        print(current_device().figures.peak_bytes > 0)
    """
    result = run(code, *VIRTUAL, "--mode", "managed")
    assert lines(result) == ["True"]


@pytest.mark.thorough
@CHAINER
@pytest.mark.parametrize(
    "use",
    [
        "get_device('@cupy:0').use()",
        "cuda.get_device_from_id(0).use()",
        "links.Linear(3, 3).to_gpu()",
    ],
)
def test_a_script_that_asks_for_a_gpu_is_told_how_to_do_without(run: Run, use: str) -> None:
    if cuda_reason() is None:
        pytest.skip("there is a CUDA device")
    result = run(f"import chainer\nchainer.{use}", *VIRTUAL, "--report")
    assert result.returncode == 1
    assert "RuntimeError: CUDA environment is not correctly set up" in result.stderr
    hint, line = result.stderr.splitlines()[-2:]
    assert hint.startswith("umem: Chainer finds no GPU here.") and "the virtual t4" in hint
    assert "-g -1" in hint and line == "  umem run --software t4 script.py"
    if use.startswith("get_device"):
        plain = run(f"import chainer\nchainer.{use}")
        assert "-g -1" in plain.stderr.splitlines()[-2] and "virtual" not in plain.stderr


@pytest.mark.parametrize(
    "use", ["arange(4)", pytest.param("cuda.Device(0).use()", marks=pytest.mark.thorough)]
)
def test_a_cupy_script_without_a_gpu_is_told_of_the_software_gpu(run: Run, use: str) -> None:
    pytest.importorskip("cupy")
    if cuda_reason() is None:
        pytest.skip("there is a CUDA device")
    result = run(f"import cupy\ncupy.{use}", arguments=("a b",))
    assert result.returncode == 1 and "CUDARuntimeError" in result.stderr
    assert "umem: CuPy finds no GPU here." in result.stderr
    assert result.stderr.splitlines()[-1] == "  umem run --software t4 script.py 'a b'"


FULL = """
    import sys
    from umem.devices import current_device
    how = sys.argv.pop(1)
    def make():
        return current_device().xp.ones(80 << 20, "u1")
    if how == "caught":
        try:
            make()
        except MemoryError:
            raise SystemExit(3)
    if how == "cause":
        try:
            make()
        except MemoryError as error:
            raise ValueError("too large") from error
    make()
"""


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["plain", "cause"])
def test_out_of_memory_it_is_told_how_to_find_out_what_is_needed(run: Run, how: str) -> None:
    options = (*VIRTUAL, "--mode", "unmanaged", "--report")
    result = run(FULL, *options, arguments=(how, "a b"))
    assert result.returncode == 1
    assert result.stderr.splitlines()[-2:] == [
        f"  umem run --record out/run.umem.gz script.py {how} 'a b'",
        "  umem replay out/run.umem.gz --gpu t4 --vram 64MiB",
    ]
    assert result.stderr.index("OutOfMemoryError") < result.stderr.index("moved")


@pytest.mark.thorough
def test_of_other_errors_nothing_is_said(run: Run) -> None:
    result = run("raise MemoryError", *VIRTUAL)
    assert result.returncode == 1 and "umem: " not in result.stderr
    circle = ValueError()
    circle.__cause__ = circle
    errors = MemoryError(), RuntimeError("CUDA"), ValueError("CUDA environ"), circle
    for error in (*errors, TypeError("0-dimensional")):
        assert advice(error, ["script.py"], "t4", "64MiB") is None


@pytest.mark.thorough
@pytest.mark.parametrize("use", ["int(a)", "'%d' % a", "numpy.zeros(3).__setitem__(0, a)"])
def test_an_array_that_numpy_takes_for_a_number_no_more_is_told_with_both_ways_out(
    run: Run, use: str
) -> None:
    if np.lib.NumpyVersion(np.__version__) < "2.4.0":
        pytest.skip("this NumPy takes it for one")
    result = run(f"import numpy\na = numpy.array([1])\n{use}")
    assert result.returncode == 1 and "Error" in result.stderr.splitlines()[-2]
    hint = result.stderr.splitlines()[-1]
    assert hint.startswith("umem: NumPy up to 2.3 converted an array of shape (1,) to a number")
    assert "a.item()" in hint and "pip install 'numpy<2.4'" in hint


@pytest.mark.parametrize(
    "error, known",
    [
        (TypeError("only 0-dimensional arrays can be converted to Python scalars"), True),
        (TypeError("%d format: a real number is required, not numpy.ndarray"), True),
        (TypeError("%d format: a real number is required, not str"), False),
        (ValueError("only 0-dimensional arrays can be converted to Python scalars"), False),
    ],
)
def test_only_numpys_own_words_are_taken_for_that(error: Exception, known: bool) -> None:
    said = advice(error, ["script.py"], None, None)
    assert (said is not None and "a.item()" in said) == known


@pytest.mark.thorough
def test_of_an_error_that_the_script_takes_care_of_nothing_is_said(run: Run) -> None:
    result = run(FULL, *VIRTUAL, "--mode", "unmanaged", arguments=("caught",))
    assert (result.returncode, result.stderr) == (3, "")


# -- Chainer, with and without -----------------------------------------------------------------

WORKERS = """
    import multiprocessing, os, sys
    import chainer
    import chainer.functions as F
    import numpy as np

    def work(n):
        return float(F.sum(F.relu(chainer.Variable(np.arange(n, dtype="f") - 2))).array)

    if __name__ == "__main__":
        with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
            print(pool.map(work, [4, 5]), os.environ.get("UMEM_MODE"))
"""


@pytest.mark.thorough
@CHAINER
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_worker_processes_have_a_chainer_that_is_mended(run: Run, method: str) -> None:
    result = run(WORKERS, *VIRTUAL, "--mode", "managed", arguments=(method,))
    assert lines(result) == ["[1.0, 3.0] managed"]


@pytest.mark.thorough
@CHAINER
def test_another_program_that_the_script_starts_has_it_too(tmp_path: Path, run: Run) -> None:
    (tmp_path / "other.py").write_text("import chainer; print(chainer.__version__)")
    code = "import subprocess, sys; subprocess.run([sys.executable, 'other.py'], check=True)"
    assert lines(run(code))[0].startswith("7.8")


def test_the_environments_own_start_up_module_still_runs(tmp_path: Path, run: Run) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text("import sys; sys.own = __name__")
    path = f"{tmp_path / 'site'}{os.pathsep}{ROOT}"
    code = """
        import subprocess, sys
        code = "import sys; print(sys.own, 'numpy' in sys.modules, 'startup' in str(sys.path))"
        subprocess.run([sys.executable, "-c", code], check=True)
    """
    assert lines(run(code, PYTHONPATH=path)) == ["sitecustomize False False"]


WITHOUT_CHAINER = """
import sys
from importlib.machinery import PathFinder
real = PathFinder.find_spec.__func__
def find_spec(cls, name, path=None, target=None):
    return None if name.split(".")[0] == "chainer" else real(cls, name, path, target)
PathFinder.find_spec = classmethod(find_spec)
from umem.cli import main
main()
"""


@pytest.mark.thorough
@pytest.mark.parametrize("options", [(), (*VIRTUAL, "--mode", "managed")])
def test_a_script_without_chainer_runs_where_chainer_is_not_installed(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    (tmp_path / "script.py").write_text("import sys; print('chainer' in sys.modules)")
    result = execute("-c", WITHOUT_CHAINER, "run", *options, "script.py", cwd=tmp_path)
    assert lines(result) == ["False"]
    (tmp_path / "script.py").write_text("import chainer")
    failed = execute("-c", WITHOUT_CHAINER, "run", *options, "script.py", cwd=tmp_path)
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'chainer'"


# -- refused before the script runs ------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--mode", "mangaed"], 2, "is not one of"),
        (["--limit", "1GiB"], 2, "--limit needs --mode or UMEM_MODE"),
        (["--prefetch"], 2, "--prefetch needs --mode or UMEM_MODE"),
        (["--vram", "1GiB"], 2, "--vram needs --dry, --software or --virtual"),
        (["--record", "a.umem.gz", "--record", "b"], 2, "--record is given more than once"),
        (["--vram", "1GiB", "--vram", "2GiB"], 2, "--vram is given more than once"),
        (["--sofware", "t4"], 2, "--software"),
        (["--mod=hybrid"], 2, "--mode"),
        (["-5"], 2, "No such option"),
        (["--", "--sofware"], 2, "there is no file --sofware"),
        (["--virtual", "v101"], 1, "did you mean"),
        (["--virtual", "t4", "--vram", "0"], 1, "vram must be above zero"),
        (["--virtual", "t4", "--mode", "managed", "--limit", "-1"], 1, "limit must be a size"),
        (["--virtual", "t4", "--mode", "managed", "--limit", "120%"], 1, "limit must be at most"),
        (["--virtual", "jetson", "--mode", "managed"], 1, "shares its memory"),
    ],
)
def test_bad_input_is_refused_before_the_script_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, text: str
) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    script = tmp_path / "script.py"
    script.write_text("raise SystemError")
    if find_spec("threadpoolctl"):  # which some library imports, and which sets a variable then
        importlib.import_module("threadpoolctl")
    before = dict(os.environ)
    result = CliRunner().invoke(main, ["run", *arguments, str(script)])
    assert text in result.output
    assert result.exit_code == code
    assert not umem.status().on and dict(os.environ) == before


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "value"), [("UMEM_MODE", "mangaed"), ("UMEM_LIMIT", "x"), ("UMEM_PREFETCH", "maybe")]
)
def test_a_bad_variable_is_named_before_the_script_runs(run: Run, name: str, value: str) -> None:
    variables = {"UMEM_MODE": "managed", name: value}
    result = run("raise SystemError", *VIRTUAL, **variables)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(f"Error: {name} must be")


def test_without_a_gpu_a_mode_is_refused_with_all_ways_out(run: Run) -> None:
    if cuda_reason() is None:
        pytest.skip("there is a CUDA device")
    result = run("raise SystemError", "--mode", "managed")
    assert result.returncode == 1
    assert "cupy-cuda12x" in result.stderr and "umem.virtual_gpu" in result.stderr
    assert "umem run --software t4 SCRIPT" in result.stderr


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nowhere.py", "there is no file"),
        (".", "is a directory"),
        ("picture.png", "picture.png is not a Python script: it contains null bytes"),
    ],
)
def test_what_is_no_script_is_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    result = CliRunner().invoke(main, ["run", str(tmp_path / name)])
    assert result.exit_code == 2
    assert text in " ".join(result.output.split())


def test_a_script_that_cannot_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    result = CliRunner().invoke(main, ["run", str(tmp_path / "script.py")])
    assert result.exit_code == 2
    assert "Permission denied" in " ".join(result.output.split())
