"""What happened to blocks of managed memory, counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Moves:
    """Blocks that moved, were made or were given up; what a clock turns into time.

    ``dropped`` blocks left VRAM without a copy, because the host's was valid.
    """

    hit: int = 0
    migrated_in: int = 0
    populated: int = 0
    migrated_out: int = 0
    dropped: int = 0
    prefetched_out: int = 0
    discarded: int = 0
    released: int = 0
    remote: int = 0

    def add(self, other: Moves) -> None:
        """Add another's counts to these."""
        self.hit += other.hit
        if other.migrated_in or other.populated:
            self.migrated_in += other.migrated_in
            self.populated += other.populated
        if other.migrated_out or other.dropped or other.remote:
            self.migrated_out += other.migrated_out
            self.dropped += other.dropped
            self.remote += other.remote
        if other.prefetched_out or other.discarded or other.released:
            self.prefetched_out += other.prefetched_out
            self.discarded += other.discarded
            self.released += other.released
