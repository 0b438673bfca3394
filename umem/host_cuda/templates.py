"""Rewrites the kernels of CuPy's templates as loops of one thread.

On a GPU each element has a thread, and threads of a block exchange sums. Here one thread loops over
the rows of the arrays, with the loops of ``umem_loops.h``. Input and output are source text.
"""

from __future__ import annotations

import re

from umem.errors import DeviceError

_ELEMENTS = re.compile(r"CUPY_FOR\((?P<i>\w+), _ind\.size\(\)\) \{\s*_ind\.set\((?P=i)\);")
_BLOCK_SIZE = re.compile(r"_sdata_raw\[(\d+) \* sizeof\(_type_reduce\)\]")
_LOCAL_ARRAY = re.compile(r"[\w>]\s+\w+\s*\[[^\]\n]*\]\s*(?:[=;{]|\[)")
_AT = r"(\w+)\[{0}\.get\(\)\]"
_LEAVES = re.compile(r"\b(return|break)\b")
_RETURNING = re.compile(r"^\s*#\s*define(?:[^\n\\]|\\\n)*\breturn\b", re.MULTILINE)
"""A macro that returns, as in CuPy's ``searchsorted`` kernel."""

_IN_TURN = "#undef CUPY_FOR\n#define CUPY_FOR(i, n) for (ptrdiff_t i = 0; i < (n); ++i)\n"
WAITS = re.compile(
    r"\b__sync(threads|warp)|\b__(shfl|match|reduce)_|\b__(any|all|ballot)_sync|\b__activemask"
)
"""Calls by which threads wait for one another."""


def as_loops(source: str) -> str | None:
    """Rewrite a kernel of CuPy's templates as loops of one thread.

    Returns None for other kernels, and for those whose threads wait for each other in a way that
    loops cannot follow.

    Raises:
        DeviceError: it is a reduction, but not in the form of the known versions of CuPy.
    """
    block, elements = _BLOCK_SIZE.search(source), _ELEMENTS.search(source)
    if block is not None:
        text = _reduction(source, block[1])
    elif elements is None and "CUPY_FOR" in source and "cooperative_groups.h" in source:
        if WAITS.search(source):
            return None
        text = f"{_IN_TURN}{source}"  # fusion's loops, with barriers of the grid between them
    elif elements is None:
        rows = _rows(source)
        if rows is None:
            return None
        text = rows
    elif (known := _known(source)) is not None:
        text = source[: elements.start()] + known + source[_closing(source, elements.end()) + 1 :]
    elif WAITS.search(source):
        return None
    else:
        text = _elementwise(source, elements)
    in_order = _LOCAL_ARRAY.search(text)  # each element needs it for itself
    order = "#undef UMEM_ANY_ORDER\n#define UMEM_ANY_ORDER\n" if in_order else ""
    return f'#include "umem_loops.h"\n{order}{text}'


def _elementwise(source: str, found: re.Match[str]) -> str:
    """Rewrite an elementwise kernel as a loop over elements."""
    i, end = found["i"], _closing(source, found.end())
    at, body = _AT.format("_ind"), source[found.end() : end]
    arrays = "".join(f", {name}" for name in dict.fromkeys(re.findall(at, body)))
    body = re.sub(at, rf"umem_at(\1, _row, {i} - _row.start, {i})", body)
    if "_ind.get()" in body:
        body = f"_ind.set({i}); {body}"
    if _LEAVES.search(body) or _RETURNING.search(source):  # a thread ends: others go on
        body = f"[&] {{ do {{ {body} }} while (0); }}();"
    loops = f"""\
for (UmemRows<decltype(_ind)::ndim> _row(_ind{arrays}); _row; _row.next())
        UMEM_ANY_ORDER for (ptrdiff_t {i} = _row.start; {i} < _row.stop; ++{i}) {{{body}"""
    return source[: found.start()] + loops + source[end:]


def _closing(source: str, start: int) -> int:
    """Return the position of the brace that closes the one open at a position."""
    depth = 1
    for match in re.finditer(
        r"//[^\n]*|/\*.*?\*/|\"(?:\\\\.|[^\"\\\\])*\"|[{}]", source[start:], re.DOTALL
    ):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if not depth:
            return start + match.start()
    raise DeviceError("the software GPU cannot find the end of a kernel's loop")


