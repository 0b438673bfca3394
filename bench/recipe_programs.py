"""The programs of bench/recipes.py: one a recipe of docs/how-to/recipes.md, over chunks on the GPU.

The page has each program for data on the host; here is the same one for data that is copied to the
GPU first, in managed or hybrid memory, and back at the end. A chunk is an array of its own, of
6 MiB, about a twelfth of VRAM as in the page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import umem
from umem.units import MIB

PAGE = Path(__file__).resolve().parents[1] / "docs" / "how-to" / "recipes.md"
CHUNK_BYTES = 6 * MIB
ROUNDS = {"k-means": 5, "conjugate gradients": 10}
HALO = 9
Data = dict[str, Any]
Chunks = Sequence[tuple[Any, ...]]
Loop = Callable[[Chunks], Iterable[tuple[Any, ...]]]
"""Given the arrays that each pass of a loop uses, loops over them; again where it is looped over
again."""


# -- data on the host --------------------------------------------------------------------------
# By the names that the page's code gives the arrays, of so many bytes together.


def random(rows: int, *shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).random((rows, *shape), np.float32)


def tall_matrix(nbytes: int, width: int) -> Data:
    rows = random(nbytes // 2 // (4 * width), width)
    right = random(width, width, seed=1) / width
    return {"rows": rows, "right": right, "product": np.empty_like(rows)}


def keys(nbytes: int, width: int) -> Data:
    return {"keys": random(nbytes // 4)}


def signals(nbytes: int, width: int) -> Data:
    return {"signals": random(nbytes // (8 * width), 2 * width).view(np.complex64)}


def banded(nbytes: int, width: int) -> Data:
    """Make a symmetric matrix of ``width`` diagonals, with the largest one in the middle."""
    from scipy import sparse

    size, offsets = nbytes // (8 * width + 4), np.arange(width) - width // 2
    values = np.where(offsets, -1.0, width)
    return {"n": size, "matrix": sparse.diags(values, offsets, (size, size), "csr", np.float32)}


def points(nbytes: int, width: int) -> Data:
    found = random(nbytes // (4 * width), width)
    found += np.arange(len(found))[:, None] % 8
    return {"points": found}


def image(nbytes: int, width: int) -> Data:
    picture = random(nbytes // 2 // (4 * width), width)
    return {"image": picture, "edges": np.empty_like(picture)}


def prices(nbytes: int, width: int) -> Data:
    return {"prices": np.empty(nbytes // 4, np.float32)}


def table(nbytes: int, width: int) -> Data:
    return {"table": random(nbytes // 2 // (4 * width), width)}


# -- the programs over chunks ------------------------------------------------------------------


def cut(x: Any) -> list[Any]:
    """Cut a host array into chunks."""
    step = max(1, CHUNK_BYTES // x[:1].nbytes)
    return [x[start : start + step] for start in range(0, len(x), step)]


def fetch(chunks: Iterable[Any], to: Any) -> Any:
    """Copy chunks back into a host array."""
    start = 0
    for chunk in chunks:
        to[start : start + len(chunk)] = chunk.get()
        start += len(chunk)
    return to


def multiply(cp: Any, data: Data, loop: Loop) -> Any:
    right, rows = cp.asarray(data["right"]), [cp.asarray(part) for part in cut(data["rows"])]
    products = [cp.empty_like(part) for part in rows]
    for part, to in loop(list(zip(rows, products, strict=True))):
        cp.matmul(part, right, out=to)
    return fetch(products, data["product"])


def sort(cp: Any, data: Data, loop: Loop) -> Any:
    """Sort chunks, cut all of them at the same keys, and sort what lies between two of these."""
    keys = data["keys"]
    runs = [cp.asarray(part) for part in cut(keys)]
    bounds = np.quantile(keys[:: len(keys) // 4096], np.linspace(0, 1, len(runs) + 1)[1:-1])
    found = []
    for (run,) in loop([(run,) for run in runs]):
        run.sort()
        found.append(cp.searchsorted(run, cp.asarray(bounds, "f4")))
    cuts = [np.r_[0, one.get(), len(run)] for one, run in zip(found, runs, strict=True)]
    buckets = [
        tuple(run[at[number] : at[number + 1]] for run, at in zip(runs, cuts, strict=True))
        for number in range(len(runs))
    ]
    end = 0
    for pieces in loop(buckets):
        bucket = cp.concatenate(pieces)
        bucket.sort()
        keys[end : end + len(bucket)] = bucket.get()
        end += len(bucket)
    return keys


def transform(cp: Any, data: Data, loop: Loop) -> Any:
    chunks = [cp.asarray(part) for part in cut(data["signals"])]
    for (rows,) in loop([(chunk,) for chunk in chunks]):
        rows[...] = cp.fft.fft(rows, axis=1)
    return fetch(chunks, data["signals"])


def solve(cp: Any, data: Data, loop: Loop) -> Any:
    """Solve with the matrix in chunks of rows; the vectors get their memory before it."""
    from cupyx.scipy import sparse
    from cupyx.scipy.sparse import linalg

    n, matrix = data["n"], data["matrix"]
    vectors = [cp.empty(n, np.float32) for _ in range(6)]
    step = CHUNK_BYTES * n // (4 * matrix.nnz)  # of the values; there are as many indices
    parts = [sparse.csr_matrix(matrix[start : start + step]) for start in range(0, n, step)]
    del vectors
    chunks = loop([(part.data, part.indices, part.indptr) for part in parts])

    def times(p: Any) -> Any:
        return cp.concatenate([part @ p for part, _ in zip(parts, chunks, strict=True)])

    operator = linalg.LinearOperator(matrix.shape, times, dtype=np.float32)
    x, _ = linalg.cg(operator, cp.ones(n, np.float32), maxiter=ROUNDS["conjugate gradients"])
    return x.get()


def cluster(cp: Any, data: Data, loop: Loop) -> Any:
    """Find the centres of eight clusters by k-means."""
    chunks = loop([(cp.asarray(part),) for part in cut(data["points"])])
    centres, one_hot = cp.asarray(data["points"][:8]), cp.eye(8, dtype=np.float32)
    for _ in range(ROUNDS["k-means"]):
        squares, twice, sums, counts = (centres**2).sum(axis=1), 2 * centres.T, 0, 0
        for (part,) in chunks:
            own = one_hot[(squares - part @ twice).argmin(axis=1)]
            sums, counts = sums + own.T @ part, counts + own.sum(axis=0)
        centres = sums / counts[:, None]
    return centres.get()


def find_edges(cp: Any, data: Data, loop: Loop) -> Any:
    """Filter an image whose chunks have rows of their neighbours at both ends."""
    from cupyx.scipy import ndimage

    picture, pairs, insides = data["image"], [], []
    step = max(1, CHUNK_BYTES // picture[:1].nbytes)
    for start in range(0, len(picture), step):
        low, stop = max(0, start - HALO), min(len(picture), start + step)
        chunk = cp.asarray(picture[low : stop + HALO])
        pairs.append((chunk, cp.empty((stop - start, picture.shape[1]), np.float32)))
        insides.append(slice(start - low, stop - low))
    for (rows, to), inside in zip(loop(pairs), insides, strict=True):
        smooth = ndimage.gaussian_filter(rows, 2)
        slope = cp.hypot(ndimage.sobel(smooth, 0), ndimage.sobel(smooth, 1))
        to[...] = slope[inside]
    return fetch((to for _, to in pairs), data["edges"])


def simulate(cp: Any, data: Data, loop: Loop) -> Any:
    """Draw prices by the page's kernel."""
    held: Data = {"cp": cp}
    exec(page_code("Monte Carlo").program.partition("\n\n")[0], held)
    draw, first = held["draw"], 0
    chunks = [cp.empty(len(part), np.float32) for part in cut(data["prices"])]
    for (to,) in loop([(chunk,) for chunk in chunks]):
        draw((len(to) // 256 + 1,), (256,), (to, first, len(to)))
        first += len(to)
    return fetch(chunks, data["prices"])


def standardise(cp: Any, data: Data, loop: Loop) -> Any:
    """Keep dask's chunks on the GPU for both passes."""
    import dask
    import dask.array as da

    with dask.config.set(scheduler="synchronous"):
        step = max(1, CHUNK_BYTES // data["table"][:1].nbytes)
        chunks = da.from_array(data["table"], chunks=(step, -1)).map_blocks(cp.asarray).persist()
        loop([(part,) for part in dask.compute(*chunks.to_delayed().ravel())])
        mean, deviation = dask.compute(chunks.mean(axis=0), chunks.std(axis=0))
        return ((chunks - mean) / deviation).map_blocks(cp.asnumpy).compute()


# -- ways to loop ------------------------------------------------------------------------------


class Prefetched:
    """Loops over chunks that come to the GPU ahead, and go to the host behind, on a stream."""

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """Yield the chunks, each fetched while the one before it is worked on."""
        import cupy as cp

        side, here = cp.cuda.Stream(non_blocking=True), cp.cuda.get_current_stream()
        ready = self._fetch(0, side)
        for number, arrays in enumerate(self._chunks):
            here.wait_event(ready)
            if number + 1 < len(self._chunks):
                ready = self._fetch(number + 1, side)
            yield arrays
            side.wait_event(here.record())
            umem.prefetch(arrays, "cpu", stream=side)

    def _fetch(self, number: int, stream: Any) -> Any:
        umem.prefetch(self._chunks[number], stream=stream)
        return stream.record()


def on_the_host(chunks: Chunks) -> Chunks:
    """Leave chunks on the host, where the GPU reads them over the bus."""
    umem.preset(chunks, "streaming")
    return chunks


HINTS: dict[str, Loop] = {
    "lookahead": umem.lookahead, "prefetch": Prefetched, "streaming": on_the_host,
}  # fmt: skip


# -- the recipes -------------------------------------------------------------------------------


class Code(NamedTuple):
    """The code of a recipe in the page: imports and data, and the program after a blank line."""

    data: str
    program: str

    @property
    def imports(self) -> str:
        lines = self.data.splitlines()
        return "\n".join(line for line in lines if line.startswith(("import ", "from ")))


def page_code(name: str) -> Code:
    """Return the code of a recipe in the page."""
    page = PAGE.read_text(encoding="utf-8")
    section = page.partition(f"\n## {RECIPES[name].heading}\n")[2]
    data, _, program = section.partition("```py\n")[2].partition("```")[0].partition("\n\n")
    return Code(data, program)


@dataclass(frozen=True)
class Recipe:
    """A recipe of the page.

    Attributes:
        heading: of its section in docs/how-to/recipes.md.
        widths: of rows, or entries a row: that of the page's figures, and another one.
        make: makes the data on the host, of so many bytes and of a width.
        result: the name of the result in the page's code.
        on_gpu: the program over chunks.
        hint: what managed memory is told, one of `HINTS`.
        stays_up_to: the data, in times VRAM, up to which the page advises to leave all of it on the
            GPU, because what the loop allocates has room beside it; None: the page advises blocks.
    """

    heading: str
    widths: tuple[int, int]
    make: Callable[[int, int], Data]
    result: str
    on_gpu: Callable[[Any, Data, Loop], Any]
    hint: str
    stays_up_to: float | None = None

    def advised(self, of_vram: float) -> str:
        """Return the way that the page advises for data of so many times VRAM."""
        stays = self.stays_up_to is not None and of_vram <= self.stays_up_to
        return "hybrid" if stays else "blocks"


RECIPES = {
    "product": Recipe(
        "A matrix larger than the card", (1024, 640), tall_matrix, "product", multiply, "streaming"
    ),
    "sort": Recipe("A sort", (1, 1), keys, "ordered", sort, "lookahead", 0.67),
    "transform": Recipe(
        "Fourier transforms of rows", (1024, 500), signals, "signals", transform, "streaming"
    ),
    "conjugate gradients": Recipe(
        "A sparse system", (125, 63), banded, "x", solve, "lookahead", 0.8
    ),
    "k-means": Recipe("k-means", (16, 20), points, "centres", cluster, "streaming", 0.67),
    "image": Recipe("An image", (4096, 2500), image, "edges", find_edges, "streaming"),
    "Monte Carlo": Recipe("Monte Carlo", (1, 1), prices, "prices", simulate, "streaming"),
    "dask": Recipe("dask.array", (16, 40), table, "result", standardise, "streaming", 0.8),
}
