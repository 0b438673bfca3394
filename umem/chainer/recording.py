"""What a recorder sees of Chainer: every function forward and backward, every parameter update.

Function hooks do not see the gradients (in backward the functions that compute them have no
output nodes), so the classes' methods are wrapped while a recorder is active, and put back.

Models: inputs, outputs, arrays that a function keeps on itself, gradients, optimizer state; a
function inside another is its own operation.
Does not model: temporaries inside a function (the calibration pass measures them as workspace),
arithmetic outside Chainer's functions, ChainerX arrays.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import chainer
import numpy as np
from chainer import _backprop_utils, function_node, optimizer

from umem.chainer.flops import estimate
from umem.recorder import Measured, Recorder, active
from umem.trace import Access, Op

_PLAIN = frozenset((int, float, bool, str, type(None), np.dtype, type))
_GATHERS = frozenset(("EmbedID", "SparseMatMul", "GetItem", "SelectItem", "Permutate"))


class ChainerSource:
    """Wraps Chainer's function, backward step and update while recorders are active."""

    def __init__(self) -> None:
        self._restore: list[Callable[[], None]] = []

    def start(self) -> None:
        """Put the wrappers in place."""
        self._wrap(function_node.FunctionNode, "apply", _recorded_apply)
        self._wrap(_backprop_utils, "backprop_step", _recorded_backprop)
        self._wrap(optimizer.UpdateRule, "update", _recorded_update)
        self._wrap(optimizer.GradientMethod, "update", _recorded_step)

    def stop(self) -> None:
        """Put back exactly what was there."""
        while self._restore:
            self._restore.pop()()

    def _wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, make(original))
        self._restore.append(lambda: setattr(owner, name, original))


# -- forward, and the functions that backward applies ------------------------------------------


class _Backward(threading.local):
    """How deep the calling thread is in backward steps."""

    depth = 0


_backward = _Backward()


def _recorded_apply(original: Any) -> Any:
    def apply(self: Any, inputs: Any) -> Any:
        recorders = active()
        if not recorders:
            return original(self, inputs)
        before = _arrays_on(self)
        measured = Measured(recorders)
        try:
            outputs = original(self, inputs)
            measured.stop()
            _emit_apply(recorders, self, inputs, outputs, before, measured)
        finally:
            measured.close()
        return outputs

    return apply


def _emit_apply(
    recorders: tuple[Recorder, ...], func: Any, inputs: Any, outputs: Any,
    before: list[tuple[str, Any]], measured: Measured,
) -> None:  # fmt: skip
    name = func.label
    phase = "backward" if _backward.depth else "forward"
    made_kind = "gradient" if _backward.depth else "activation"
    ins = [_array(x) for x in inputs]
    outs = [y.array for y in outputs]
    old = {id(array) for _, array in before}
    stash = [(key, array) for key, array in _arrays_on(func) if id(array) not in old]
    workspace = measured.workspace_bytes(_new_bytes(recorders[-1], outs, stash))
    flops, traffic = estimate(func, ins, outs)
    for recorder in recorders:
        reads = [
            recorder.known(array) or _first_read(recorder, x, array, name)
            for x, array in zip(inputs, ins, strict=True)
            if array is not None
        ]
        for key, array in before:
            reads.append(recorder.access(array, "input", f"{name}.{key}", uploaded=True))
        writes = [recorder.access(a, made_kind, name) for a in outs if a is not None]
        seen = {access.tensor for access in (*reads, *writes)}
        for key, array in stash:
            access = recorder.access(array, "stash", f"{name}.{key}")
            if access.tensor not in seen:
                writes.append(access)
        _emit(recorder, name, phase, reads, writes, flops, traffic, measured.seconds, workspace)


def _first_read(recorder: Recorder, x: Any, array: Any, name: str) -> Access:
    if isinstance(x, chainer.Parameter):
        return recorder.access(array, "parameter", x.name or name, uploaded=True)
    if _backward.depth:  # computed by array code inside a backward method
        return recorder.access(array, "gradient", name)
    return recorder.access(array, "input", name, uploaded=True)


# -- backward ----------------------------------------------------------------------------------


def _recorded_backprop(original: Any) -> Any:
    def backprop_step(
        func: Any, indexes: Any, grad_outputs: Any, grad_inputs: Any, is_debug: bool
    ) -> None:
        recorders = active()
        if not recorders:
            original(func, indexes, grad_outputs, grad_inputs, is_debug)
            return
        measured = Measured(recorders)
        _backward.depth += 1
        try:
            original(func, indexes, grad_outputs, grad_inputs, is_debug)
            measured.stop()
            _emit_backprop(recorders, func, grad_outputs, grad_inputs, measured)
        finally:
            _backward.depth -= 1
            measured.close()

    return backprop_step


