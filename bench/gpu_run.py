"""What does this GPU say of all that was only read or simulated, in the minutes that there are?

`python bench/gpu_run.py OUT.zip --minutes 9` does, by order of value, each step in a process of its
own: facts of the machine; *first light*, one call of each public function that uses a GPU;
*pressure*, what umem does about it beside plain memory, and what the link carries; the doctor;
tests of Chainer and of the device; the constants of the cost model; Chainer's functions and links
against NumPy. `--wheels` prints what to bring along, and how.

All results are in one archive: NN-name.json says how a step ended and what it has found,
NN-name.txt is what it said. Calls and tests are kept line by line, so that a step that is cut,
hangs or is killed keeps what it had. At the end of the minutes, when it is interrupted and when it
is killed, whatever runs is ended, and the next call goes on behind what is done; a step that was
not is done again, and what it said is kept until then. NOT RUN YET: no step has been seen on a GPU.

Needs no network, and of this script alone no package: a step that lacks one, or whose version is
none that umem knows, names the wheel to bring. Managed memory stays under 4 GiB and under half of
what is free (gpu_guard.py); `--oversubscribe` asks for more than is free, on a card of one's own.
`--software` rehearses everything on the software GPU, which is simulated.
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
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from gpu_run_parts import calls, outcomes
from gpu_run_parts.archive import Archive
from gpu_run_parts.wheels import WHEELS, instructions, missing, table

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
        kind: what it writes: "json", "calls" (a line a call) or "tests" (a line a test).
        seconds: the most that it may take.
        needs: modules without which it is not begun.
        quick: arguments for a rehearsal that takes seconds.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    needs: tuple[str, ...] = DEVICE
    quick: tuple[str, ...] = ()
    kind: str = "json"


def of_calls(name: str, group: str, seconds: float, needs: tuple[str, ...]) -> Step:
    """Make the step that tries a group of calls."""
    command = ("bench/gpu_run.py", "--calls", group, "{result}")
    return Step(name, command, seconds, needs, ("--quick",), "calls")


def of_tests(
    name: str, seconds: float, *files: str, needs: tuple[str, ...], only: str = "", quick: str
) -> Step:
    """Make the step that runs the gpu tests of files, whatever plugins and warnings there are.

    Args:
        quick: those of them that a quick rehearsal runs, as pytest's -k.
    """
    given = "-m pytest -v -rA -m gpu -o filterwarnings=default -p no:cacheprovider"
    chosen = ("-k", only) if only else ()
    plugin = ("-p", "bench.gpu_run_parts.outcomes")
    command = (*given.split(), *plugin, *chosen, *(f"tests/{file}" for file in files))
    return Step(name, command, seconds, needs, ("-k", quick), "tests")


def bench(name: str, script: str, seconds: float, needs: tuple[str, ...]) -> Step:
    """Make the step that runs a benchmark."""
    return Step(name, (f"bench/{script}", "--json", "{result}"), seconds, needs, ("--quick",))


FUNCTIONS = "compat/functions/test_gpu_functions.py"
STEPS = (
    # Some 3 s; a first import of CuPy from a cold disk takes longer.
    Step("machine", ("bench/gpu_run.py", "--machine", "{result}"), 20, ("numpy", "cupy")),
    of_calls("first-light", "first_light", 60, ("numpy", "cupy")),
    of_calls("pressure", "pressure", 90, ("numpy", "cupy")),
    Step("doctor", ("-m", "umem", "doctor", "--json"), 30, (*DEVICE, "click", "rich")),
    of_tests(
        "chainer-tests",
        75,
        "on_chainer/lookahead/test_gpu.py",
        "on_chainer/offload/test_gpu.py",
        "compat/test_gpu_training.py",
        "compat/test_gpu.py",
        "on_chainer/test_gcn.py",
        "house/test_example_gcn.py",
        needs=(*TESTING, *CHAINER),
        quick="test_less_is_held_at_most or test_scatter_add_get_item",
    ),
    of_tests(
        "diet-tests",
        50,
        "on_chainer/optimizers/test_gpu.py",
        "on_chainer/precision/test_gpu.py",
        "on_chainer/accumulation/test_gpu.py",
        "on_chainer/resume/test_gpu.py",
        needs=(*TESTING, *CHAINER),
        quick="test_words_are_those_of_numpy",
    ),
    of_tests(
        "smaller-tests",
        40,
        "on_chainer/layers/test_gpu.py",
        "on_chainer/quantization/test_gpu.py",
        "on_chainer/distillation/test_gpu.py",
        needs=(*TESTING, *CHAINER),
        quick="test_trained_weights_on_a_gpu_become_layers_there",
    ),
    of_tests(
        "device-tests", 60, "devices/cuda/test_gpu_device.py", needs=TESTING, quick="TestHints"
    ),
    of_tests("facts-tests", 40, "devices/cuda/test_gpu_facts.py", needs=TESTING, quick="TestPools"),
    of_tests(
        "status-tests",
        40,
        "devices/cuda/test_gpu_status.py",
        "devices/cuda/test_gpu_counters.py",
        needs=(*TESTING, "click", "rich"),
        quick="test_every_feature_has_a_reason",
    ),
    bench("constants", "cuda_constants.py", 40, (*DEVICE, "click", "rich")),
    bench("managed", "cuda_managed.py", 60, (*DEVICE, *CHAINER, "click", "rich")),
    *(
        of_tests(
            f"{kind}s-{dtype}",
            240,
            FUNCTIONS,
            needs=(*TESTING, *CHAINER),
            only=f"test_a_{kind} and {dtype}",
            quick=f"test_a_{kind} and {dtype} and {quick}",
        )
        for kind, quick in (("function", "relu"), ("link", "Linear"))
        for dtype in ("float32", "float16")
    ),
    of_calls("host-calls", "host", 120, ("numpy",)),
)
OVERSUBSCRIBE = of_calls("oversubscribe", "oversubscribe", 60, ("numpy", "cupy"))
"""Only with --oversubscribe."""


class Stopped(BaseException):
    """SIGTERM, SIGHUP or Ctrl-C."""


class Run:
    """One call: the steps that are not done, until the time is up; none where there is no GPU.

    Args:
        archive: where results are, and go; held meanwhile.
        minutes: how long it may take.
        software: on the software GPU.
        quick: what takes seconds of each step.
    """

    def __init__(self, archive: Archive, minutes: float, *, software: bool, quick: bool) -> None:
        self.archive, self.software, self.quick = archive, software, quick
        self.end = time.monotonic() + 60 * minutes
        self.no_gpu: str | None = None

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
            elif absent := missing(step.needs):
                wheels = [WHEELS[module].bring for module in absent]
                self.archive.add(name, {"state": "missing", "why": absent, "wheels": wheels})
                yield name, f"missing: {', '.join(absent)}"
            elif self.left() < LEAST_SECONDS:
                yield name, "not begun: no time is left"
            else:
                yield name, self._do(name, step)
                if self.no_gpu is not None:
                    return

    def _state(self, name: str) -> str | None:
        """How a step ended in a run of this kind; a rehearsal does not stand for the real one."""
        found = self.archive.record(name)
        same = (found.get("software"), found.get("quick")) == (self.software, self.quick)
        return str(found.get("state")) if same else None

    def _do(self, name: str, step: Step) -> str:
        """Run one step in a process of its own, within its time, and keep what it printed."""
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
        output, result = self.archive.begin(name, record)
        command = [sys.executable, *(part.replace("{result}", str(result)) for part in given)]
        environment = {**self._environment(), outcomes.VARIABLE: str(result)}
        state, code = "interrupted", None
        try:
            with open(output, "wb") as file:
                code = finished(command, limit, file, environment, self.archive.lock)
            late = "timed out" if limit == most else "cut short"
            state = late if code is None else "failed" if code else "passed"
        finally:
            seconds = round(time.monotonic() - start, 3)
            found = read(result, step.kind)
            if isinstance(found, dict) and "no_gpu" in found:
                state, self.no_gpu = "no GPU", str(found["no_gpu"])
            ended = {"state": state, "exit_code": code, "seconds": seconds, "result": found}
            self.archive.add(name, {**record, **ended}, output.read_bytes())
            self.archive.clear(name)
        return f"{state} in {seconds:.1f} s{summed(found, step.kind)}"

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
    reader, writer = os.pipe()
    keeper = subprocess.Popen(
        [sys.executable, "-I", "-S", str(KEEPER), str(reader), *command],
        stdin=subprocess.DEVNULL,
        stdout=file,
        stderr=subprocess.STDOUT,
        env=environment,
        cwd=ROOT,
        start_new_session=True,
        pass_fds=(reader, lock),
    )
    os.close(reader)
    try:
        return keeper.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(BrokenPipeError):
            os.write(writer, b".")
        with contextlib.suppress(subprocess.TimeoutExpired):
            keeper.wait(STOP_SECONDS)
        os.close(writer)
        keeper.kill()
        keeper.wait()


def read(path: Path, kind: str) -> Any:
    """What a step wrote, as far as it came: JSON, calls or tests; None where it wrote nothing."""
    if not path.exists():
        return None
    if kind == "calls":
        return calls.results(path)
    if kind == "tests":
        return outcomes.read(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def summed(found: Any, kind: str) -> str:
    """Count how calls or tests ended, in words; or say who else uses the card."""
    if kind == "calls" and found:
        counts: dict[str, int] = {}
        for line in found:
            counts[line["state"]] = counts.get(line["state"], 0) + 1
    elif kind == "tests" and found:
        counts = {state: len(found[state]) for state in found if found[state]}
    else:
        others = found.get("others") if isinstance(found, dict) else None
        return f"; others use this card: {others}" if others else ""
    return ": " + ", ".join(f"{count} {state}" for state, count in counts.items())


def machine(path: Path) -> int:
    """Ask CUDA and the system what this machine is, and write it part by part."""
    found: dict[str, Any] = {
        "versions": {"python": platform.python_version(), **installed()},
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "core_count": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }
    for part in (gpu_facts, umem_facts, driver_facts):
        path.write_text(json.dumps(found, indent=1, default=str), encoding="utf-8")
        found |= part()
        if "no_gpu" in found:
            break
    path.write_text(json.dumps(found, indent=1, default=str), encoding="utf-8")
    return int("no_gpu" in found)


def gpu_facts() -> dict[str, Any]:
    """Ask CUDA; ``no_gpu`` says why there is none."""
    import cupy

    from umem.devices.cuda import open_cuda
    from umem.errors import DeviceNotFoundError

    try:
        device = open_cuda()
    except DeviceNotFoundError as error:
        return {"no_gpu": str(error)}
    properties = cupy.cuda.runtime.getDeviceProperties(device.ordinal)
    plain = {
        key: value.decode(errors="replace") if isinstance(value, bytes) else value
        for key, value in properties.items()
        if isinstance(value, (bytes, int, float, str)) and key != "uuid"
    }
    return {
        "simulated": device.simulated,
        "device": device.name,
        "cuda": device.versions(),
        "properties": plain,
        "attributes": dict(cupy.cuda.Device().attributes),
        "memory_info": list(cupy.cuda.runtime.memGetInfo()),
    }


def umem_facts() -> dict[str, Any]:
    """Ask umem."""
    import gpu_guard

    import umem
    from umem.devices.cuda import open_cuda

    device = open_cuda()
    return {
        "host_available_bytes": device.host_available_bytes(),
        "managed_budget_bytes": gpu_guard.guard(device).budget_bytes,
        "status": umem.status().to_json(),
        "others": gpu_guard.others(device),
    }


def driver_facts() -> dict[str, Any]:
    """Ask nvidia-smi."""
    try:
        smi = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=5).stdout
    except (OSError, subprocess.TimeoutExpired):
        smi = None
    return {"nvidia_smi": smi}


def installed() -> dict[str, str]:
    """Versions of what matters here, by the name that it is installed by."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("out", metavar="OUT.zip", nargs="?", type=Path, help="archive of results")
    parser.add_argument("--wheels", action="store_true", help="print what to bring along, and how")
    parser.add_argument("--minutes", type=float, default=9.0, help="stop after so many (9)")
    parser.add_argument("--software", action="store_true", help="rehearse on the software GPU")
    parser.add_argument("--quick", action="store_true", help="seconds a step: see that it runs")
    parser.add_argument(
        "--oversubscribe",
        action="store_true",
        help="at last, ask for more managed memory than is free: on a card of your own",
    )
    names = [step.name for step in (*STEPS, OVERSUBSCRIBE)]
    parser.add_argument("--only", action="append", choices=names, help="a step; may be repeated")
    given = parser.parse_args()
    if not given.wheels and given.out is None:
        parser.error("the archive to write is missing: OUT.zip")
    if not given.minutes > 0:
        parser.error("--minutes must be more than 0")
    given.error = parser.error
    return given


