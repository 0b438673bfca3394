"""Traces: what is saved is what is loaded, and a file that is broken says where, and only that."""

from __future__ import annotations

import gzip
import json
import os
import stat
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import traces

import umem
from umem.cli import main
from umem.errors import TraceError
from umem.trace import Access, Alloc, Checker, Event, Free, Hint, Mark, Op, Trace
from umem.trace import file as trace_file
from umem.trace.analysis import analyse
from umem.trace.events import LEAF, TapeEntry

HEADER = {"format": "umem-trace", "version": 7, "backend": "numpy", "meta": {}}
GOOD: list[Any] = [
    HEADER,
    ["alloc", 0, 100, "parameter", "W", True, []],
    ["alloc", 1, 50, "activation", "y", False, ["net.py:7 forward", "train.py:3 main"]],
    ["op", "Linear", "forward", [[0, 0, 100]], [[1, 0, 50]], 10, 150, "stream", 0.5, None, None,
     None, "float32"],
    ["hint", "prefetch", [[0, 0, 100]], "cpu", False, True],
    ["free", 1],
    ["mark", "backward", None],
    ["mark", "step", None],
    ["end", 7],
]  # fmt: skip
EXAMPLE = Trace(
    [
        Alloc(0, 100, "parameter", "W", True),
        Alloc(1, 50, "activation", "y", False, ("net.py:7 forward", "train.py:3 main")),
        Op(
            "Linear",
            "forward",
            (Access(0, 0, 100),),
            (Access(1, 0, 50),),
            10,
            150,
            "stream",
            0.5,
            None,
        ),
        Hint("prefetch", (Access(0, 0, 100),), "cpu", False, True),
        Free(1),
        Mark("backward"),
        Mark("step"),
    ]
)


def write(path: Path, lines: list[Any]) -> Path:
    text = "".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines)
    path.write_bytes(gzip.compress(text.encode("utf-8", "surrogatepass"), mtime=0))
    return path


def message(path: Path) -> str:
    """What loading says; anything but a TraceError that names the file fails the test."""
    with pytest.raises(TraceError) as caught:
        Trace.load(path)
    assert path.name in str(caught.value)
    return str(caught.value)


# -- saving and loading ------------------------------------------------------------------------


