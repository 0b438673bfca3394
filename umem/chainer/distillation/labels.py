"""Labels in a batch: split off for a loss, and added to items without one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from umem._common.printable import quoted
from umem.errors import StateError

NO_LABEL = -1
"""Label of a row without one; `chainer.functions.softmax_cross_entropy` ignores it."""


class Given(NamedTuple):
    """The arguments of a loss, split into the networks' inputs and the labels."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    labels: Any


def split(key: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Given:
    """Split the labels off a loss's arguments, as `chainer.links.Classifier` does.

    Raises:
        StateError: there are no labels, or nothing beside them.
    """
    if key is None:
        return Given(args, kwargs, None)
    if isinstance(key, str):
        if key not in kwargs:
            raise StateError(f"items have no {quoted(key)}, which label_key names")
        return Given(args, {k: x for k, x in kwargs.items() if k != key}, kwargs[key])
    count = len(args)
    if not -count <= key < count or (count == 1 and not kwargs):
        raise StateError(
            f"items have {count} parts, and label_key={key} takes the labels from them: give "
            "tuples of inputs and a label, or label_key=None and weight=1"
        )
    return Given((*args[: key % count], *args[key % count + 1 :]), kwargs, args[key])


def are_classes(scores: Any, labels: Any) -> bool:
    """Tell whether labels are integer classes, one for each row of the scores."""
    if labels is None or getattr(labels, "dtype", None) is None:
        return False
    is_one_a_row = labels.shape == (*scores.shape[:1], *scores.shape[2:]) and scores.ndim > 1
    return bool(labels.dtype.kind == "i" and is_one_a_row)


def without_label(item: Any, like: Any, key: Any) -> Any:
    """Append the label -1 to an unlabelled item, so that it can be batched with labelled ones.

    Args:
        item: an input, a tuple of inputs, or a dictionary of them.
        like: an item with a label.
        key: the label's index or name; None: items have none.

    Raises:
        StateError: the item has a label, or other inputs; labels are not signed integers.
    """
    if key is None:
        return item
    if isinstance(like, Mapping):
        label = _no_label(like.get(key))
        if not isinstance(item, Mapping) or {*item, key} != {*like} or key in item:
            raise _other(sorted(map(str, item)) if isinstance(item, Mapping) else 1, sorted(like))
        return {**item, key: label}
    if not isinstance(like, tuple):
        raise StateError(
            f"items with a label must be tuples of inputs and the label, or dictionaries; got an "
            f"{type(like).__name__}. If no item has one, give label_key=None and weight=1"
        )
    parts = item if isinstance(item, tuple) else (item,)
    if len(parts) != len(like) - 1:
        raise _other(len(parts), len(like))
    place = key % len(like)
    return (*parts[:place], _no_label(like[key]), *parts[place:])


def _no_label(label: Any) -> Any:
    dtype = np.dtype(getattr(label, "dtype", type(label)))
    if dtype.kind != "i":
        raise StateError(
            f"labels of type {dtype} cannot hold -1, which marks a missing label: give signed "
            "integers, such as int32"
        )
    return np.full(getattr(label, "shape", ()), NO_LABEL, dtype)


def _other(item: Any, like: Any) -> StateError:
    return StateError(
        f"items without a label have the parts {item}, and those with one {like}: the first must "
        "be the second without the label"
    )
