"""``umem run --dry``: whether a script fits, by the script itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import dry_features
from tests.support.dry_programs import CONVERGENCE, KMEANS, TRAINER, Done, run_dry, umem_run
from tests.support.software_programs import needs_compiler, needs_cupy
from umem import Trace
from umem.compat import find_package

pytestmark = [
    needs_compiler,
    needs_cupy,
    pytest.mark.skipif(find_package() is None, reason="Chainer is not installed"),
]

KEYS = {
    "simulated", "gpu", "title", "vram_bytes", "mode", "fits", "ended", "exit_status", "peak_bytes",
    "reserved_peak_bytes", "step_seconds", "step_seconds_all", "moved_bytes", "steps_run",
    "steps_in_script", "epoch_seconds", "run_seconds", "wall_seconds", "asked",
    "caught_out_of_memory", "failure", "first_connection", "written", "evaluated", "reported",
    "has_steps",
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Done, Path]:
    """A run of a Trainer, and its folder."""
    folder = tmp_path_factory.mktemp("trained")
    return run_dry(TRAINER, folder, arguments=("--gpu", "0")), folder


@pytest.mark.thorough
def test_a_trainer_runs_until_two_steps_are_alike(trained: tuple[Done, Path]) -> None:
    done, _ = trained
    found = done.json
    assert done.status == 0, done.errors
    assert set(found) == KEYS
    assert found["simulated"] and found["fits"] and found["ended"] == "steady"
    assert 3 <= found["steps_run"] == len(found["step_seconds_all"]) < 20
    assert found["steps_in_script"] == 3 * 16
    assert found["epoch_seconds"] == pytest.approx(16 * found["step_seconds"])
    assert found["run_seconds"] == pytest.approx(48 * found["step_seconds"])
    # Parameters, gradients and two states of Adam's.
    assert found["peak_bytes"] > 4 * 4 * (785 * 1024 + 1025 * 10)
    assert found["reserved_peak_bytes"] >= found["peak_bytes"]
    assert found["evaluated"] is True
    # What Chainer saves and prints decides nothing.
    assert found["asked"] == [] and found["reported"] > 0
    assert "\nfits\n" in done.errors


@pytest.mark.thorough
def test_steps_under_recompute_are_compared_once_they_follow_a_plan(tmp_path: Path) -> None:
    done = run_dry(TRAINER, tmp_path, "--recompute", "50%", arguments=("--gpu", "0"))
    assert done.status == 0, done.errors
    assert done.json["ended"] == "steady" and done.json["steps_run"] >= 5


def test_what_a_trainer_writes_is_gone(trained: tuple[Done, Path]) -> None:
    done, folder = trained
    assert any("snapshot_iter" in name for name in done.json["written"])
    assert not (folder / "result").exists()
    assert "to a scratch folder, now deleted" in done.errors


@pytest.mark.thorough
def test_a_trainer_dry_is_a_trainer_real(tmp_path: Path) -> None:
    words = ("--gpu", "0", "--iterations", "4")
    dry = run_dry(TRAINER, tmp_path, "--dry-steps", "all", arguments=words)
    real = umem_run("--software", "t4", "script.py", *words, cwd=tmp_path)
    assert real.returncode == dry.status == 0, real.stderr + dry.errors
    found = [text.partition("figures")[2].split() for text in (real.stdout, dry.output)]
    # Without `umem.chainer` the real run does not count Chainer's own time.
    assert found[0][:2] == found[1][:2] and int(found[0][0]) > 12 << 20
    assert dry.json["ended"] == "script" and dry.json["steps_run"] == 4


def test_memory_that_runs_out_is_named_with_line_step_and_holders(tmp_path: Path) -> None:
    done = run_dry(TRAINER, tmp_path, "--vram", "16MiB", arguments=("--gpu", "0"))
    found = done.json
    assert done.status == 3 == found["exit_status"] and not found["fits"]
    assert found["ended"] == "out of memory" and found["step_seconds"] is None
    assert found["failure"]["line"].startswith("script.py:") and found["failure"]["step"] == 1
    assert any("model" in holder["place"] for holder in found["failure"]["holders"])
    assert found["caught_out_of_memory"] == []
    assert "does not fit: out of memory at script.py:" in done.errors
    assert "Traceback" not in done.errors


CAUGHT = """
import cupy
for size in (1 << 40, 1 << 20):
    try:
        x = cupy.zeros(size, "f")
    except cupy.cuda.memory.OutOfMemoryError:
        print("smaller")
