"""Results become plain values by one rule."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import inf, nan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from umem._common.as_json import json_text, named, plain
from umem.devices import StepCost


class Pair(NamedTuple):
    left: int
    right: Any


@dataclass(frozen=True)
class Inner:
    path: Path
    pair: Pair


@dataclass(frozen=True)
class Worded:
    nbytes: int

    def to_json(self) -> dict[str, Any]:
        return {"nbytes": self.nbytes, "half": Pair(self.nbytes // 2, None)}


def test_records_become_dictionaries_and_collections_lists() -> None:
    value = {"inner": Inner(Path("a/b"), Pair(1, (2, {3}))), "worded": [Worded(8)]}
    assert plain(value) == {
        "inner": {"path": "a/b", "pair": {"left": 1, "right": [2, [3]]}},
        "worded": [{"nbytes": 8, "half": {"left": 4, "right": None}}],
    }


@pytest.mark.parametrize("value", [nan, inf, -inf, np.float32(nan)])
def test_what_is_no_finite_number_is_null(value: Any) -> None:
    assert json.loads(json_text({"loss": [value, 1.5]})) == {"loss": [None, 1.5]}


def test_numbers_of_numpy_are_numbers() -> None:
    found = plain([np.int64(3), np.float32(0.5), np.bool_(True)])
    assert found == [3, 0.5, True] and list(map(type, found)) == [int, float, bool]


def test_figures_of_a_model_go_under_names_that_say_so() -> None:
    cost = StepCost(seconds=0.5, migrated_in_bytes=2, migrated_out_bytes=3, remote_bytes=4)
    assert named(cost, ("seconds", "moved_bytes"), ("moved_bytes",)) == {
        "seconds": 0.5,
        "simulated_moved_bytes": 9,
    }
    assert StepCost(migrated_in_bytes=2).moved_bytes is None


def test_one_line_says_the_same() -> None:
    value = {"a": [1, None, "x<"], "b": {"c": 0.5}}
    assert "\n" not in json_text(value, compact=True)
    assert json.loads(json_text(value, compact=True)) == json.loads(json_text(value)) == value
