"""What does this GPU say of all that was only read or simulated, in the minutes that there are?

`python bench/gpu_run.py OUT.zip --minutes 9` checks the versions of what is installed. Then it
does, by order of value, each step in a process of its own: facts of the machine, the doctor, the
constants of the cost model, tests of the device, managed memory beside plain, tests of facts, all
other tests for a GPU, and Chainer's functions and links against NumPy.

All results are in one archive: NN-name.json says how a step ended and what it has found,
NN-name.txt is what it said. At the end of the minutes, when it is interrupted and when it is
killed, whatever runs is ended, and the next call goes on behind what is done; a step that was not
is done again, and what it said is kept until then. NOT RUN YET: no step has been seen on a GPU.

Needs no network, and of this script alone no package: a step that lacks one, or whose version is
none that umem knows, names the wheel to bring. Managed memory stays under 4 GiB and under half of
what is free (gpu_guard.py). `--software` rehearses everything on the software GPU, which is
simulated.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from gpu_run_parts import calls
from gpu_run_parts.archive import Archive
from gpu_run_parts.wheels import WHEELS, missing, table

ROOT = Path(__file__).resolve().parents[1]
KEEPER = ROOT / "bench" / "gpu_run_parts" / "keeper.py"
PACKAGES = (
    "numpy", "scipy", "chainer", "cupy", "cupy-cuda12x", "cupy-cuda13x", "cuda-core",
    "cuda-bindings", "pytest", "hypothesis",
)  # fmt: skip
DEVICE = ("numpy", "cupy", "cuda.core")
TESTING = (*DEVICE, "pytest", "hypothesis")
CHAINER = ("chainer", "packaging", "scipy")
STOP_SECONDS = 60.0
"""The longest wait for a step that was asked to stop."""
SOFTWARE_TIMES = 10
"""How many times longer a rehearsal's step may take, whose arithmetic is the host's."""
LEAST_SECONDS = 2.0
"""With less time left nothing is begun."""
DONE = ("passed", "failed", "timed out")


@dataclass(frozen=True)
class Step:
    """One thing to find out.

    Attributes:
        name: of its files.
        command: arguments of Python; ``{result}`` is a file that it may write.
        seconds: the most that it may take.
        needs: modules without which it is not begun.
        quick: arguments for a rehearsal that takes seconds.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    needs: tuple[str, ...] = DEVICE
    quick: tuple[str, ...] = ()


def tests(*files: str, only: str = "") -> tuple[str, ...]:
    """Arguments that run the gpu tests of files, whatever plugins and warnings there are."""
    given = "-m pytest -v -rA -m gpu -o filterwarnings=default -o minversion=0 -p no:cacheprovider"
    chosen = ("-k", only) if only else ()
    return (*given.split(), "--junitxml={result}", *chosen, *(f"tests/{name}" for name in files))


def bench(script: str) -> tuple[str, ...]:
    """Arguments that run a benchmark."""
    return (f"bench/{script}", "--json", "{result}")


FUNCTIONS = "compat/functions/test_gpu_functions.py"
STEPS = (
    Step("machine", ("bench/gpu_run.py", "--machine", "{result}"), 60, ("numpy", "cupy")),
    Step("doctor", ("-m", "umem", "doctor", "--json"), 90, (*DEVICE, "click", "rich")),
    Step("constants", bench("cuda_constants.py"), 120, (*DEVICE, "click", "rich"), ("--quick",)),
    Step(
        "device-tests", tests("devices/cuda/test_gpu_device.py"), 240, TESTING, ("-k", "TestHints")
    ),
    Step(
        "managed", bench("cuda_managed.py"), 240, (*DEVICE, *CHAINER, "click", "rich"), ("--quick",)
    ),
    Step("facts-tests", tests("devices/cuda/test_gpu_facts.py"), 240, TESTING, ("-k", "TestPools")),
    Step(
        "status-tests",
        tests("devices/cuda/test_gpu_status.py", "devices/cuda/test_gpu_counters.py"),
        240,
        (*TESTING, "click", "rich"),
    ),
    Step(
        "chainer-tests",
        tests(
            "on_chainer/lookahead/test_gpu.py",
            "on_chainer/offload/test_gpu.py",
            "compat/test_gpu_training.py",
            "compat/test_gpu.py",
            "on_chainer/test_gcn.py",
            "house/test_example_gcn.py",
        ),
        240,
        (*TESTING, *CHAINER),
    ),
    Step(
        "diet-tests",
        tests(
            "on_chainer/optimizers/test_gpu.py",
            "on_chainer/precision/test_gpu.py",
            "on_chainer/accumulation/test_gpu.py",
            "on_chainer/resume/test_gpu.py",
        ),
        240,
        (*TESTING, *CHAINER),
    ),
    Step(
        "smaller-tests",
        tests(
            "on_chainer/layers/test_gpu.py",
            "on_chainer/quantization/test_gpu.py",
            "on_chainer/distillation/test_gpu.py",
        ),
        240,
        (*TESTING, *CHAINER),
    ),
    *(
        Step(
            f"{kind}s-{dtype}",
            tests(FUNCTIONS, only=f"test_a_{kind} and {dtype}"),
            480,
            (*TESTING, *CHAINER),
        )
        for kind in ("function", "link")
        for dtype in ("float32", "float16")
    ),
)


