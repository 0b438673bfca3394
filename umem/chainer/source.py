"""The source of recordings of Chainer: functions, backward steps, parameter updates.

Models: inputs, outputs, a function's array attributes, gradients, optimizer state; a function
inside another is its own operation.
Does not model: temporaries inside a function (the calibration pass measures them as workspace),
arithmetic outside Chainer's functions, ChainerX arrays.
"""

from __future__ import annotations

from typing import Any

import chainer
from chainer import Variable, function_node
from chainer.function import FunctionAdapter

from umem._common.arithmetic import of_dtype
from umem._common.scopes import derived
from umem.chainer.flops import Estimator, estimator
from umem.chainer.function_arithmetic import arithmetic, is_product
from umem.chainer.function_facts import is_array
from umem.chainer.function_kernels import NO_KERNEL, Rule, launches
from umem.chainer.precision.half_functions import master_kernels
from umem.chainer.saved.slots import arrays_in, arrays_on, holds_nothing, values_on
from umem.chainer.tap import Proceed, Subscriber, subscribe, unsubscribe
from umem.trace import Mark
from umem.trace.recording import Audience, Measured, Reach, Recorder, active, thread_state

_STATISTICS = ("running_mean", "running_var")
"""Running statistics, which normalisation updates in place."""
_GATHERS = frozenset(
    ("EmbedIDFunction", "EmbedIDGrad", "SparseMatMul", "GetItem", "SelectItem", "Permutate")
)


class MarksBackward(Subscriber):
    """Marks operations inside a backward as such, for the thread."""

    def backward(self, proceed: Proceed, *args: Any, **kwargs: Any) -> None:
        """Mark operations inside as backward."""
        _in_backward(proceed, *args, **kwargs)

    def grad(self, proceed: Proceed, *args: Any, **kwargs: Any) -> Any:
        """Mark operations inside as backward."""
        return _in_backward(proceed, *args, **kwargs)


class ChainerSource(MarksBackward):
    """Reports Chainer's functions, backward steps and updates to active recorders.

    It is innermost: an operation's time is Chainer's own function's.
    """

    place = 1

    def start(self) -> None:
        """Subscribe to the tap."""
        subscribe(self)

    def stop(self) -> None:
        """Unsubscribe from the tap."""
        unsubscribe(self)
        thread_state().backward_depth = 0  # an interrupted step may have left another value

    # -- forward, and the functions that backward applies ----------------------------------

    def apply(self, proceed: Proceed, func: Any, inputs: Any) -> Any:
        """Record a call of a function, and its array attributes."""
        audience = derived(Audience)
        if not audience.recorders:
            return proceed(func, inputs)
        before = values_on(func)
        if func.__class__ is FunctionAdapter:  # an old-style function has the attributes itself
            before += func.function.__dict__.values()
        measured = Measured(audience, inputs)
        try:
            outputs = proceed(func, inputs)
            measured.stop()
            made = []
            for y in outputs:  # _data: see _array; not called, for speed
                made.append(y._data[0])
            _emit_apply(audience, func, inputs, made, before, measured)
        finally:
            measured.close()
        return outputs

    # -- backward --------------------------------------------------------------------------

    def rerun(self, proceed: Proceed, func: Any, inputs: Any) -> Any:
        """Record a forward that runs again, as part of backward."""
        audience = derived(Audience)
        if not audience.recorders:
            return proceed(func, inputs)
        before = values_on(func)
        measured = Measured(audience, inputs)
        audience.state.backward_depth += 1
        try:
            outputs = proceed(func, inputs)
            measured.stop()
            _emit_apply(audience, func, inputs, list(outputs), before, measured)
        finally:
            audience.state.backward_depth -= 1
            measured.close()
        return outputs

    def backprop_step(
        self,
        proceed: Proceed,
        func: Any,
        indexes: Any = None,
        grad_outputs: Any = None,
        grad_inputs: Any = None,
        is_debug: bool = False,
    ) -> None:
        """Record one function's backward: functions it calls, and its own computation."""
        audience = derived(Audience)
        if not audience.recorders:
            proceed(func, indexes, grad_outputs, grad_inputs, is_debug)
            return
        measured = Measured(audience, grad_outputs)
        try:
            proceed(func, indexes, grad_outputs, grad_inputs, is_debug)
            measured.stop()
            _emit_backprop(audience, func, grad_outputs, grad_inputs, measured)
        finally:
            measured.close()

    # -- update ----------------------------------------------------------------------------

    def update(self, proceed: Proceed, rule: Any, parameter: Any) -> None:
        """Record the update of a parameter."""
        audience = derived(Audience)
        if not audience.recorders or not rule.enabled:
            proceed(rule, parameter)
            return
        measured = Measured(audience, (parameter,))
        try:
            proceed(rule, parameter)
            measured.stop()
            for recorder in audience.recorders:
                _emit_update(recorder, rule, parameter, measured)
        finally:
            measured.close()

    def step(self, proceed: Proceed, method: Any, *args: Any, **kwargs: Any) -> None:
        """Record the end of a step."""
        proceed(method, *args, **kwargs)
        for recorder in active():
            recorder.emit(Mark("step"))


