"""Write the operators of docs/reference/onnx.md from umem's table: `--check` only compares."""

from __future__ import annotations

import sys
from pathlib import Path

from umem.onnx.exported.operators import OPERATORS, Operator

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "onnx.md"
HEADING = "## The operators\n"
NONE = "These have no gradient"
NOTHING = "These keep nothing"


def kept(operator: Operator) -> str:
    """What an operator keeps, in words."""
    places = list(operator.inputs)
    said = ["input" if place == 0 else f"input {place}" for place in places]
    if operator.other is not None:
        said.append("each of two inputs whose other one has a gradient")
    said += ["output"] * operator.output
    said += [f"`{label}`" for label in operator.stash]
    return ", ".join(said)


def text() -> str:
    """The section of the page."""
    groups: dict[str, list[str]] = {NONE: [], NOTHING: []}
    rows = []
    for name, operator in OPERATORS.items():
        if operator.passes == "none":
            groups[NONE].append(name)
        elif not kept(operator):
            groups[NOTHING].append(name)
        else:
            source = operator.source.replace("|", "\\|")
            rows.append(f"| {name} | {kept(operator)} | {source} |")
    lines = [
        f"umem knows {len(OPERATORS)} operators. This list is written from "
        "umem/onnx/exported/operators.py. `gy` is the gradient of the output `y`.\n",
        "| operator | what backward needs | why |\n|---|---|---|",
        "\n".join(rows),
        f"\n{NOTHING}: {', '.join(sorted(groups[NOTHING]))}.\n",
        f"{NONE}: {', '.join(sorted(groups[NONE]))}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    before, _, _ = page.partition(HEADING)
    made = f"{before}{HEADING}{text()}"
    if "--check" in sys.argv and made != page:
        sys.exit("docs/reference/onnx.md has other operators: python scripts/onnx_operators.py")
    PAGE.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
