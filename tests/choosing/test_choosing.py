"""`umem.choose`: the order of techniques, what is refused, and scripts run dry under each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
from click.testing import CliRunner
from dry_programs import EIGHT_LAYERS
from software_programs import needs_cupy

import umem
from umem.choosing.child import DryProgram, DryResult, MadeAt, run_dry
from umem.choosing.choosing import REPEATS, ScriptChoice, TriedTechnique, choose_for, ordered
from umem.choosing.technique import Technique
from umem.choosing.technique_rows import TECHNIQUES, nothing, recompute, within
from umem.cli import main
from umem.compat import find_package
from umem.errors import DryRunError, SizeError, UnknownGpuError

needs_chainer = pytest.mark.skipif(find_package() is None, reason="no Chainer")
GIB = 1 << 30
PROGRAM = DryProgram("train.py", ("64",), "t4", "8GiB")


def fitting(*seconds: float, peak: int = GIB) -> DryResult:
    return DryResult(seconds, peak, peak, 0, uses_chainer=True, vram_bytes=8 * GIB, title="T4")


def missing(nbytes: int) -> DryResult:
    return replace(
        fitting(), why_not="out of memory at train.py:3, in step 1", missing_bytes=nbytes
    )


def failing(why: str = "fails at train.py:9, in step 1: ValueError: no") -> DryResult:
    return replace(fitting(), why_not=why, failed=True)


def row(name: str, *results: DryResult) -> TriedTechnique:
    return TriedTechnique(name, f"umem run --{name}", results)


def names(rows: Sequence[TriedTechnique]) -> list[str]:
    return [one.name for one in rows]


# -- order -----------------------------------------------------------------------------------------


def test_what_fits_comes_first_and_the_quickest_of_it() -> None:
    rows = [
        row("nothing", missing(5)),
        row("slow", fitting(3.0)),
        row("failed", failing()),
        row("quick", fitting(1.0)),
        row("nearly", missing(2)),
    ]
    assert names(ordered(rows)) == ["quick", "slow", "nearly", "nothing", "failed"]


def test_nothing_is_first_where_it_fits() -> None:
    rows = [row("nothing", fitting(2.0)), row("same", fitting(2.0)), row("slow", fitting(3.0))]
    assert names(ordered(rows)) == ["nothing", "same", "slow"]


@pytest.mark.parametrize(
    ("low", "high", "first"), [(1.0, 1.0, "other"), (1.0, 1.4, "other"), (0.5, 1.8, "nothing")]
)
def test_nothing_yields_to_what_is_quicker_by_more_than_its_range(
    low: float, high: float, first: str
) -> None:
    middle = (low + high) / 2
    other = row("other", fitting(low), fitting(middle), fitting(high))
    assert names(ordered([row("nothing", fitting(2.0)), other]))[0] == first


def test_a_row_is_the_median_and_the_range_of_its_draws() -> None:
    found = row("managed", fitting(3.0, 2.0), fitting(5.0), fitting(1.0, 4.0))
    assert (found.seconds_low, found.seconds, found.seconds_high) == (1.0, 4.0, 5.0)
    assert found.width == 4.0


def test_a_row_fits_if_all_its_draws_do() -> None:
    found = row("managed", fitting(3.0), missing(7), fitting(1.0))
    assert not found.fits and found.seconds is None
    assert found.why_not == "out of memory at train.py:3, in step 1" and found.missing_bytes == 7


def test_where_nothing_fits_it_says_what_the_least_one_misses() -> None:
    rows = (row("min", missing(2 << 20)), row("nothing", missing(9 << 20)))
    choice = ScriptChoice(PROGRAM, "T4", 8 * GIB, rows, True)
    assert choice.summary == "nothing fits; min comes closest, and needs at least 2.0 MiB more"
    assert choice.best is None


# -- which techniques run --------------------------------------------------------------------------


class RunDry:
    """Notes what is to run, and says of each technique what was made up for it."""

    def __init__(self, plain: DryResult, **others: DryResult) -> None:
        self.plain, self.others = plain, others
        self.ran: list[str] = []

    def __call__(self, program: DryProgram, technique: Technique, stop: Event) -> DryResult:
        self.ran.append(technique.name)
        default = self.plain if technique.name == "nothing" else fitting(9.0)
        return self.others.get(technique.name, default)


def test_every_technique_is_tried_and_paging_ones_several_times() -> None:
    run_dry = RunDry(missing(GIB), offload=fitting(1.0))
    choice = choose_for(PROGRAM, run_dry=run_dry)
    suited = [one for one in TECHNIQUES if one.suits(has_chainer=True)]
    assert run_dry.ran[0] == "nothing"
    assert sorted(run_dry.ran) == sorted(
        one.name for one in suited for _ in range(REPEATS if one.is_paging else 1)
    )
    assert {one.name for one in choice.rows} == {one.name for one in suited}
    assert choice.best is not None and choice.best.name == "offload"


def test_what_fits_with_little_to_spare_is_tried_several_times() -> None:
    tight = replace(fitting(1.0), peak_bytes=6 * GIB, reserved_peak_bytes=15 * GIB // 2)
    results = iter([tight, tight, missing(5)])
    ran: list[str] = []

    def run_dry(program: DryProgram, technique: Technique, stop: Event) -> DryResult:
        ran.append(technique.name)
        return next(results) if technique.name == "recompute card" else fitting(2.0)

    choice = choose_for(PROGRAM, run_dry=run_dry)
    found = {one.name: one for one in choice.rows}
    assert ran.count("recompute card") == REPEATS and ran.count("recompute min") == 1
    assert not found["recompute card"].fits and found["recompute min"].fits


def test_a_program_without_chainer_gets_modes_and_a_sentence_on_its_arrays() -> None:
    plain = replace(missing(GIB), uses_chainer=False)
    managed = replace(fitting(2.0), uses_chainer=False, large_arrays=(MadeAt("fft.py:4", 3 * GIB),))
    choice = choose_for(PROGRAM, run_dry=RunDry(plain, managed=managed))
    assert set(names(choice.rows)) == {
        "nothing", "managed", "managed, prefetch", "managed, streaming", "hybrid",
    }  # fmt: skip
    assert "umem.blocks" in choice.advice and "umem.lookahead" in choice.advice
    assert "fft.py:4 (3.0 GiB)" in choice.advice


def test_a_script_that_fails_by_itself_is_refused_with_its_line() -> None:
    run_dry = RunDry(failing())
    with pytest.raises(DryRunError, match=r"cannot run train\.py 64: fails at train\.py:9"):
        choose_for(PROGRAM, run_dry=run_dry)
    assert run_dry.ran == ["nothing"]


def test_a_script_that_fails_under_a_technique_has_its_line_in_that_row() -> None:
    choice = choose_for(PROGRAM, run_dry=RunDry(fitting(1.0), accumulate=failing()))
    (found,) = [one for one in choice.rows if one.name == "accumulate"]
    assert found.why_not == "fails at train.py:9, in step 1: ValueError: no"
    assert choice.rows[-1] is found and choice.rows[0].name == "nothing"


def test_a_script_that_never_touches_the_gpu_is_refused() -> None:
    with pytest.raises(DryRunError, match=r"allocates nothing on the GPU.*--recompute 8GiB"):
        choose_for(PROGRAM, run_dry=RunDry(fitting(1.0, peak=0)))


def test_techniques_within_a_budget_go_by_it_and_not_by_the_card() -> None:
    found = within("6GiB")
    assert not any(one.is_paging or "card" in one.name + one.line for one in found)
    assert "umem run --recompute 6GiB" in [one.line for one in found]
    assert all(one.turn_on.keywords["budget"] == "6GiB" for one in found if "6GiB" in one.name)  # type: ignore[attr-defined]


def test_the_line_to_type_has_the_program_in_it() -> None:
    choice = choose_for(PROGRAM, run_dry=RunDry(fitting(1.0)))
    lines = {one.name: choice.line_of(one) for one in choice.rows}
    assert lines["recompute 50%"] == "umem run --recompute 50% train.py 64"
    assert lines["half precision"] == "umem.chainer.half_precision(model, optimizer)"
    assert lines["lookahead"] == (
        "umem run --mode managed train.py 64  # with umem.chainer.LookaheadPrefetch():"
    )


# -- real scripts ----------------------------------------------------------------------------------

NETWORK = (
    EIGHT_LAYERS.replace("WIDTH", "512")
    + """
