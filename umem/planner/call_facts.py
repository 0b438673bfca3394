"""Function calls of a forward pass with their backward, of which a planning problem is made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from umem.planner.node import Node


@dataclass(frozen=True)
class CallFacts:
    """One call of a forward pass, and its backward.

    Attributes:
        label: the function's name.
        nbytes: bytes of the memory of its outputs that the call itself allocated.
        cost: of recomputing it.
        grad_bytes: bytes of the gradient of its outputs.
        alias: the call whose output its output is a view of.
        stash_bytes: bytes of function state that its backward reads and that can be recomputed.
        drawn_bytes: bytes of function state drawn at random, which is never drawn a second time.
        mask_bytes, packed_bytes: the part of ``drawn_bytes`` that is a dropout's mask, and the
            mask's bytes at one bit an element.
        again: True if it may be recomputed; otherwise its outputs are never dropped.
        workspace_bytes, backward_workspace_bytes: temporary memory while it or its backward runs.
        stays_bytes: bytes of the parameters' gradients that its backward is the first to make.
        needs: the calls whose outputs its backward reads.
        dead: True if backward does not reach it.
        backward_cost: of its backward; None: twice its cost.
    """

    label: str
    nbytes: int
    cost: float
    grad_bytes: int
    alias: int | None = None
    stash_bytes: int = 0
    drawn_bytes: int = 0
    mask_bytes: int = 0
    packed_bytes: int = 0
    again: bool = True
    workspace_bytes: int = 0
    backward_workspace_bytes: int = 0
    stays_bytes: int = 0
    needs: tuple[int, ...] = ()
    dead: bool = False
    backward_cost: float | None = None


def held_of(calls: Sequence[CallFacts]) -> dict[int, int]:
    """Return by call the bytes that stay as long as the graph: of calls never recomputed.

    They are a call's function state and outputs; where its outputs are views, the outputs of the
    base, under the base's number. Other calls are missing.
    """
    found: dict[int, int] = {}
    for index, call in enumerate(calls):
        if call.again:
            continue
        found[index] = found.get(index, 0) + (0 if call.dead else call.stash_bytes)
        root = index
        while (base := calls[root].alias) is not None:
            root = base
        if root == index or calls[root].again:
            found[root] = found.get(root, 0) + calls[root].nbytes
    return found


def nodes_of(
    calls: Sequence[CallFacts],
    names: Sequence[str],
    edges: Iterable[tuple[int, int]],
    held: Mapping[int, int],
    *,
    packs: bool,
    moves: bool,
) -> list[Node]:
    """Make the graph's nodes of calls.

    Args:
        calls: in the order of forward.
        names: the nodes' names, by call.
        edges: pairs of calls: the second reads an output of the first.
        held: the calls whose bytes count in the constant (see `held_of`); their nodes have none.
        packs: a dropout's mask is kept as bits; packing and unpacking it takes workspace.
        moves: values may be offloaded; a call that must not be recomputed keeps its outputs, there
            or in memory, until its own backward.
    """
    summed = _summed(calls, edges)
    nodes = []
    for index, call in enumerate(calls):
        mask = call.mask_bytes if packs else 0
        no_stash = call.dead or call.alias is not None or index in held
        own = (index,) if moves and not call.again else ()
        needs = dict.fromkeys((*(() if call.dead else call.needs), *own))
        node = Node(
            name=names[index],
            nbytes=0 if index in held else call.nbytes,
            cost=call.cost,
            alias_of=None if call.alias is None else names[call.alias],
            recomputable=call.again,
            stash_bytes=0 if no_stash else call.stash_bytes,
            grad_bytes=0 if call.dead or index in summed else call.grad_bytes,
            workspace_bytes=call.workspace_bytes + mask + mask // 4,  # a byte an element to pack
            backward_workspace_bytes=call.backward_workspace_bytes + mask,
            stays_bytes=0 if call.dead else call.stays_bytes,
            needs=tuple(names[i] for i in needs),
            backward_cost=0 if call.dead else call.backward_cost,
        )
        nodes.append(node)
    return nodes


def _summed(calls: Sequence[CallFacts], edges: Iterable[tuple[int, int]]) -> frozenset[int]:
    """Return the calls whose outputs `Sum` alone reads: their gradient is a broadcast view."""
    users: dict[int, set[str]] = {}
    for source, user in edges:
        users.setdefault(source, set()).add(calls[user].label)
    return frozenset(source for source, labels in users.items() if labels == {"Sum"})


def floor_of(
    nodes: Sequence[Node],
    calls: Sequence[CallFacts],
    edges: Iterable[tuple[str, str]],
    forward_bytes: int,
) -> tuple[int, str]:
    """Return the most bytes that one call needs at once, forward or backward, and its name.

    No plan needs less. The gradients of parameters that backward has made by then are included.
    Without calls, 0 bytes and ``"nothing"``.
    """
    size = {node.name: 0 if node.alias_of else node.nbytes for node in nodes}
    grad = {node.name: node.grad_bytes or 0 for node in nodes}
    inputs: dict[str, list[str]] = {node.name: [] for node in nodes}
    for source, user in edges:
        inputs[user].append(source)
    floor = (0, "nothing")
    stayed = 0
    for call, node in reversed(list(zip(calls, nodes, strict=True))):
        stayed += node.stays_bytes
        read = inputs[node.name]
        forward = sum(size[n] for n in read) + size[node.name] + node.stash_bytes
        forward += node.workspace_bytes + forward_bytes
        backward = 0
        if not call.dead:
            backward = sum(size[n] for n in node.needs or ()) + node.stash_bytes
            backward += grad[node.name] + sum(grad[n] for n in read)
            backward += node.backward_workspace_bytes + stayed
        floor = max(floor, (max(forward, backward), node.name))
    return floor
