"""A second run that is not the first, and what a checkpoint refuses from the start."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import umem.chainer  # noqa: F401  # isort: skip  (before Chainer, which it makes ready)
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from checkpoint_cases import agree, variable

from umem.chainer import checkpoint
from umem.errors import (
    RecomputeCountError,
    RecomputeDtypeError,
    RecomputeError,
    RecomputeShapeError,
    UnsupportedError,
)

# -- the second run is not the first -----------------------------------------------------------


def line_of(func: Callable[..., Any], offset: int = 1) -> str:
    code = func.__code__
    return re.escape(f"({code.co_filename}, line {code.co_firstlineno + offset})")


def again() -> bool:
    return bool(chainer.config.in_recomputing)


def more(x: Any) -> Any:
    return F.exp(F.tanh(x)) if again() else F.tanh(x)


def fewer(x: Any) -> Any:
    return F.tanh(x) if again() else F.exp(F.tanh(x))


def another(x: Any) -> Any:
    return F.tanh(x) if again() else F.exp(x)


def other_shape(x: Any) -> Any:
    return F.tanh(x[: 3 if again() else 4])


def other_output(x: Any) -> Any:
    return F.reshape(x, (2, 4) if again() else (4, 2))


def other_type(x: Any) -> Any:
    return F.tanh(chainer.Variable(x.array.astype("d")) if again() else x)


def other_output_type(x: Any) -> Any:
    return F.cast(x, "float64" if again() else "float16")


def passed_on(x: Any) -> Any:
    return (x, F.tanh(x))[:1] if again() else (F.tanh(x),)


def nothing(x: Any) -> Any:
    y = F.tanh(x)
    return None if again() else y


DIFFERENT: dict[Callable[..., Any], tuple[type[RecomputeError], str]] = {
    more: (RecomputeCountError, "one function more than the first: 'exp' " + line_of(more)),
    fewer: (RecomputeCountError, "called 1 functions and the first 2: 'exp' is missing"),
    another: (RecomputeCountError, "function 1 was 'exp' in the first run .* and is 'Tanh' "),
    other_shape: (RecomputeShapeError, r"'Tanh' had inputs of shapes \(\(4,\),\) .* \(\(3,\),\) "),
    other_output: (RecomputeShapeError, r"'Reshape' made shape \(4, 2\) .* and \(2, 4\) "),
    other_type: (RecomputeDtypeError, r"'Tanh' had inputs of types float32 in .* and float64 "),
    other_output_type: (RecomputeDtypeError, "'Cast' made type float16 .* and float64 "),
    passed_on: (RecomputeCountError, "computed in the first run, but is passed on|other things"),
    nothing: (RecomputeCountError, r"returned other things in its second run: \[None\]"),
}


@pytest.mark.parametrize("region", DIFFERENT)
def test_a_second_run_that_differs_names_the_function_and_the_line(
    region: Callable[..., Any],
) -> None:
    kind, message = DIFFERENT[region]
    x = variable(8)
    y = checkpoint(region, x)
    with pytest.raises(kind, match=message) as caught:
        F.sum(y[0] if isinstance(y, tuple) else y).backward()
    assert type(caught.value) is kind and x.grad is None
    if region not in (passed_on, nothing):
        assert re.search(line_of(region), str(caught.value))


def test_the_line_is_that_of_the_user_also_inside_links() -> None:
    net = chainer.Sequential(L.Linear(3, 3), F.tanh)

    def region(x: Any) -> Any:
        return net(x[: 2 if again() else 3])

    with pytest.raises(RecomputeShapeError, match=line_of(region)):
        F.sum(checkpoint(region, variable(4, 3))).backward()


def test_without_the_check_other_functions_may_run() -> None:
    x = variable(8)
    y = checkpoint(another, x, determinism_check=False)
    F.sum(y).backward()
    np.testing.assert_allclose(x.grad, 1 - np.tanh(x.array) ** 2, rtol=1e-5)
    with pytest.raises(RecomputeCountError, match="returned other things"):
        F.sum(checkpoint(nothing, x, determinism_check=False)).backward()


def test_state_that_moves_on_from_call_to_call_is_noticed() -> None:
    cell, x = L.LSTM(4, 4), variable(3, 4)
    cell(x)  # a state from before
    y = checkpoint(cell, x)
    with pytest.raises(RecomputeError, match=r"'LSTM' reads a Variable .* as an argument"):
        F.sum(y).backward()
    cell.reset_state()
    steps = [checkpoint(cell, x) for _ in range(3)]
    with pytest.raises(RecomputeError):
        F.sum(sum(steps)).backward()


def test_a_parameter_that_is_not_the_same_any_more_is_noticed() -> None:
    weights = [chainer.Parameter(np.ones(3, np.float32), name="w") for _ in range(2)]
    y = checkpoint(lambda x: x * weights[0], variable(3))
    w = weights.pop(0)
    with pytest.raises(RecomputeError, match="reads a Variable in the second run"):
        F.sum(y).backward()
    weights[0] = variable(3)
    with pytest.raises(RecomputeError, match="does not read the parameter 'w'"):
        F.sum(y).backward()
    assert w.grad is None


def test_constants_that_each_run_makes_for_itself_are_no_difference() -> None:
    x, kept = variable(3), {}

    def region(x: Any) -> Any:
        kept["scale"] = chainer.Variable(np.full(3, 2, np.float32))
        return x * kept["scale"] * chainer.Variable(np.full(3, 3, np.float32))

    agree(lambda call: F.sum(F.tanh(call(region, x))), x)


def test_in_debug_mode_other_values_are_noticed() -> None:
    scale = np.ones(3, np.float32)
    x = variable(3)
    with chainer.using_config("debug", True):
        y = F.sum(checkpoint(lambda x: F.exp(x * scale), x))
        y.backward()
        scale *= 2
        with pytest.raises(RecomputeError, match="other values than the first: an array"):
            y.backward()


# -- what is refused ---------------------------------------------------------------------------


def test_chainerx_arrays_are_refused_wherever_they_come_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = variable(3)
    monkeypatch.setattr(x, "_has_chainerx_array", True)
    with pytest.raises(UnsupportedError, match=r"ChainerX arrays: .*to_device"):
        checkpoint(F.tanh, x)

    with pytest.raises(UnsupportedError, match="ChainerX"):
        checkpoint(lambda x: mark(F.tanh(x)), variable(3))


def mark(y: Any) -> Any:
    y._has_chainerx_array = True
    return y


def test_static_graphs_are_refused() -> None:
    with (
        chainer.using_config("schedule_func", object()),
        pytest.raises(UnsupportedError, match="static_graph"),
    ):
        checkpoint(F.tanh, variable(3))