@pytest.mark.thorough
@given(traces())
@settings(deadline=None)
def test_what_is_saved_is_what_is_loaded(trace: Trace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = trace.save(Path(folder) / "x.trace")
        assert umem.Trace.load(path) == trace
        again = trace.save(Path(folder) / "y.trace")
        assert path.read_bytes() == again.read_bytes()  # no time, no name in it


def test_the_documented_text_is_the_format(tmp_path: Path) -> None:
    assert Trace.load(write(tmp_path / "x", GOOD)) == EXAMPLE
    lines = gzip.decompress(EXAMPLE.save(tmp_path / "y").read_bytes()).decode().splitlines()
    assert [json.loads(line) for line in lines] == GOOD


def test_what_a_tape_has_is_in_no_file(tmp_path: Path) -> None:
    entry = TapeEntry(4, (LEAF,), (0,), True, 50)
    events = [
        e._replace(entry=entry)
        if isinstance(e, Op)
        else Mark("backward", 4)
        if e == Mark("backward")
        else e
        for e in EXAMPLE.events
    ]
    assert Trace.load(Trace(events).save(tmp_path / "x")) == EXAMPLE
    older = [4, [-2], [0], True, True, False, 50]
    lines = [[*line[:10], older] if line[0] == "op" else line for line in GOOD[1:]]
    lines = [
        ["mark", "backward", 4] if line[:2] == ["mark", "backward"] else line for line in lines
    ]
    assert Trace.load(write(tmp_path / "y", [HEADER, *lines])) == EXAMPLE


def test_an_empty_trace_is_a_trace(tmp_path: Path) -> None:
    assert Trace.load(Trace([]).save(str(tmp_path / "x"))) == Trace([])
    assert (Trace([]).peak_bytes, Trace([]).step_count, len(Trace([]))) == (0, 0, 0)


def test_a_trace_prints_as_one_line() -> None:
    assert repr(EXAMPLE) == "<Trace of numpy: 7 events, 1 operation, 1 step>"
    assert str(Trace([], "cupy")) == "<Trace of cupy: 0 events, 0 operations, 0 steps>"
    large = Trace(EXAMPLE.events * 1000)
    assert repr(large) == "<Trace of numpy: 7,000 events, 1,000 operations, 1,000 steps>"


@pytest.mark.parametrize("act", [lambda wrong: umem.replay(wrong, "t4"), analyse])
def test_a_path_in_the_place_of_a_trace_is_told_how_to_load_it(act: Any) -> None:
    for path in ("b4.umem.gz", Path("b4.umem.gz")):
        with pytest.raises(TraceError, match=r"umem\.Trace\.load\('b4\.umem\.gz'\) reads it"):
            act(path)
    for wrong, name in ((None, "NoneType"), ([], "list"), (umem.record(), "Recorder")):
        with pytest.raises(TraceError, match=rf"a trace is needed, .*; got {name}$"):
            act(wrong)


def test_saving_does_not_overwrite_without_force(tmp_path: Path) -> None:
    path = Trace([Mark("old")]).save(tmp_path / "x")
    with pytest.raises(TraceError, match="exists; pass force=True"):
        EXAMPLE.save(path)
    assert Trace.load(path) == Trace([Mark("old")])
    EXAMPLE.save(path, force=True)
    assert Trace.load(path) == EXAMPLE
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize(
    "name", ["missing/x", "file/x", "folder", "n" * 300, "null\0byte", "folder/../file/x/y"]
)
def test_a_place_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for force in (False, True):
        with pytest.raises(TraceError):
            EXAMPLE.save(tmp_path / name, force=force)
    with pytest.raises(TraceError):
        Trace.load(tmp_path / name)
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_path_without_a_name_cannot_be_written() -> None:
    with pytest.raises(TraceError):
        EXAMPLE.save("/", force=True)


def test_what_is_no_file_is_not_replaced_by_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # a device needs privileges; a pipe does not
    with pytest.raises(TraceError, match="is not a regular file"):
        EXAMPLE.save(tmp_path / "pipe", force=True)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, MemoryError, TypeError])
def test_an_interrupted_save_keeps_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interruption: type[BaseException]
) -> None:
    path = Trace([Mark("old")]).save(tmp_path / "x")

    def writelines(file: gzip.GzipFile, lines: Iterable[bytes]) -> None:
        file.write(next(iter(lines)))
        raise interruption

    monkeypatch.setattr(gzip.GzipFile, "writelines", writelines)
    with pytest.raises(interruption):
        EXAMPLE.save(path, force=True)
    monkeypatch.undo()
    assert Trace.load(path) == Trace([Mark("old")])
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


# -- broken files ------------------------------------------------------------------------------


def test_what_is_wrong_with_a_file_is_said_in_plain_words(tmp_path: Path) -> None:
    said = "cannot be read as a trace: there is no such file or folder"
    assert message(tmp_path / "nowhere.trace") == f"{tmp_path / 'nowhere.trace'} {said}"
    assert message(tmp_path / "no" / "x.trace").endswith(said)
    assert message(tmp_path).endswith("cannot be read as a trace: it is a folder")
    assert message(tmp_path / ("n" * 300)).endswith("cannot be read as a trace: file name too long")
    with pytest.raises(TraceError, match=r"cannot be read as a trace: .*embedded null"):
        Trace.load("a\0b")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "x.trace is not a umem trace (line 1: it is empty)"),
        (gzip.compress(b"", mtime=0), "x.trace is not a umem trace (line 1: it is empty)"),
        (b'""', "x.trace cannot be read as a trace: it is not compressed with gzip, as every"),
        (b"import chainer\n", "it is not compressed with gzip, as every trace is"),
        (
            gzip.compress(b"step 1\n", mtime=0),
            "x.trace is not a umem trace (line 1: it is not JSON)",
        ),
        (gzip.compress(b"\xff\n", mtime=0), "x.trace is not a umem trace (line 1: it is not JSON)"),
        (
            gzip.compress(json.dumps(HEADER).encode() + b"\n{", mtime=0),
            "x.trace, line 2: it is not JSON",
        ),
        (gzip.compress(b"x" * 99, mtime=0)[:-8] + b"\0" * 8, "its compressed data are damaged"),
        (gzip.compress(b"x" * 99, mtime=0)[:-4] + b"\0" * 4, "its compressed data are damaged"),
        (b"\x1f\x8b\x07" + b"\0" * 40, "its compressed data are damaged"),
        (b"\x1f\x8b\x08" + b"\0" * 7 + b"\xff" * 40, "its compressed data are damaged"),
    ],
)
def test_what_is_wrong_with_the_contents_is_said_in_plain_words(
    tmp_path: Path, content: bytes, said: str
) -> None:
    (tmp_path / "x.trace").write_bytes(content)
    found = message(tmp_path / "x.trace")
    assert said in found
    assert "Errno" not in found and "Expecting" not in found


