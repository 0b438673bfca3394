"""One training step, its peak, its floor, its results and its seconds.

Memory and time are never measured in the same pass: tracemalloc costs up to several times.
"""

from __future__ import annotations

import gc
import hashlib
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import chainer
import numpy as np
from chainer import _backprop_utils, function_node
from models import Region, build, call

from recompute_parts.array_bytes import ArrayBytes
from recompute_parts.networks import Network


class Trainee:
    """A network with its optimizer, and its state at the beginning to go back to."""

    def __init__(self, network: Network) -> None:
        np.random.seed(0)
        model = build(*network.model)
        self.model, self._loss = model.link, model.loss
        self._inputs = model.inputs(network.batch)
        self.optimizer = chainer.optimizers.MomentumSGD(lr=1e-4).setup(self.model)
        self.step()  # makes the optimizer's state
        self._first = {name: array.copy() for name, array in self._state().items()}
        self._generator = np.random.get_state()

    @property
    def input_bytes(self) -> int:
        """Arrays, and the parts of a graph's adjacency."""
        matrices = [x.matrix for x in self._inputs if hasattr(x, "matrix")]
        parts = [each for m in matrices for each in (m.data, m.indices, m.indptr)]
        return sum(getattr(x, "nbytes", 0) for x in (*self._inputs, *parts))

    @property
    def parameter_bytes(self) -> int:
        return sum(p.array.nbytes for p in self.model.params())

    @property
    def constant_bytes(self) -> int:
        """Parameters, the optimizer's state and the inputs: gradients are of the step."""
        held = (value for p in self.model.params() for value in p.update_rule.state.values())
        state = sum(value.nbytes for value in held if isinstance(value, np.ndarray))
        return self.parameter_bytes + state + self.input_bytes

    def step(
        self,
        region: Region = call,
        update: Callable[[], None] | None = None,
        between: Callable[[], None] = lambda: None,
    ) -> Any:
        """Forward, gradients cleared, backward, update: the order of ``optimizer.update(f)``."""
        loss = self._loss(*self._inputs, region=region)
        between()
        self.model.cleargrads()
        loss.backward()
        (update or self.optimizer.update)()
        return loss.array

    def reset(self) -> None:
        """Back to the beginning: parameters, their state, statistics, random numbers."""
        for name, array in self._state().items():
            array[...] = self._first[name]
        np.random.set_state(self._generator)

    def _state(self) -> dict[str, Any]:
        """Every array that a step changes, gradients apart."""
        found = dict(self.statistics())
        for name, parameter in self.model.namedparams():
            found[name] = parameter.array
            for key, value in parameter.update_rule.state.items():
                if isinstance(value, np.ndarray):
                    found[f"{name}:{key}"] = value
        return found

    def statistics(self) -> Iterator[tuple[str, Any]]:
        """What links keep besides parameters: running means and variances."""
        for path, link in self.model.namedlinks():
            for key in sorted(link._persistent):
                value = getattr(link, key)
                if isinstance(value, np.ndarray):
                    yield f"{path}/{key}", value

    # -- memory ------------------------------------------------------------------------------

    def measure(
        self, mode: AbstractContextManager[Any], region: Region
    ) -> tuple[int, int, Results]:
        """Two steps from the beginning: the second's peak, Python's objects, results of both.

        The peak is of the arrays that were allocated since the first step's start: gradients,
        saved arrays and workspace; not parameters, state and inputs. Python's objects (the
        graph's nodes, above all) are those at the end of a third step's forward pass.
        """
        self.reset()
        self.model.cleargrads()
        gc.collect()
        results: Results = {}
        tracemalloc.start(1)
        try:
            with mode:
                with ArrayBytes() as arrays:
                    for number in range(2):
                        gc.collect()
                        arrays.reset()
                        loss = self.step(region)
                        peak = arrays.peak
                        results |= self._results(number, loss)
                        del loss
                objects: list[int] = []
                self.step(region, between=lambda: objects.append(object_bytes()))
        finally:
            tracemalloc.stop()
        return peak, objects[0], results

    def _results(self, number: int, loss: Any) -> Results:
        """Copies of losses, gradients, statistics and parameters."""
        found = {"loss": loss, **dict(self.statistics())}
        for name, parameter in self.model.namedparams():
            found[f"{name}:grad"] = parameter.grad
        return {f"{number} {name}": digest(array) for name, array in found.items()}

    # -- the floor ---------------------------------------------------------------------------

    def floor(self) -> int:
        """The most that a single function, forward or backward, or the update needs at once.

        Counted for a function, above parameters, state and inputs: the arrays that it reads
        (forward: its inputs; backward: what it retained and the gradients of its outputs), what
        is allocated while it runs (outputs, gradients of its inputs, workspace: the peak that
        tracemalloc sees), and the parameters' gradients that are there. For the update: the
        gradients and what is allocated. Nothing else is counted, such as what other functions
        keep: a plan that computes the same with the same functions cannot go below it.
        """
        self.reset()
        gc.collect()
        watch = _Floor(self)
        tracemalloc.start(1)
        try:
            with watch:
                for _ in range(2):
                    watch.most = 0
                    self.step(update=watch.update)
        finally:
            tracemalloc.stop()
        return watch.most

    # -- time --------------------------------------------------------------------------------

    def seconds(self, mode: AbstractContextManager[Any], region: Region) -> tuple[float, float]:
        """Processor seconds of one step, and of its forward pass."""
        self.reset()
        gc.collect()
        turned: list[float] = []
        with mode:
            start = time.process_time()
            self.step(region, between=lambda: turned.append(time.process_time()))
            return time.process_time() - start, turned[0] - start