import cupy
model = Net()
model.to_gpu()
optimizer = chainer.optimizers.Adam()
optimizer.setup(model)
for step in range(4):
    optimizer.update(model, cupy.ones((int(sys.argv[1]), 512), "f"))
"""
)


def technique(name: str) -> Technique:
    return next(one for one in TECHNIQUES if one.name == name)


@pytest.fixture
def network(tmp_path: Path) -> DryProgram:
    path = tmp_path / "network.py"
    path.write_text(NETWORK)
    return DryProgram(str(path), ("16384",), "t4", "384MiB")


@pytest.mark.thorough
@needs_cupy
@needs_chainer
def test_recomputation_fits_a_network_that_is_too_large_as_it_is(network: DryProgram) -> None:
    plain, least = (
        run_dry(network, technique(name), Event()) for name in ("nothing", "recompute min")
    )
    assert "out of memory at" in str(plain.why_not) and "network.py:" in str(plain.why_not)
    assert plain.missing_bytes and plain.uses_chainer
    assert least.why_not is None and least.seconds and least.peak_bytes <= 384 << 20


@needs_cupy
@needs_chainer
@pytest.mark.thorough
@pytest.mark.parametrize("name", [one.name for one in TECHNIQUES])
def test_each_technique_is_turned_on_in_a_script_that_is_not_edited(
    network: DryProgram, name: str
) -> None:
    roomy = replace(network, arguments=("2048",))
    plain, other = (run_dry(roomy, technique(one), Event()) for one in ("nothing", name))
    assert plain.why_not is None and other.why_not is None, other.why_not
    differs = (other.peak_bytes, other.seconds[-1]) != (plain.peak_bytes, plain.seconds[-1])
    # Recompute changes nothing where all fits, and managed memory where nothing moves.
    idle = ("nothing", "recompute card", "managed", "managed, prefetch", "managed, streaming")
    assert differs or name in (*idle, "hybrid", "lookahead")
    if name in ("half precision", "8-bit states", "accumulate", "recompute min", "offload"):
        assert other.peak_bytes < plain.peak_bytes


@pytest.mark.thorough
@needs_cupy
@needs_chainer
def test_a_loop_that_calls_backward_itself_is_not_accumulated(tmp_path: Path) -> None:
    path = tmp_path / "by_hand.py"
    head, _ = NETWORK.split("for step in")
    path.write_text(
        f"{head}for step in range(4):\n"
        '    loss = model(cupy.ones((64, 512), "f"))\n'
        "    model.cleargrads()\n"
        "    loss.backward()\n"
        "    optimizer.update()\n"
    )
    found = run_dry(DryProgram(str(path)), technique("accumulate"), Event())
    assert found.failed and "no loss function and batch" in str(found.why_not)
    assert f"by_hand.py:{len(head.splitlines()) + 5}" in str(found.why_not)


@pytest.mark.thorough
@needs_cupy
def test_the_lines_that_make_large_arrays_of_a_program_without_chainer_are_known(
    tmp_path: Path,
) -> None:
    path = tmp_path / "sums.py"
    path.write_text("import cupy\nx = cupy.ones((1 << 20) * 64, 'f')\ny = x + 1\n")
    found = run_dry(DryProgram(str(path), vram="256MiB"), technique("managed, streaming"), Event())
    assert not found.uses_chainer and found.why_not is None
    managed = run_dry(DryProgram(str(path), vram="256MiB"), technique("managed"), Event())
    assert {Path(one.line).name for one in managed.large_arrays} == {"sums.py:2", "sums.py:3"}
    assert {one.nbytes for one in managed.large_arrays} == {256 << 20}
    assert found.seconds != managed.seconds


def refuse(stack: ExitStack) -> None:
    raise SizeError("this technique is for nobody")


@needs_cupy
def test_a_technique_that_is_refused_says_why(network: DryProgram) -> None:
    found = run_dry(network, Technique("mine", "mine()", refuse), Event())
    assert found.failed and "this technique is for nobody" in str(found.why_not)


@pytest.mark.thorough
@needs_cupy
@needs_chainer
def test_the_command_prints_the_table_or_json(
    network: DryProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = [technique(name) for name in ("nothing", "recompute min", "managed")]
    monkeypatch.setattr("umem.choosing.choosing.REPEATS", 1)
    monkeypatch.setattr("umem.cli.choose_script.TECHNIQUES", kept)
    monkeypatch.setattr(
        "umem.cli.choose_script.tried", lambda program: choose_for(program, techniques=kept)
    )
    run_dry = ["choose", "--gpu", "t4", "--vram", "384MiB", network.script, *network.arguments]
    result = CliRunner().invoke(main, run_dry, env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    title, head, *rows = result.output.splitlines()
    assert "T4 with 384.0 MiB of VRAM" in title and "(simulated)" in title
    assert head.split() == ["technique", "step", "peak", "pool", "moved", "type"]
    assert any("umem run --recompute min" in line for line in rows)
    assert any(line.startswith("nothing: out of memory at") for line in rows)
    result = CliRunner().invoke(main, [*run_dry[:1], "--json", *run_dry[1:]])
    found = json.loads(result.output)
    assert found["simulated"] and found["rows"][0]["fits"] and not found["rows"][-1]["fits"]
    assert found["rows"][-1]["missing_bytes"] > 0


def test_bad_arguments_are_refused_before_anything_runs(tmp_path: Path) -> None:
    script = tmp_path / "a.py"
    script.write_text("")
    for words, said in (
        (["--gpu", "t44", str(script)], "no GPU named"),
        (["--vram", "lots", str(script)], "must be a size"),
        ([str(tmp_path / "b.py")], "there is no file"),
        (["--inference", str(script)], "--inference needs a model in ONNX"),
        (["--optimizer", "adam", str(script)], "--optimizer needs a model in ONNX"),
        (["model.onnx", "--gpu", "t4"], "cannot read model.onnx"),
        (["--gpu", "t4", "model.onnx", "32"], "A model in ONNX takes no arguments; got '32'"),
    ):
        result = CliRunner().invoke(main, ["choose", *words])
        assert result.exit_code in (1, 2) and said in " ".join(result.output.split())


@needs_cupy
@needs_chainer
@pytest.mark.slow
def test_choose_is_the_same_in_python(network: DryProgram) -> None:
    choice = umem.choose(network.script, *network.arguments, gpu="t4", vram="384MiB")
    by_name = {one.name: one for one in choice.rows}
    assert not by_name["nothing"].fits and by_name["recompute min"].fits
    assert by_name["managed"].fits and len(by_name["managed"].results) == REPEATS
    times = [one.seconds for one in choice.fitting]
    assert times == sorted(times)  # type: ignore[type-var]


def test_a_gpu_that_is_none_is_refused_in_python() -> None:
    with pytest.raises(UnknownGpuError):
        umem.choose("train.py", gpu="t44")
    with pytest.raises(SizeError):
        umem.choose("train.py", gpu="t4", vram="lots")


def test_rows_are_told_to_another_process_by_name() -> None:
    assert TECHNIQUES[0].turn_on is nothing and len({one.name for one in TECHNIQUES}) == len(
        TECHNIQUES
    )
    assert not Technique("a", "a()", recompute).suits(has_chainer=False)