def test_where_a_trace_cannot_be_written_is_said_in_plain_words(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"cannot write .*: there is no such file or folder$"):
        EXAMPLE.save(tmp_path / "no" / "x")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"\xff\xfe\xfd",
        b"hello",
        b"[]\n",
        b"null\n",
        b'"x"\n',
        b"NaN\n",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"\0" * 100,
        b"1" * 5000,
    ],
)
def test_what_is_no_trace_inside_is_refused_in_line_1(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.trace"
    path.write_bytes(gzip.compress(content, mtime=0))
    assert "line 1" in message(path)


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"},
        {"format": None},
        {"version": "1"},
        {"version": True},
        {"version": 0},
        {"version": -1},
        {"version": 1.0},
        {"version": float("inf")},
        {"version": float("nan")},
        {"version": None},
        {"version": []},
        {"backend": None},
        {"backend": 3},
        {"meta": None},
        {"meta": []},
        {"meta": [["a", "b"]]},
        {"meta": {"a": 1}},
        {"meta": {"a": None}},
    ],
)
def test_a_header_of_another_kind_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    assert "line 1" in message(write(tmp_path / "x", [{**HEADER, **change}, ["end", 0]]))


@pytest.mark.parametrize("key", HEADER)
def test_a_header_with_a_part_missing_is_refused(tmp_path: Path, key: str) -> None:
    header = {k: v for k, v in HEADER.items() if k != key}
    assert "line 1" in message(write(tmp_path / "x", [header, ["end", 0]]))


@pytest.mark.parametrize("version", [8, 99, 10**30])
def test_a_newer_version_says_so(tmp_path: Path, version: int) -> None:
    text = message(write(tmp_path / "x", [{**HEADER, "version": version}, "anything"]))
    assert f"version {version}" in text
    assert "update umem" in text


