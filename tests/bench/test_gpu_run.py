"""bench/gpu_run.py: what it does with its minutes, on made-up steps; and a rehearsal."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench_scripts import BENCH, ROOT, module, run
from gpu_run_kills import killed_and_continued, records
from processes import python
from project import EXTRAS, PYPROJECT
from software_programs import needs_compiler, needs_cupy

from umem.errors import UmemError

gpu_run = module("gpu_run")
calls = module("gpu_run_parts.calls")
wheels = module("gpu_run_parts.wheels")
Archive: Any = module("gpu_run_parts.archive").Archive
NAMES = [step.name for step in gpu_run.STEPS]


def step(name: str, code: str, seconds: float = 60, needs: tuple[str, ...] = ()) -> Any:
    return gpu_run.Step(name, ("-c", code, "{result}"), seconds, needs)


def go(folder: Path, *steps: Any, minutes: float = 1.0, quick: bool = False) -> dict[str, str]:
    archive = Archive(folder / "out.zip")
    with archive.held():
        made = gpu_run.Run(archive, minutes, software=False, quick=quick)
        return dict(made.go(list(enumerate(steps, 1))))


def written(folder: Path, name: str) -> Any:
    return records(folder / "out.zip")[name]


def said_by(folder: Path, name: str) -> str:
    return Archive(folder / "out.zip").entries()[f"{name}.txt"].decode()


def test_what_a_step_says_and_writes_is_kept(tmp_path):
    code = "import sys; print('said'); open(sys.argv[1], 'w').write('[1]')"
    said = go(tmp_path, step("one", code), step("two", "raise SystemExit(3)"))
    assert said["01-one"].startswith("passed in") and said["02-two"].startswith("failed in")
    assert said_by(tmp_path, "01-one") == "said\n"
    one, two = written(tmp_path, "01-one"), written(tmp_path, "02-two")
    assert (one["state"], one["result"], one["command"][:2]) == ("passed", [1], ["python", "-c"])
    assert (two["state"], two["exit_code"], two["result"]) == ("failed", 3, None)
    assert [path.name for path in tmp_path.iterdir()] == ["out.zip"]


def test_what_is_done_is_not_done_again(tmp_path):
    steps = (step("one", "print(1)"), step("two", "raise SystemExit(1)"))
    go(tmp_path, *steps)
    before = records(tmp_path / "out.zip")
    assert go(tmp_path, *steps) == {"01-one": "passed before", "02-two": "failed before"}
    assert records(tmp_path / "out.zip") == before
    for other in ({**before["01-one"], "software": True}, {**before["01-one"], "quick": True}, 3):
        Archive(tmp_path / "out.zip").add("01-one", other)  # no run of this kind
        assert go(tmp_path, *steps)["01-one"].startswith("passed in")
    assert go(tmp_path, *steps, quick=True)["01-one"].startswith("passed in")


def is_running(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


def test_a_step_that_passes_its_limit_is_stopped_with_what_it_started(tmp_path):
    code = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
time.sleep(600)
"""
    said = go(tmp_path, step("slow", code, 5.0), step("next", "print(2)"))
    assert said["01-slow"].startswith("timed out") and said["02-next"].startswith("passed")
    assert not is_running(int(said_by(tmp_path, "01-slow").split()[0]))
    assert go(tmp_path, step("slow", code, 5.0)) == {"01-slow": "timed out before"}


def test_a_step_that_ends_leaves_nothing_that_it_has_started(tmp_path):
    code = """
import subprocess, sys
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
print(subprocess.Popen(sleep, start_new_session=True).pid, flush=True)
"""
    assert go(tmp_path, step("one", code))["01-one"].startswith("passed")
    assert not is_running(int(said_by(tmp_path, "01-one").split()[0]))


def test_the_minutes_cut_a_step_short_and_the_next_call_does_it_again(tmp_path):
    slow, last = step("slow", "import time; time.sleep(600)"), step("last", "print(1)")
    said = go(tmp_path, slow, last, minutes=4 / 60)
    assert said["01-slow"].startswith("cut short") and said["02-last"].startswith("not begun")
    assert written(tmp_path, "01-slow")["state"] == "cut short"
    assert go(tmp_path, step("slow", "print(2)"), last)["01-slow"].startswith("passed in")


