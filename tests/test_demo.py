"""``umem demo``: a graph network that does not fit trains anyway, and what it says is true."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from processes import printed_quietly
from software_programs import needs_software_gpu

from umem.cli import main
from umem.devices.cuda import cuda_reason

import umem.chainer  # isort: skip  (imports Chainer through the layer)

SMALL = ["--nodes", "3000", "--steps", "3", "--vram", "4MiB"]
ROW = {
    "mode": str, "prefetch": bool, "how": str, "fits": bool, "peak_bytes": int,
    "resident_peak_bytes": int, "migrated_in_bytes": int, "migrated_out_bytes": int,
    "fault_count": int, "seconds": float, "loss": list,
}  # fmt: skip
MAY_BE_NULL = {"seconds", "loss"}


def demo(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["demo", *map(str, arguments)])


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    out = tmp_path_factory.mktemp("demo") / "a" / "b"
    result = demo(*SMALL, "--out", out)
    assert result.exit_code == 0, result.output
    return result, out


@pytest.fixture(scope="module")
def report(ran: tuple[Result, Path]) -> Any:
    return json.loads((ran[1] / "demo.json").read_text())


# -- what it writes ----------------------------------------------------------------------------


def test_it_writes_a_picture_and_a_json_file_and_nothing_else(ran: tuple[Result, Path]) -> None:
    out = ran[1]
    assert sorted(path.name for path in out.iterdir()) == ["demo.json", "demo.png"]
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert f"Wrote {out}/demo.png and {out}/demo.json." in ran[0].output.splitlines()


def test_the_json_file_has_every_documented_field_in_its_type(report: Any) -> None:
    for key, kind in {"simulated": bool, "device": str, "vram_bytes": int, "factor": float}.items():
        assert type(report[key]) is kind
    assert len(report["rows"]) == 5
    for row in report["rows"]:
        for key, kind in ROW.items():
            assert type(row[key]) is kind or (row[key] is None and key in MAY_BE_NULL), key
    assert (report["simulated"], report["device"]) == (True, "v100-16gb")


def test_the_rows_are_the_modes_in_their_order(report: Any) -> None:
    found = [(row["mode"], row["prefetch"], row["how"]) for row in report["rows"]]
    assert found == [
        ("unmanaged", False, "run"),
        ("managed", False, "run"),
        ("managed", True, "replay"),
        ("managed", False, "replay"),
        ("hybrid", False, "replay"),
    ]


def test_unmanaged_memory_does_not_fit_and_every_other_mode_does(report: Any) -> None:
    first, *others = report["rows"]
    assert (first["fits"], first["seconds"], first["loss"]) == (False, None, None)
    assert first["peak_bytes"] <= report["vram_bytes"]
    assert all(row["fits"] and row["seconds"] > 0 for row in others)
    assert "MiB" in first["reason"]


def test_the_loss_falls_and_is_told_only_where_it_was_computed(report: Any) -> None:
    losses = [row["loss"] for row in report["rows"]]
    assert len(losses[1]) == 3
    assert losses[1] == sorted(losses[1], reverse=True)
    assert losses[1][0] == pytest.approx(math.log(40), rel=0.1)
    assert [losses[0], *losses[2:]] == [None] * 4


def test_the_factor_is_the_peak_over_the_vram(report: Any) -> None:
    managed = report["rows"][1]
    assert report["factor"] == managed["peak_bytes"] / report["vram_bytes"]
    assert report["factor"] >= 2.4
    assert {row["peak_bytes"] for row in report["rows"][1:]} == {managed["peak_bytes"]}
    assert all(row["resident_peak_bytes"] <= report["vram_bytes"] for row in report["rows"])


def test_the_defaults_exceed_vram_as_much_as_promised() -> None:
    options = {option.name: option.default for option in main.get_command(None, "demo").params}  # type: ignore[attr-defined]
    assert (options["nodes"], options["steps"], options["vram"]) == (64_000, 10, "96MiB")
    assert umem.chainer.BYTES_PER_NODE * 64_000 / (96 << 20) >= 2.4


@pytest.mark.parametrize("nodes", [2000, 8000])
def test_what_a_node_needs_is_what_the_cuda_demo_counts_on(nodes: int) -> None:
    rows, trace = umem.chainer.run_virtual(
        umem.chainer.Workload.generate(nodes, 2), "v100-16gb", 4 << 20, lambda what, done: None
    )
    assert trace.peak_bytes == pytest.approx(umem.chainer.BYTES_PER_NODE * nodes, rel=0.08)
    assert trace.step_count == 2
    assert rows[1].peak_bytes == trace.peak_bytes


def test_the_workload_is_the_same_every_time() -> None:
    first, second = (umem.chainer.Workload.generate(1000, 1) for _ in range(2))
    assert (first.adjacency != second.adjacency).nnz == 0
    assert (first.graph.features == second.graph.features).all()


# -- what it says ------------------------------------------------------------------------------


def test_no_line_is_wider_than_a_terminal(ran: tuple[Result, Path]) -> None:
    lines = [line for line in ran[0].output.splitlines() if not line.startswith("Wrote ")]
    assert max(map(len, lines)) <= 80


def test_what_is_simulated_says_so(ran: tuple[Result, Path]) -> None:
    text = ran[0].output
    (title,) = [line for line in text.splitlines() if "the step needs" in line]
    assert title.startswith("simulated v100-16gb, 4.0 MiB of VRAM: the step needs ")
    assert "(simul.)" in text
    for claim in ("memory and time are simulated.", "times as long (simulated)."):
        assert claim in " ".join(text.split())


def test_it_says_what_it_is_doing_and_what_to_run_next(ran: tuple[Result, Path]) -> None:
    text = ran[0].output
    steps = ["making the graph ...", "unmanaged ...", "managed ...", "replaying hybrid ..."]
    assert [text.index(step) for step in steps] == sorted(text.index(step) for step in steps)
    after = text[text.index("Next:") :]
    assert "umem demo --vram 48MiB" in after
    assert ("--device cuda" in after) == (cuda_reason() is None)


@pytest.mark.thorough
def test_its_path_may_have_the_word_markup_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "[red]out"
    monkeypatch.setenv("COLUMNS", "200")
    result = demo("--nodes", "1000", "--steps", "1", "--vram", "2MiB", "--out", out)
    assert result.exit_code == 0 and f"Wrote {out}/demo.png" in result.output
    assert sorted(path.name for path in out.iterdir()) == ["demo.json", "demo.png"]


def test_without_matplotlib_it_writes_the_numbers_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = demo("--nodes", "1000", "--steps", "1", "--vram", "2MiB", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "No picture: pictures need matplotlib; pip install 'matplotlib" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["demo.json"]


def test_it_overwrites_what_it_wrote_before(tmp_path: Path) -> None:
    (tmp_path / "demo.json").write_text("old")
    (tmp_path / "mine.txt").write_text("kept")
    assert demo("--nodes", 1000, "--steps", 1, "--vram", "2MiB", "--out", tmp_path).exit_code == 0
    assert json.loads((tmp_path / "demo.json").read_text())["rows"]
    assert (tmp_path / "mine.txt").read_text() == "kept"


# -- what it refuses ---------------------------------------------------------------------------

REFUSED = [
    (["--device", "virtual:v101"], 1, "no GPU named 'v101'; did you mean v100-16gb"),
    (["--device", "virtual:"], 1, "no GPU named ''"),
    (["--device", "virtual:v100"], 1, "v100-16gb or v100-32gb"),
    (["--device", "tpu"], 2, "is not virtual:NAME, software:NAME or cuda"),
    (["--vram", "12 parsecs"], 1, '--vram must be a size such as "256MiB"'),
    (["--vram", "0"], 1, "--vram must be above zero"),
    (["--vram", "-1GiB"], 1, "--vram must be a size"),
    (["--vram", "1MiB"], 1, "2.0 MiB"),
    (["--vram", "9" * 30], 1, "below 8 EiB"),
    (["--nodes", "999"], 2, "999 is not in the range 1000<=x<=5000000"),
    (["--nodes", "5000001"], 2, "not in the range"),
    (["--nodes", "many"], 2, "'many' is not a valid integer"),
    (["--steps", "0"], 2, "0 is not in the range"),
    (["--factor", "0"], 2, "not in the range"),
    (["--device", "cuda", "--factor", "nan"], 2, "nan is not a number"),
    (["--factor", "3"], 2, "--factor needs --device cuda"),
    (["--bytes", "1GiB"], 2, "--bytes needs --device cuda"),
    (["--device", "cuda", "--nodes", "2000"], 2, "--nodes needs --device virtual or software"),
    (["--device", "cuda", "--vram", "1GiB"], 2, "--vram needs --device virtual or software"),
    (["--colour"], 2, "No such option"),
    (["extra"], 2, "unexpected extra argument"),
]


@pytest.mark.parametrize(("arguments", "code", "text"), REFUSED)
def test_bad_input_is_refused_before_a_folder_is_made(
    tmp_path: Path, arguments: list[str], code: int, text: str
) -> None:
    result = demo(*arguments, "--out", tmp_path / "out")
    assert text in " ".join(result.output.split())
    assert result.exit_code == code
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(cuda_reason() is None, reason="there is a CUDA device")
def test_cuda_without_a_gpu_names_both_ways_out_and_leaves_no_folder(tmp_path: Path) -> None:
    result = demo("--device", "cuda", "--out", tmp_path / "a" / "b")
    assert result.exit_code == 1
    text = " ".join(result.output.split())
    assert text.startswith("Error: no CUDA device:")
    assert "cupy-cuda12x" in text
    assert "umem.virtual_gpu" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["file", "file/out", "file/a/b", "n" * 300])
def test_a_folder_that_cannot_be_made_is_refused_at_once(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("in the way")
    result = demo(*SMALL, "--out", tmp_path / name)
    assert result.exit_code == 1
    text = "".join(result.output.split())
    assert text.startswith("Error:cannotwriteto")
    assert text.endswith("Nameanotherfolderwith--out")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("name", ["demo.json", "demo.png"])
def test_a_folder_in_the_way_of_a_file_is_an_error_and_not_a_traceback(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).mkdir()
    result = demo("--nodes", "1000", "--steps", "1", "--vram", "2MiB", "--out", tmp_path)
    assert result.exit_code == 1
    assert "Error: cannot write to" in result.output
    assert "Traceback" not in result.output
    assert not [path for path in tmp_path.iterdir() if path.name != name]


def test_a_jetson_is_refused_with_its_reason(tmp_path: Path) -> None:
    result = demo(*SMALL, "--device", "virtual:jetson-orin-64gb", "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert "nothing to oversubscribe" in " ".join(result.output.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["run_virtual", "draw_modes"])
def test_ctrl_c_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    import umem.reports

    def interrupt(*arguments: Any) -> None:
        if where == "draw_modes":
            arguments[3].write(b"half")
        raise KeyboardInterrupt

    of = umem.chainer if where == "run_virtual" else umem.reports
    monkeypatch.setattr(of, where, interrupt)
    old = tmp_path / "demo.json"
    old.write_text("old")
    result = demo("--nodes", "1000", "--steps", "1", "--vram", "2MiB", "--out", tmp_path)
    assert result.exit_code == 130
    assert "Interrupted. Nothing was written." in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["demo.json"]
    assert old.read_text() == "old"


@pytest.mark.thorough
@pytest.mark.usefixtures("ctrl_c")
def test_a_real_ctrl_c_ends_with_130_and_no_folder(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "umem", "demo", "--nodes", "20000", "--steps", "500",
         "--vram", "64MiB", "--out", str(tmp_path / "out")],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        said = list(takewhile(lambda line: line != "  managed ...\n", process.stdout))
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 130, "".join(said) + rest
    assert "Interrupted. Nothing was written." in rest
    assert "Traceback" not in rest
    assert list(tmp_path.iterdir()) == []


# -- on the software GPU -----------------------------------------------------------------------


@needs_software_gpu
def test_on_the_software_gpu_cupy_has_the_losses_that_numpy_has(
    ran: tuple[Result, Path], report: Any, tmp_path: Path, kernel_cache: Path
) -> None:
    command = ("demo", "--device", "software:v100-16gb", *SMALL)
    text = printed_quietly("-m", "umem", *command, cwd=tmp_path, XDG_CACHE_HOME=kernel_cache)
    for said in ("on a software Tesla V100", "by CuPy on this processor", "memory and time are"):
        assert said in " ".join(text.split())
    assert "--device cuda " not in text
    found = json.loads((tmp_path / "out" / "demo.json").read_text())
    assert found["simulated"] is True
    assert [row["how"] for row in found["rows"]] == [row["how"] for row in report["rows"]]
    stopped, managed = found["rows"][:2]
    assert not stopped["fits"] and "Out of memory" in stopped["reason"]
    assert managed["loss"] == pytest.approx(report["rows"][1]["loss"], rel=1e-6)
    assert managed["migrated_out_bytes"] > 0 and managed["seconds"] > 0
    assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
