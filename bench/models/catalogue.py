"""All families, and the one way to build a model of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from models import (
    attention,
    chainer_links,
    densenet,
    gcn,
    generative,
    perceptron,
    pspnet,
    recurrent,
    residual,
    unet,
)
from models.model import Model, Whole

FAMILIES = (
    residual, chainer_links, densenet, unet, pspnet, generative, recurrent, attention, perceptron,
    gcn,
)  # fmt: skip
MODELS: dict[str, dict[str, Callable[[], Model]]] = {
    name: sizes for family in FAMILIES for name, sizes in family.MODELS.items()
}


def build(name: str, size: str) -> Model:
    """Make a model with fresh parameters, drawn from NumPy's global generator.

    Its loss is called as a link, as the models of programs are.

    Raises:
        KeyError: there is no such model, or no such size of it.
    """
    made = MODELS[name][size]()
    return replace(made, loss=Whole(made.link, made.loss))