BROKEN = [
    "", "nonsense", "[", "null", "3", "[]", "{}", '"alloc"', "[3]", "[null]", "[[]]", '[["alloc"]]',
    '{"mark": 0, "x": 1}', '{"free": 0}', '["mark", "\xff', "[" * 100_000, '["mark","a"] ["x"]',
    '["what"]', '["end"]', '["end", true]', '["end", 2, 3]', '["end", 2.0]', '["end", 1]',
    '["end", 10]', '["end", "2"]', '["end", null]',
    '["alloc"]', '["alloc", 5]', '["alloc", 5, 10, "array"]', '["alloc",5,10,"array","x",true,1]',
    '["alloc",5,10,"array","x",true,"at"]', '["alloc",5,10,"array","x",true,[1]]',
    '["alloc", 0, 10, "array", "twice", false]', '["alloc", 5, -1, "array", "x", false]',
    '["alloc", 5, true, "array", "x", false]', '["alloc", true, 1, "array", "x", false]',
    '["alloc", 5, 1.0, "array", "x", false]', '["alloc", 5.0, 1, "array", "x", false]',
    '["alloc", 5, NaN, "array", "x", false]', '["alloc", 5, Infinity, "array", "x", false]',
    '["alloc", 5, "10", "array", "x", false]', '["alloc", "5", 10, "array", "x", false]',
    '["alloc", [], 10, "array", "x", false]', '["alloc", {}, 10, "array", "x", false]',
    '["alloc", null, 10, "array", "x", false]', '["alloc", 5, null, "array", "x", false]',
    '["alloc", -1, 10, "array", "x", false]', '["alloc", 5, 9223372036854775808, "array", "x"]',
    '["alloc", 5, 10, "toy", "x", false]', '["alloc", 5, 10, [], "x", false]',
    '["alloc", 5, 10, "array", 7, false]', '["alloc", 5, 10, "array", null, false]',
    '["alloc", 5, 10, "array", "x", 1]', '["alloc", 5, 10, "array", "x", null]',
    '["free"]', '["free", 9]', '["free", true]', '["free", 0.0]', '["free", []]', '["free", null]',
    '["free", 0, 1]', '["free", "0"]',
    '["op", "F", "forward", [], []', '["op", "F", "forward"]', '["op", "F", "forward", 3, []]',
    '["op", "F", "sideways", [], []]', '["op", "F", null, [], []]', '["op", 7, "forward", [], []]',
    '["op", "F", "forward", "abc", []]', '["op", "F", "forward", {"abc": 1}, []]',
    '["op", "F", "forward", [[9, 0, 1]], []]', '["op", "F", "forward", [], [[9, 0, 1]]]',
    '["op", "F", "forward", [[0, 0]], []]', '["op", "F", "forward", [[0, 0, 1, 2]], []]',
    '["op", "F", "forward", [[0, -1, 1]], []]', '["op", "F", "forward", [[0, 2, 1]], []]',
    '["op", "F", "forward", [[0, 0, 101]], []]', '["op", "F", "forward", [[0, 0, 1.5]], []]',
    '["op", "F", "forward", [[0, false, true]], []]', '["op", "F", "forward", [[true, 0, 1]], []]',
    '["op", "F", "forward", [[0.0, 0, 1]], []]', '["op", "F", "forward", [["0", 0, 1]], []]',
    '["op", "F", "forward", [[[0], 0, 1]], []]', '["op", "F", "forward", [[0, NaN, 1]], []]',
    '["op", "F", "forward", [], [], -1]', '["op", "F", "forward", [], [], true]',
    '["op", "F", "forward", [], [], null]', '["op", "F", "forward", [], [], 1.0]',
    '["op", "F", "forward", [], [], 1' + "0" * 400 + "]",
    '["op", "F", "forward", [], [], 0, -1]', '["op", "F", "forward", [], [], 0, "1"]',
    '["op", "F", "forward", [], [], 0, 0, "zigzag"]', '["op", "F", "forward", [], [], 0, 0, null]',
    '["op", "F", "forward", [], [], 0, 0, "stream", NaN]',
    '["op", "F", "forward", [], [], 0, 0, "stream", Infinity]',
    '["op", "F", "forward", [], [], 0, 0, "stream", -1.0]',
    '["op", "F", "forward", [], [], 0, 0, "stream", true]',
    '["op", "F", "forward", [], [], 0, 0, "stream", "1"]',
    '["op", "F", "forward", [], [], 0, 0, "stream", 1e999]',
    '["op", "F", "forward", [], [], 0, 0, "stream", 1' + "0" * 400 + "]",
    '["op", "F", "forward", [], [], 0, 0, "stream", null, -1]',
    '["op", "F", "forward", [], [], 0, 0, "stream", null, true]',
    '["hint", "prefetch"]', '["hint", "wish", []]', '["hint", [], []]', '["hint", "prefetch", 3]',
    '["hint", "prefetch", [[9, 0, 1]]]', '["hint", "prefetch", [[0, 0, 101]]]',
    '["hint", "prefetch", [], "moon"]', '["hint", "prefetch", [], -1]',
    '["hint", "prefetch", [], true]', '["hint", "prefetch", [], 1.0]',
    '["hint", "prefetch", [], null, 1]', '["hint", "prefetch", [], null, false, null]',
    '["mark"]', '["mark", 3]', '["mark", null]', '["mark", ["step"]]', '["mark", "backward", 1, 1]',
]  # fmt: skip


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    for line in BROKEN:
        lines = [*GOOD[:3], line, *GOOD[4:]]
        assert "line 4: " in message(write(tmp_path / "x", lines)), line[:60]


