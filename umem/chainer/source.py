"""What a recorder sees of Chainer: every function forward and backward, every parameter update.

Models: inputs, outputs, arrays that a function keeps on itself, gradients, optimizer state; a
function inside another is its own operation.
Does not model: temporaries inside a function (the calibration pass measures them as workspace),
arithmetic outside Chainer's functions, ChainerX arrays.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import chainer
import numpy as np
from chainer import Variable, function_node
from chainer.function import FunctionAdapter

from umem.chainer.flops import Estimator, estimator
from umem.chainer.tap import Proceed, Subscriber, subscribe, unsubscribe
from umem.trace.recording.recorder import Measured, Reach, Recorder, active
from umem.trace.trace import Mark

_PLAIN = frozenset((int, float, bool, str, type(None), np.dtype, type))
_OWN = frozenset((
    "inputs", "outputs", "rank", "stack", "lazy_grad_sum", "_input_layouts", "_output_layouts",
    "_input_indexes_to_retain", "_output_indexes_to_retain", "_output_count",
    "_retained_output_data", "_use_cudnn", "_local_function_hooks", "_n_local_function_hooks",
))  # fmt: skip
"""Attributes that function nodes have anyway."""
_STATISTICS = ("running_mean", "running_var")
"""What normalisation holds and changes in place."""
_GATHERS = frozenset(
    ("EmbedIDFunction", "EmbedIDGrad", "SparseMatMul", "GetItem", "SelectItem", "Permutate")
)


class _Backward(threading.local):
    """How deep the calling thread is in backward steps."""

    depth = 0


_backward = _Backward()


class ChainerSource(Subscriber):
    """Tells recorders of Chainer's functions, backward steps and updates while they are active.

    It stands innermost: an operation's time is that of Chainer's own function.
    """

    place = 1

    def start(self) -> None:
        """Listen."""
        subscribe(self)

    def stop(self) -> None:
        """Listen no more."""
        unsubscribe(self)
        _backward.depth = 0  # where an interrupted step of this thread has left it

    # -- forward, and the functions that backward applies ----------------------------------

    def apply(self, proceed: Proceed, func: Any, inputs: Any) -> Any:
        """Record an application, with what the function keeps on itself."""
        recorders = active()
        if not recorders:
            return proceed(func, inputs)
        before = tuple(func.__dict__.values())
        if func.__class__ is FunctionAdapter:  # what an old-style function holds is on the function
            before += tuple(func.function.__dict__.values())
        measured = Measured()
        try:
            outputs = proceed(func, inputs)
            measured.stop()
            made = [y._data[0] for y in outputs]
            _emit_apply(recorders, func, inputs, made, before, measured)
        finally:
            measured.close()
        return outputs

    # -- backward --------------------------------------------------------------------------

    def backprop_step(
        self,
        proceed: Proceed,
        func: Any,
        indexes: Any = None,
        grad_outputs: Any = None,
        grad_inputs: Any = None,
        is_debug: bool = False,
    ) -> None:
        """Record a backward step: the functions that it applies, and what it computes itself."""
        recorders = active()
        if not recorders:
            proceed(func, indexes, grad_outputs, grad_inputs, is_debug)
            return
        measured = Measured()
        _backward.depth += 1
        try:
            proceed(func, indexes, grad_outputs, grad_inputs, is_debug)
            measured.stop()
            _emit_backprop(recorders, func, grad_outputs, grad_inputs, measured)
        finally:
            _backward.depth -= 1
            measured.close()

    def pop_gradient(self, proceed: Proceed, table: Any, node: Any) -> Any:
        """Count the summing of gradients, between two backward steps, as backward."""
        if len(table.grads.get(node, ())) < 2:  # nothing to add up
            return proceed(table, node)
        _backward.depth += 1
        try:
            return proceed(table, node)
        finally:
            _backward.depth -= 1

    # -- update ----------------------------------------------------------------------------

    def update(self, proceed: Proceed, rule: Any, parameter: Any) -> None:
        """Record the update of a parameter."""
        recorders = active()
        if not recorders or not rule.enabled:
            proceed(rule, parameter)
            return
        measured = Measured()
        try:
            proceed(rule, parameter)
            measured.stop()
            for recorder in recorders:
                _emit_update(recorder, rule, parameter, measured)
        finally:
            measured.close()

    def step(self, proceed: Proceed, method: Any, *args: Any, **kwargs: Any) -> None:
        """Record that a step is over."""
        proceed(method, *args, **kwargs)
        for recorder in active():
            recorder.emit(Mark("step"))


# -- what is recorded --------------------------------------------------------------------------


def rerun(func: Any, inputs: tuple[Any, ...]) -> Any:
    """Run a function's forward once more, on arrays; recorders see it as part of backward."""
    recorders = active()
    if not recorders:
        return func.forward(inputs)
    before = tuple(func.__dict__.values())
    measured = Measured()
    _backward.depth += 1
    try:
        outputs = func.forward(inputs)
        measured.stop()
        _emit_apply(recorders, func, inputs, list(outputs), before, measured)
    finally:
        _backward.depth -= 1
        measured.close()
    return outputs


