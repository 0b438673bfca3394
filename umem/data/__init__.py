"""Load data when it is needed, and cache it by an eviction policy.

    order = umem.data.known_order(seed=0)
    data = umem.data.cached(dataset, memory="2GiB", disk="20GiB", order=order)
    iterator = chainer.iterators.SerialIterator(data, 20, order_sampler=order)

Users call it; chainer's reports and snapshots ask it for counters and orders. Chainer is not
needed. docs/reference/data.md has the whole picture.

    caching.py          is `cached`: a dataset that serves another one's items from memory and disk
    store.py            keeps items in shared memory, and evicts by a policy
    pages.py            stores the bytes of items in pages of one size
    shared_block.py     is the memory that all processes share, and its lock
    policies.py         chooses victims: next-use, lru or cost
    orders.py           is `known_order`: orders whose coming epochs are known
    epoch_draws.py      draws an epoch's order, the same on every NumPy
    epoch_position.py   follows the position of requests in a known order
    next_uses.py        looks up the next use of an item
    prefetch_thread.py  fetches items before they are asked for, and holds them
    loading.py          loads an item from the disk tier or from the dataset
    fingerprint.py      detects changes of a dataset
    disk_tier.py        stores items in one unnamed file
    items.py            serializes items to bytes and back, never by pickle
    codec.py            is the interface of compression
    compression.py      compresses by Blosc2
    codec_report.py     reports compression, a row for each kind of array
    counters.py         has the counters of a cache
    compressed_rows.py  stores many small rows, compressed in blocks
    sparse.py           splits SciPy's sparse matrices into arrays and into rows
    images.py           reads JPEG files as a dataset, at the size that is needed
    dataset_mixin.py    indexes as Chainer's datasets do, without Chainer

- All workers share one block of memory; none has a part of its own. zict is not used, because its
  mappings belong to one process.
- Only requests change the contents of the store, so hits are exactly the policy's.
"""

from typing import TYPE_CHECKING

from umem.data.caching import CachedDataset, cached
from umem.data.codec import Codec, RawCodec
from umem.data.codec_report import CodecReport, KindReport
from umem.data.compressed_rows import CompressedRows, RowsReport
from umem.data.compression import BloscCodec
from umem.data.counters import DataCounters
from umem.data.epoch_draws import ClassBalanced, EpochBits, Weighted, shuffle, with_replacement
from umem.data.images import JpegImages, LabeledJpegImages
from umem.data.orders import KnownOrder, known_order
from umem.data.sparse import SparseRows

__all__ = [
    "BloscCodec",
    "CachedDataset",
    "ClassBalanced",
    "Codec",
    "CodecReport",
    "CompressedRows",
    "DataCounters",
    "EpochBits",
    "JpegImages",
    "KindReport",
    "KnownOrder",
    "LabeledJpegImages",
    "RawCodec",
    "RowsReport",
    "SparseRows",
    "Weighted",
    "cached",
    "known_order",
    "shuffle",
    "with_replacement",
]

if TYPE_CHECKING:
    from umem.data.caching import reported
    from umem.data.items import pack
else:
    from umem._common.faces import face

    _, __getattr__ = face(__name__, caching="reported", items="pack")
