"""The manual's order for MultiprocessIterator makes plain runs repeat, and those under umem."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from processes import python
from project import ROOT

pytest.importorskip("umem.chainer")
pytestmark = pytest.mark.thorough

TRAIN = """
from contextlib import nullcontext
import umem.chainer, chainer, chainer.functions as F, chainer.links as L, numpy as np

def train(block):
    {code}
    np.random.seed(0)
    model = chainer.ChainList(*(L.Linear(64, 64) for _ in range(6)))
    optimizer = chainer.optimizers.SGD(0.1).setup(model)
    with block:
        for _ in range(40):
            h = chainer.Variable(np.stack(iterator.next()))
            for layer in model:
                h = F.dropout(F.relu(layer(h)), 0.2)
            optimizer.update(F.mean, h * h)
    iterator.finalize()
    return [p.array for p in model.params()]

if __name__ == "__main__":
    first, *others = [train(block) for block in
                      (nullcontext(), nullcontext(), umem.chainer.Recompute("min"))]
    print([all((a == b).all() for a, b in zip(first, other)) for other in others])
"""


def test_the_order_of_the_manual_repeats_plainly_and_under_recompute(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "how-to" / "run-old-scripts.md").read_text(encoding="utf-8")
    section = text.split("## Make a run repeatable\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    script = tmp_path / "train.py"
    script.write_text(TRAIN.replace("{code}", code.replace("\n", "\n    ")))
    done = python(script, timeout=120)
    assert done.stdout == "[True, True]\n", done.stderr