def _in_backward(proceed: Proceed, *args: Any, **kwargs: Any) -> Any:
    """Proceed, with the thread's operations meanwhile marked as backward."""
    state = thread_state()
    state.backward_depth += 1
    try:
        return proceed(*args, **kwargs)
    finally:
        state.backward_depth -= 1


# -- recorded events ---------------------------------------------------------------------------


def _emit_apply(
    audience: Audience,
    func: Any,
    inputs: Any,
    outs: list[Any],
    before: list[Any],
    measured: Measured,
) -> None:
    """Record one call; bench/overhead.py measures the cost of each microsecond here."""
    kind = _kinds.get(func.__class__) or _kind_of(func)
    name = kind.label or func.label
    if audience.state.backward_depth:
        phase, made = "backward", "gradient"
    else:
        phase, made = "forward", "activation"
    ins = []
    for x in inputs:
        ins.append(x._data[0] if isinstance(x, Variable) else x)  # as _array
    held = None if holds_nothing(func) else arrays_on(func)
    flops, traffic = kind.estimate(func, ins, outs)
    kernels = None if kind.launches is None else kind.launches(func, ins, outs)
    if kernels is NO_KERNEL:
        flops = traffic = 0
    type_of_work = arithmetic(func, kind.is_product, outs)
    for recorder in audience.recorders:
        reads = recorder.find(ins)
        for index, reach in enumerate(reads):
            if reach is None and ins[index] is not None:
                reads[index] = _first_read(recorder, inputs[index], ins[index], name)
        writes = recorder.follow(outs, made, name)
        if held:
            _add_held(recorder, name, held, before, reads, writes)
        recorder.emit_op(
            name,
            phase,
            reads,
            writes,
            flops,
            traffic,
            kind.pattern,
            measured.seconds,
            measured.workspace_bytes,
            kernels,
            type_of_work,
        )


def _add_held(
    recorder: Recorder,
    name: str,
    held: list[tuple[str, Any]],
    before: list[Any],
    reads: list[Reach],
    writes: list[Reach],
) -> None:
    """Add the arrays a function holds: read if held before the call, otherwise written."""
    values = (("", value) for value in before if not isinstance(value, chainer.Function))
    old = {id(array) for _, array in arrays_in(values)}
    seen = {access[0] for access in (*reads, *writes) if access is not None}
    for key, array in held:
        if id(array) in old:
            kind = "state" if key in _STATISTICS else "input"
            access = recorder.access(array, kind, f"{name}.{key}", True)
            reads.append(access)
            if kind == "state":
                writes.append(access)
            continue
        # A pooling under a cap has indexes as small as on a GPU: their name distinguishes them.
        small = ", int32" if key == "indexes" and array.dtype == "int32" else ""
        access = recorder.access(array, "stash", f"{name}.{key}{small}")
        if access[0] not in seen:
            writes.append(access)


