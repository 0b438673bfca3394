"""Steps of a dry run: when one is over, and when enough have run."""

from __future__ import annotations

import pytest

from umem.dry.dry_steps import MOST_STEPS, DrySteps, GpuReading, StepLimit, Turns
from umem.dry.unknown_reads import MOST_READS, EndlessReads, UnknownReads, is_answered, shortest
from umem.errors import SizeError
from umem_software_gpu import parsed


class Gpu:
    """Figures that a test sets."""

    def __init__(self) -> None:
        self.seconds, self.moved, self.uploaded, self.held, self.peak = 0.0, 0, 0, 0, 0

    def read(self) -> GpuReading:
        return GpuReading(self.seconds, self.peak, self.held, self.moved, self.uploaded)

    def step(self, peak: int, *, seconds: float = 1.0, moved: int = 0, uploaded: int = 0) -> None:
        self.seconds += seconds
        self.moved += moved
        self.uploaded += uploaded
        self.peak = peak


def ended(gpu: Gpu, steps: DrySteps, *peaks: int, **more: float) -> DrySteps:
    for peak in peaks:
        gpu.step(peak, **more)  # type: ignore[arg-type]
        steps.end()
    return steps


def made(text: str | None = None, least: int = 3) -> tuple[Gpu, DrySteps]:
    gpu = Gpu()
    return gpu, DrySteps(gpu.read, StepLimit.parse(text, least), lambda: None)


def test_two_steps_that_agree_are_enough_after_three() -> None:
    gpu, steps = made()
    assert not ended(gpu, steps, 5, 5).is_over
    assert ended(gpu, steps, 5).is_over and steps.why_over == "steady"


def test_steps_that_differ_go_on_to_the_most() -> None:
    gpu, steps = made()
    assert not ended(gpu, steps, *range(MOST_STEPS - 1)).is_over
    assert ended(gpu, steps, 99).is_over and steps.why_over == "steps"
    assert steps.peak_bytes == 99


@pytest.mark.parametrize("differs", [{"moved": 100}, {"seconds": 2.0}])
def test_moved_bytes_and_time_have_to_agree_too(differs: dict[str, float]) -> None:
    gpu, steps = made()
    ended(gpu, steps, 5, 5)
    assert not ended(gpu, steps, 5, **differs).is_over
    assert ended(gpu, steps, 5, **differs).is_over


def test_a_recording_wants_more_steps() -> None:
    gpu, steps = made(least=12)
    assert not ended(gpu, steps, *[5] * 11).is_over
    assert ended(gpu, steps, 5).is_over


def test_a_number_of_steps_and_all() -> None:
    gpu, steps = made("2")
    assert not ended(gpu, steps, 5).is_over
    assert ended(gpu, steps, 5).is_over and steps.why_over == "steps"
    gpu, steps = made("all")
    assert not ended(gpu, steps, *[5] * 50).is_over


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5", ""])
def test_what_is_no_number_of_steps_is_refused(text: str) -> None:
    with pytest.raises(SizeError, match="steps must be a number of at least 1, or all"):
        StepLimit.parse(text)


def test_what_runs_between_steps_belongs_to_none() -> None:
    gpu, steps = made()
    ended(gpu, steps, 5)
    gpu.step(50, seconds=10.0)  # an evaluation
    steps.begin()
    ended(gpu, steps, 5)
    assert [step.seconds for step in steps.steps] == [1.0, 1.0]
    assert [step.peak_bytes for step in steps.steps] == [5, 5]
    assert steps.peak_bytes == 50


def test_growth_is_that_of_every_one_of_the_last_steps() -> None:
    gpu, steps = made()
    for held in (0, 10, 20, 30, 40):
        gpu.held = held
        ended(gpu, steps, held)
    assert steps.growth_bytes == 0  # too few
    gpu.held = 50
    assert ended(gpu, steps, 50).growth_bytes == 10
    assert ended(gpu, steps, 50).growth_bytes == 0


def test_batches_differ_by_what_is_copied_after_the_first_step() -> None:
    gpu, steps = made()
    ended(gpu, steps, 5, uploaded=1000)
    ended(gpu, steps, 5, 5, uploaded=10)
    assert steps.batches is None
    assert ended(gpu, steps, 5, uploaded=4).batches == (4, 10)


# -- turns of optimizers ----------------------------------------------------------------------


def turns(order: str, waiting: str = "") -> list[int]:
    """The updates, by their numbers, with which a turn is over."""
    followed, optimizers = Turns(), {name: object() for name in order + waiting}
    for optimizer in optimizers.values():
        followed.set_up(optimizer)
    found = []
    for number, name in enumerate(order, 1):
        followed.updated(optimizers[name])
        if followed.is_complete:
            followed.begin()
            found.append(number)
    return found


def test_one_optimizers_update_is_a_turn() -> None:
    assert turns("aaa") == [1, 2, 3]


def test_a_turn_of_two_has_an_update_of_each() -> None:
    assert turns("ababab") == [2, 4, 6]


def test_a_critic_may_be_updated_more_often() -> None:
    assert turns("cccccgcccccg") == [6, 12]


def test_an_optimizer_that_never_updates_is_not_waited_for_long() -> None:
    found = turns("a" * 110, waiting="b")
    assert found == list(range(Turns.patience + 1, 111))


# -- values that are asked for ------------------------------------------------------------------


def test_a_line_that_asks_on_and_on_stops_the_program() -> None:
    asked = UnknownReads()
    asked["train.py:5", "cupy_max"] += 1
    with pytest.raises(EndlessReads) as stopped:
        for _ in range(MOST_READS + 1):
            asked["train.py:4", "cupy_sum"] += 1
    assert stopped.value.line == "train.py:4"
    assert not isinstance(stopped.value, Exception)  # no handler of the program's catches it


def test_a_step_and_a_new_line_begin_the_count_again() -> None:
    asked = UnknownReads()
    for number in range(3):
        for _ in range(MOST_READS - 1):
            asked["train.py:4", "cupy_sum"] += 1
        if number % 2:
            asked.restart_counts()
        else:
            asked[f"train.py:{number + 5}", "cupy_max"] += 1
    assert asked["train.py:4", "cupy_sum"] == 3 * (MOST_READS - 1)


def test_answers_are_named_by_the_end_of_a_path() -> None:
    assert is_answered("/home/me/src/train.py:41", "train.py:41")
    assert is_answered("/home/me/src/train.py:41", "src/train.py:41")
    assert not is_answered("/home/me/src/train.py:41", "rain.py:41")
    assert not is_answered("/home/me/src/train.py:411", "train.py:41")


def test_lines_are_named_by_the_shortest_path_that_is_one_files() -> None:
    lines = ["/a/b/train.py:3", "/a/c/train.py:3", "/a/c/train.py:5", "/a/net.py:1"]
    assert list(shortest(lines).values()) == [
        "b/train.py:3", "c/train.py:3", "c/train.py:5", "net.py:1",
    ]  # fmt: skip


def test_the_variable_of_other_processes_has_a_word_for_it() -> None:
    assert parsed("t4,vram=1GiB,dry,force") == ("t4", {"vram": "1GiB", "dry": True, "force": True})