Results = dict[str, Any]


def object_bytes() -> int:
    """Bytes that tracemalloc follows now and that are not arrays."""
    others = tracemalloc.DomainFilter(False, np.lib.tracemalloc_domain)
    traces = tracemalloc.take_snapshot().filter_traces([others]).traces
    return sum(trace.size for trace in traces)


def digest(array: Any) -> Any:
    """A checksum of an array's bits, so that nothing large is kept while a peak is measured."""
    bits = np.ascontiguousarray(array)
    return np.frombuffer(hashlib.blake2b(bits.view(np.uint8).data).digest(), np.uint8)


def different(one: Results, other: Results) -> list[str]:
    """The losses, gradients and statistics that have other bits."""
    return [name for name in one if not np.array_equal(one[name], other.get(name))]


class _Floor:
    """Watches each function of a plain step."""

    def __init__(self, trainee: Trainee) -> None:
        self._trainee = trainee
        self._constants = {id(p.array) for p in trainee.model.params()}
        self._outside: set[int] = set()
        self.most = 0
        self._depth = 0

    def __enter__(self) -> _Floor:
        """Watch every function, forward and backward."""
        self._apply = function_node.FunctionNode.apply
        self._step = _backprop_utils.backprop_step
        apply, step, watch = self._apply, self._step, self

        def watched_apply(func: Any, inputs: Any) -> Any:
            made = [x for x in inputs if getattr(x, "creator_node", None) is not None]
            with watch._running([x.array for x in made]):
                return apply(func, inputs)

        def watched_step(func: Any, *args: Any) -> None:
            read = [func.inputs[index] for index in func._input_indexes_to_retain or ()]
            kept = [node.data for node in read if node.creator_node is not None]
            kept += func._retained_output_data or ()
            kept += [gy.array for gy in args[1] if gy is not None]
            with watch._running(kept):
                step(func, *args)

        function_node.FunctionNode.apply = watched_apply
        _backprop_utils.backprop_step = watched_step
        return self

    def __exit__(self, *exception: Any) -> None:
        function_node.FunctionNode.apply = self._apply
        _backprop_utils.backprop_step = self._step

    def update(self) -> None:
        with self._running([]):
            self._trainee.optimizer.update()

    @contextmanager
    def _running(self, arrays: list[Any]) -> Iterator[None]:
        """Note the most that is needed at once while a function runs on some arrays."""
        if self._depth:  # a function inside another one's backward
            yield
            return
        held = self._bytes(arrays)
        self._depth += 1
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        try:
            yield
        finally:
            self._depth -= 1
        _, peak = tracemalloc.get_traced_memory()
        self.most = max(self.most, held + peak - before)

    def _bytes(self, arrays: list[Any]) -> int:
        """The bytes behind arrays, and the parameters' gradients."""
        grads = [p.grad for p in self._trainee.model.params() if p.grad is not None]
        roots = {}
        for array in (*arrays, *grads):
            if array is None:
                continue
            while isinstance(array.base, np.ndarray):
                array = array.base
            roots[id(array)] = array.nbytes
        return sum(n for key, n in roots.items() if key not in self._constants)