"""


@pytest.mark.thorough
def test_memory_errors_that_a_script_catches_are_counted(tmp_path: Path) -> None:
    done = run_dry(CAUGHT, tmp_path)
    assert done.status == 0 and done.json["fits"] and done.output == "smaller\n"
    assert done.json["caught_out_of_memory"] == [{"line": "script.py:5", "count": 1}]
    assert "out of memory at script.py:5, once; the script continued" in done.errors


@pytest.mark.thorough
def test_a_count_of_unknown_flags_is_asked_for_in_the_verdict(tmp_path: Path) -> None:
    done = run_dry(KMEANS, tmp_path)
    assert done.status == 0, done.errors
    (asked,) = {one["line"] for one in done.json["asked"]}
    assert asked == "script.py:10" and not done.json["asked"][0]["answered"]
    assert "fits, if the values read at script.py:10 are as assumed" in done.errors


@pytest.mark.thorough
def test_an_answer_is_no_assumption(tmp_path: Path) -> None:
    done = run_dry(KMEANS, tmp_path, "--answer", "script.py:10=1000", "--answer", "other.py:1=2")
    assert done.json["fits"] and all(one["answered"] for one in done.json["asked"])
    assert "\nfits\n" in done.errors
    assert "other.py:1 read no value, so its --answer was not used" in done.errors


@pytest.mark.thorough
def test_a_loop_that_ends_by_a_value_is_stopped(tmp_path: Path) -> None:
    done = run_dry(CONVERGENCE, tmp_path)
    assert done.status == 1 and done.json["ended"] == "asked too often" and not done.json["fits"]
    assert done.json["failure"]["line"] == "script.py:6"
    assert "--answer script.py:6=VALUE" in done.errors
    assert done.output == ""


@pytest.mark.thorough
def test_a_loop_that_ends_by_a_value_ends_by_an_answer(tmp_path: Path) -> None:
    done = run_dry(CONVERGENCE, tmp_path, "--answer", "script.py:6=2")
    assert done.status == 0 and done.json["ended"] == "script" and done.output == "done\n"
    assert done.json["steps_run"] == 0 and done.json["step_seconds"] > 0


ON_NUMPY = """
import chainer, numpy
import chainer.functions as F, chainer.links as L
model = L.Classifier(L.Linear(4, 3))
optimizer = chainer.optimizers.SGD().setup(model)
x, t = numpy.ones((5, 4), "f"), numpy.zeros(5, "i")
HOW
print("never")
"""
HOW = {
    "updates": "optimizer.update(model, x, t)",
    "a loop": "model(x, t).backward()",
    "a trainer": """
