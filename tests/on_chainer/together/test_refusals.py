"""What is refused changes nothing: public calls with what they cannot take, in every state."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import umem.chainer  # isort: skip  (before chainer)
import chainer.functions as F
import random_compositions as compositions
from chainer import optimizers

from umem.chainer.layers import LowRank, Separable, TiedTo
from umem.chainer.optimizers import Adam8bit, dequantize_states, quantize_states
from umem.chainer.tap import POINTS

X, T = compositions.batches(
    compositions.Composition(3, "Perceptron", 12, False, "", {}, [], None)
)[0]  # fmt: skip
Call = Callable[[Any, Any, Path], Any]


def everything(net: Any, optimizer: Any) -> dict[str, Any]:
    """The model, its optimizer, generators and Chainer's functions, down to the objects."""
    found: dict[str, Any] = {"t": optimizer.t, "class": type(optimizer).__name__}
    found["random"] = repr((np.random.get_state(), random.getstate()))
    found["optimizer"] = sorted(vars(optimizer))
    found["scale"] = optimizer._loss_scale
    found["hooks"] = [*optimizer._hookable._pre_update_hooks]
    found["hyper"] = repr(sorted(optimizer.hyperparam.get_dict().items()))
    for path, link in net.namedlinks():
        found[f"{path} class"], found[f"{path} names"] = type(link).__name__, sorted(vars(link))
        found[f"{path} params"] = sorted(link._params)
        kept = {name: one for name, one in vars(link).items() if isinstance(one, np.ndarray)}
        found |= {f"{path}.{name}": array.copy() for name, array in kept.items()}
    for name, parameter in net.namedparams():
        rule = parameter.update_rule
        found[f"{name} is"] = id(parameter), id(parameter.array), id(rule), type(rule).__name__
        found[name] = parameter.array.copy()
        found[f"{name} grad"] = None if parameter.grad is None else parameter.grad.copy()
        found[f"{name} t"] = rule.t
        found[f"{name} rule"] = sorted(vars(rule)), id(rule._fp32_param)
        for key, value in (rule.state or {}).items():
            found[f"{name}.{key}"] = np.copy(value)
    return found | {str(point): vars(point.owner)[point.name] for point in POINTS}


class NotAnOptimizer:
    target = None


def other_model(kind: Any = compositions.Normalized) -> Any:
    """Another model, whose numbers leave the generator where it was."""
    state = np.random.get_state()
    try:
        return kind()
    finally:
        np.random.set_state(state)


def mixing(net: Any) -> Callable[..., Any]:
    def loss(x: Any, t: Any) -> Any:
        y = net.scores(x)
        return F.mean(F.matmul(F.softmax(F.matmul(y, y, transb=True)), y))

    return loss


def saved(net: Any, optimizer: Any, folder: Path, **others: Any) -> dict[str, Any]:
    parts = {"net": net, "optimizer": optimizer}
    umem.chainer.save_run(folder / "run", step=1, wait=True, **{**parts, **others})
    return parts


def resume_other(net: Any, optimizer: Any, folder: Path) -> None:
    other = other_model()
    saved(other, optimizers.Adam().setup(other), folder)
    umem.chainer.resume_run(folder / "run", net=net, optimizer=optimizer)


def resume_other_rule(net: Any, optimizer: Any, folder: Path) -> None:
    other = other_model(compositions.Perceptron)
    theirs = optimizers.AdaGrad().setup(other)
    theirs.update(other, X, T)
    saved(other, theirs, folder)
    umem.chainer.resume_run(folder / "run", net=net, optimizer=optimizer)


def resume_missing(net: Any, optimizer: Any, folder: Path) -> None:
    other = other_model(compositions.Perceptron)
    umem.chainer.save_run(folder / "run", step=1, wait=True, net=other)
    umem.chainer.resume_run(folder / "run", net=net, optimizer=optimizer)


def in_parts(loss: Callable[[Any], Any], *args: Any, **options: Any) -> Call:
    def call(net: Any, optimizer: Any, _: Path) -> None:
        with umem.chainer.accumulate(optimizer, **(options or {"micro_batch": 3})):
            optimizer.update(loss(net), *args)

    return call


def with_nan(net: Any, optimizer: Any, _: Path) -> None:
    state = next(v for v in net.score.W.update_rule.state.values() if v.shape)
    was = state.reshape(-1)[0]
    state.reshape(-1)[0] = np.nan
    try:
        quantize_states(optimizer)
    finally:
        state.reshape(-1)[0] = was