def test_a_dead_tensor_cannot_be_used_or_freed_again(tmp_path: Path) -> None:
    for use in ('["op","F","forward",[[1,0,50]],[]]', '["hint","discard",[[1,0,5]]]', '["free",1]'):
        text = message(write(tmp_path / "x", [*GOOD[:6], use, ["end", 6]]))
        assert "line 7: tensor 1 is" in text
        assert "not alive" in text


def test_a_number_may_be_used_again_after_it_was_freed(tmp_path: Path) -> None:
    again = Trace([Alloc(0, 1, "array", "a"), Free(0), Alloc(0, 2, "array", "b")])
    assert Trace.load(again.save(tmp_path / "x")) == again


def test_what_follows_the_end_is_refused(tmp_path: Path) -> None:
    for rest in (["mark", "x"], "", "garbage"):
        assert "continues after" in message(write(tmp_path / "x", [*GOOD, rest]))


def test_a_line_without_end_is_refused_before_it_fills_the_memory(tmp_path: Path) -> None:
    bomb = json.dumps(HEADER).encode() + b'\n["mark", "' + b"a" * (20 << 20)
    path = tmp_path / "x"
    path.write_bytes(gzip.compress(bomb, mtime=0))
    assert "line 2" in message(path)


def test_text_cut_after_any_line_or_inside_one_is_truncated(tmp_path: Path) -> None:
    text = "".join(json.dumps(line) + "\n" for line in GOOD)
    for stop in range(len(text) - 1):
        path = tmp_path / "x"
        path.write_bytes(gzip.compress(text[:stop].encode(), 1))
        message(path)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    content = EXAMPLE.save(tmp_path / "whole").read_bytes()
    path = tmp_path / "cut"
    for stop in range(len(content)):
        path.write_bytes(content[:stop])
        text = message(path)
        assert stop == 0 or "truncated" in text or "cannot be read" in text


# -- fuzzing -----------------------------------------------------------------------------------


VIEWS = (["report"], ["report", "--json"], ["replay", "--vram", "64MiB"])


def loads_or_refuses(content: bytes, commands: Sequence[list[str]] = ()) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.trace"
        path.write_bytes(content)
        for words in commands:
            result = CliRunner().invoke(main, [*words, str(path)])
            assert result.exit_code in (0, 1, 3), result.exception
            assert result.exit_code != 1 or "Error: " in result.output, result.exception
            assert result.output.replace("\n", "").isprintable()
        try:
            trace = Trace.load(path)
        except TraceError as error:
            assert "x.trace" in str(error)
            return
        checker = Checker()
        for event in trace.events:
            checker.check(event)
        assert trace.peak_bytes >= 0
        assert len(trace.lifetimes()) >= 0
        saved = trace.save(Path(folder) / "again")
        assert Trace.load(saved) == trace
        umem.replay(trace, "t4", "hybrid", "64MiB")


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_changed_text_loads_or_is_refused(data: st.DataObject) -> None:
    text = bytearray("".join(json.dumps(x) + "\n" for x in GOOD).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text) - 1))
        stop = data.draw(st.integers(at, min(len(text), at + 5)))
        text[at:stop] = data.draw(st.binary(max_size=3) | st.sampled_from([b'"', b"[", b"1e9"]))
    loads_or_refuses(gzip.compress(bytes(text), 1))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["alloc", "free", "op", "cpu", "forward", 0, 1, 100, 2**70, 1e300]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


def replaced(draw: Any, value: Any) -> Any:
    """The value with one part of it, at any depth, exchanged, dropped or doubled."""
    if not value or not isinstance(value, (list, dict)) or draw(st.integers(0, 3)) == 0:
        return draw(JSON)
    if isinstance(value, dict):
        key = draw(st.sampled_from(sorted(value)))
        return {**value, key: replaced(draw, value[key])}
    at = draw(st.integers(0, len(value) - 1))
    how = draw(st.sampled_from(("change", "change", "change", "drop", "double")))
    new = [replaced(draw, value[at])] if how == "change" else [value[at]] * (how == "double") * 2
    return [*value[:at], *new, *value[at + 1 :]]