def main() -> int:
    """Returns 0 where every step has passed, here or before."""
    given = arguments()
    if given.wheels:
        print(instructions())
        return 0
    archive = Archive(given.out.resolve())
    try:
        archive.entries()
        archive.running.mkdir(exist_ok=True)
    except zipfile.BadZipFile:
        given.error(f"{given.out} is there, and no archive of results")
    except OSError as error:
        given.error(f"cannot write {given.out}: {error.strerror}")
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, stop)
    offered = (*STEPS, *[OVERSUBSCRIBE] * given.oversubscribe)
    steps = [(n, s) for n, s in enumerate(offered, 1) if not given.only or s.name in given.only]
    run = Run(archive, given.minutes, software=given.software, quick=given.quick)
    try:
        with archive.held():
            return told(run, steps)
    except Stopped:
        print("interrupted: what is done stays, and the next call goes on", flush=True)
        return 130
    except TimeoutError as error:
        given.error(str(error))
    except OSError as error:  # the disk is full, or the folder gone
        print(f"cannot write {given.out}: {error.strerror}", file=sys.stderr)
    return 2


def told(run: Run, steps: Sequence[tuple[int, Step]]) -> int:
    """Do the steps and print how each ended, and which wheels they lack; returns the exit code."""
    passed, absent = 0, set()
    for name, words in run.go(steps):
        print(f"{name:<24}{words}", flush=True)
        passed += words.startswith("passed")
        absent |= set(words.partition("missing: ")[2].split(", ")) - {""}
    if run.no_gpu is not None:
        print(f"Nothing else was begun: {run.no_gpu}")
    if absent:
        print("Bring these (--wheels says how):")
        for module, why in missing(sorted(absent)).items():
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
        sys.exit(machine(Path(sys.argv[2])))
    sys.exit(main())
