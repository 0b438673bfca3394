"""`diet`: record a step at small sizes, choose what keeps it to a budget, and turn that on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from math import inf
from typing import Any

import chainer

import umem
from umem.chainer.accumulation.accumulating import accumulate
from umem.chainer.chunking.capped import workspace
from umem.chainer.dial.as_it_was import as_it_was
from umem.chainer.function_facts import is_array
from umem.chainer.optimizers import dequantize_states, quantize_states
from umem.chainer.parameters_once import parameter_bytes
from umem.chainer.precision.half_precision import half_precision
from umem.chainer.recompute.recompute import Recompute
from umem.chainer.tap import Proceed, Subscriber, subscribe, unsubscribe
from umem.devices.cost import cuda_model
from umem.devices.open import entered_device
from umem.devices.specs import GpuSpec, gpu_spec
from umem.errors import BudgetError, SizeError, StateError
from umem.predict.diet_places import SURE, HostArrays, Place, PlainPool
from umem.predict.dieting import PARTS, Chosen, Combination, cheapest
from umem.predict.techniques.step_variants import StepVariants
from umem.switch import Switch
from umem.trace.events import Event, Op
from umem.trace.trace import Trace
from umem.units import format_bytes, format_seconds, parse_bytes

__all__ = ["Diet", "diet"]


def diet(
    model: Any,
    optimizer: Any,
    step: Callable[[int], Any],
    budget: int | str,
    *,
    size: int | None = None,
    sizes: Sequence[int] = (4, 8),
    gpu: str | GpuSpec | None = None,
    without: Collection[str] = (),
    quiet: bool = False,
) -> Diet:
    """Keep a training step to a budget by the cheapest techniques that do, without editing it.

    The step is recorded at two small sizes, and everything that it changed is restored: parameters,
    gradients, statistics, states, NumPy's and Python's random state. From the trace the peak and
    the time of a step of the wanted size are simulated under recomputation, micro-batches, a cap on
    workspace, 8-bit states, half precision, and combinations of these. The fastest combination that
    fits is turned on, for the calling thread and process, until `Diet.undo` or the end of ``with``.

    More exact combinations are preferred: results equal to the bit, then up to rounding, then 8-bit
    states, then half precision. A less exact one is taken only where it takes at most 95% of the
    time, and on NumPy, where times scatter, the last two only where nothing else fits.

    Args:
        model: the link that is trained.
        optimizer: a `chainer.GradientMethod`, set up with the model or with a link around it.
        step: makes its input for a size and runs one training step on it, an update included.
            Micro-batches are only for steps that call ``optimizer.update(lossfun, *arrays)``.
        budget: bytes in all that a step may take (parameters, gradients, states, inputs, saved
            arrays, workspace), as an int or text. On a GPU: what CuPy's pool may take.
        size: the size to choose for, such as the batch; None: the largest of ``sizes``.
        sizes: the sizes at which the step is recorded; see `umem.record_at`.
        gpu: the GPU to simulate times for, where arrays are CuPy's; None: the simulated GPU in use,
            else a T4.
        without: techniques that are not to be used: "recompute", "accumulate", "workspace",
            "8-bit states", "half precision".
        quiet: print no report.

    Raises:
        SizeError: the budget is no size. StateError: the model is no link, the optimizer no
            gradient method, either is not set up, or the step does not update the model.
            BudgetError: nothing fits; names the least budget that would. ScalingError: see
            `umem.record_at`. In each case nothing is turned on, and everything is restored, except
            for another model that the step trained.
    """
    budget_bytes = _checked(model, optimizer, step, budget)
    _check_parts(without)
    held = parameter_bytes(model)
    if budget_bytes < held:
        raise BudgetError(
            f"a budget of {format_bytes(budget_bytes)} has no room for the parameters alone, which "
            f"take {format_bytes(held)}: give more, or a smaller model"
        )
    watch = _Updates(optimizer)
    with watch, as_it_was(model, optimizer):
        count = optimizer.t
        trace = umem.record_at(step, sizes)
        updated = watch.count > 0 or optimizer.t > count
    if not updated:
        raise StateError(
            f"the step has no update of the {type(optimizer).__name__} that was given: call "
            "optimizer.update in it, and give its model with it; another one that it trains has "
            "taken the recorded steps"
        )
    if not watch.splits:
        without = (*without, "accumulate")
    size = max(sizes) if size is None else size
    found = diet_of(trace, model, optimizer, budget_bytes, size=size, gpu=gpu, without=without)
    if not quiet:
        print(found.report())
    return found


def diet_of(
    trace: Trace,
    model: Any,
    optimizer: Any,
    budget_bytes: int,
    *,
    size: int | None = None,
    gpu: str | GpuSpec | None = None,
    without: Collection[str] = (),
) -> Diet:
    """Choose the techniques that keep a recorded step to a budget, and turn them on; see `diet`.

    Args:
        trace: of the step; scaled to ``size`` where it was recorded at several.
        model, optimizer: those that the step trains.
        budget_bytes: the most that a step may take.
        size: the size to choose for; None: the trace's own.
        gpu: the GPU to simulate times for; None: see `diet`.
        without: techniques that are not to be used.

    Raises:
        BudgetError: nothing fits; nothing is turned on.
    """
    settled = all(param.array is not None for param in model.params())
    # A first pass that makes parameters has been seen to need more memory than in the trace.
    subject, place = placed(trace, size, budget_bytes, gpu, SURE if settled else inf)
    chosen = cheapest(subject, place, without)
    return Diet(model, optimizer, chosen, budget_bytes)


def placed(
    trace: Trace, size: int | None, budget_bytes: int, gpu: str | GpuSpec | None, sure: float = SURE
) -> tuple[StepVariants, Place]:
    """Return the variants of a step, and the memory that they are to fit in: the host's or a GPU's.

    Args:
        trace: of the step.
        size: the size that the variants have; None: as recorded.
        budget_bytes: the memory; on a GPU, its VRAM.
        gpu: see `diet`.
        sure: recomputation gets "min" as its budget below this many times the least; inf: always.
    """
    spec = _gpu_of(trace, gpu)
    if spec is None:
        return StepVariants(trace, (), size, correct="off"), HostArrays(budget_bytes, sure)
    spec = spec.with_vram(budget_bytes)
    subject = StepVariants(_without_times(trace), [spec], size)
    return subject, PlainPool(spec, subject, sure)


def _without_times(trace: Trace) -> Trace:
    """Return the trace without the operations' host seconds, which differ from run to run."""
    recordings = {point: list(map(_untimed, found)) for point, found in trace.recordings.items()}
    return replace(trace, events=list(map(_untimed, trace.events)), recordings=recordings)