@pytest.mark.thorough
@given(st.data())
@settings(max_examples=250, deadline=None)
def test_changed_values_load_or_are_refused(data: st.DataObject) -> None:
    lines = list(GOOD)
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.integers(0, len(lines) - 1))
        lines[at] = replaced(data.draw, lines[at])
    text = "".join(json.dumps(line) + "\n" for line in lines)
    loads_or_refuses(gzip.compress(text.encode(), 1), VIEWS)


# -- what a trace knows ------------------------------------------------------------------------


@pytest.mark.thorough
@given(traces(), st.data())
@settings(deadline=None)
def test_workspace_comes_from_the_calibration_pass_and_nothing_else_does(
    trace: Trace, data: st.DataObject
) -> None:
    sizes = [data.draw(st.integers(0, 99)) for _ in trace.ops]
    measured = iter(sizes)
    other: list[Event] = [
        e._replace(workspace_bytes=next(measured), flops=0) if isinstance(e, Op) else e
        for e in trace.events
        if not isinstance(e, Mark)
    ]
    whole = trace.with_workspace(Trace(other))
    assert [op.workspace_bytes for op in whole.ops] == sizes
    assert whole.backend == trace.backend
    assert [e._replace(workspace_bytes=None) if isinstance(e, Op) else e for e in whole.events] == [
        e._replace(workspace_bytes=None) if isinstance(e, Op) else e for e in trace.events
    ]


def test_a_calibration_of_other_operations_is_refused() -> None:
    ops = [Op("A", "forward", (), (), workspace_bytes=1), Op("B", "forward", (), (), 0)]
    one = Trace([ops[0], ops[1]])
    for other in ([ops[0]], [ops[1], ops[0]], [*ops, ops[0]], [ops[0]._replace(phase="update")]):
        with pytest.raises(TraceError, match=r"calibration pass ran \d operations"):
            one.with_workspace(Trace(list(other)))


def test_a_pass_that_measured_times_is_no_calibration() -> None:
    timed = Trace([Op("A", "forward", (), (), host_seconds=1.0)])
    with pytest.raises(TraceError, match='measure="workspace"'):
        timed.with_workspace(timed)


# -- within limits -----------------------------------------------------------------------------


def packed(path: Path, *parts: bytes) -> Path:
    path.write_bytes(gzip.compress(json.dumps(HEADER).encode() + b"\n" + b"".join(parts)))
    return path


def test_no_more_events_are_read_than_allowed(tmp_path: Path) -> None:
    path = packed(tmp_path / "x", b'["mark","a"]\n' * 10, b'["end",10]\n')
    assert len(Trace.load(path, max_events=10)) == 10
    with pytest.raises(TraceError, match=r"x has more than 9 events; max_events=, or --max-ev"):
        Trace.load(path, max_events=9)


@pytest.mark.parametrize(
    "several", [{"sizes": [4, 8]}, {"axes": ["batch", "length"], "sizes": [[4, 16], [8, 16]]}]
)
def test_of_a_file_of_several_sizes_the_largest_is_read(
    several: dict[str, Any], tmp_path: Path
) -> None:
    sections = [["mark", "small"], ["end", 1], ["mark", "a"], ["mark", "b"], ["end", 2]]
    path = write(tmp_path / "x", [{**HEADER, "version": 4, **several}, *sections])
    assert Trace.load(path).events == [Mark("a"), Mark("b")]


def test_operations_have_no_more_accesses_than_as_many_events_may(tmp_path: Path) -> None:
    op = ["op", "F", "forward", [[0, 0, 1]] * 1000, []]
    path = write(tmp_path / "x", [HEADER, ["alloc", 0, 1, "array", "a"], op, ["end", 2]])
    assert len(Trace.load(path, max_events=250).events[1].reads) == 1000
    with pytest.raises(TraceError, match="more than 996 accesses, 4 for each of the 249 events"):
        Trace.load(path, max_events=249)


