"""Where sources of memory lie."""

from __future__ import annotations

import itertools

import pytest

from umem.host_cuda.memory_sources import PlainSource, UntouchedSource

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize("kind", [PlainSource, UntouchedSource])
def test_addresses_ascend_with_time_whatever_the_sizes(kind: type[PlainSource]) -> None:
    source = kind()
    sizes = [512, 4 * MIB, 300, 1 * MIB, 100 * KIB, 512, 7 * MIB, 2 * KIB] * 4
    addresses = [source.take(nbytes) or 0 for nbytes in sizes]
    pairs = zip(itertools.pairwise(addresses), sizes, strict=False)
    assert all(low + nbytes <= high for (low, high), nbytes in pairs)
    for address, nbytes in zip(addresses[::2], sizes[::2], strict=True):
        source.give(address, nbytes)
    later = source.take(512) or 0
    assert later > addresses[-1]
    for address, nbytes in [*zip(addresses[1::2], sizes[1::2], strict=True), (later, 512)]:
        source.give(address, nbytes)
    assert source.given_bytes == 0
