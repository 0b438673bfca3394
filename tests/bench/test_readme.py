"""README.md of bench/ and of tests/conformance says what results say, in three figures."""

from __future__ import annotations

import copy
import re
from importlib.util import find_spec
from typing import Any

import pytest
from bench_scripts import module, run

pytestmark = pytest.mark.skipif(find_spec("chainer") is None, reason="no Chainer")
report_tables = module("report_tables")
MOST_DIGITS = 4


@pytest.fixture(scope="module", params=["BENCH", "CONFORMANCE"])
def place(request: pytest.FixtureRequest) -> Any:
    """A folder of scripts with results."""
    return getattr(module("make_readme"), request.param)


@pytest.fixture(scope="module")
def benches(place: Any) -> dict[str, Any]:
    return place.benches()


@pytest.fixture(scope="module")
def results(place: Any) -> dict[str, Any]:
    return dict(place.results())


def columns(benches: dict[str, Any], results: dict[str, Any]) -> list[Any]:
    """Every column of the first table of each result, which the README shows."""
    return [
        column
        for result in results.values()
        for column in benches[result["bench"]].tables_of(result)[0].columns
    ]


def digits(cell: str) -> int:
    """The most significant digits of a number in a cell."""
    found = re.findall(r"\d[\d,]*(?:\.\d+)?", cell)
    return max((_digits(number.replace(",", "")) for number in found), default=0)


def _digits(number: str) -> int:
    whole = number.lstrip("0") if "." in number else number.strip("0")
    return len(whole.replace(".", "").lstrip("0"))


@pytest.mark.thorough
def test_the_readme_is_what_the_results_say() -> None:
    done = run("make_readme.py", "--check")
    assert done.returncode == 0, done.stderr


def test_no_cell_has_more_than_four_significant_digits_but_counts(benches, results) -> None:
    cells = [
        (name, column.title, column.cell(row))
        for name, result in results.items()
        for table in benches[result["bench"]].tables_of(result)
        for row in table.rows
        for column in table.columns
        if column.write is not report_tables.count
    ]
    assert len(cells) > 200
    assert [cell for cell in cells if digits(cell[2]) > MOST_DIGITS] == []


def test_counts_are_whole_numbers(benches, results) -> None:
    for result in results.values():
        for table in benches[result["bench"]].tables_of(result):
            for column in table.columns:
                if column.write is report_tables.count:
                    cells = [column.cell(row) for row in table.rows]
                    assert all(re.fullmatch(r"-|\d[\d,]*", cell) for cell in cells), column.head


def test_no_head_is_a_key_and_every_head_is_in_the_readme(place, benches, results) -> None:
    heads = {column.title for column in columns(benches, results)}
    assert heads and not [head for head in heads if re.search(r"[a-z]_[a-z]", head)]
    text = place.readme.read_text()
    assert [head for head in heads if f" {head} " not in text] == []


def test_a_section_is_a_question_and_one_sentence_before_its_table(place, results) -> None:
    sections = place.readme.read_text().split("\n## ")[1:]
    assert len(sections) == len(results)
    for section in sections:
        question, _, answer, _, table = section.split("\n")[:5]
        assert question.endswith("?")
        assert answer.endswith(".") and not re.search(r"[.!?] [A-Z]", answer)
        assert table
        small = [line for line in section.split("\n") if line.startswith("<sub>")]
        assert len(small) == 1 and "at commit" in small[0]


def changed(value: Any) -> Any:
    """The same result with other figures."""
    if isinstance(value, dict):
        return {key: changed(each) for key, each in value.items()}
    if isinstance(value, list):
        return [changed(each) for each in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return 3 * value + 7


def test_every_answer_follows_the_figures(benches, results) -> None:
    for name, result in results.items():
        bench = benches[result["bench"]]
        other = {**copy.deepcopy(result), "rows": changed(result["rows"])}
        assert bench.answer(other) != bench.answer(result), name


def test_every_script_declares_its_question(place, benches) -> None:
    declared = {bench.partition("-")[0] for bench in benches}
    scripts = {path.stem for path in place.folder.glob("*.py") if "__main__" in path.read_text()}
    # These run all of them, or write what they have found.
    assert scripts - {"gpu_run", "make_readme", "hardware_page"} == declared
    assert all(bench.question.endswith("?") for bench in benches.values())


# -- figures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "how", "expected"),
    [
        (0.0298437, {}, "0.0298"),
        (147464.2, {}, "147,000"),
        (9.996, {}, "10.0"),
        (999.6, {}, "1,000"),
        (1.0, {}, "1.00"),
        (0, {}, "0"),
        (-0.004, {"places": 1}, "0"),
        (12.53, {"places": 1, "signed": True}, "+12.5"),
        (-1029.4, {"places": 1, "signed": True}, "-1,030"),
    ],
)
def test_a_figure_has_three_significant_digits(value, how, expected) -> None:
    assert report_tables.figure(value, **how) == expected


def test_a_column_takes_its_value_from_the_row_and_its_unit_into_the_head() -> None:
    column = report_tables.quantity("step", "seconds", "ms", per=1e-3)
    assert (column.title, column.cell({"seconds": 0.12345})) == ("step (ms)", "123")
    assert column.cell({"seconds": None}) == column.cell({}) == "-"
    table = report_tables.Table((report_tables.text("name", "name"), column), [{"name": "a"}])
    assert table.markdown() == "| name | step (ms) |\n| --- | ---: |\n| a | - |\n"


def test_spans_lists_and_times_read_as_words() -> None:
    assert report_tables.span([3.0, 1.0]) == "1.00 to 3.00"
    assert report_tables.span([2.0, 2.0]) == "2.00"
    assert report_tables.listed("abc") == "a, b and c" and report_tables.listed("a") == "a"
    times = [report_tables.duration(each) for each in (2.0, 0.0705, 3e-5)]
    assert times == ["2.00 s", "70.5 ms", "30.0 us"]