def test_a_step_without_its_package_names_the_wheel_and_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setitem(gpu_run.WHEELS, "no_such.module", wheels.Wheel("a-wheel>=1"))
    lacking = step("one", "print(1)", needs=("numpy", "no_such.module"))
    assert go(tmp_path, lacking) == {"01-one": "missing: no_such.module"}
    assert written(tmp_path, "01-one") == {
        "state": "missing", "why": {"no_such.module": "not installed"}, "wheels": ["a-wheel>=1"],
    }  # fmt: skip
    assert go(tmp_path, step("one", "print(1)"))["01-one"].startswith("passed in")


@pytest.mark.parametrize(
    ("least", "below", "why"),
    [("1.1", "", None), ("999", "", "older than 999"), ("1.1", "1.2", "not older than 1.2")],
)
def test_versions_are_looked_at_first(tmp_path, monkeypatch, least, below, why):
    monkeypatch.setitem(wheels.WHEELS, "numpy", wheels.Wheel("numpy", ("numpy",), least, below))
    said = go(tmp_path, step("one", "print(1)", needs=("numpy",)))["01-one"]
    first = written(tmp_path, "00-wheels")["result"]["numpy"]
    assert first["version"] == metadata.version("numpy")
    assert said.startswith("passed" if why is None else "missing: numpy")
    assert first["problem"] is None if why is None else first["problem"].endswith(why)


def test_a_file_that_is_no_archive_is_left_alone(tmp_path):
    (tmp_path / "notes").write_text("mine")
    done = run("gpu_run.py", str(tmp_path / "notes"))
    assert done.returncode == 2 and "no archive of results" in done.stderr
    assert (tmp_path / "notes").read_text() == "mine"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_leaves_what_was_written(tmp_path, number):
    code = f"""
import sys
sys.path.insert(0, {str(BENCH)!r})
import gpu_run
gpu_run.STEPS = (
    gpu_run.Step("one", ("-c", "print(1)"), 60, ()),
    gpu_run.Step("two", ("-c", "import time; print(2, flush=True); time.sleep(600)"), 600, ()),
)
sys.argv = ["gpu_run.py", {str(tmp_path / "out.zip")!r}]
sys.exit(gpu_run.main())
"""
    program = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    said = tmp_path / "out.zip.running" / "02-two.txt"
    end = time.monotonic() + 60
    while not (said.exists() and said.read_text() == "2\n"):
        assert time.monotonic() < end and program.poll() is None
        time.sleep(0.02)
    program.send_signal(number)
    printed, _ = program.communicate(timeout=60)
    assert program.returncode == 130
    assert printed.splitlines()[-1].startswith("interrupted: what is done stays")
    assert written(tmp_path, "01-one")["state"] == "passed"
    assert written(tmp_path, "02-two")["state"] == "interrupted"
    assert said_by(tmp_path, "02-two").startswith("2\n")


STEPS = """
import sys
sys.path.insert(0, {bench!r})
import gpu_run
starts = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time;"
starts += "time.sleep(600)'], start_new_session=True); time.sleep(0.3)"
gpu_run.STEPS = [gpu_run.Step(f"step{{n}}", ("-c", starts), 60, ()) for n in range(24)]
sys.argv = ["gpu_run.py", {out!r}]
sys.exit(gpu_run.main())
"""


@pytest.mark.thorough
def test_killed_at_any_moment_it_leaves_nothing_running_and_goes_on(tmp_path):
    out = tmp_path / "out.zip"
    program = ["-c", STEPS.format(bench=str(BENCH), out=str(out))]
    found = killed_and_continued(program, out, kills=8, longest_seconds=0.9, seed=27)
    assert [record["state"] for record in found.values()] == ["passed"] * 25


@needs_cupy
@needs_compiler
@pytest.mark.slow
def test_a_rehearsal_killed_ten_times_comes_to_its_end(tmp_path):
    out = tmp_path / "out.zip"
    program = [str(BENCH / "gpu_run.py"), str(out), "--software", "--minutes", "120"]
    found = killed_and_continued(program, out, kills=10, longest_seconds=60.0, seed=27)
    assert list(found) == ["00-wheels", *(f"{n:02}-{name}" for n, name in enumerate(NAMES, 1))]
    assert {name: record["state"] for name, record in found.items()} == dict.fromkeys(
        found, "passed"
    )


