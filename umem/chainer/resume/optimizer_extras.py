"""State of optimizers and links that Chainer does not save, but a resumed run needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import chainer
from chainer import serializer

from umem._common.printable import quoted
from umem.errors import SnapshotError, SnapshotWarning, warn_at_program


def is_optimizer(part: Any) -> bool:
    """Tell whether an object is Chainer's optimizer, or ChainerMN's wrapper of one."""
    return isinstance(getattr(part, "actual_optimizer", part), chainer.Optimizer)


def serialize_optimizer(optimizer: Any, saver: Any) -> None:
    """Save or restore loss scaling, hyper-parameters, and each update rule's attributes.

    These are the rule's own hyperparameters, its numbers (whether it is on, and powers beside its
    state), and the float32 master of a parameter in half precision; and the list of the parameters
    that ChainerMN has broadcast.

    Raises:
        SnapshotError: see `_serialize_hyperparameters`.
    """
    _serialize_loss_scaling(optimizer, saver)
    _serialize_broadcast(optimizer, saver)
    _serialize_hyperparameters(getattr(optimizer, "hyperparam", None), saver["hyperparameters"])
    for name, parameter in optimizer.target.namedparams():
        rule = getattr(parameter, "update_rule", None)
        if rule is not None:
            _serialize_rule(rule, parameter, saver["rules"][name])


def expect_states(optimizer: Any, saver: Any) -> None:
    """Turn off the update rules that had no state when saved, so that loading does not look for
    one.

    Loading then raises if the state of another rule is missing. `serialize_optimizer` restores
    which rules are on.

    Raises:
        SnapshotError: a parameter was updated by another rule. Otherwise MomentumSGD would use
            Adam's mean of squares, which is also ``v``, as its velocity.
    """
    for name, parameter in optimizer.target.namedparams():
        rule = getattr(parameter, "update_rule", None)
        if rule is None:
            continue
        there, here = saver["rules"][name]("kind", None), _kind(rule)
        if there != here:
            raise SnapshotError(f"{name!r} is updated by {there} there and by {here} here")
        if not saver["rules"][name]("has_state", None):
            rule.enabled = False


def _kind(rule: Any) -> str:
    """Name the computation of a rule; an 8-bit rule takes the state of its plain one."""
    return type(rule).__name__.replace("8bit", "")


def _serialize_loss_scaling(optimizer: Any, saver: Any) -> None:
    """Save or restore loss scaling: the attributes `_loss_scal...`, which exist once it is used."""
    own = vars(getattr(optimizer, "actual_optimizer", optimizer))
    now = {k: v for k, v in own.items() if k.startswith("_loss_scal")}
    own.update(saver("loss_scaling", now))


def _serialize_broadcast(optimizer: Any, saver: Any) -> None:
    """Save or restore the list of the parameters that ChainerMN has broadcast, if it is used.

    An update broadcasts if the model has parameters that the wrapped optimizer has not recorded. A
    resumed run already has equal parameters on all ranks, and would lose an update.
    """
    noted = vars(optimizer).get("target_params")
    if noted is not None:
        saved = saver("target_params", [list(each) for each in noted])
        vars(optimizer)["target_params"] = [tuple(each) for each in saved]


def _serialize_hyperparameters(hyperparameters: Any, saver: Any) -> None:
    """Save or restore hyperparameters, except their link to the inherited ones.

    Raises:
        SnapshotError: a switch differs; for example, AMSGrad has another state than Adam.
    """
    if hyperparameters is None:
        return
    now = {k: v for k, v in vars(hyperparameters).items() if k != "_parent"}
    saved = saver("own", now)
    for name, value in now.items():
        if isinstance(value, bool) and saved.get(name, value) != value:
            raise SnapshotError(f"{name!r} is {quoted(saved[name])} there and {value} here")
    vars(hyperparameters).update(saved)


def _serialize_rule(rule: Any, parameter: Any, saver: Any) -> None:
    """Save or restore one update rule's numbers, hyper-parameters and float32 master.

    Its kind and whether it has a state are saved for `expect_states`. A missing master is
    created.
    """
    numbers = {k: v for k, v in vars(rule).items() if type(v) in (bool, int, float)}
    saved = saver("numbers", numbers)
    vars(rule).update({k: v for k, v in saved.items() if k in numbers})
    _serialize_hyperparameters(rule.hyperparam, saver)
    saver("has_state", rule.state is not None)
    saver("kind", _kind(rule))
    # The float32 copy of use_fp32_update has no public name.
    master = rule._fp32_param
    array = saver("master", None if master is None else master.array)
    if array is not None and master is None:
        sent = parameter.device.send(array)
        rule._fp32_param = chainer.Parameter(sent, name=parameter.name)


# -- links -------------------------------------------------------------------------------------


def serialize_link(link: Any, saver: Any) -> None:
    """Save or restore variables that links keep between calls, such as an LSTM's state.

    Variables with a graph are omitted, because a graph is not saved. If the link has a
    ``reset_state``, and so would continue from them, a warning is given.
    """
    if isinstance(saver, serializer.Serializer):
        kept = list(_kept_variables(link))
        saver("kept", [[path, name] for path, name, _ in kept])
        for path, name, value in kept:
            saver[path](name, value.array)
        return
    links = {path.strip("/"): each for path, each in link.namedlinks()}
    for path, name in saver("kept", None):
        owner = links[path.strip("/")]
        array = saver[path](name, None)
        setattr(owner, name, chainer.Variable(owner.device.send(array)))


def _kept_variables(link: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield the variables without a graph that links keep between calls, each with path and name.

    Warns:
        SnapshotWarning: a link with a ``reset_state`` keeps a variable with a graph, which a
            snapshot cannot hold.
    """
    for path, each in link.namedlinks():
        kept = [(n, v) for n, v in sorted(vars(each).items()) if _is_kept(v)]
        yield from ((path, name, value) for name, value in kept if value.creator_node is None)
        grown = [name for name, value in kept if value.creator_node is not None]
        if grown and hasattr(each, "reset_state"):
            warn_at_program(
                f"{path} keeps {', '.join(grown)} with a graph, which a snapshot cannot hold: "
                "a resumed run would begin without. Cut the graph after each "
                "update, by loss.unchain_backward()",
                SnapshotWarning,
            )


def _is_kept(value: Any) -> bool:
    is_variable = isinstance(value, chainer.Variable) and not isinstance(value, chainer.Parameter)
    return is_variable and value.array is not None
