"""Recording with stacks: each tensor knows the lines of the user's that made it."""

from __future__ import annotations

import gc
import importlib
import inspect
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from processes import printed

import umem
from umem._common.stacks import USER_DEPTH, Frame
from umem.devices.virtual import VirtualGPU
from umem.errors import StateError
from umem.trace import Alloc
from umem.trace.recording.recorder import active

xp = VirtualGPU("t4").xp

chainer = pytest.importorskip("umem.chainer").chainer
F, L = chainer.functions, chainer.links
HERE = str(Path(__file__))


def here(offset: int = 0) -> str:
    """The caller's own place, some lines on, as a stack tells it in this folder."""
    frame: FrameType | None = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    code = frame.f_back.f_code
    path = Path(code.co_filename)
    file = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{file}:{frame.f_back.f_lineno + offset} {code.co_name}"


def allocs(recorder: Any) -> list[Alloc]:
    return [event for event in recorder.trace.events if isinstance(event, Alloc)]


def test_a_stack_is_the_users_places_innermost_first() -> None:
    def inner() -> tuple[Any, str]:
        return xp.ones(10), here()

    with umem.record(stacks=True) as recorder:
        (array, place), outer = inner(), here()
    (alloc,) = allocs(recorder)
    assert alloc.stack[:2] == (place, outer)
    assert all(".py:" in text for text in alloc.stack)
    del array


def test_without_stacks_an_allocation_has_none() -> None:
    with umem.record() as recorder:
        xp.ones(10)
    assert [alloc.stack for alloc in allocs(recorder)] == [()]


class Model(chainer.Chain):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.first = L.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        self.place = here(1)
        return F.sum(F.relu(self.first(x)))


def train(model: Any, optimizer: Any) -> dict[str, str]:
    found = {"forward": here(1)}
    loss = model(np.ones((2, 4), "f"))
    model.cleargrads()
    found["backward"] = here(1)
    loss.backward()
    found["update"] = here(1)
    optimizer.update()
    return found


def test_each_kind_of_tensor_has_the_line_that_made_it() -> None:
    model = Model()
    optimizer = chainer.optimizers.Adam().setup(model)
    with umem.record(stacks=True) as recorder:
        places = train(model, optimizer)
    stacks: dict[str, set[tuple[str, ...]]] = {}
    for alloc in allocs(recorder):
        stacks.setdefault(alloc.kind, set()).add(alloc.stack[:2])
    assert stacks["activation"] == {(model.place, places["forward"])}  # Chainer's are left out
    assert {stack[0] for stack in stacks["gradient"]} == {places["backward"]}
    assert {stack[0] for stack in stacks["state"]} == {places["update"]}


def test_a_stack_is_a_handful_of_places_deep() -> None:
    def down(depth: int) -> Any:
        return down(depth - 1) if depth else xp.ones(3)

    with umem.record(stacks=True) as recorder:
        down(50)
    (alloc,) = allocs(recorder)
    assert len(alloc.stack) == USER_DEPTH
    assert all(text.endswith(" down") for text in alloc.stack)


MOVING = """
import os
import umem
from umem.devices.virtual import VirtualGPU

xp = VirtualGPU("t4").xp

def work():
    return xp.ones(3)

with umem.record(stacks=True) as recorder:
    work()
    os.chdir(os.sep)
print(*recorder.trace.events[0].stack, sep="\\n")
"""


@pytest.mark.thorough
def test_places_are_told_from_the_folder_where_recording_began(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deeper").mkdir()
    script = tmp_path / "deep" / "script.py"
    script.write_text(MOVING)
    plain, by_umem = [str(script)], ["-m", "umem", "run", str(script)]
    for folder, file, command in (
        (tmp_path / "deep", "script.py", plain),
        (tmp_path, "deep/script.py", by_umem),
        (tmp_path / "deeper", str(script), plain),
        (Path("/"), str(script), by_umem),
    ):
        found = printed(*command, cwd=folder)
        assert found.splitlines() == [f"{file}:9 work", f"{file}:12 <module>"]


def test_where_the_current_folder_is_gone_places_are_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with umem.record(stacks=True) as recorder:
        xp.ones(3)
    assert allocs(recorder)[0].stack[0].startswith(f"{HERE}:")
    assert str(Frame(HERE, 3, "f")) == f"{HERE}:3 f"


def test_stacks_survive_a_file_and_no_variable_is_held(tmp_path: Path) -> None:
    class MemoryOwner:
        alive = True

        def __del__(self) -> None:
            MemoryOwner.alive = False

    def work() -> None:
        held = MemoryOwner()
        xp.ones(3)
        del held

    with umem.record(stacks=True) as recorder:
        work()
        gc.collect()
        assert not MemoryOwner.alive
    trace = recorder.trace
    again = umem.Trace.load(trace.save(tmp_path / "a.umem.gz"))
    assert again.events == trace.events and allocs(recorder)[0].stack


def test_a_virtual_gpu_inside_takes_allocations_without_stacks() -> None:
    with umem.virtual_gpu("t4", vram="64MiB") as gpu, umem.record(stacks=True) as recorder:
        array = gpu.xp.ones(1 << 20, "u1")
    assert gpu.figures.peak_bytes == 1 << 20
    assert allocs(recorder)[0].stack
    del array


def test_the_conditions_of_the_benchmark_are_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(umem.__file__).parent.parent / "bench")
    overhead = importlib.import_module("overhead")
    found = {}
    for name, condition in overhead.conditions().items():
        with condition() as recorder:
            found[name] = len(active())
            xp.ones(3)
        if name in ("record", "stacks"):
            assert bool(allocs(recorder)[0].stack) == (name == "stacks")
    assert found == {"off": 0, "record": 1, "stacks": 1, "watch": 1, "live": 1}


@pytest.mark.parametrize("stacks", [1, "yes", None])
def test_stacks_is_true_or_false(stacks: Any) -> None:
    with pytest.raises(StateError, match="stacks must be True or False"):
        umem.record(stacks=stacks)
