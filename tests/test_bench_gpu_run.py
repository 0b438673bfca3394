"""bench/gpu_run.py: what it does with its minutes, on made-up steps; and a rehearsal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from bench_scripts import BENCH, ROOT, module, run
from project import EXTRAS
from test_software_gpu import needs_compiler, needs_cupy

gpu_run = module("gpu_run")
NAMES = [step.name for step in gpu_run.STEPS]


def step(name: str, code: str, seconds: float = 60, needs: tuple[str, ...] = ()) -> Any:
    return gpu_run.Step(name, ("-c", code, "{result}"), seconds, needs)


def go(folder: Path, *steps: Any, minutes: float = 1.0) -> dict[str, str]:
    made = gpu_run.Run(folder, minutes, software=False, quick=False)
    return dict(made.go(list(enumerate(steps, 1))))


def written(folder: Path, name: str) -> Any:
    return json.loads((folder / f"{name}.json").read_text())


def test_what_a_step_says_and_writes_is_kept(tmp_path):
    code = "import sys; print('said'); open(sys.argv[1], 'w').write('[1]')"
    said = go(tmp_path, step("one", code), step("two", "raise SystemExit(3)"))
    assert said["01-one"].startswith("passed in") and said["02-two"].startswith("failed in")
    assert (tmp_path / "01-one.txt").read_text() == "said\n"
    one, two = written(tmp_path, "01-one"), written(tmp_path, "02-two")
    assert (one["state"], one["result"], one["command"][:2]) == ("passed", [1], ["python", "-c"])
    assert (two["state"], two["exit_code"], two["result"]) == ("failed", 3, None)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json"] * 2 + [".txt"] * 2


def test_what_is_done_is_not_done_again(tmp_path):
    steps = (step("one", "print(1)"), step("two", "raise SystemExit(1)"))
    go(tmp_path, *steps)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert go(tmp_path, *steps) == {"01-one": "passed before", "02-two": "failed before"}
    assert before == {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    (tmp_path / "02-two.json").unlink()
    assert go(tmp_path, *steps)["02-two"].startswith("failed in")
    rehearsed = json.loads((tmp_path / "01-one.json").read_text())
    for other in ({**rehearsed, "software": True}, {**rehearsed, "quick": True}, {}, 3):
        (tmp_path / "01-one.json").write_text(json.dumps(other))  # no run of this kind
        assert go(tmp_path, *steps)["01-one"].startswith("passed in")


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
    pid = int((tmp_path / "01-slow.txt").read_text().split()[0])
    assert go(tmp_path, step("slow", code, 5.0)) == {"01-slow": "timed out before"}
    deadline = time.monotonic() + 60
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(pid)


def test_the_minutes_cut_a_step_short_and_the_next_call_does_it_again(tmp_path):
    slow, last = step("slow", "import time; time.sleep(600)"), step("last", "print(1)")
    said = go(tmp_path, slow, last, minutes=4 / 60)
    assert said["01-slow"].startswith("cut short") and said["02-last"].startswith("not begun")
    assert written(tmp_path, "01-slow")["state"] == "cut short"
    assert go(tmp_path, step("slow", "print(2)"), last)["01-slow"].startswith("passed in")


def test_a_step_without_its_package_names_the_wheel_and_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setitem(gpu_run.WHEELS, "no_such.module", "a-wheel>=1")
    lacking = step("one", "print(1)", needs=("json", "no_such.module"))
    assert go(tmp_path, lacking) == {"01-one": "missing: no_such.module"}
    assert written(tmp_path, "01-one") == {"state": "missing", "wheels": ["a-wheel>=1"]}
    assert go(tmp_path, step("one", "print(1)"))["01-one"].startswith("passed in")


def test_a_broken_file_of_results_counts_as_none(tmp_path):
    (tmp_path / "01-one.json").write_text('{"sta')
    assert go(tmp_path, step("one", "print(1)"))["01-one"].startswith("passed in")


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
sys.argv = ["gpu_run.py", {str(tmp_path / "out")!r}]
sys.exit(gpu_run.main())
"""
    program = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    said = tmp_path / "out" / "02-two.txt"
    end = time.monotonic() + 60
    while not (said.exists() and said.read_text() == "2\n"):
        assert time.monotonic() < end and program.poll() is None
        time.sleep(0.02)
    program.send_signal(number)
    printed, _ = program.communicate(timeout=60)
    assert program.returncode == 130
    assert printed.splitlines()[-1].startswith("interrupted: what is done stays")
    assert written(tmp_path / "out", "01-one")["state"] == "passed"
    assert written(tmp_path / "out", "02-two")["state"] == "interrupted"


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
print(sorted(new - sys.stdlib_module_names - {{"gpu_run"}}))
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
        f"tests/{path.name}"
        for path in (ROOT / "tests").glob("test_*.py")
        if "pytest.mark.gpu" in path.read_text("utf-8")
    }
    assert marked - {"tests/test_on_software_gpu.py", "tests/test_bench_gpu_run.py"} == named
    wanted = {text.replace("[cu12]", "") for text in EXTRAS["cuda12"]}
    assert gpu_run.WHEELS["cuda.core"] in wanted


@pytest.mark.parametrize(
    ("given", "said"),
    [(["--minutes", "0"], "--minutes must be more than 0"), (["--only", "x"], "invalid choice")],
)
def test_bad_arguments_are_named(tmp_path, given, said):
    done = run("gpu_run.py", str(tmp_path / "out"), *given)
    assert done.returncode == 2 and said in done.stderr and not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    done = run("gpu_run.py", str(tmp_path / "file" / "out"))
    assert done.returncode == 2 and "cannot write" in done.stderr


@needs_cupy
@needs_compiler
@pytest.mark.thorough
def test_a_rehearsal_on_the_software_gpu(tmp_path, monkeypatch, pytestconfig):
    assert pytestconfig.cache is not None
    monkeypatch.setenv("XDG_CACHE_HOME", str(pytestconfig.cache.mkdir("software-gpu")))
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    chosen = ("machine", "doctor", "constants", "device-tests", "managed", "facts-tests")
    only = [part for name in chosen for part in ("--only", name)]
    given = (str(tmp_path), "--software", "--quick", *only)
    done = run("gpu_run.py", *given, timeout=600)
    texts = {path.name: path.read_text()[-2000:] for path in tmp_path.glob("*.txt")}
    assert done.returncode == 0, (done.stdout, done.stderr, texts)
    machine = written(tmp_path, "01-machine")["result"]
    assert machine["simulated"] is True and machine["managed_budget_bytes"] < 4 << 30
    assert json.loads((tmp_path / "02-doctor.txt").read_text())["ok"] is True
    for name in ("03-constants", "05-managed"):
        found = written(tmp_path, name)
        assert found["software"] and found["result"]["simulated"] and found["result"]["rows"]
    for name in ("04-device-tests", "06-facts-tests"):
        outcomes = written(tmp_path, name)["result"]
        assert outcomes["passed"] and not outcomes["failed"]
    again = run("gpu_run.py", *given)
    assert again.returncode == 0
    assert [line.split()[1:] for line in again.stdout.splitlines()] == [["passed", "before"]] * 6