def _emit_backprop(
    recorders: tuple[Recorder, ...], func: Any, grad_outputs: Any, grad_inputs: Any,
    measured: Measured,
) -> None:  # fmt: skip
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
        used += [array for _, array in _arrays_on(func)]
        reads = [recorder.known(a) or _first_read(recorder, None, a, name) for a in _present(used)]
        workspace = measured.workspace_bytes(sum(a.nbytes for a in made))
        writes = [recorder.access(a, "gradient", name) for a in made]
        flops = 2 * sum(a.size for a in made)
        _emit(recorder, name, "backward", reads, writes, flops, None, measured.seconds, workspace)


# -- update ------------------------------------------------------------------------------------


def _recorded_update(original: Any) -> Any:
    def update(self: Any, param: Any) -> None:
        recorders = active()
        if not recorders:
            original(self, param)
            return
        measured = Measured(recorders)
        try:
            original(self, param)
            measured.stop()
            for recorder in recorders:
                _emit_update(recorder, self, param, measured)
        finally:
            measured.close()

    return update


def _emit_update(recorder: Recorder, rule: Any, param: Any, measured: Measured) -> None:
    if param.array is None:
        return
    name = type(rule).__name__.removesuffix("Rule")
    owned = [("parameter", param.name or name, param.array)]
    full = getattr(rule, "_fp32_param", None)
    if full is not None and full.array is not None:
        owned.append(("state", f"{name}.fp32", full.array))
    state = {key: v for key, v in (rule.state or {}).items() if _is_array(v)}
    owned += [("state", f"{name}.{key}", v) for key, v in state.items()]
    new = sum(v.nbytes for v in state.values() if recorder.known(v) is None)
    workspace = measured.workspace_bytes(new)
    writes = [
        recorder.access(array, kind, label, uploaded=kind == "parameter")
        for kind, label, array in owned
    ]
    reads = list(writes)
    if param.grad is not None:
        reads.append(recorder.access(param.grad, "gradient", param.name or name))
    flops = 2 * param.size * (1 + 2 * len(state))
    _emit(recorder, name, "update", reads, writes, flops, None, measured.seconds, workspace)


def _recorded_step(original: Any) -> Any:
    def update(self: Any, lossfun: Any = None, *args: Any, **kwargs: Any) -> None:
        original(self, lossfun, *args, **kwargs)
        for recorder in active():
            recorder.mark("step")

    return update


# -- helpers -----------------------------------------------------------------------------------


def _emit(
    recorder: Recorder, name: str, phase: str, reads: list[Access], writes: list[Access],
    flops: int, traffic: int | None, seconds: float | None, workspace: int | None,
) -> None:  # fmt: skip
    if traffic is None:
        traffic = sum(a[2] - a[1] for a in reads) + sum(a[2] - a[1] for a in writes)
    pattern = "random" if name in _GATHERS else "stream"
    recorder.op(
        Op(name, phase, tuple(reads), tuple(writes), flops, traffic, pattern, seconds, workspace)
    )


def _array(x: Any) -> Any:
    """The array of a Variable, or the array itself."""
    return x.array if isinstance(x, chainer.Variable) else x


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or hasattr(value, "__cuda_array_interface__")


def _present(arrays: Iterable[Any]) -> Iterator[Any]:
    return (array for array in arrays if array is not None)


def _new_bytes(recorder: Recorder, outs: list[Any], stash: list[tuple[str, Any]]) -> int:
    made = {id(a): a for a in (*_present(outs), *(array for _, array in stash))}
    return sum(a.nbytes for a in made.values() if a.base is None and recorder.known(a) is None)


def _arrays_on(func: Any) -> list[tuple[str, Any]]:
    """The arrays that a function holds as attributes, sparse matrices taken apart."""
    found: list[tuple[str, Any]] = []
    attributes = func.__dict__
    adapted = attributes.get("_function")  # an old-style Function behind its adapter
    for owner in (attributes, getattr(adapted, "__dict__", None) or {}):
        for key, value in owner.items():
            if type(value) in _PLAIN or key in ("inputs", "outputs", "_retained_output_data"):
                continue
            if isinstance(value, np.ndarray):
                found.append((key, value))
            elif isinstance(value, (list, tuple)):
                found += [(key, item) for item in value if _is_array(item)]
            elif hasattr(value, "indptr") and hasattr(value, "indices"):
                found += [
                    (f"{key}.{part}", getattr(value, part))
                    for part in ("data", "indices", "indptr")
                ]
            elif _is_array(value):
                found.append((key, value))
    return found