class Stopped(BaseException):
    """SIGTERM, SIGHUP or Ctrl-C."""


class Run:
    """One call: the steps that are not done, until the time is up.

    Args:
        archive: where results are, and go; held meanwhile.
        minutes: how long it may take.
        software: on the software GPU.
        quick: what takes seconds of each step.
    """

    def __init__(self, archive: Archive, minutes: float, *, software: bool, quick: bool) -> None:
        self.archive, self.software, self.quick = archive, software, quick
        self.end = time.monotonic() + 60 * minutes

    def left(self) -> float:
        """Seconds until the end."""
        return self.end - time.monotonic()

    def go(self, steps: Sequence[tuple[int, Step]]) -> Iterator[tuple[str, str]]:
        """Do what is to be done; gives each step's name and how it ended, in words."""
        self.archive.take_over()
        self.archive.add("00-wheels", {"state": "passed", "result": table()})
        for number, step in steps:
            name = f"{number:02}-{step.name}"
            state = self._state(name)
            if state in DONE:
                yield name, f"{state} before"
            elif lacking := missing(step.needs):
                wheels = [WHEELS[module].bring for module in lacking]
                self.archive.add(name, {"state": "missing", "why": lacking, "wheels": wheels})
                yield name, f"missing: {', '.join(lacking)}"
            elif self.left() < LEAST_SECONDS:
                yield name, "not begun: no time is left"
            else:
                yield name, self._do(name, step)

    def _state(self, name: str) -> str | None:
        """How a step ended in a run of this kind; a rehearsal does not stand for the real one."""
        found = self.archive.record(name)
        same = (found.get("software"), found.get("quick")) == (self.software, self.quick)
        return str(found.get("state")) if same else None

    def _do(self, name: str, step: Step) -> str:
        given = [*step.command, *(step.quick if self.quick else ())]
        most = step.seconds * (SOFTWARE_TIMES if self.software else 1)
        limit = min(most, self.left())
        start, began = time.monotonic(), time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())
        record = {
            "state": "running",
            "began": f"{began}.{time.time_ns() % 10**9:09}Z",
            "limit_seconds": round(limit, 3),
            "software": self.software,
            "quick": self.quick,
            "command": ["python", *given],
        }
        said, result = self.archive.begin(name, record)
        command = [sys.executable, *(part.replace("{result}", str(result)) for part in given)]
        state, code = "interrupted", None
        try:
            with open(said, "wb") as file:
                code = finished(command, limit, file, self._environment(), self.archive.lock)
            late = "timed out" if limit == most else "cut short"
            state = late if code is None else "failed" if code else "passed"
        finally:
            seconds = round(time.monotonic() - start, 3)
            ended = {"state": state, "exit_code": code, "seconds": seconds, "result": read(result)}
            self.archive.add(name, {**record, **ended}, said.read_bytes())
            self.archive.clear(name)
        return f"{state} in {seconds:.1f} s"

    def _environment(self) -> dict[str, str]:
        ahead = [str(ROOT / "tests" / "support" / "on_software_gpu")] if self.software else []
        paths = [*ahead, str(ROOT), os.environ.get("PYTHONPATH", "")]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONUNBUFFERED": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }


def finished(
    command: list[str], seconds: float, file: Any, environment: dict[str, str], lock: int
) -> int | None:
    """Run a program with all that it starts; its exit code, or None where it was stopped.

    It has a keeper (gpu_run_parts/keeper.py), which ends it all when it is over, when it is told
    to, and when this process is no more. The keeper holds the archive's lock until then.
    """
    told, tell = os.pipe()
    keeper = subprocess.Popen(
        [sys.executable, "-I", "-S", str(KEEPER), str(told), *command],
        stdin=subprocess.DEVNULL,
        stdout=file,
        stderr=subprocess.STDOUT,
        env=environment,
        cwd=ROOT,
        start_new_session=True,
        pass_fds=(told, lock),
    )
    os.close(told)
    try:
        return keeper.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(BrokenPipeError):
            os.write(tell, b".")
        with contextlib.suppress(subprocess.TimeoutExpired):
            keeper.wait(STOP_SECONDS)
        os.close(tell)
        keeper.kill()
        keeper.wait()


