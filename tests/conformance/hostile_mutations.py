"""Changes to the file of a trace, from single bytes to what only a reader of traces would think of.

Most changes repair the count at the end, so that they are not refused for that alone.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from random import Random
from typing import Any

from hostile_bases import Base

EXTREMES: tuple[Any, ...] = (
    0, 1, 2, 511, 512, 4096, 1 << 20, (1 << 21) + 1, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 43,
    1 << 46, 1 << 53, (1 << 53) + 1, 1 << 62, (1 << 63) - 1, 1 << 63, 1 << 64, 10**30, 10**300,
    10**4200, -1, -(1 << 63), 0.0, -0.0, 0.5, 1e17, 1e18, 1e308, -1e308, 1e-320, float("nan"),
    float("inf"), float("-inf"), None, True, False, "", "0", "cpu", "step", "start", "end",
    "x" * 70_000, "\x1b[31mred\x1b[0m", "\u202eabc", "a\nb\r\tc", "\0", "\ud800", "\U0001f600",
    "$\\frac{", "<script>", "[red]", "{}", [], [[]], [0], {}, {"a": []},
)  # fmt: skip
NAMES = (
    "Dropout", "SGD", "Adam", "MaxPoolingND", "Convolution2DFunction", "BatchNormalization", "LSTM",
    "_ * 0.125", "Linear#3", "#", "", "x" * 3000, "ReLU\x1b[2J", "forward",
)  # fmt: skip
PHASES = ("forward", "backward", "update", "array", "sideways")
KINDS = ("parameter", "input", "activation", "stash", "gradient", "state", "array", "toy")
TOKENS = (
    b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b"\0", b"\xff\xfe", b"\xed\xa0\x80", b'"', b"[",
    b"]", b",", b"\n", b"{", b"}", b"[" * 3000, b'{"a":' * 3000, b"\\ud800", b"\\u0000", b"-",
    b"true", b" " * 5000, b"//", b"\xef\xbb\xbf", b'"meta":{},', b"a" * 1_200_000,
)  # fmt: skip


def mutated(base: Base, other: Base, rng: Random) -> tuple[str, bytes]:
    """The name of the change, and the file."""
    how = rng.choices((in_bytes, in_text, in_values, in_sense), (1, 1, 3, 5))[0]
    return how(base, other, rng)


def _packed(lines: list[bytes]) -> bytes:
    return gzip.compress(b"".join(line + b"\n" for line in lines), 1, mtime=0)


# -- bytes of the compressed file --------------------------------------------------------------


def in_bytes(base: Base, other: Base, rng: Random) -> tuple[str, bytes]:
    """Of the file as it is on the disk."""
    name = rng.choice(
        (
            "flip",
            "cut",
            "drop",
            "insert",
            "append",
            "zeros",
            "members",
            "flags",
            "name",
            "plain",
            "bomb",
            "wide",
            "stored",
        )
    )
    return f"bytes, {name}", _in_bytes(name, _packed(list(base.lines)), base, rng)


def _in_bytes(name: str, content: bytes, base: Base, rng: Random) -> bytes:
    data, at = bytearray(content), rng.randrange(len(content))
    if name == "flip":
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif name == "cut":
        del data[at:]
    elif name == "drop":
        del data[at : at + rng.randint(1, 50)]
    elif name == "insert":
        data[at:at] = rng.randbytes(rng.randint(1, 50))
    elif name == "append":
        data += rng.randbytes(rng.randint(1, 500))
    elif name == "zeros":
        data += bytes(rng.choice((1, 1000, 1 << 22)))
    elif name == "members":
        data += content * rng.randint(1, 3)
    elif name == "flags":
        data[3] = rng.randrange(256)
    elif name == "name":
        data[3] = 8
        data[10:10] = b"n" * rng.choice((1, 1 << 22)) + b"\0" * rng.randint(0, 1)
    elif name == "plain":
        return zlib.compress(content) if rng.random() < 0.5 else b"\n".join(base.lines)
    elif name == "bomb":
        line = rng.choice((b'["mark","a"]\n', b"\n", b"\0", b" ", b'["mark","' + b"b" * 9000))
        return gzip.compress(base.lines[0] + b"\n" + line * ((1 << 23) // len(line)), 1)
    elif name == "wide":
        return zlib.compress(content, wbits=15 + 16)
    else:
        return gzip.compress(gzip.decompress(content), 0)
    return bytes(data)


# -- bytes of the text -------------------------------------------------------------------------


def in_text(base: Base, other: Base, rng: Random) -> tuple[str, bytes]:
    """Of what the file says."""
    text = bytearray(b"".join(line + b"\n" for line in base.lines))
    names = []
    for _ in range(rng.randint(1, 3)):
        name = rng.choice(("flip", "cut", "drop", "token", "digits", "double"))
        names.append(name)
        at = rng.randrange(max(1, len(text)))
        if name == "flip" and text:
            text[at] = rng.randrange(256)
        elif name == "cut" and rng.random() < 0.3:
            del text[at:]
        elif name == "drop":
            del text[at : at + rng.randint(1, 40)]
        elif name == "token":
            text[at : at + rng.randint(0, 3)] = rng.choice(TOKENS)
        elif name == "digits":
            places = [i for i, c in enumerate(text) if 48 <= c < 58]
            if places:
                place = rng.choice(places)
                text[place : place + 1] = str(rng.randrange(10 ** rng.randint(1, 19))).encode()
        else:
            text[at:at] = text[at : at + rng.randint(1, 400)]
    return f"text, {' and '.join(names)}", gzip.compress(bytes(text), 1)


# -- values ------------------------------------------------------------------------------------


def in_values(base: Base, other: Base, rng: Random) -> tuple[str, bytes]:
    """Of single values and lines, whatever they mean."""
    lines = list(base.lines)
    names = []
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(lines)) if rng.random() < 0.9 else 0
        name = rng.choice(("value", "value", "value", "drop", "double", "swap", "move", "other"))
        names.append(name)
        if name == "value":
            lines[at] = _dumped(_replaced(json.loads(lines[at]), rng))
        elif name == "drop" and len(lines) > 2:
            del lines[at]
        elif name == "double":
            lines[at:at] = [lines[at]] * rng.choice((1, 1, 2, 50))
        elif name == "swap":
            to = rng.randrange(len(lines))
            lines[at], lines[to] = lines[to], lines[at]
        elif name == "move":
            lines.insert(rng.randrange(len(lines)), lines.pop(at))
        else:
            lines[at] = rng.choice(other.lines)
    if rng.random() < 0.8:
        lines = _recounted(lines)
    return f"values, {' and '.join(names)}", _packed(lines)


def _dumped(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _replaced(value: Any, rng: Random) -> Any:
    """The value with one part of it, at any depth, exchanged, dropped or doubled."""
    if not isinstance(value, (list, dict)) or not value or rng.random() < 0.1:
        return rng.choice(EXTREMES)
    if isinstance(value, dict):
        key = rng.choice(sorted(value))
        if rng.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: _replaced(value[key], rng)}
    at, how = rng.randrange(len(value)), rng.random()
    if how < 0.8:
        new = [_replaced(value[at], rng)]
    else:
        new = [] if how < 0.9 else [value[at]] * rng.choice((2, 2, 300))
    return [*value[:at], *new, *value[at + 1 :]]


def _recounted(lines: list[bytes]) -> list[bytes]:
    """With each end announcing what comes before it."""
    found: list[bytes] = []
    count = -1  # the first line is the header
    for line in lines:
        if line.startswith(b'["end"'):
            line, count = b'["end",%d]' % max(0, count), -1
        found.append(line)
        count += 1
    return found


# -- sense -------------------------------------------------------------------------------------

Lines = list[Any]


def in_sense(base: Base, other: Base, rng: Random) -> tuple[str, bytes]:
    """Of what events mean: most of these traces can be read."""
    lines: Lines = [json.loads(line) for line in base.lines]
    names = []
    for _ in range(rng.randint(1, 4)):
        name = rng.choice(list(SENSE))
        names.append(name)
        lines = SENSE[name](lines, rng)
    return f"sense, {' and '.join(names)}", _packed(_recounted([_dumped(x) for x in lines]))


def _some(lines: Lines, code: str, rng: Random) -> list[Any]:
    """Some or all events of a kind."""
    found = [line for line in lines[1:] if line[0] == code]
    return found if rng.random() < 0.3 else rng.sample(found, min(len(found), rng.randint(1, 5)))


def _setting(code: str, place: int, values: tuple[Any, ...]) -> Callable[[Lines, Random], Lines]:
    def change(lines: Lines, rng: Random) -> Lines:
        value = rng.choice(values)
        for line in _some(lines, code, rng):
            if len(line) > place:
                line[place] = value if rng.random() < 0.7 else rng.choice(values)
        return lines

    return change


def _larger(lines: Lines, rng: Random) -> Lines:
    """Tensors larger, and their accesses with them."""
    factor = rng.choice((2, 1000, 1 << 16, 1 << 20, 1 << 26, 1 << 30))
    chosen = {line[1] for line in _some(lines, "alloc", rng)}
    for line in lines[1:]:
        if line[0] == "alloc" and line[1] in chosen:
            line[2] *= factor
        for accesses in line[3:5] if line[0] == "op" else line[2:3] if line[0] == "hint" else ():
            for access in accesses:
                if access[0] in chosen:
                    access[1:] = [value * factor for value in access[1:]]
    return lines


def _renumbered(lines: Lines, rng: Random) -> Lines:
    """Tensors with few numbers, that come again, or with large ones."""
    shift, most = rng.choice(((0, 7), (0, 40), (1 << 62, 1 << 63), ((1 << 63) - 999, 1 << 63)))

    def new(number: int) -> int:
        return (number + shift) % most

    for line in lines[1:]:
        if line[0] in ("alloc", "free"):
            line[1] = new(line[1])
        for accesses in line[3:5] if line[0] == "op" else line[2:3] if line[0] == "hint" else ():
            for access in accesses:
                access[0] = new(access[0])
    return lines


def _reused(lines: Lines, rng: Random) -> Lines:
    """Numbers that are free are used again, as early as can be."""
    free: list[int] = []
    now: dict[int, int] = {}
    for line in lines[1:]:
        if line[0] == "alloc":
            now[line[1]] = line[1] = free.pop() if free else len(now)
        elif line[0] == "free":
            line[1] = now.get(line[1], line[1])
            free.append(line[1])
        for accesses in line[3:5] if line[0] == "op" else line[2:3] if line[0] == "hint" else ():
            for access in accesses:
                access[0] = now.get(access[0], access[0])
    return lines


def _marked(lines: Lines, rng: Random) -> Lines:
    for _ in range(rng.choice((1, 1, 3, 100))):
        label = rng.choice(("step", "start", "end", "x\x1b[1m"))
        lines.insert(rng.randint(1, len(lines) - 1), ["mark", label])
    return lines


def _hinted(lines: Lines, rng: Random) -> Lines:
    """Hints on tensors that are alive."""
    for _ in range(rng.randint(1, 6)):
        at = rng.randint(1, len(lines) - 1)
        alive = {line[1]: line[2] for line in lines[1:at] if line[0] == "alloc"}
        for line in lines[1:at]:
            if line[0] == "free":
                alive.pop(line[1], None)
        accesses = [[t, 0, alive[t]] for t in sorted(alive, key=str) if rng.random() < 0.3]
        action = rng.choice(("prefetch", "discard", "read_mostly", "preferred_location"))
        place = rng.choice(("cpu", 0, None, 1 << 62))
        lines.insert(at, ["hint", action, accesses, place, rng.random() < 0.5, rng.random() < 0.5])
    return lines


def _without(code: str) -> Callable[[Lines, Random], Lines]:
    def change(lines: Lines, rng: Random) -> Lines:
        gone = {id(line) for line in _some(lines, code, rng)}
        return [line for line in lines if id(line) not in gone]

    return change


def _header(lines: Lines, rng: Random) -> Lines:
    key = rng.choice(("backend", "backend", "meta", "sizes"))
    values = {
        "backend": ("cupy", "numpy", "model", "other", "\x1b[31m", ""),
        "meta": ({"steps": "9" * 9}, {"steps": "0"}, {"corrected": "x"}, {"a\x1b": "b" * 9000}),
        "sizes": ([1, 2], [4, 8], [2, 10**18], [1, 10**300], [8, 4], [1], [True, 2]),
    }
    lines[0][key] = rng.choice(values[key])
    return lines


def _shuffled(lines: Lines, rng: Random) -> Lines:
    low, high = sorted(rng.sample(range(1, len(lines)), 2))
    part = lines[low:high]
    rng.shuffle(part)
    return [*lines[:low], *part, *lines[high:]]


def _crowded(lines: Lines, rng: Random) -> Lines:
    """Operations with many accesses."""
    for line in _some(lines, "op", rng)[:3]:
        place = rng.choice((3, 4))
        line[place] = [list(access) for access in line[place] * rng.choice((2, 50, 1000))]
    return lines


BYTES = (0, 1, 3, 511, 1 << 20, (1 << 21) - 1, 1 << 31, 1 << 40, 1 << 43, 1 << 46, 1 << 62)
SENSE: dict[str, Callable[[Lines, Random], Lines]] = {
    "larger": _larger, "renumbered": _renumbered, "reused": _reused, "marked": _marked,
    "hinted": _hinted, "header": _header, "shuffled": _shuffled, "crowded": _crowded,
    "phase": _setting("op", 2, PHASES[:-1]), "name": _setting("op", 1, NAMES),
    "kind": _setting("alloc", 3, KINDS[:-1]), "uploaded": _setting("alloc", 5, (True, False)),
    "label": _setting("alloc", 4, (*NAMES, "MaxPoolingND.indexes", "W.fp32")),
    "bytes": _setting("alloc", 2, BYTES), "workspace": _setting("op", 9, (*BYTES, None)),
    "flops": _setting("op", 5, (0, 1, 1 << 40, (1 << 63) - 1)),
    "traffic": _setting("op", 6, (0, 1, 1 << 40, (1 << 63) - 1)),
    "pattern": _setting("op", 7, ("stream", "random", "strided")),
    "seconds": _setting("op", 8, (0, 0.0, 1e-300, 1e17, 1, None)),
    "reads": _setting("op", 3, ([],)), "writes": _setting("op", 4, ([],)),
    "stack": _setting("alloc", 6, ([], ["a"] * 500, ["x\x1b[2J:1 f", ""])),
    "no frees": _without("free"), "no marks": _without("mark"), "no operations": _without("op"),
}  # fmt: skip