def half_keeping(net: Any, optimizer: Any, _: Path) -> None:
    umem.chainer.half_precision(net, optimizer, keep=["/no"])


CALLS: dict[str, Call] = {
    "half: type": lambda n, o, _: umem.chainer.half_precision(n, o, dtype="bfloat16"),
    "half: scale": lambda n, o, _: umem.chainer.half_precision(n, o, scale=0.5),
    "half: interval": lambda n, o, _: umem.chainer.half_precision(n, o, interval=0),
    "half: keep": half_keeping,
    "half: no optimizer": lambda n, o, _: umem.chainer.half_precision(n, NotAnOptimizer()),
    "half: not set up": lambda n, o, _: umem.chainer.half_precision(n, optimizers.SGD()),
    "half: another model": lambda n, o, _: umem.chainer.half_precision(other_model(), o),
    "half: scale is no number": lambda n, o, _: umem.chainer.half_precision(n, o, scale="x"),
    "half: keep is no text": lambda n, o, _: umem.chainer.half_precision(n, o, keep=[3]),
    "accumulate: none": lambda n, o, _: umem.chainer.accumulate(o),
    "accumulate: size": lambda n, o, _: umem.chainer.accumulate(o, steps=0),
    "accumulate: weight": lambda n, o, _: umem.chainer.accumulate(o, 2, weight="4"),
    "accumulate: weights": lambda n, o, _: umem.chainer.accumulate(o, 2, weight={"a": 2}),
    "accumulate: off": lambda n, o, _: umem.chainer.accumulate(o, 2).disable(),
    "saved_in: type": lambda n, o, _: umem.chainer.saved_in("float16"),
    "8-bit: keep": lambda n, o, _: quantize_states(o, keep=["/no*"]),
    "8-bit: keep is text": lambda n, o, _: quantize_states(o, keep="/score"),
    "8-bit: size": lambda n, o, _: quantize_states(o, least_size=-1),
    "8-bit: NaN": with_nan,
    "8-bit: none": lambda n, o, _: dequantize_states(o),
    "tie: no place": lambda n, o, _: umem.chainer.tie(n, "/third", "/no"),
    "tie: one place": lambda n, o, _: umem.chainer.tie(n, "/third"),
    "tie: shapes": lambda n, o, _: umem.chainer.tie(n, "/third", "/fourth", "/second"),
    "tie: twice": lambda n, o, _: umem.chainer.tie(n, "/third", "/fourth", "/fourth"),
    "tie: no text": lambda n, o, _: umem.chainer.tie(n, "/third", 4),
    "slimmer: no rule": lambda n, o, _: umem.chainer.slimmer(n, {}),
    "slimmer: no layer": lambda n, o, _: umem.chainer.slimmer(n, {"/no*": LowRank(rank=2)}),
    "slimmer: kind": lambda n, o, _: umem.chainer.slimmer(n, {"/second": Separable()}),
    "slimmer: rank": lambda n, o, _: umem.chainer.slimmer(
        n, {"/second": LowRank(rank=2), "/third": LowRank(rank=4000)}
    ),
    "slimmer: tie": lambda n, o, _: umem.chainer.slimmer(
        n, {"/second": LowRank(rank=2), "/third": TiedTo("/no")}
    ),
    "slimmer: example": lambda n, o, _: umem.chainer.slimmer(
        n, {"/second": LowRank(rank=2)}, (X[:, :3], T)
    ),
    "aware: bits": lambda n, o, _: umem.chainer.quantization_aware(n, bits=3),
    "aware: keep": lambda n, o, _: umem.chainer.quantization_aware(n, keep=["/no"]),
    "aware: group": lambda n, o, _: umem.chainer.quantization_aware(n, group=3),
    "quantize: nothing seen": lambda n, o, _: umem.chainer.quantize(n),
    "quantize: bits": lambda n, o, _: umem.chainer.quantize(n, X, bits=5),
    "quantize: does not run": lambda n, o, _: umem.chainer.quantize(n, X[:, :3]),
    "quantize: NaN": lambda n, o, _: umem.chainer.quantize(n, (X * np.nan, T)),
    "load: no file": lambda n, o, path: umem.chainer.load_quantized(str(path / "no"), n),
    "resume: another model": resume_other,
    "resume: another rule": resume_other_rule,
    "resume: no optimizer": resume_missing,
    "workspace: size": lambda n, o, _: umem.chainer.workspace("-3"),
    "Recompute: budget": lambda n, o, _: umem.chainer.Recompute("much"),
    "Offload: folder": lambda n, o, path: umem.chainer.Offload(str(path / "no")),
}
CALLS_OF_UPDATE: dict[str, Call] = {
    "parts: empty": in_parts(lambda net: net, X[:0], T[:0]),
    "parts: lengths": in_parts(lambda net: net, X, T[:5]),
    "parts: no scalar": in_parts(lambda net: lambda x, t: net.scores(x), X, T),
    "parts: mixing": in_parts(mixing, X, T),
    "steps: mixing": in_parts(mixing, X, T, steps=2),
    "parts: no loss": lambda n, o, _: in_parts(lambda net: None)(n, o, _),
}
"""Those that clear gradients, as they say."""
STATES: dict[str, Call] = {
    "plain": lambda *_: lambda: None,
    "half": lambda n, o, _: umem.chainer.half_precision(n, o).undo,
    "8-bit": lambda n, o, _: quantize_states(o, least_size=0) and (lambda: None),
    "tied": lambda n, o, _: umem.chainer.tie(n, "/third", "/fourth").undo,
    "aware": lambda n, o, _: umem.chainer.quantization_aware(n).undo,
}


