"""A dry run of a program: it is followed, ended once it has shown enough, and summed up."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

from umem._common.stacks import error_line, program_line
from umem.dry import (
    DOES_NOT_FIT,
    FAILED,
    INTERRUPTED,
    CaughtOutOfMemory,
    DryOutcome,
    DrySteps,
    End,
    EndlessReads,
    Failure,
    GpuReading,
    Holder,
    ScratchDisk,
    StepLimit,
    StepsOver,
    Turns,
    UnknownReads,
    UnknownValue,
    is_answered,
    shortest,
)
from umem.errors import causes, is_cupys_out_of_memory
from umem.trace import Mark
from umem.trace.recording import listeners
from umem.units import BLOCK_BYTES, format_bytes


class DryRun:
    """Follows a program on a dry GPU, from `begin` on.

    Args:
        gpu: what `umem.software_gpu` returned, with ``dry=True``.
        mode: where allocations come from, for the report.
        limit: how many steps run.
        answers: values for lines that read unknown memory.
        notes: sentences for the report.
    """

    def __init__(
        self,
        gpu: Any,
        mode: str,
        limit: StepLimit,
        answers: dict[str, float] | None = None,
        notes: Iterable[str] = (),
    ) -> None:
        self._gpu, self._mode, self._limit = gpu, mode, limit
        self._answers, self._reads = answers or {}, UnknownReads()
        self._turns = Turns()
        self._out: Counter[str] = Counter()
        self._failure: Failure | None = None
        self.ended: End = "script"
        self.outcome: DryOutcome | None = None
        self._exit_code: Any = 0
        self._facts: Any = None
        self._evaluated = False
        self._extension: str | None = None
        self._notes = list(notes)
        self._is_tty = sys.stderr.isatty()
        self._began = time.perf_counter()

    # -- the program runs ------------------------------------------------------------------

    def begin(self, stack: ExitStack, disk: ScratchDisk) -> None:
        """Follow the program until the stack unwinds.

        Args:
            stack: undoes it.
            disk: the scratch disk that it writes to.
        """
        from umem.devices.cuda import PoolMeter

        self._disk = disk
        # The dry runtime's interface: what was read of unknown memory, and values for lines.
        runtime = self._gpu._runtime
        runtime.reads, runtime.answers = self._reads, self._answers
        self._meter = stack.enter_context(PoolMeter())
        self._steps = DrySteps(self._read, self._limit, self._step_ended)
        listeners.append(self._marked)
        stack.callback(listeners.remove, self._marked)
        self._count_errors(stack)
        if "umem.chainer" in sys.modules:
            from umem.chainer import DryTraining

            training = DryTraining(self)
            training.start()
            stack.callback(training.stop)
        self._began = time.perf_counter()

    def _count_errors(self, stack: ExitStack) -> None:
        """Count the errors that CuPy makes when memory runs out, caught ones included."""
        # CuPy raises one for each request that fails for good; a callback by
        # `umem.on_out_of_memory` would have the request tried again, which is not what runs.
        kind: Any = sys.modules["cupy.cuda.memory"].OutOfMemoryError
        made = kind.__init__

        def noted(error: Any, *args: Any, **kwargs: Any) -> None:
            made(error, *args, **kwargs)
            self._out[program_line()] += 1

        kind.__init__ = noted
        stack.callback(setattr, kind, "__init__", made)

    def _read(self) -> GpuReading:
        """Read the figures of all devices, and begin a new peak."""
        held = self._meter.held()
        self._meter.reset()
        figures = [each.figures for each in self._gpu.devices]
        return GpuReading(
            max(each.seconds or 0.0 for each in figures),
            held.peak,
            held.live,
            sum(each.moved_bytes or 0 for each in figures),
            sum(each.uploaded_bytes or 0 for each in figures),
        )

    def _step_ended(self) -> None:
        self._reads.restart_counts()
        if self._is_tty:
            peak = format_bytes(self._steps.peak_bytes)
            passed = time.perf_counter() - self._began
            text = f"umem: dry run: step {self._steps.count}, peak {peak}, {passed:.0f} s"
            print(f"\r{text:<70}", end="", file=sys.stderr, flush=True)

    def _marked(self, mark: Mark) -> None:
        """End a step at a mark of the program's, which has no optimizer."""
        if mark == Mark("step"):
            self._steps.end()
            self.end_if_over()

    # -- Chainer tells (umem.chainer.dry_training) -----------------------------------------

    def set_up(self, optimizer: object) -> None:
        """Wait for an optimizer in each turn."""
        self._turns.set_up(optimizer)

    def updated(self, optimizer: object) -> None:
        """Note an optimizer's update."""
        self._turns.updated(optimizer)

    def after_update(self) -> None:
        """End a step if the turn of all optimizers is complete."""
        if self._turns.is_complete:
            self._turns.begin()
            self._steps.end()

    def wait_for(self, least: int) -> None:
        """Let so many steps run before two are compared."""
        self._steps.wait_for(least)

    @property
    def is_over(self) -> bool:
        """Tell whether enough steps have run."""
        return self._steps.is_over

    def end_if_over(self) -> None:
        """End the program if enough steps have run."""
        if self._steps.is_over:
            self.ended = self._steps.why_over
            raise StepsOver(0)

    def end_if_untouched(self) -> None:
        """End the program if it has allocated nothing on the GPU so far: it trains on NumPy."""
        if not any(each.figures.reserved_peak_bytes for each in self._gpu.devices):
            self.ended = "steps"
            raise StepsOver(0)

    def begin_step(self) -> None:
        """Begin a step anew, in the middle of a turn not."""
        if not self._turns.has_begun:
            self._steps.begin()

    def trainer_began(self, facts: Any) -> None:
        """Note what a Trainer says of its run."""
        self._facts = facts

    def calls_early(self, name: str) -> None:
        """Note that an extension is called before its turn."""
        self._extension = name

    def failed_early(self, name: str, error: Exception) -> None:
        """Note how an extension failed that was called before its turn."""
        self._notes.append(
            f"the extension {name}, which umem ran early, raised {type(error).__name__}: {error}"
        )

    def evaluated(self) -> None:
        """Note that an evaluator has run."""
        self._evaluated = True

    # -- the program ends ------------------------------------------------------------------

    def exited(self, stop: SystemExit) -> None:
        """Note that the program ended itself, or was ended because enough had run."""
        if isinstance(stop, EndlessReads):
            self.ended = "asked too often"
            line = self._shown()[stop.line]
            self._failure = Failure(line, self._number, "asked too often")
        elif not isinstance(stop, StepsOver) and stop.code not in (0, None):
            self._exit_code = stop.code

    def stopped(self, error: BaseException) -> bool:
        """Note the error that ended the program; returns whether its traceback is to be shown."""
        out = next(filter(is_cupys_out_of_memory, causes(error)), None)
        if isinstance(error, KeyboardInterrupt):
            self.ended = "interrupted"
            return False
        self.ended = "error" if out is None else "out of memory"
        line = error_line(error if out is None else out)
        if out is None:
            text = f"{type(error).__name__}: {error}"
            missing = isinstance(error, FileNotFoundError) and error.filename
            self._failure = Failure(line, self._number, text, missing=missing or None)
            return True
        self._out.subtract([line])
        holders, too_much, why = self._explained(out)
        self._failure = Failure(
            line, self._number, str(out), holders, too_much, explanation=why,
            extension=self._extension,
        )  # fmt: skip
        return False

    @property
    def _number(self) -> int:
        return self._steps.count + 1

    def _explained(self, error: BaseException) -> tuple[tuple[Holder, ...], int | None, str | None]:
        """Return who held the memory that ran out, how much was missing, and both as text."""
        from umem.memory import explain

        try:
            found = explain(error)
        except Exception:  # an error of the driver must not hide the script's
            return (), None, None
        holders = tuple(Holder(one.nbytes, one.place) for one in found.held)
        # CuPy gave its free blocks back before it gave up: what the driver has is all there was.
        asked = -(-(found.asked_bytes or 0) // BLOCK_BYTES) * BLOCK_BYTES
        missing = asked - sys.modules["cupy"].cuda.runtime.memGetInfo()[0]
        return holders, missing if missing > 0 else None, str(found)

    def sum_up(self) -> int:
        """Sum up the run as `outcome`, before the stack unwinds; returns the exit status."""
        wall = time.perf_counter() - self._began
        if self._is_tty and self._steps.count:
            print(f"\r{'':<70}\r", end="", file=sys.stderr, flush=True)
        status = {
            "script": FAILED if self._exit_code else 0, "out of memory": DOES_NOT_FIT,
            "error": FAILED, "asked too often": FAILED, "interrupted": INTERRUPTED,
        }.get(self.ended, 0)  # fmt: skip
        steps = self._steps.steps
        count = len(steps)
        if not count:
            self._steps.end()  # the whole program
        self._steps.begin()  # what came after the last step counts for the peak
        is_whole = count or self.ended == "script"
        figures = [each.figures for each in self._gpu.devices]
        reserved = max(each.reserved_peak_bytes or 0 for each in figures)
        if not (reserved or status):
            self.ended, status = "nothing on the GPU", FAILED
        facts = self._facts
        self.outcome = DryOutcome(
            gpu=self._gpu.name,
            title=self._gpu.spec.title,
            vram_bytes=self._gpu.spec.usable_bytes,
            mode=self._mode,
            ended=self.ended,
            exit_status=status,
            peak_bytes=self._steps.peak_bytes,
            reserved_peak_bytes=reserved,
            step_seconds=steps[-1].seconds if is_whole else None,
            step_seconds_all=tuple(each.seconds for each in steps if is_whole),
            moved_bytes=steps[-1].moved_bytes,
            steps_run=count,
            steps_in_script=None if facts is None else facts.run_steps,
            epoch_steps=None if facts is None else facts.epoch_steps,
            wall_seconds=wall,
            asked=tuple(self._unknown_values()),
            caught_out_of_memory=tuple(
                CaughtOutOfMemory(line, count) for line, count in self._out.items() if count > 0
            ),
            failure=self._failure,
            first_connection=self._disk.first_connection,
            written=self._disk.written,
            evaluated=self._evaluated if facts is not None and facts.evaluates else None,
            reported=self._reads.reported,
            has_steps=bool(count) or self._turns.has_optimizers,
            own_exit_code=self._exit_code,
            unused_answers=tuple(self._unused()),
            notes=(*self._notes, *self._of_steps()),
        )
        return status

    def _of_steps(self) -> Iterator[str]:
        """Yield sentences on steps that are not alike."""
        growth = self._steps.growth_bytes
        if growth and self.ended == "steps":
            free = self._gpu.spec.usable_bytes - self._steps.steps[-1].peak_bytes
            yield (
                f"each step holds {format_bytes(growth)} more than the one before. Memory runs out "
                f"after about {max(0, free) // growth:,} more steps"
            )
        batches = self._steps.batches
        if batches is not None and self.ended in ("steady", "steps"):
            least, most = map(format_bytes, batches)
            yield (
                f"batches differ in size, {least} to {most}, and the largest may not have run. "
                "--dry-steps all runs all of them"
            )

    def _unknown_values(self) -> Iterator[UnknownValue]:
        shown = self._shown()
        for (line, what), count in sorted(self._reads.items()):
            answered = any(is_answered(line, place) for place in self._answers)
            yield UnknownValue(shown[line], what, count, answered)

    def _shown(self) -> dict[str, str]:
        """Return the lines that asked for values, with paths as short as they can be."""
        return shortest(line for line, _ in self._reads)

    def _unused(self) -> Iterator[str]:
        for place in self._answers:
            if not any(is_answered(line, place) for line, _ in self._reads):
                yield place