_REDUCTION = re.compile(
    r"  __shared__ char _sdata_raw\[.*?"
    r"_type_reduce _s = (?P<identity>[^;]*);.*?"
    r"_J \+= _J_stride\) \{\s*_in_ind\.set\(_j\);(?P<element>.*?)\n    \}\n"
    r"    _sdata\[_tid\] = _s;.*?"
    r"if \(_tid < _block_stride && _i < _out_ind\.size\(\)\) \{(?P<result>.*)\n    \}\n  \}\n\}",
    re.DOTALL,
)


def _reduction(source: str, size: str) -> str:
    """Rewrite a reduction as loops between its barriers.

    The elements that each thread adds, and the order of adding their sums, stay the same; the
    elements are read in memory order instead of thread by thread.
    """
    source = _without_branches(source)
    found = _REDUCTION.search(source)
    if found is None:
        raise DeviceError("the software GPU does not know this reduction of CuPy's")
    at = _AT.format("_in_ind")
    element = re.sub(at, r"umem_value(_of\1 + _k)", found["element"])
    arrays = dict.fromkeys(re.findall(at, found["element"]))
    given = "".join(f", {name}" for name in arrays)
    runs = "".join(f"\n  UmemRun<decltype({name})> _run{name};" for name in arrays)
    places = "".join(
        f"\n      const auto* const _of{name} = _run{name}.of({name}, _run);" for name in arrays
    )
    if "_in_ind.get()" in element:
        element = f"_in_ind.set(_j); {element}"

    def run(sum_so_far: str) -> str:
        return f"""\
UMEM_ANY_ORDER for (ptrdiff_t _k = 0; _k < _run.length; ++_k) {{
          const IndexT _J = _number + ((IndexT)_k & _step);
          const ptrdiff_t _j = _run.flat + _k * _run.flat_step;
          _type_reduce _s = {sum_so_far};{element}
          _sums.put(_run.sum + _k, _s);
        }}"""

    loops = f"""\
  UmemSums<_type_reduce> _sums;{runs}
  UmemRuns<decltype(_in_ind)::ndim> _run(_in_ind, _out_ind.size(), {size}, _block_stride{given});
  const IndexT _step = _run.width == 1 ? -1 : 0;  // the next element's number is one more
  for (ptrdiff_t _i_base = _run.from; _i_base < _run.to; _i_base += _run.width) {{
    const ptrdiff_t _all = _run.threads * _run.width;
    for (ptrdiff_t _k = _run.untouched(); _k < _all; ++_k) _sums.put(_k, {found["identity"]});
    for (_run.begin(_i_base); _run; _run.next()) {{{places}
      const IndexT _number = _run.number;
      if (_run.number < _run.threads)
        {run(found["identity"])}
      else
        {run("_sums.get(_run.sum + _k)")}
    }}
    for (ptrdiff_t _offset = _all / 2; _offset >= _run.width; _offset /= 2)
      UMEM_ANY_ORDER for (ptrdiff_t _k = 0; _k < _offset; ++_k) {{
        _type_reduce _a = _sums.get(_k), _b = _sums.get(_k + _offset);
        _sums.put(_k, REDUCE(_a, _b));
      }}
    for (ptrdiff_t _k = _run.first; _k < _run.stop; ++_k) {{
      const ptrdiff_t _i = _k;
      _type_reduce _s = _sums.get(_k - _run.first);{found["result"]}
    }}
  }}
}}"""
    return source[: found.start()] + loops + source[found.end() :]


_NUMBERS = re.compile(r"typedef (?!float16|bfloat16|complex)\w[\w ]* type_in0_raw;")
_ARGUMENT = re.compile(r"(?<=REDUCE\(a, b\) \()my_arg(min|max)(?:_float)?\(a, b\)")
_EXTREME = re.compile(r"(?<=REDUCE\(a, b\) \()my_(min|max)(_float)?\(a, b\)")
_KEEPS = {"min": "<=", "max": ">="}
_TAKES = {"min": "<", "max": ">"}