def test_outcomes_of_tests_are_kept_test_by_test(tmp_path):
    (tmp_path / "test_three.py").write_text(
        "import os, pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 1 == 2\n"
        "@pytest.mark.skip(reason='why')\ndef test_not(): pass\n"
        "@pytest.fixture\ndef broken(): raise ValueError('set-up')\n"
        "def test_unready(broken): pass\n"
        "def test_dies(): os._exit(3)\n"
        "def test_after(): pass\n"
    )
    (tmp_path / "test_unreadable.py").write_text("import no_such_module\n")
    path = tmp_path / "lines"
    for name in ("test_unreadable.py", "test_three.py"):
        words = ("-m", "pytest", "-q", "-p", "bench.gpu_run_parts.outcomes", "-c", os.devnull, name)
        python(*words, cwd=tmp_path, PYTEST_DISABLE_PLUGIN_AUTOLOAD=1, UMEM_OUTCOMES=path)
    with open(path, "a") as file:
        file.write('{"name": "cut in the mi')
    found = gpu_run.read(path, "tests")
    three = "test_three.py::test_"
    assert found["passed"] == [f"{three}good"]
    assert set(found["failed"]) == {f"{three}bad", f"{three}unready", "test_unreadable.py"}
    assert "assert 1 == 2" in found["failed"][f"{three}bad"]
    assert found["skipped"] == {f"{three}not": "Skipped: why"}
    assert found["cut"] == [f"{three}dies"]
    assert gpu_run.summed(found, "tests") == ": 1 passed, 3 failed, 1 skipped, 1 cut"


MADE = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, {bench!r})
from gpu_run_parts import calls
CALLS = calls.Calls()

@CALLS("umem.one", "umem.other")
def one(given): return {{"processes": os.getpid(), "quick": given.quick}}

@CALLS(needs=("no_such_module",))
def lacks(given): raise AssertionError

@CALLS(seconds=0.1)
def hangs(given): time.sleep(600)

@CALLS()
def dies(given): os.kill(os.getpid(), 11)

@CALLS()
def breaks(given): raise RuntimeError("an illegal address")

@CALLS(stand_in="a worker")
def last(given): return {{"processes": os.getpid()}}

calls.calls_of = lambda group: CALLS
if "broken" in sys.argv:
    calls.tidy = lambda xp: False
os._exit(calls.make("host", Path(sys.argv[1]), int(sys.argv[-1]), False))
"""


@pytest.mark.parametrize("how", ["tidy", "broken"])
def test_a_call_that_hangs_dies_or_raises_costs_its_own_line(tmp_path, monkeypatch, how):
    monkeypatch.setattr(calls, "GONE_SECONDS", 0.5)
    path = tmp_path / "lines"
    command = [sys.executable, "-c", MADE.format(bench=str(BENCH)), str(path), how]
    assert calls.watch(command, path) == 1
    found = {line["name"]: line for line in calls.results(path)}
    assert {name: line["state"] for name, line in found.items()} == {
        "one": "passed", "lacks": "missing", "hangs": "hung", "dies": "died", "breaks": "failed",
        "last": "passed",
    }  # fmt: skip
    assert found["one"]["covers"] == ["umem.one", "umem.other"]
    assert found["last"]["stand_in"] == "a worker"
    assert "signal 11" in found["dies"]["error"] and "illegal" in found["breaks"]["error"]
    assert found["lacks"]["error"] == "not installed: no_such_module"
    assert found["one"]["found"]["processes"] != found["last"]["found"]["processes"]
    assert calls.read_lines(path)[-1] == {"over": True}


def test_a_process_that_makes_no_call_is_tried_once(tmp_path):
    path = tmp_path / "lines"
    assert calls.watch([sys.executable, "-c", "raise SystemExit(3)"], path) == 1
    (line,) = calls.results(path)
    assert (line["state"], line["error"]) == ("failed", "died with exit code 3")


def test_a_step_that_is_stopped_keeps_the_calls_it_has_made(tmp_path):
    code = """
