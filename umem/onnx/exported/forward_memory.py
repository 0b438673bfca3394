"""Memory that forward allocates: its tensors, its readers, and when it is freed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from umem.onnx.exported.onnx_graph import OnnxGraph, TensorType
from umem.onnx.exported.strides import Ints
from umem.trace.events import OUTSIDE, Access, Event, Free


@dataclass
class PlacedTensor:
    """A tensor of the graph, and the memory that it is in.

    Attributes:
        kind: its shape and type.
        memory: the number of the trace's tensor that it is, or is a view of.
        memory_bytes: the bytes of that.
        strides: where its elements lie, in elements.
        source: as in a `TapeEntry`: the call that made it, or that none has.
        rank: how many calls on a tape are before it, at most.
    """

    kind: TensorType
    memory: int
    memory_bytes: int
    strides: Ints
    source: int = OUTSIDE
    rank: int = 0

    @property
    def access(self) -> Access:
        """Return the access to all of its memory."""
        return Access(self.memory, 0, self.memory_bytes)


class ForwardMemory:
    """Counts uses of memory, to free what neither forward nor backward needs any more."""

    def __init__(self, graph: OnnxGraph) -> None:
        self._outputs = frozenset(graph.outputs)
        self._uses: dict[str, int] = {}
        self._waiting: dict[int, int] = {}  # uses in forward that are to come
        self._held: set[int] = set()
        self._alive: dict[int, None] = {}
        for node in graph.nodes:
            if graph.runs_on_host(node):
                continue  # it asks for a shape, and reads no memory
            for name in node.inputs:
                self._uses[name] = self._uses.get(name, 0) + 1

    def made(self, memory: int) -> None:
        """Note memory that forward allocated."""
        self._alive[memory] = None

    def note(self, name: str, memory: int) -> None:
        """Note that a tensor is in some memory."""
        self._waiting[memory] = self._waiting.get(memory, 0) + self._uses.get(name, 0)
        if name in self._outputs:
            self.hold(memory)

    def hold(self, memory: int) -> None:
        """Keep memory until backward is over."""
        self._held.add(memory)

    def gone(self, read: Sequence[PlacedTensor], made: Sequence[PlacedTensor]) -> Iterator[Event]:
        """Yield frees of memory that a call read or made for the last time."""
        for value in read:
            if value.memory in self._waiting:
                self._waiting[value.memory] -= 1
        for memory in dict.fromkeys(value.memory for value in (*read, *made)):
            is_over = memory in self._alive and not self._waiting.get(memory)
            if is_over and memory not in self._held:
                del self._alive[memory]
                yield Free(memory)

    def over(self) -> Iterator[Event]:
        """Yield frees of all memory that is left after backward."""
        for memory in self._alive:
            yield Free(memory)
        self._alive.clear()