def _untimed(event: Event) -> Event:
    return event._replace(host_seconds=None) if isinstance(event, Op) else event


def _gpu_of(trace: Trace, gpu: str | GpuSpec | None) -> GpuSpec | None:
    """Return the GPU to simulate times for; None for NumPy's arrays outside of a virtual GPU.

    That is the one named, else the virtual or software GPU in use, else a T4.
    """
    if gpu is not None:
        return gpu_spec(gpu)
    entered = entered_device()
    if trace.backend == "numpy" and entered is None:
        return None
    spec = getattr(cuda_model() if entered is None else entered, "spec", None)
    return spec if isinstance(spec, GpuSpec) else gpu_spec("t4")


class Diet(Switch):
    """The techniques that `diet` has turned on; as a context manager it turns them off at the end.

    Attributes:
        chosen: the combination that is on, and all that were tried, with simulated figures.
    """

    def __init__(self, model: Any, optimizer: Any, chosen: Chosen, budget_bytes: int) -> None:
        self.chosen, self.budget_bytes = chosen, budget_bytes
        self._recompute: Recompute | None = None
        self._stack = ExitStack()
        with ExitStack() as stack:
            self._recompute = turn_on(stack, chosen.best, model, optimizer)
            self._stack = stack.pop_all()

    def _take_back(self) -> None:
        """Turn the techniques off, the last one first.

        Parameters keep their trained values; 8-bit states become float32.
        """
        self._stack.close()

    def report(self) -> str:
        """Describe the techniques that are on, and recomputation so far, in a few lines of text."""
        best, plain, counted = self.chosen.best, self.chosen.plain, self.chosen.counted
        lines = [
            f"umem diet for {format_bytes(self.budget_bytes)} (all figures are simulated):",
            f"  as it is: {format_bytes(plain.taken_bytes)}{counted}, "
            f"{format_seconds(plain.seconds)} a step",
        ]
        if not best.names:
            return "\n".join([*lines, "  it fits: nothing is turned on"])
        lines += [f"  on: {name}" for name in best.names]
        lines.append(
            f"  with that: {format_bytes(best.taken_bytes)}, {format_seconds(best.seconds)} a "
            f"step; {best.exactness}"
        )
        fit = sum(one.fits for one in self.chosen.tried)
        lines.append(
            f"  {fit} of {len(self.chosen.tried)} combinations fit; of those as exact, this "
            "is the cheapest"
        )
        if self.summary():
            lines.append(f"  {self.summary()}")
        return "\n".join(lines)

    def summary(self) -> str:
        """Describe recomputation so far in a line; empty where it is off or no pass has run."""
        if self._recompute is None or not self._recompute.pass_count:
            return ""
        said = self._recompute.summary()
        return f"recomputation (peaks and time of forward and backward alone): {said}"