def read(path: Path) -> Any:
    """What a step wrote: JSON, or the outcomes in pytest's XML; None where it wrote nothing."""
    try:
        text = path.read_text(encoding="utf-8")
        if not text.startswith("<"):
            return json.loads(text)
        cases = list(ElementTree.fromstring(text).iter("testcase"))
    except (OSError, ValueError, ElementTree.ParseError):
        return None
    found: dict[str, Any] = {"passed": [], "failed": [], "skipped": {}}
    for case in cases:
        name = f"{case.get('classname')}::{case.get('name')}"
        skipped = case.find("skipped")
        if skipped is not None:
            found["skipped"][name] = skipped.get("message")
        else:
            bad = case.find("failure") is not None or case.find("error") is not None
            found["failed" if bad else "passed"].append(name)
    return found


def machine() -> dict[str, Any]:
    """Ask CUDA and the system what this machine is; allocates nothing."""
    import cupy
    import gpu_guard

    import umem
    from umem.devices.cuda import open_cuda

    device = open_cuda()
    properties = cupy.cuda.runtime.getDeviceProperties(device.ordinal)
    plain = {
        key: value.decode(errors="replace") if isinstance(value, bytes) else value
        for key, value in properties.items()
        if isinstance(value, (bytes, int, float, str)) and key != "uuid"
    }
    try:
        smi = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        smi = None
    return {
        "simulated": device.simulated,
        "device": device.name,
        "versions": {"python": platform.python_version(), **installed(), **device.versions()},
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "core_count": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "properties": plain,
        "attributes": dict(cupy.cuda.Device().attributes),
        "memory_info": list(cupy.cuda.runtime.memGetInfo()),
        "host_available_bytes": device.host_available_bytes(),
        "managed_budget_bytes": gpu_guard.guard(device).budget_bytes,
        "status": umem.status().to_json(),
        "nvidia_smi": smi,
    }


def installed() -> dict[str, str]:
    """Versions of what matters here, by the name that it is installed by."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def main() -> int:
    """Returns 0 where every step has passed, here or before."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("out", metavar="OUT.zip", type=Path, help="archive of the results")
    parser.add_argument("--minutes", type=float, default=9.0, help="stop after so many (9)")
    parser.add_argument("--software", action="store_true", help="rehearse on the software GPU")
    parser.add_argument("--quick", action="store_true", help="seconds a step: see that it runs")
    names = [step.name for step in STEPS]
    parser.add_argument("--only", action="append", choices=names, help="a step; may be repeated")
    given = parser.parse_args()
    if not given.minutes > 0:
        parser.error("--minutes must be more than 0")
    archive = Archive(given.out.resolve())
    try:
        archive.entries()
        archive.running.mkdir(exist_ok=True)
    except zipfile.BadZipFile:
        parser.error(f"{given.out} is there, and no archive of results")
    except OSError as error:
        parser.error(f"cannot write {given.out}: {error.strerror}")
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, stop)
    steps = [(n, step) for n, step in enumerate(STEPS, 1) if step.name in (given.only or names)]
    run = Run(archive, given.minutes, software=given.software, quick=given.quick)
    passed, lacking = 0, set()
    try:
        with archive.held():
            for name, words in run.go(steps):
                print(f"{name:<24}{words}", flush=True)
                passed += words.startswith("passed")
                lacking |= set(words.partition("missing: ")[2].split(", ")) - {""}
    except Stopped:
        print("interrupted: what is done stays, and the next call goes on", flush=True)
        return 130
    except TimeoutError as error:
        parser.error(str(error))
    if lacking:
        print("Bring these, by pip download where there is a network, and install them with")
        print("pip install --no-index --find-links FOLDER:")
        for module, why in missing(sorted(lacking)).items():
            print(f"  {WHEELS[module].bring} ({why})")
    return 0 if passed == len(steps) else 1


def stop(number: int, frame: Any) -> None:
    """Once: a second signal would cut off the writing of what is there."""
    for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)
    raise Stopped


if __name__ == "__main__":
    if sys.argv[1:2] == ["--calls"]:
        sys.exit(calls.main(sys.argv[2:]))
    if sys.argv[1:2] == ["--machine"]:
        Path(sys.argv[2]).write_text(json.dumps(machine(), indent=1, default=str))
    else:
        sys.exit(main())
