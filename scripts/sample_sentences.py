"""Draw sentences that users read: python scripts/sample_sentences.py --seed 1 --count 60.

A third each comes from pages, docstrings and messages. Give them to somebody who does not know
umem, have each said in other words, and judge the answers: a sentence that is misread is a bug.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z`*])")
LEAST_WORDS = 6


def pages() -> Iterator[str]:
    """Yield the sentences of running text on pages."""
    for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]:
        text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        for paragraph in text.split("\n\n"):
            if not paragraph.lstrip().startswith(("#", "|", "-", "!", "<")):
                yield from SENTENCE.split(" ".join(paragraph.split()))


def strings() -> Iterator[tuple[bool, str]]:
    """Yield docstrings (True) and other texts (False) of the package."""
    for path in sorted(ROOT.glob("umem/**/*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
        docstrings = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield id(node) in docstrings, node.value
            elif isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "X" for p in node.values)
                yield False, "".join(map(str, parts))


def drawn(kind: list[str], count: int, generator: random.Random) -> list[str]:
    """Draw sentences of at least some words, each once."""
    long = sorted({text for text in kind if len(text.split()) >= LEAST_WORDS})
    return generator.sample(long, count)


def main() -> None:
    """Print the sentences, numbered."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    given = parser.parse_args()
    generator = random.Random(given.seed)
    texts = list(strings())
    docstrings = [
        " ".join(sentence.split())
        for is_docstring, text in texts
        if is_docstring
        for paragraph in text.split("\n\n")
        if not re.match(r"\s*(Args|Attributes|>>>|\S+\.py)", paragraph)
        for sentence in SENTENCE.split(paragraph)
    ]
    messages = [" ".join(text.split()) for is_docstring, text in texts if not is_docstring]
    kinds = (list(pages()), docstrings, messages)
    found = [one for kind in kinds for one in drawn(kind, given.count // 3, generator)]
    for number, text in enumerate(found, 1):
        print(f"{number}. {text}")


if __name__ == "__main__":
    main()