def turn_on(stack: ExitStack, chosen: Combination, model: Any, optimizer: Any) -> Recompute | None:
    """Turn a combination on until the stack is left, first the techniques that convert arrays.

    Returns the `Recompute` that is on, if any. Raises what the techniques raise; those that were on
    by then are turned off when the stack is left.
    """
    change = chosen.change
    if change.half:
        stack.callback(half_precision(model, optimizer).undo)
    if change.small_states:
        quantize_states(optimizer)
        stack.callback(dequantize_states, optimizer)
    if change.cap_bytes is not None:
        stack.callback(workspace(change.cap_bytes).enable().disable)
    if change.micro_batch is not None:
        stack.callback(accumulate(optimizer, micro_batch=change.micro_batch).enable().disable)
    if chosen.budget is None:
        return None
    return stack.enter_context(Recompute(chosen.budget))


def batch_of(args: tuple[Any, ...]) -> int:
    """Return the batch size of ``update(lossfun, *arrays)``; 0 for any other arguments."""
    if len(args) < 2 or not callable(args[0]):
        return 0
    sizes = {len(array) if is_array(array) and array.ndim else 0 for array in args[1:]}
    size = sizes.pop()
    return 0 if sizes else size


class _Updates(Subscriber):
    """Watches whether an optimizer's updates are given the batch, which micro-batches need."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.count = self._given_count = 0

    def __enter__(self) -> None:
        subscribe(self)

    def __exit__(self, *exc: object) -> None:
        unsubscribe(self)

    def step(self, proceed: Proceed, method: Any, *args: Any, **kwargs: Any) -> None:
        """Count an update."""
        if method is self._optimizer:
            self.count += 1
            self._given_count += batch_of(args) > 0
        proceed(method, *args, **kwargs)

    @property
    def splits(self) -> bool:
        """True if there were updates, and each was given a loss function and its arrays."""
        return 0 < self.count == self._given_count


def _checked(model: Any, optimizer: Any, step: Any, budget: int | str) -> int:
    """Check the arguments of `diet`, and return the budget in bytes.

    Raises:
        SizeError, StateError: see `diet`.
    """
    budget_bytes = _parsed(budget)
    if not isinstance(model, chainer.Link):
        raise StateError(f"a diet is for a chainer.Link; got {type(model).__name__}")
    if not isinstance(optimizer, chainer.GradientMethod):
        raise StateError(
            "a diet is for an optimizer that goes by gradients, such as chainer.optimizers.Adam(); "
            f"got {type(optimizer).__name__}"
        )
    if optimizer.target is None:
        raise StateError("the optimizer has no model yet: optimizer.setup(model) first")
    if not callable(step):
        raise StateError(
            "a step is a function of the batch size that trains once on it; got "
            f"{type(step).__name__}"
        )
    own = {id(param) for param in optimizer.target.params()}
    for name, param in model.namedparams():
        if param.array is None:
            raise StateError(
                f"the parameter {name} has no array yet: run the model once on a batch, so that it "
                "takes its shape from it"
            )
        if id(param) not in own:
            raise StateError(f"the optimizer is set up with another model: {name} is not its own")
    return budget_bytes


def _check_parts(without: Collection[str]) -> None:
    given = [without] if isinstance(without, str) else without
    for part in given:
        if part not in PARTS or isinstance(without, str):
            raise StateError(
                f"without has some of {', '.join(map(repr, PARTS))}, as a list; got {without!r}"
            )


def _parsed(budget: int | str) -> int:
    if isinstance(budget, (bool, float)) or not isinstance(budget, (int, str)):
        raise SizeError(f'a budget is bytes as an int or a size like "4GiB"; got {budget!r}')
    return parse_bytes(budget, "budget")