def ready() -> tuple[Any, Any]:
    np.random.seed(0)
    net = compositions.Perceptron()
    optimizer = optimizers.Adam().setup(net)
    optimizer.update(net, X, T)
    return net, optimizer


def refused(call: Call, net: Any, optimizer: Any, folder: Path, but: str = "") -> None:
    before = everything(net, optimizer)
    try:
        call(net, optimizer, folder)
    except Exception:
        pass
    else:
        pytest.skip("it is not refused in this state")
    after = everything(net, optimizer)
    changed = compositions.differing(after, before)
    assert not [name for name in changed if not (but and name.endswith(but))]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_refused_changes_nothing(name: str, tmp_path: Path) -> None:
    refused(CALLS[name], *ready(), tmp_path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS_OF_UPDATE)
def test_an_update_that_is_refused_clears_gradients_and_changes_nothing_else(
    name: str, tmp_path: Path
) -> None:
    refused(CALLS_OF_UPDATE[name], *ready(), tmp_path, but=" grad")


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("state", list(STATES)[1:])
@pytest.mark.parametrize("name", [*CALLS, *CALLS_OF_UPDATE])
def test_nor_does_it_where_something_is_on(name: str, state: str, tmp_path: Path) -> None:
    net, optimizer = ready()
    off = STATES[state](net, optimizer, tmp_path)
    optimizer.update(net, X, T)
    try:
        but = " grad" if name in CALLS_OF_UPDATE else ""
        refused({**CALLS, **CALLS_OF_UPDATE}[name], net, optimizer, tmp_path, but)
    finally:
        off()


@pytest.mark.parametrize("name", ["alpha", "beta1", "eps"])
def test_an_optimizer_of_8_bits_refuses_before_a_parameter_changes(name: str) -> None:
    net = compositions.Perceptron()
    optimizer = Adam8bit(least_size=0).setup(net)
    optimizer.update(net, X, T)
    net.cleargrads()
    net(X, T).backward()
    setattr(optimizer.hyperparam, name, np.nan)
    before = everything(net, optimizer)
    with pytest.raises(ValueError, match=name):
        optimizer.update()
    setattr(optimizer.hyperparam, name, np.nan)
    assert not compositions.differing(everything(net, optimizer), before)


def test_the_fingerprint_sees_a_parameter_and_a_generator() -> None:
    net, optimizer = ready()
    before = everything(net, optimizer)
    np.random.rand()
    net.score.W.array[0, 0] += 1
    assert compositions.differing(everything(net, optimizer), before) == ["random", "/score/W"]


TURNED_ON: dict[str, Call] = {
    "half": STATES["half"],
    "saved_in": lambda n, o, _: umem.chainer.saved_in("bfloat16").undo,
    "accumulate": lambda n, o, _: umem.chainer.accumulate(o, 2).enable().disable,
    "workspace": lambda n, o, _: umem.chainer.workspace("1MiB").enable().disable,
}


@pytest.mark.parametrize("name", TURNED_ON)
def test_where_chainer_was_imported_anew_nothing_is_left_on(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    functions = [vars(point.owner)[point.name] for point in POINTS]
    net, optimizer = ready()
    before = everything(net, optimizer)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "chainer", object())  # type: ignore[arg-type]
        with pytest.raises(umem.errors.StateError, match="imported anew"):
            TURNED_ON[name](net, optimizer, tmp_path)
    assert not compositions.differing(everything(net, optimizer), before)
    TURNED_ON[name](net, optimizer, tmp_path)()
    assert [vars(point.owner)[point.name] for point in POINTS] == functions