def _without_branches(source: str) -> str:
    """Rewrite a minimum or maximum without branches, so that it is vectorised."""
    if "struct min_max_st" not in source:
        return source
    source = source.replace("#define REDUCE", '#include "umem_min_max.h"\n#define REDUCE', 1)
    if not _NUMBERS.search(source):
        return source
    if found := _ARGUMENT.search(source):
        nothing = "umem_nothing<type_in0_raw>(UMEM_KEEPS)"
        source = source.replace("_type_reduce _s = _type_reduce()", f"_type_reduce _s = {nothing}")
        source = source.replace("_s = REDUCE(_s, _a)", "_s = umem_next(_s, _a, UMEM_KEEPS)")
        source = _ARGUMENT.sub("umem_arg(a, b, UMEM_KEEPS)", source)
        keeps = f"[](auto x, auto y) {{ return x {_KEEPS[found[1]]} y; }}"
        source = f"#define UMEM_KEEPS {keeps}\n{source}"
    return _EXTREME.sub(_chosen, source)


def _chosen(found: re.Match[str]) -> str:
    """Return the condition for taking y of x and y; NaN loses, or wins in ``_float``."""
    takes = f"(y {_TAKES[found[1]]} x) | (x != x)"
    if found[2]:
        takes = f"(x == x) & !(x {_KEEPS[found[1]]} y)"
    return f"umem_extreme(a, b, [](auto x, auto y) {{ return {takes}; }})"


# -- kernels that are known by name ----------------------------------------------------------------

_TAKE = """\
const ptrdiff_t _segment = rdim_ == 1 ? cdim_ : rdim_;
for (UmemRows<decltype(_ind)::ndim> _row(_ind); _row; _row.next())
  for (ptrdiff_t _from = _row.start, _to; _from < _row.stop; _from = _to) {
    const ptrdiff_t _skipped = _from % _segment;
    _to = std::min(_row.stop, _from - _skipped + _segment);
    const ptrdiff_t _base = ldim_ == 1 ? 0 : _from / (cdim_ * rdim_) * index_range_;
    if (rdim_ == 1) {
      for (ptrdiff_t i = _from; i < _to; ++i) {
        const ptrdiff_t _index = umem_at(_raw_indices, _row, i - _row.start, i);
        umem_at(_raw_out, _row, i - _row.start, i) = a[_base + umem_wrap(_index, index_range_)];
      }
    } else {  // the index is the same for all of them
      ptrdiff_t _place = umem_at(_raw_indices, _row, _from - _row.start, _from);
      _place = (_base + umem_wrap(_place, index_range_)) * rdim_ + _skipped - _from;
      UMEM_ANY_ORDER for (ptrdiff_t i = _from; i < _to; ++i)
        umem_at(_raw_out, _row, i - _row.start, i) = a[_place + i];
    }
  }"""
_SUMS_OF_BLOCKS = """\
const ptrdiff_t _blocks = (a.size() + SIZE - 1) / SIZE;
const ptrdiff_t _stop = umem_share.end(_blocks, 1);
for (ptrdiff_t _block = umem_share.begin(_blocks, 1); _block < _stop; ++_block) {
  const ptrdiff_t _end = std::min<ptrdiff_t>(a.size(), (_block + 1) * SIZE);
  O x = START;
  for (ptrdiff_t i = _block * SIZE; i < _end; ++i) x CHANGE a[i];
  b[_block] = x;
}"""
_SCAN = """\
O x = START;
const ptrdiff_t _blocks = (a.size() + SIZE - 1) / SIZE;
const ptrdiff_t _stop = std::min<ptrdiff_t>(a.size(), umem_share.end(_blocks, 1) * SIZE);
for (ptrdiff_t i = umem_share.begin(_blocks, 1) * SIZE; i < _stop; ++i) {
  if (i % SIZE == 0) x = START;
  x CHANGE a[i];
  O y = x;
  if (i >= SIZE) y CHANGE b[i / SIZE - 1];
  out[i] = y;
}"""
_NONZERO = """\
for (ptrdiff_t i = 0, x = 0; i < a.size(); ++i) {
  if (!a[i]) continue;
  O j = i;
  for (ptrdiff_t d = a.ndim - 1; d >= 0; d--) {
    const ptrdiff_t _place[] = {x, d}, _next = j / a.shape()[d];
    dst[_place] = j - _next * a.shape()[d];
    j = _next;
  }
  x++;
}"""
_KNOWN = {
    re.compile(r"void cupy_take\(.*\+ i % rdim;\s*out = a\[out_i\];", re.DOTALL): _TAKE,
    re.compile(r"void cupy_bsum_shfl\(.*\bx = a\[2\*i\];", re.DOTALL): _SUMS_OF_BLOCKS,
    re.compile(r"void cupy_scan_\w+\(.*\bx = a\[i\];.*out\[i\] = x;", re.DOTALL): _SCAN,
    re.compile(r"void cupy_nonzero_kernel_incomplete_scan\(.*dst\[ind\]", re.DOTALL): _NONZERO,
}
"""Loops for kernels whose threads wait for one another, or that divide for each element."""