import sys, time
with open(sys.argv[1], "w") as file:
    print('{"begun": "one", "number": 0, "seconds": 9}', file=file)
    print('{"name": "one", "covers": [], "state": "passed"}', file=file)
    print('{"begun": "two", "number": 1, "seconds": 9}', file=file)
    print('{"name": "two", "st', end="", file=file)
print("written", flush=True)
time.sleep(600)
"""
    slow = gpu_run.Step("calls", ("-c", code, "{result}"), 4.0, (), (), "calls")
    assert go(tmp_path, slow)["01-calls"].endswith(": 1 passed, 1 cut")
    record = written(tmp_path, "01-calls")
    assert record["state"] == "timed out"
    assert [line["state"] for line in record["result"]] == ["passed", "cut"]


def test_without_a_gpu_nothing_else_is_begun_and_the_next_call_asks_again(tmp_path):
    code = "import sys; open(sys.argv[1], 'w').write('{\"no_gpu\": \"no driver\"}'); sys.exit(1)"
    for _ in range(2):
        said = go(tmp_path, step("machine", code), step("next", "print(2)"))
        assert list(said) == ["01-machine"] and said["01-machine"].startswith("no GPU in")
    assert go(tmp_path, step("machine", "print(1)"))["01-machine"].startswith("passed in")


def test_a_machine_without_a_gpu_is_told_why(tmp_path):
    done = python(BENCH / "gpu_run.py", tmp_path / "out.zip", CUDA_VISIBLE_DEVICES="")
    if "no GPU" not in done.stdout:
        pytest.skip("CuPy is not installed, or finds a GPU")
    assert done.returncode == 1 and len(done.stdout.splitlines()) == 2
    assert "Nothing else was begun: no CUDA device" in done.stdout
    assert written(tmp_path, "01-machine")["result"]["versions"]["python"]


def test_who_else_uses_the_card_is_said():
    assert "20.0 GiB" in gpu_run.summed({"others": "20.0 GiB of VRAM are in use"}, "json")
    assert gpu_run.summed({"others": None}, "json") == gpu_run.summed(None, "calls") == ""


@pytest.mark.parametrize(
    ("who", "host", "error"),
    [("nvidia-smi lists 2 processes", None, "lists 2 processes"), (None, 7, "7 B left")],
)
def test_a_card_that_others_use_is_not_oversubscribed(monkeypatch, who, host, error):
    oversubscribe, guard = module("gpu_run_parts.oversubscribe"), module("gpu_guard")
    monkeypatch.setattr(guard, "others", lambda device: who)
    device: Any = SimpleNamespace(simulated=False, host_available_bytes=lambda: host)
    with pytest.raises(UmemError, match=f"not oversubscribed: .*{error}"):
        oversubscribe.oversubscribed(calls.Given(None, device, Path(), True))


def test_only_who_asks_for_it_oversubscribes(tmp_path):
    assert gpu_run.OVERSUBSCRIBE not in gpu_run.STEPS
    for group in ("first_light", "pressure", "host"):
        assert "oversubscribed" not in [call.name for call in calls.calls_of(group)]


def test_wheels_are_named_with_how_to_get_them():
    done = run("gpu_run.py", "--wheels")
    assert done.returncode == 0, done.stderr
    for word in ("cupti-python==13.*", "--no-deps", "--python-version 3.12", "chainer==7.8.1"):
        assert word in done.stdout
    there = {"numpy", "scipy", "cupy", "cuda.core", "chainer"}  # Chainer is built
    named = {re.match(r"[\w-]+", text)[0] for text in wheels.CARRIED}
    assert {wheel.names[0] for name, wheel in wheels.WHEELS.items() if name not in there} <= named
    done = run("gpu_run.py")
    assert done.returncode == 2 and "OUT.zip" in done.stderr


def test_an_archive_that_can_no_longer_be_written_ends_the_run(tmp_path):
    code = f"""
