"""What surrounds a checkpointed region: running statistics, configuration, errors, threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import umem.chainer  # noqa: F401  # isort: skip  (before Chainer, which it makes ready)
import chainer
import chainer.functions as F
import chainer.link_hooks
import chainer.links as L
import numpy as np
import pytest
from chainer.functions.normalization.batch_normalization import BatchNormalization
from checkpoint_cases import agree, draw, plain, variable

from umem.chainer import checkpoint
from umem.errors import RecomputeCountError


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Nothing stays: no hook, no configuration."""
    before = dict(vars(chainer.config._local))
    yield
    assert not chainer.get_function_hooks() and not chainer._get_link_hooks()
    assert dict(vars(chainer.config._local)) == before


# -- running statistics ------------------------------------------------------------------------


class Unguarded(chainer.Link):  # type: ignore[misc, unused-ignore]
    """Keeps statistics as chainermn's MultiNodeBatchNormalization does: not knowing of reruns."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.avg_mean, self.avg_var = np.zeros(size, np.float32), np.zeros(size, np.float32)
        self.register_persistent("avg_mean")
        self.register_persistent("avg_var")
        with self.init_scope():
            self.gamma = chainer.Parameter(1, size)
            self.beta = chainer.Parameter(0, size)

    def forward(self, x: Any) -> Any:
        func = BatchNormalization(2e-5, self.avg_mean, self.avg_var, 0.9)
        (y,) = func.apply((x, self.gamma, self.beta))
        self.avg_mean[:] = func.running_mean
        self.avg_var[:] = func.running_var
        return y


def renormalization(size: int) -> Any:
    return L.BatchRenormalization(
        size, rmax=3, dmax=5, initial_avg_mean=0, initial_avg_var=1, dtype=np.float32
    )


NORMS = {
    "BatchNormalization": lambda: L.BatchNormalization(16),
    "BatchRenormalization": lambda: renormalization(16),
    "DecorrelatedBatchNormalization": lambda: L.DecorrelatedBatchNormalization(16, groups=4),
    "one without a guard": lambda: Unguarded(16),
}


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_running_statistics_are_updated_once(name: str, deep: bool) -> None:
    def trained(call: Any) -> list[Any]:
        np.random.seed(0)
        norm, link = NORMS[name](), L.Linear(16, 16)
        block = lambda x: F.tanh(link(norm(x)))  # noqa: E731
        inner = (lambda x: call(block, x)) if deep else block
        found = []
        for step in range(3):
            x = variable(20, 16, seed=step)
            h = call(inner, x)
            h = call(inner, h * 3 + 1)  # the same link again
            link.cleargrads()
            norm.cleargrads()
            F.sum(h * h).backward()
            found += [x.grad, link.W.grad, *(p.grad for _, p in sorted(norm.namedparams()))]
        return found + [np.array(getattr(norm, key)) for key in sorted(norm._persistent)]

    for expected, found in zip(trained(plain), trained(checkpoint), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_the_real_multi_node_batch_normalization_updates_its_statistics_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from chainermn.functions import batch_normalization
    from chainermn.links import MultiNodeBatchNormalization

    # Choosing a backend imports MPI, which the arithmetic does not need.
    monkeypatch.setattr(batch_normalization, "get_communication_backend", lambda *_: "mpi")

    class Alone:
        """A communicator of one process."""

        def _multi_node_mean(self, send: Any, receive: Any) -> None:
            """The mean over one process is there already."""

    def trained(call: Any) -> list[Any]:
        with pytest.warns(FutureWarning, match="experimental"):
            norm = MultiNodeBatchNormalization(4, Alone())
        norm.cleargrads()
        x = variable(6, 4)
        F.sum(F.tanh(call(norm, x))).backward()
        return [norm.avg_mean, norm.avg_var, norm.gamma.grad, x.grad]

    for expected, found in zip(trained(plain), trained(checkpoint), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("deep", [False, True])
def test_spectral_normalization_of_a_link_that_is_called_twice_agrees_with_the_plain_run(
    deep: bool,
) -> None:
    def trained(call: Any) -> list[Any]:
        np.random.seed(0)
        link = L.Linear(None, 6)
        link.add_hook(chainer.link_hooks.SpectralNormalization())
        block = lambda x: F.tanh(link(x))  # noqa: E731
        region = (lambda x: call(block, F.sin(x))) if deep else block
        found = []
        for step in range(3):
            real, fake = variable(5, 6, seed=step), variable(5, 6, seed=step + 9)
            loss = F.sum(call(region, real)) - F.sum(F.exp(call(region, fake)))
            link.cleargrads()
            loss.backward()
            found += [link.W.grad, link.W_u.copy(), real.grad]
        return found

    for expected, found in zip(trained(plain), trained(checkpoint), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_fine_tuning_counts_each_batch_once() -> None:
    norm = L.BatchNormalization(3)
    for step in range(3):
        F.sum(checkpoint(norm, variable(5, 3, seed=step), finetune=True)).backward()
    assert norm.N == 3


def test_statistics_stay_when_the_second_run_fails_inside_the_function() -> None:
    norm = Unguarded(3)

    class Failing(BatchNormalization):  # type: ignore[misc, unused-ignore]
        def forward(self, inputs: Any) -> Any:
            found = super().forward(inputs)
            if chainer.config.in_recomputing:
                raise ZeroDivisionError
            return found

    def region(x: Any) -> Any:
        return Failing(2e-5, norm.avg_mean, norm.avg_var, 0.9).apply((x, norm.gamma, norm.beta))[0]

    y = checkpoint(region, variable(5, 3))
    before = norm.avg_mean.copy(), norm.avg_var.copy()
    with pytest.raises(ZeroDivisionError):
        F.sum(y).backward()
    np.testing.assert_array_equal((norm.avg_mean, norm.avg_var), before)


# -- configuration -----------------------------------------------------------------------------


def test_the_second_run_has_the_configuration_of_the_first() -> None:
    seen: list[tuple[Any, ...]] = []
    keys = ("train", "dtype", "use_cudnn", "lazy_grad_sum", "my_own")

    def region(x: Any) -> Any:
        seen.append(tuple(getattr(chainer.config, key) for key in keys))
        return F.dropout(x) * 2

    chosen = (False, np.dtype("float16"), "never", True, "mine")
    x = variable(30)
    with chainer.using_config("my_own", "mine"):
        for key, value in zip(keys, chosen, strict=True):
            setattr(chainer.config, key, value)
        y = checkpoint(region, x)
    for key in keys[:-1]:
        delattr(chainer.config, key)
    with pytest.raises(AttributeError):
        _ = chainer.config.my_own
    F.sum(y).backward()
    assert seen == [chosen, chosen]
    assert np.all(x.grad == 2)  # no dropout in either run
    assert chainer.config.train and chainer.config.use_cudnn != "never"


def test_a_region_under_evaluation_is_equal_bit_for_bit() -> None:
    norm, x = L.BatchNormalization(3), variable(6, 3)
    with chainer.using_config("train", False):
        agree(lambda call: F.sum(F.tanh(call(lambda x: F.dropout(norm(x)), x))), x, norm.gamma)


def test_a_region_may_turn_backprop_off_inside() -> None:
    x = variable(4)

    def region(x: Any) -> Any:
        with chainer.no_backprop_mode():
            scale = F.sum(x * x)
        return x / scale

    agree(lambda call: F.sum(F.exp(call(region, x))), x)


# -- after an error ----------------------------------------------------------------------------


def fail(*_: Any) -> None:
    raise ZeroDivisionError("as planned")


class FailingBackward(chainer.FunctionNode):  # type: ignore[misc, unused-ignore]
    def forward(self, inputs: Any) -> Any:
        return inputs

    def backward(self, indexes: Any, grads: Any) -> Any:
        fail()


def in_forward(x: Any) -> Any:
    fail()


def in_second_run(x: Any) -> Any:
    y = F.dropout(x)
    if chainer.config.in_recomputing:
        fail()
    return y


def in_backward(x: Any) -> Any:
    return FailingBackward().apply((F.dropout(x),))[0]


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("region", [in_forward, in_second_run, in_backward])
def test_after_an_error_everything_is_as_before_and_the_next_step_works(
    region: Any, deep: bool
) -> None:
    x = variable(8)
    func = (lambda x: checkpoint(region, F.dropout(x))) if deep else region
    h = F.tanh(x)
    creator = h.creator_node
    with pytest.raises(ZeroDivisionError, match="as planned"):
        y = checkpoint(lambda v: func(v) * h, h)
        before = draw()
        F.sum(y).backward()
    if region is not in_forward:
        assert draw() == before
    assert h.creator_node is creator and x.grad is None
    agree(lambda call: F.sum(call(F.dropout, x)), x)


def test_after_a_failed_check_the_random_numbers_are_as_before() -> None:
    x, extra = variable(8), []

    def region(x: Any) -> Any:
        for _ in extra:
            x = F.dropout(x)
        return F.dropout(x)

    y, before = checkpoint(region, x), draw()
    extra.append(None)
    with pytest.raises(RecomputeCountError):
        F.sum(y).backward()
    assert draw() == before


# -- threads -----------------------------------------------------------------------------------


def test_threads_have_their_regions_to_themselves() -> None:
    links = [L.Linear(6, 6) for _ in range(4)]
    found: list[Any] = [None] * 4

    def work(number: int) -> None:
        link, x = links[number], variable(5, 6, seed=number)
        for _ in range(20):
            link.cleargrads()
            x.cleargrad()
            F.sum(F.tanh(checkpoint(lambda x: F.sigmoid(link(x)), x))).backward()
        found[number] = (x.grad, link.W.grad)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, link in enumerate(links):
        x = variable(5, 6, seed=number)
        link.cleargrads()
        F.sum(F.tanh(F.sigmoid(link(x)))).backward()
        np.testing.assert_array_equal(found[number][0], x.grad)
        np.testing.assert_array_equal(found[number][1], link.W.grad)
