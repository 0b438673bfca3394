"""The report of a quantised model: bytes before and after, and why layers stay in floats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from umem.chainer.quantization.exchanging import own_names
from umem.units import format_bytes


@dataclass(frozen=True)
class LayerReport:
    """One layer with parameters.

    Attributes:
        path: such as ``/first``.
        kind: the class of its present link.
        float_bytes: bytes of its parameters before.
        quantized_bytes: bytes of its present arrays; the same if it stays.
        stays: the reason why it stays in floats; None if it does not.
    """

    path: str
    kind: str
    float_bytes: int
    quantized_bytes: int
    stays: str | None


@dataclass(frozen=True)
class QuantizationReport:
    """The layers of a quantised model; a shared weight is counted in its first layer.

    Attributes:
        layers: in the order of the model's links.
    """

    layers: tuple[LayerReport, ...]

    @property
    def float_bytes(self) -> int:
        """Return the bytes of all parameters in the original model."""
        return sum(layer.float_bytes for layer in self.layers)

    @property
    def quantized_bytes(self) -> int:
        """Return the bytes of the same layers in the quantised model."""
        return sum(layer.quantized_bytes for layer in self.layers)

    @property
    def stays(self) -> dict[str, str]:
        """Map the paths of layers that stay in floats to the reason."""
        return {layer.path: layer.stays for layer in self.layers if layer.stays is not None}

    def __str__(self) -> str:
        """Format a row for each layer, and the totals."""
        width = max(len(layer.path) for layer in self.layers)
        lines = [
            f"{layer.path:{width}}  {format_bytes(layer.float_bytes):>10} -> "
            f"{format_bytes(layer.quantized_bytes):>10}  {layer.kind}"
            + (f": {layer.stays}" if layer.stays else "")
            for layer in self.layers
        ]
        share = self.quantized_bytes / max(1, self.float_bytes)
        lines.append(
            f"{'all':{width}}  {format_bytes(self.float_bytes):>10} -> "
            f"{format_bytes(self.quantized_bytes):>10}  {share:.2f} of the bytes"
        )
        return "\n".join(lines)


def report_of(
    links: Mapping[str, Any], made: Mapping[Any, Any], left: Mapping[str, str]
) -> QuantizationReport:
    """Make the report of a conversion.

    Args:
        links: the float model's, by path.
        made: the quantised link of each that has one.
        left: the reason why one stays, by path.
    """
    rows: list[LayerReport] = []
    before: set[int] = set()  # already counted: old parameters, present parameters and weights
    now: set[int] = set()
    for path, link in links.items():
        if not own_names(link):
            continue
        layer = made.get(link)
        parameters = [getattr(link, name) for name in own_names(link)]
        was = sum(_bytes_of(one, link, layer) for one in parameters if id(one) not in before)
        before.update(map(id, parameters))
        if layer is None:
            size = sum(_bytes_of(one, link, None) for one in parameters if id(one) not in now)
            now.update(map(id, parameters))
        else:
            size = layer.nbytes - (layer.weight.nbytes if id(layer.weight) in now else 0)
            now.add(id(layer.weight))
        rows.append(LayerReport(path, type(layer or link).__name__, was, size, left.get(path)))
    return QuantizationReport(tuple(rows))


def _bytes_of(parameter: Any, link: Any, layer: Any) -> int:
    """Return a parameter's bytes; of an uninitialised W, the bytes it will have."""
    if parameter.is_initialized:
        return int(parameter.array.nbytes)
    return 4 * prod(layer.weight.shape) if layer is not None and parameter is link.W else 0
