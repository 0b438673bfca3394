"""The optimizer's update of an exported step: what a rule of Chainer's reads, keeps and does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from umem.onnx.exported.tape_backward import Gradients
from umem.trace.events import Access, Alloc, Event, Mark, Op

OptimizerName = Literal["adam", "momentum", "sgd", "none"]
OPTIMIZERS: dict[str, tuple[str, tuple[str, ...], int]] = {
    "adam": ("Adam", ("m", "v"), 10),
    "momentum": ("MomentumSGD", ("v",), 4),
    "sgd": ("SGD", (), 2),
}
"""For each optimizer: Chainer's rule of that name, its states, and its operations an element."""


def update_events(
    optimizer: OptimizerName, parameters: Mapping[str, Alloc], gradients: Gradients
) -> Iterator[Event]:
    """Yield the update of every parameter with a gradient; nothing for ``"none"``.

    A state is as large as its parameter, and of its type.
    """
    if optimizer == "none":
        return
    rule, states, count = OPTIMIZERS[optimizer]
    fresh = gradients.fresh
    for name, parameter in parameters.items():
        if name in gradients.of:
            gradient, nbytes = gradients.whole(gradients.of[name]), parameter.nbytes
            written = [Access(parameter.tensor, 0, nbytes)]
            for label in states:
                yield Alloc(fresh, nbytes, "state", f"{rule}.{label}")
                written.append(Access(fresh, 0, nbytes))
                fresh += 1
            reads = (*written, gradient)
            traffic = sum(access.stop for access in (*reads, *written))
            flops = count * gradient.stop // 4
            yield Op(rule, "update", reads, tuple(written), flops, traffic, workspace_bytes=0)
    yield Mark("step")
