"""A naive model of unified memory, one 2 MiB block at a time, to hold `Residency` against.

It was written from a description of the driver before the model was read, and imports nothing
from umem. Two rules were corrected afterwards, from NVIDIA's API reference (cudaMemAdvise and
cudaMemPrefetchAsync): a preferred location does not keep a prefetch from moving the data, and a
prefetch of memory that was never written populates it where it goes. Every rule is a few lines of
dictionaries; it is slow on purpose.

Models: first-in-first-out eviction by last migration, population or prefetch; duplicates of
read_mostly blocks; zero-copy; discard; prefetch both ways; VRAM that shrinks.
Does not model: anything smaller than a block, time, or more than one GPU.
"""

from __future__ import annotations

from collections import OrderedDict


class Oracle:
    """Where every block is, and what moved since the beginning."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.resident: OrderedDict[int, None] = OrderedDict()  # oldest arrival first
        self.host: set[int] = set()  # blocks with valid bytes in host memory
        self.read_mostly: set[int] = set()
        self.prefers_cpu: set[int] = set()
        self.accessed_by: set[int] = set()
        self.populated = 0  # came into being in VRAM, nothing copied
        self.migrated_in = 0
        self.migrated_out = 0  # evicted with a copy
        self.dropped = 0  # left VRAM without one: the host copy was valid
        self.released = 0
        self.discarded = 0
        self.prefetched_out = 0  # sent to the host with a copy
        self.zero_copy = 0  # touches served over the bus
        self.hits = 0
        self.faults = 0  # of populated and migrated_in: those that no prefetch made

    def touch(self, blocks: range, write: bool) -> None:
        """Access blocks on the GPU, one by one: count a hit, a read over the bus, or a fault."""
        for block in blocks:
            if block in self.resident:
                self.hits += 1
                if write:
                    self.host.discard(block)  # the copies collapse
            elif self.reads_over_the_bus(block):
                self.zero_copy += 1
                self.host.add(block)  # a first touch makes the pages in host memory
            else:
                self.faults += 1
                self.bring_in(block, keeps_host_copy=block in self.read_mostly and not write)

    def reads_over_the_bus(self, block: int) -> bool:
        if self.capacity == 0:
            return True
        if block in self.read_mostly:  # duplication overrides the other two
            return False
        if block in self.prefers_cpu:
            return True
        return block in self.accessed_by and block in self.host

    def bring_in(self, block: int, keeps_host_copy: bool) -> None:
        """Make a block resident, after the oldest ones have made room for it."""
        while len(self.resident) >= self.capacity:
            self.evict_oldest()
        if block in self.host:
            self.migrated_in += 1
            if not keeps_host_copy:
                self.host.remove(block)
        else:
            self.populated += 1
        self.resident[block] = None

    def evict_oldest(self) -> None:
        block, _ = self.resident.popitem(last=False)
        if block in self.host:
            self.dropped += 1
        else:
            self.migrated_out += 1  # clean or not: there is no dirty bit
            self.host.add(block)

    def prefetch(self, blocks: range) -> None:
        for block in blocks:
            if block in self.resident:
                self.resident.move_to_end(block)
                self.hits += 1
            elif self.capacity > 0:
                self.bring_in(block, keeps_host_copy=block in self.read_mostly)

    def prefetch_out(self, blocks: range) -> None:
        for block in blocks:
            if block in self.resident:
                del self.resident[block]
                if block in self.host:
                    self.dropped += 1
                else:
                    self.prefetched_out += 1
            self.host.add(block)

    def discard(self, blocks: range) -> None:
        for block in blocks:
            if block in self.resident:
                del self.resident[block]
                self.discarded += 1
            self.host.discard(block)

    def release(self, blocks: range) -> None:
        for block in blocks:
            if block in self.resident:
                del self.resident[block]
                self.released += 1
            self.host.discard(block)
            for advice in (self.read_mostly, self.prefers_cpu, self.accessed_by):
                advice.discard(block)

    def advise(self, name: str, blocks: range) -> None:
        getattr(self, name).update(blocks)

    def unset(self, name: str, blocks: range) -> None:
        getattr(self, name).difference_update(blocks)
        if name == "read_mostly":  # one copy stays: the one in VRAM where there is one
            self.host -= {block for block in blocks if block in self.resident}

    def resize(self, capacity: int) -> None:
        """Plain device memory took VRAM from the managed blocks, or gave some back."""
        self.capacity = capacity
        while len(self.resident) > capacity:
            self.evict_oldest()

    def conserved(self) -> bool:
        came = self.populated + self.migrated_in
        left = self.migrated_out + self.dropped + self.released + self.discarded
        return came - left - self.prefetched_out == len(self.resident)
