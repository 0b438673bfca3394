"""A framework of one's own: one record, and everything general works on its objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from processes import printed

import umem
from umem.errors import HintError
from umem.memory import arrays_in
from umem.trace.frameworks import Framework, names, register
from umem.trace.recording.recorder import active

MIB = 1 << 20


class ToyTensor:
    """What the toy framework keeps arrays in."""

    def __init__(self, data: Any) -> None:
        self.data = data


def double(x: ToyTensor) -> ToyTensor:
    """The toy framework's only operation."""
    return ToyTensor(x.data * 2)


class ToySource:
    """Tells recorders of `double` while they are active."""

    def start(self) -> None:
        global double
        plain = self._plain = double

        def recorded(x: ToyTensor) -> ToyTensor:
            made = plain(x)
            for recorder in active():
                reads = [recorder.access(x.data, "activation", "double", uploaded=True)]
                writes = recorder.follow([made.data], "activation", "double")
                recorder.emit_op(
                    "double", "forward", reads, writes, made.data.size, None, "stream", None, None
                )
            return made

        double = recorded

    def stop(self) -> None:
        global double
        double = self._plain  # type: ignore[assignment]

    _plain: Callable[[ToyTensor], ToyTensor] = double


@pytest.fixture
def toy() -> Iterator[Framework]:
    framework = Framework(
        "Toy", ToySource(), lambda x: [x.data] if isinstance(x, ToyTensor) else None
    )
    forget = register(framework)
    yield framework
    forget()


def test_hints_reach_into_what_a_framework_keeps_arrays_in(toy: Framework) -> None:
    with umem.virtual_gpu("v100-16gb"), umem.managed() as memory:
        tensors = {"x": ToyTensor(memory.xp.ones(MIB, "uint8"))}
        assert umem.prefetch(tensors, "cpu") == umem.advise(tensors, "read_mostly") == MIB
        assert umem.location(tensors).last_prefetch == "cpu"


def test_a_recording_has_the_operations_of_a_framework(toy: Framework) -> None:
    import numpy as np

    plain = double
    with umem.record() as recorder:
        x = ToyTensor(np.ones(MIB, "uint8"))
        double(double(x))
    (first, second) = recorder.trace.ops
    assert first.name == "double" and first.writes == second.reads
    assert recorder.trace.peak_bytes == 3 * MIB
    assert double is plain


def test_a_framework_is_named_where_nothing_was_heard_until_it_is_forgotten(toy: Framework) -> None:
    assert names() == "Chainer or Toy"


def test_a_framework_that_was_forgotten_is_a_stranger() -> None:
    assert names() == "Chainer"
    with pytest.raises(HintError, match="ToyTensor holds no arrays"):
        list(arrays_in(ToyTensor(None)))


def test_a_framework_may_come_and_go_while_something_is_recorded() -> None:
    plain = double
    with umem.record():
        forget = register(Framework("Toy", ToySource(), lambda x: None))
        assert double is not plain
        forget()
        assert double is plain


@pytest.mark.thorough
def test_a_program_that_imports_chainer_alone_may_give_hints_on_its_objects() -> None:
    code = (
        "import umem.compat; umem.compat.install()\n"
        "import sys, chainer, numpy, umem\n"
        "from umem.memory import arrays_in\n"
        "assert 'umem.chainer' not in sys.modules\n"
        "link = chainer.links.Linear(3, 2)\n"
        "print(len(list(arrays_in(link))))"
    )
    assert printed("-c", code) == "4\n"