def _emit_apply(
    recorders: tuple[Recorder, ...],
    func: Any,
    inputs: Any,
    outs: list[Any],
    before: tuple[Any, ...],
    measured: Measured,
) -> None:
    """Emit one application; bench/overhead.py says what a microsecond here costs an LSTM."""
    kind = _kinds.get(func.__class__) or _kind_of(func)
    name = kind.label or func.label
    phase, made = ("backward", "gradient") if _backward.depth else ("forward", "activation")
    ins = []
    for x in inputs:
        ins.append(x._data[0] if isinstance(x, Variable) else x)
    held: list[tuple[str, Any]] = []
    for key, value in func.__dict__.items():
        if key not in _OWN and value.__class__ not in _PLAIN:
            _find_arrays(key, value, held)
    flops, traffic = kind.estimate(func, ins, outs)
    for recorder in recorders:
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
        )


def _add_held(
    recorder: Recorder,
    name: str,
    held: list[tuple[str, Any]],
    before: tuple[Any, ...],
    reads: list[Reach],
    writes: list[Reach],
) -> None:
    """Add what the function holds: read if it held it before the call, otherwise written."""
    values = (("", value) for value in before if not isinstance(value, chainer.Function))
    old = {id(array) for _, array in _arrays_in(values)}
    seen = {access[0] for access in (*reads, *writes)}
    for key, array in held:
        if id(array) in old:
            kind = "state" if key in _STATISTICS else "input"
            access = recorder.access(array, kind, f"{name}.{key}", True)
            reads.append(access)
            if kind == "state":
                writes.append(access)
            continue
        access = recorder.access(array, "stash", f"{name}.{key}")
        if access[0] not in seen:
            writes.append(access)


def _first_read(recorder: Recorder, x: Any, array: Any, name: str) -> Reach:
    if isinstance(x, chainer.Parameter):
        return recorder.access(array, "parameter", x.name or name, uploaded=True)
    if _backward.depth:  # computed by array code inside a backward method
        return recorder.access(array, "gradient", name)
    return recorder.access(array, "input", name, uploaded=True)


def _emit_backprop(
    recorders: tuple[Recorder, ...],
    func: Any,
    grad_outputs: Any,
    grad_inputs: Any,
    measured: Measured,
) -> None:
    """Emit what the backward method computed by itself; functions it applied are recorded."""
    grads = [_array(g) for gs in grad_inputs.values() for g in gs if g is not None]
    for recorder in recorders:
        made = [a for a in grads if a is not None and recorder.known(a) is None]
        if not made:
            continue
        name = func.label
        used = [_array(g) for g in grad_outputs if g is not None]
        used += [node.data for node in func.inputs]
        used += list(func._retained_output_data or ())
        used += [array for _, array in arrays_on(func)]
        reads = [recorder.known(a) or _first_read(recorder, None, a, name) for a in _present(used)]
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
        )


def _emit_update(recorder: Recorder, rule: Any, param: Any, measured: Measured) -> None:
    if param.array is None or param.grad is None:
        return
    name = type(rule).__name__.removesuffix("Rule")
    owned = [("parameter", param.name or name, param.array)]
    full = getattr(rule, "_fp32_param", None)
    if full is not None and full.array is not None:
        owned.append(("state", f"{name}.fp32", full.array))
    state = {key: v for key, v in (rule.state or {}).items() if _is_array(v)}
    owned += [("state", f"{name}.{key}", v) for key, v in state.items()]
    writes = [
        recorder.access(array, kind, label, uploaded=kind == "parameter")
        for kind, label, array in owned
    ]
    reads = list(writes)
    reads.append(recorder.access(param.grad, "gradient", param.name or name))
    flops = 2 * param.size * (1 + 2 * len(state))
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
    )


# -- helpers -----------------------------------------------------------------------------------


class _Kind(NamedTuple):
    """What is the same for every function of a class; no label where it is computed."""

    label: str | None
    estimate: Estimator
    pattern: str


_kinds: dict[type, _Kind] = {}


def _kind_of(func: Any) -> _Kind:
    cls = type(func)
    own_label = cls.label is not function_node.FunctionNode.label
    pattern = "random" if func.label in _GATHERS else "stream"
    _kinds[cls] = kind = _Kind(None if own_label else func.label, estimator(cls), pattern)
    return kind


def _array(x: Any) -> Any:
    """The array of a Variable, or the array itself."""
    return x._data[0] if isinstance(x, Variable) else x


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or hasattr(value, "__cuda_array_interface__")


def _present(arrays: Iterable[Any]) -> Iterator[Any]:
    return (array for array in arrays if array is not None)


def arrays_on(func: Any) -> list[tuple[str, Any]]:
    """The arrays that a function holds as attributes, sparse matrices taken apart."""
    found: list[tuple[str, Any]] = []
    for key, value in func.__dict__.items():
        if key not in _OWN and value.__class__ not in _PLAIN:
            _find_arrays(key, value, found)
    return found


def _arrays_in(items: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in items:
        _find_arrays(key, value, found)
    return found


def _find_arrays(key: str, value: Any, found: list[tuple[str, Any]]) -> None:
    if _is_array(value):
        found.append((key, value))
    elif isinstance(value, (list, tuple)):
        found += [(key, item) for item in value if _is_array(item)]
    elif hasattr(value, "indptr") and hasattr(value, "indices"):
        parts = ("data", "indices", "indptr")
        found += [(f"{key}.{part}", getattr(value, part)) for part in parts]
    elif isinstance(value, chainer.Function):  # an old-style function behind its adapter
        found += arrays_on(value)
    elif isinstance(value, chainer.FunctionNode):  # max pooling, whose gradient reads its indexes
        held = value.__dict__.items()
        found += [(name, item) for name, item in held if name not in _OWN and _is_array(item)]