iterator = chainer.iterators.SerialIterator(list(zip(x, t)), 5)
updater = chainer.training.StandardUpdater(iterator, optimizer)
chainer.training.Trainer(updater, (3, "iteration")).run()""",
}


@pytest.mark.thorough
@pytest.mark.parametrize("how", HOW)
def test_training_on_numpy_is_ended_before_it_computes(how: str, tmp_path: Path) -> None:
    done = run_dry(ON_NUMPY.replace("HOW", HOW[how]), tmp_path)
    assert done.output == "" and done.json["reserved_peak_bytes"] == done.json["steps_run"] == 0
    assert "nothing ran on the GPU" in done.errors and "--device @cupy:0" in done.errors


ODD: dict[str, tuple[str, int, str, bool, str]] = {
    "a missing file": (
        "import numpy\nnumpy.load('data/train.npy')", 1, "error", False,
        "script.py:2 finds no file data/train.npy. A file of the same shapes with "
        "any values is enough",
    ),
    "no GPU": (
        "import numpy\nnumpy.ones(3)", 1, "nothing on the GPU", False,
        "nothing ran on the GPU. If the script has an option for the GPU, add it, such as --gpu 0",
    ),
    "an error": (
        "import cupy\nx = cupy.ones((999, 999)) @ cupy.ones((999, 999))\ny = float(x.sum())\n1 / y",
        1, "error", False, "It had read values that a dry run does not compute, at script.py:3",
    ),
    "an exit status": (
        "import sys\nsys.exit(5)", 1, "script", False, "the script exited with status 5",
    ),
    "a signal": (
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nopen('never')", 130, "interrupted",
        False, "interrupted. Figures so far:",
    ),
    "another program": (
        "import subprocess\nsubprocess.run(['git', 'status'])", 1, "error", False, "programs run",
    ),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("name", ODD)
def test_what_goes_wrong_is_said_in_one_sentence(name: str, tmp_path: Path) -> None:
    program, status, ended, fits, sentence = ODD[name]
    done = run_dry(program, tmp_path)
    assert (done.status, done.json["ended"], done.json["fits"]) == (status, ended, fits)
    assert sentence in done.errors


LOOP = """
import sys
import chainer, cupy
import umem, umem.chainer
from chainer import functions as F, links as L

one, two = L.Linear(300, 300), L.Linear(300, 1)
for link in (one, two):
    link.to_device("@cupy:0")
optimizers = [chainer.optimizers.SGD(0.1).setup(link) for link in (one, two)]
if "accumulate" in sys.argv:
    umem.chainer.accumulate(optimizers[1], steps=4, check=False).enable()
x = cupy.ones((64, 300), "f")
count = 0
while True:
    try:
        for link in (one, two):
            link.cleargrads()
        F.sum(two(one(x))).backward()
        for optimizer in optimizers[1:] if "accumulate" in sys.argv else optimizers:
            optimizer.update()
        count += 1
        print(count, flush=True)
    except Exception:
        print("caught")
"""


@pytest.mark.thorough
def test_a_step_is_a_turn_of_all_optimizers_and_no_handler_catches_its_end(tmp_path: Path) -> None:
    done = run_dry(LOOP, tmp_path, "--dry-steps", "5")
    assert done.status == 0, done.errors
    assert done.json["steps_run"] == 5 and done.json["ended"] == "steps"
    assert done.output.splitlines() == ["1", "2", "3", "4"]  # the fifth ends in its last update
    assert done.json["evaluated"] is None and done.json["steps_in_script"] is None


MARKS = """
import cupy, umem
x = cupy.ones((1000, 1000), "f")
kept = []
for i in range(100):
    kept.append(x @ x)
    umem.mark("step")
    print(i, flush=True)
