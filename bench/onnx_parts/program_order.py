"""A model in ONNX with its operators in the order in which a program ran them.

onnx_chainer writes operators by their distance from the inputs. Which operator is which call of a
recorded step follows from what each reads; an operator that has no call, such as a second view,
goes right before the first that reads it.
"""

from __future__ import annotations

import heapq
from math import inf
from pathlib import Path

import onnx

from onnx_parts.transferred import calls_of, matched, places
from umem.predict.recorded_problem import ForwardPass


def in_program_order(
    path: Path, names: tuple[str, ...], theirs: ForwardPass, ours: ForwardPass
) -> None:
    """Write the model anew.

    Args:
        path: the model.
        names: its names of the calls of its step, by their number.
        theirs: the forward pass of its step.
        ours: that of the recorded one.
    """
    there = places(ours)
    turn = {names[a]: there[b] for a, b in matched(calls_of(theirs), calls_of(ours)).items()}
    model = onnx.load(path)
    nodes = list(model.graph.node)
    makers = {name: place for place, node in enumerate(nodes) for name in node.output}
    before = [{makers[name] for name in node.input if name in makers} for node in nodes]
    turns = [_turn(node, turn) for node in nodes]
    for place in reversed(range(len(nodes))):
        for other in before[place]:
            if turns[other] == inf:
                turns[other] = turns[place]
    ready = [(turns[place], place) for place, needs in enumerate(before) if not needs]
    heapq.heapify(ready)
    order = []
    while ready:
        _, place = heapq.heappop(ready)
        order.append(place)
        for after, needs in enumerate(before):
            if place in needs:
                needs.discard(place)
                if not needs:
                    heapq.heappush(ready, (turns[after], after))
    del model.graph.node[:]
    model.graph.node.extend(nodes[place] for place in order)
    onnx.save(model, path)


def _turn(node: onnx.NodeProto, turn: dict[str, int]) -> float:
    return next((turn[name] for name in (node.name, *node.output) if name in turn), inf)
