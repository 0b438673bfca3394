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
    rule, states, _ = OPTIMIZERS[optimizer]
    for name, parameter in parameters.items():
        if name not in gradients.of:
            continue
        gradient = gradients.whole(gradients.of[name])
        whole = Access(parameter.tensor, 0, parameter.nbytes)
        state = []
        for label in states:
            state.append(Access(gradients.fresh, 0, parameter.nbytes))
            yield Alloc(gradients.fresh, parameter.nbytes, "state", f"{rule}.{label}")
            gradients.fresh += 1
        yield _update(optimizer, (whole, *state), gradient)
    yield Mark("step")


def _update(optimizer: OptimizerName, written: tuple[Access, ...], gradient: Access) -> Op:
    rule, _, count = OPTIMIZERS[optimizer]
    reads = (*written, gradient)
    traffic = sum(access.stop for access in (*reads, *written))
    flops = count * gradient.stop // 4
    return Op(rule, "update", reads, written, flops, traffic, workspace_bytes=0)
