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
from typing import Any

import pytest
from bench_scripts import BENCH, ROOT, module, run
from gpu_run_kills import killed_and_continued, records
from project import EXTRAS, PYPROJECT
from software_programs import needs_compiler, needs_cupy

gpu_run = module("gpu_run")
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


def test_outcomes_of_tests_are_read(tmp_path):
    path = tmp_path / "report.xml"
    path.write_text(
        '<testsuites><testsuite><testcase classname="t" name="good"/>'
        '<testcase classname="t" name="bad"><failure message="no"/></testcase>'
        '<testcase classname="t" name="not"><skipped message="why"/></testcase>'
        "</testsuite></testsuites>"
    )
    assert gpu_run.read(path) == {
        "passed": ["t::good"], "failed": ["t::bad"], "skipped": {"t::not": "why"},
    }  # fmt: skip
    path.write_text("<testsuites>")
    assert gpu_run.read(path) is None


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
        marked - {"tests/devices/software/test_gpu_tests.py", "tests/bench/test_gpu_run.py"}
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
        assert wheel.below == below and wheel.least == {"cupy": "13.0"}.get(name, least)


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
    chosen = ("machine", "doctor", "constants", "device-tests", "managed", "facts-tests")
    only = [part for name in chosen for part in ("--only", name)]
    given = (str(tmp_path / "out.zip"), "--software", "--quick", *only)
    done = run("gpu_run.py", *given, timeout=600)
    entries = Archive(tmp_path / "out.zip").entries()
    texts = {name: text[-2000:] for name, text in entries.items() if name.endswith(".txt")}
    assert done.returncode == 0, (done.stdout, done.stderr, texts)
    machine = written(tmp_path, "01-machine")["result"]
    assert machine["simulated"] is True and machine["managed_budget_bytes"] < 4 << 30
    assert json.loads(said_by(tmp_path, "02-doctor"))["ok"] is True
    for name in ("03-constants", "05-managed"):
        found = written(tmp_path, name)
        assert found["software"] and found["result"]["simulated"] and found["result"]["rows"]
    for name in ("04-device-tests", "06-facts-tests"):
        outcomes = written(tmp_path, name)["result"]
        assert outcomes["passed"] and not outcomes["failed"]
    again = run("gpu_run.py", *given)
    assert again.returncode == 0
    assert [line.split()[1:] for line in again.stdout.splitlines()] == [["passed", "before"]] * 6