"""


@pytest.mark.thorough
def test_marks_end_steps_and_growth_is_said(tmp_path: Path) -> None:
    done = run_dry(MARKS, tmp_path)
    assert done.json["steps_run"] == 20 and done.json["ended"] == "steps"
    assert len(done.output.splitlines()) == 19
    assert "each step holds 3.8 MiB more than the one before" in done.errors


@pytest.mark.thorough
def test_threads_of_a_script_that_was_ended_are_left(tmp_path: Path) -> None:
    thread = "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()\n"
    done = run_dry(thread + MARKS, tmp_path, "--dry-steps", "2")
    assert done.status == 0 and done.json["steps_run"] == 2


@pytest.mark.thorough
def test_a_recording_is_a_file_that_stays(tmp_path: Path) -> None:
    done = run_dry(TRAINER, tmp_path, "--record", "run.umem.gz", arguments=("--gpu", "0"))
    assert done.status == 0, done.errors
    trace = Trace.load(tmp_path / "run.umem.gz")
    assert trace.backend == "software" and trace.peak_bytes > 12 << 20


@pytest.mark.thorough
def test_managed_memory_moves(tmp_path: Path) -> None:
    options = ("--mode", "managed", "--vram", "16MiB")
    done = run_dry(TRAINER, tmp_path, *options, arguments=("--gpu", "0"))
    assert done.status == 0, done.errors
    assert done.json["fits"] and done.json["mode"] == "managed" and done.json["moved_bytes"] > 0


@pytest.mark.thorough
def test_a_module_and_json_on_standard_output(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("import cupy\ncupy.ones(1 << 20)\n")
    done = umem_run("--dry", "t4", "--json", "-", "-m", "module", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["peak_bytes"] == 8 << 20


@pytest.mark.thorough
def test_processes_of_the_script_are_dry(tmp_path: Path) -> None:
    program = """
        import os
        print(os.environ["UMEM_SOFTWARE_GPU"], os.environ["UMEM_DRY"])
    """
    done = run_dry(program, tmp_path, "--vram", "1GiB")
    assert done.output == "t4,vram=1GiB,dry,force 1\n"


REFUSED = {
    "--virtual": ("--virtual", "t4"), "--software": ("--software", "t4"),
    "--checked": ("--checked",), "--no-model": ("--no-model",), "--budget": ("--budget", "1GiB"),
    "--resume": ("--resume", "every=5"),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_with_a_dry_run_is_refused_by_name(name: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("open('ran', 'w')")
    done = umem_run("--dry", "t4", *REFUSED[name], "script.py", cwd=tmp_path)
    assert done.returncode == 2 and name in done.stderr and "--dry" in done.stderr
    assert not (tmp_path / "ran").exists()


BAD = {
    "an answer without a value": ("--dry", "t4", "--answer", "train.py:41"),
    "an answer that is no number": ("--dry", "t4", "--answer", "train.py:41=many"),
    "no steps": ("--dry", "t4", "--dry-steps", "0"),
    "an answer without --dry": ("--answer", "train.py:41=1"),
    "--json without --dry": ("--json", "-"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", BAD)
def test_bad_options_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("open('ran', 'w')")
    done = umem_run(*BAD[name], "script.py", cwd=tmp_path)
    assert done.returncode == 2 and not (tmp_path / "ran").exists()


# -- features of umem, dry and real ---------------------------------------------------------------


@pytest.fixture(scope="module")
def features() -> dict[str, Any]:
    """What `dry_features` says, dry and real."""
    found = {}
    for way in ("dry", "real"):
        command = [sys.executable, dry_features.__file__, way]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        found[way] = json.loads(done.stdout)
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("name", [feature.__name__ for feature in dry_features.FEATURES])
def test_features_say_dry_what_they_say_real(name: str, features: dict[str, Any]) -> None:
    assert features["dry"][name] == features["real"][name]


@pytest.mark.thorough
def test_a_kernel_is_compiled_for_the_first_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Headers and kernels are caches, which stay real though they lie with temporary files."""
    for name in ("XDG_CACHE_HOME", "CUPY_CACHE_DIR", "TMPDIR"):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.setenv(name, str(folder))
    program = """
        import cupy
        square = cupy.ElementwiseKernel("float32 x", "float32 y", "y = x * x", "my_square")
        print(square(cupy.arange(4, dtype="f")).tolist())
    """
    done = run_dry(program, tmp_path)
    assert done.status == 0 and done.output == "[0.0, 1.0, 4.0, 9.0]\n", done.errors
    assert [each.name for each in (tmp_path / "TMPDIR").iterdir()] == [
        f"umem-headers-{os.getuid()}"
    ]