import sys
sys.path.insert(0, {str(BENCH)!r})
import gpu_run
def full(*_): raise OSError(28, "No space left on device")
gpu_run.Archive.add = full
sys.argv = ["gpu_run.py", {str(tmp_path / "out.zip")!r}]
sys.exit(gpu_run.main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.endswith("No space left on device\n")
    assert "Traceback" not in done.stderr


def test_it_imports_nothing_that_may_be_missing():
    code = f"""
import sys
sys.path.insert(0, {str(BENCH)!r})
before = set(sys.modules)
import gpu_run
new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(sorted(new - sys.stdlib_module_names - {{"gpu_run", "gpu_run_parts"}}))
"""
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_steps_name_files_that_are_there_and_packages_that_have_wheels():
    assert len(set(NAMES)) == len(NAMES)
    for each in gpu_run.STEPS:
        files = [part for part in each.command if part.endswith(".py")]
        assert all((ROOT / name).is_file() for name in files)
        assert set(each.needs) <= set(gpu_run.WHEELS)
    named = {part for each in gpu_run.STEPS for part in each.command if "tests/" in part}
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if "pytest.mark.gpu" in path.read_text("utf-8")
    }
    assert (
        marked
        - {
            "tests/devices/software/test_gpu_tests.py",  # these two name the mark
            "tests/bench/test_gpu_run.py",
            "tests/bench/test_gpu_calls.py",  # the steps first-light and pressure
        }
        == named
    )


def test_wheels_are_of_the_versions_of_the_extras():
    texts = [*PYPROJECT["project"]["dependencies"]]
    texts += [text for name in ("cuda12", "cuda13", "chainer", "test") for text in EXTRAS[name]]
    wanted = {}
    for text in texts:
        name, least, below = re.match(r"([\w-]+)[^>]*>=([\d.]+)(?:,<([\d.]+))?", text).groups()
        wanted[name] = least, below or ""
    for name, wheel in wheels.WHEELS.items():
        least, below = wanted[wheel.names[0]]
        older = {"cupy": "13.0", "pytest": "8.0", "hypothesis": "6.100"}
        assert wheel.below == below and wheel.least == older.get(name, least)


@pytest.mark.parametrize(
    ("given", "said"),
    [(["--minutes", "0"], "--minutes must be more than 0"), (["--only", "x"], "invalid choice")],
)
def test_bad_arguments_are_named(tmp_path, given, said):
    done = run("gpu_run.py", str(tmp_path / "out"), *given)
    assert done.returncode == 2 and said in done.stderr and not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    done = run("gpu_run.py", str(tmp_path / "file" / "out"))
    assert done.returncode == 2 and "cannot write" in done.stderr


@needs_cupy
@needs_compiler
@pytest.mark.thorough
def test_a_rehearsal_on_the_software_gpu(tmp_path, monkeypatch, kernel_cache):
    monkeypatch.setenv("XDG_CACHE_HOME", str(kernel_cache))
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    chosen = (
        "machine", "first-light", "pressure", "doctor", "chainer-tests", "device-tests",
        "constants", "oversubscribe",
    )  # fmt: skip
    only = [part for name in chosen for part in ("--only", name)]
    given = (str(tmp_path / "out.zip"), "--software", "--quick", "--oversubscribe", *only)
    done = run("gpu_run.py", *given, timeout=900)
    entries = Archive(tmp_path / "out.zip").entries()
    texts = {name: text[-2000:] for name, text in entries.items() if name.endswith(".txt")}
    assert done.returncode == 0, (done.stdout, done.stderr, texts)
    found = {name[3:]: record for name, record in records(tmp_path / "out.zip").items()}
    machine = found["machine"]["result"]
    assert machine["simulated"] is True and machine["managed_budget_bytes"] < 4 << 30
    assert json.loads(said_by(tmp_path, "04-doctor"))["ok"] is True
    assert found["constants"]["result"]["simulated"] and found["constants"]["result"]["rows"]
    for name in ("chainer-tests", "device-tests"):
        assert found[name]["result"]["passed"] and not found[name]["result"]["failed"]
    for name, group in (("first-light", "first_light"), ("pressure", "pressure")):
        lines = found[name]["result"]
        assert [line["name"] for line in lines] == [call.name for call in calls.calls_of(group)]
    (line,) = found["oversubscribe"]["result"]
    assert line["found"]["bytes"] > line["found"]["free_bytes"]
    assert line["found"]["managed"]["pages"]["evicted_bytes"] > 0
    again = run("gpu_run.py", *given)
    assert again.returncode == 0
    assert [line.split()[1:] for line in again.stdout.splitlines()] == [["passed", "before"]] * 8