def test_no_more_text_is_read_than_allowed(tmp_path: Path) -> None:
    path = packed(tmp_path / "x", b'["mark","aaaaaaaa"]\n' * 1000, b'["end",1000]\n')
    text = len(gzip.decompress(path.read_bytes()))
    assert len(Trace.load(path, max_bytes=text)) == 1000
    with pytest.raises(TraceError, match=r"x holds more than .*; max_bytes=, or --max-bytes"):
        Trace.load(path, max_bytes=text - 1)


def test_what_could_not_be_read_again_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"cannot be saved: an event takes more than 1\.0 MiB"):
        Trace([Mark("a" * (1 << 20))]).save(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_what_umem_records_is_within_the_limits() -> None:
    from umem.trace.recording.kept_steps import EVENT_LIMIT

    assert trace_file.MAX_EVENTS >= EVENT_LIMIT * 5 // 4
    assert trace_file.MAX_BYTES >= 200 * EVENT_LIMIT


@pytest.mark.parametrize(
    ("rest", "said"),
    [(b"x", "data are damaged"), (gzip.compress(b'["end",0]\n', mtime=0), "after its end")],
)
def test_what_is_appended_to_the_file_is_refused(tmp_path: Path, rest: bytes, said: str) -> None:
    path = EXAMPLE.save(tmp_path / "x")
    path.write_bytes(path.read_bytes() + rest)
    assert said in message(path)


@pytest.mark.parametrize("kind", ["k" * 1_000_000, "\x1b[31m" * 100_000, "\n" * 1000])
def test_what_a_file_says_makes_no_long_and_no_strange_message(tmp_path: Path, kind: str) -> None:
    for line in (
        ["alloc", 0, 1, kind, "x"],
        [kind],
        ["op", kind, "forward", [[0, 0, 1]], []],
        ["mark", kind * 20],
        ["hint", kind, []],
        ["alloc", kind, 1, "array", "x"],
    ):
        text = message(write(tmp_path / "x", [HEADER, line, ["end", 1]]))
        assert text.isprintable() and len(text) < 1000


def test_a_name_of_a_file_is_printed_without_its_control_characters(tmp_path: Path) -> None:
    name = "x\x1b[31m\n\u202e"
    for act in (Trace.load, EXAMPLE.save):
        (tmp_path / name).mkdir(exist_ok=True)
        with pytest.raises(TraceError) as caught:
            act(tmp_path / name)
        assert str(caught.value).isprintable() and "x\\x1b[31m\\n\\u202e" in str(caught.value)


@pytest.mark.parametrize("field", ["nbytes", "workspace_bytes"])
def test_bytes_that_no_machine_has_are_refused_by_line(tmp_path: Path, field: str) -> None:
    def lines(*figures: int) -> list[Any]:
        events: list[Any] = []
        for number, figure in enumerate(figures):
            alloc = ["alloc", number, figure if field == "nbytes" else 1, "array", "x"]
            op = ["op", "F", "forward", [], [], 0, 0, "stream", None, figure]
            events += [alloc, ["free", number]] if field == "nbytes" else [op, ["mark", "m"]]
        return [HEADER, *events, ["end", len(events)]]

    most = 1 << 46
    assert len(Trace.load(write(tmp_path / "x", lines(most, most)))) == 4
    assert f"line 4: {field} is {most + 1} bytes" in message(
        write(tmp_path / "x", lines(most, most + 1))
    )
    assert f"line {2 * 256 + 2}: the sum of all allocations up to here" in message(
        write(tmp_path / "x", lines(*[most] * 256, 1))
    )


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_does_not_have_are_refused_anywhere(tmp_path: Path, number: str) -> None:
    for line in (f'["mark", {number}]', f'["op","F","forward",[],[],0,0,"stream",{number}]'):
        assert "line 2: it is not JSON" in message(write(tmp_path / "x", [HEADER, line]))


def test_text_of_another_encoding_is_refused(tmp_path: Path) -> None:
    text = "".join(json.dumps(line) + "\n" for line in GOOD)
    for encoding in ("utf-16", "utf-32", "utf-8-sig"):
        (tmp_path / "x").write_bytes(gzip.compress(text.encode(encoding)))
        assert "line 1: it is not JSON" in message(tmp_path / "x")