def _known(source: str) -> str | None:
    """Return the loops of a known kernel, for its block size and its reduction."""
    for pattern, loops in _KNOWN.items():
        if pattern.search(source) is None:
            continue
        if loops == _TAKE and "rdim_" not in source:  # the names of CuPy 13
            return re.sub(r"(ldim|cdim|rdim|index_range)_\b", r"\1", loops)
        if loops not in (_SCAN, _SUMS_OF_BLOCKS):
            return loops
        size, start = re.search(r"block_id = i / (\d+)", source), re.search(r"O x = (\d+)", source)
        change = re.search(r"\bx ([+*]=) ", source)
        if size is None or start is None or change is None:
            return None
        elements = int(size[1]) * (2 if loops == _SUMS_OF_BLOCKS else 1)
        loops = loops.replace("SIZE", str(elements)).replace("START", start[1])
        return loops.replace("CHANGE", change[1])
    return None


_SCAN_OF_ROWS = """
  for (ptrdiff_t row = 0; row < src.size() / batch_size; ++row) {
    std::decay_t<decltype(dst[UmemCell{0, 0}.at])> x = src[UmemCell{row, 0}.at];
    for (ptrdiff_t col = 0; col < batch_size; ++col) {
      const decltype(x) next = src[UmemCell{row, col}.at];
      if (col % SIZE == 0) x = next;
      else x CHANGE next;
      dst[UmemCell{row, col}.at] = x;
    }
  }
"""
_SUMS_OF_ROWS = """
  for (ptrdiff_t row = 0; row < src_dst.size() / batch_size; ++row)
    for (ptrdiff_t col = SIZE; col < batch_size; ++col)
      if (col % SIZE != SIZE - 1)
        src_dst[UmemCell{row, col}.at] CHANGE src_dst[UmemCell{row, col / SIZE * SIZE - 1}.at];
"""
_ROWS = re.compile(
    r"void cupy_(?P<name>inclusive_batch_scan|add_scan_blocked_sum)_kernel\([^()]*\)"
    r"\{(?P<body>.*)\}",
    re.DOTALL,
)
"""CuPy's kernels that scan along an axis."""


def _rows(source: str) -> str | None:
    """Return a scan along rows as loops, row after row; None if it is another kernel."""
    found = _ROWS.search(source)
    if found is None:
        return None
    is_scan = found["name"] == "inclusive_batch_scan"
    size = re.search(r"my_block = (\d+)|pad_batch_size > (\d+)", found["body"])
    change = re.search(r"(?:temp\[index_block\]|src_dst\[dst_idx\]) ([+*]=) ", found["body"])
    if size is None or change is None:
        return None
    loops = _SCAN_OF_ROWS if is_scan else _SUMS_OF_ROWS
    loops = loops.replace("SIZE", size[1] or size[2]).replace("CHANGE", change[1])
    return source[: found.start("body")] + loops + source[found.end("body") :]


def is_known(source: str) -> bool:
    """Tell whether a kernel is known by name and has loops that several cores may share."""
    return any(loops != _NONZERO and pattern.search(source) for pattern, loops in _KNOWN.items())