def _first_read(recorder: Recorder, x: Any, array: Any, name: str) -> Reach:
    if isinstance(x, chainer.Parameter):
        return recorder.access(array, "parameter", x.name or name, uploaded=True)
    if thread_state().backward_depth:  # computed by array code inside a backward method
        return recorder.access(array, "gradient", name)
    return recorder.access(array, "input", name, uploaded=True)


def _emit_backprop(
    audience: Audience, func: Any, grad_outputs: Any, grad_inputs: Any, measured: Measured
) -> None:
    """Record a backward method's own computation; its function calls are recorded already."""
    grads = []
    for summands in grad_inputs.values():
        for g in summands:
            array = g._data[0] if isinstance(g, Variable) else g  # as _array
            if array is not None:
                grads.append(array)
    for recorder in audience.recorders:
        _emit_own(recorder, func, grad_outputs, grads, measured)


def _emit_own(
    recorder: Recorder, func: Any, grad_outputs: Any, grads: list[Any], measured: Measured
) -> None:
    """Record the gradients that a backward method computed without calling functions."""
    made = recorder.unseen(grads)
    if made:
        name = func.label
        used = [_array(g) for g in grad_outputs if g is not None]
        used += [node.data for node in func.inputs]
        # FunctionNode.output_data raises if nothing was retained, and has None for the others.
        used += list(func._retained_output_data or ())
        used += [array for _, array in arrays_on(func)]
        used = [a for a in used if a is not None]
        reads = [recorder.known(a) or _first_read(recorder, None, a, name) for a in used]
        writes = recorder.follow(made, "gradient", name)
        flops = 2 * sum(a.size for a in made)
        recorder.emit_op(
            name,
            "backward",
            reads,
            writes,
            flops,
            None,
            "stream",
            measured.seconds,
            measured.workspace_bytes,
            arithmetic=of_dtype(made[0].dtype),
        )


def _emit_update(recorder: Recorder, rule: Any, param: Any, measured: Measured) -> None:
    """Record the update of one parameter: reads parameter, state and gradient, writes the first
    two.
    """
    if param.array is None or param.grad is None:
        return
    name = type(rule).__name__.removesuffix("Rule")
    owned = [("parameter", param.name or name, param.array)]
    # Under use_fp32_update the rule updates a copy that only it knows; there is no public name.
    full = getattr(rule, "_fp32_param", None)
    if full is not None and full.array is not None:
        owned.append(("state", f"{name}.fp32", full.array))
    state = {key: v for key, v in (rule.state or {}).items() if is_array(v)}
    owned += [("state", f"{name}.{key}", v) for key, v in state.items()]
    writes = [
        recorder.access(array, kind, label, uploaded=kind == "parameter")
        for kind, label, array in owned
    ]
    reads = list(writes)
    reads.append(recorder.access(param.grad, "gradient", param.name or name))
    flops = 2 * param.size * (1 + 2 * len(state))
    kernels = None if full is None or full.array is None else master_kernels(param.size)
    recorder.emit_op(
        name,
        "update",
        reads,
        writes,
        flops,
        None,
        "stream",
        measured.seconds,
        measured.workspace_bytes,
        kernels=kernels,
        arithmetic=of_dtype(param.dtype),
    )


# -- helpers -----------------------------------------------------------------------------------


class _Kind:
    """Facts shared by all functions of a class.

    Attributes:
        label: None if the function computes it.
    """

    __slots__ = ("estimate", "is_product", "label", "launches", "pattern")

    def __init__(self, func: Any) -> None:
        cls = type(func)
        own_label = cls.label is not function_node.FunctionNode.label
        self.label: str | None = None if own_label else func.label
        self.estimate: Estimator = estimator(cls)
        self.is_product = is_product(cls)
        self.launches: Rule | None = launches(cls)
        self.pattern = "random" if func.label in _GATHERS else "stream"


_kinds: dict[type, _Kind] = {}


def _kind_of(func: Any) -> _Kind:
    _kinds[type(func)] = kind = _Kind(func)
    return kind


def _array(x: Any) -> Any:
    """Return the array of a Variable, or an array as it is.

    Variable.array raises if the layout is not the standard one, and checks it each time.
    """
    return x._data[0] if isinstance(x, Variable) else x
