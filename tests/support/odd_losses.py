"""Losses that people write and that `umem.chainer.accumulate` may refuse (`random_losses`).

Many have no gradient that parts could give: they mix samples, or go by numbers of the batch. Each
looks like something that is fine. Arguments and ``h`` are those of `loss_families`; ``state`` is
the program's own, with the number of the update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Family:
    """Lines of a loss function, which set ``loss`` or return it themselves."""

    name: str
    names: str
    body: str
    weight: str | None = None
    ways: tuple[str, ...] = ()
    round: str | None = None
    """How it goes backward by hand, where that is special."""

    @property
    def plain(self) -> bool:
        return not any(line.startswith("return ") for line in self.body.split("\n"))


_CE = "F.softmax_cross_entropy(model.l2(h), c, reduce='no')"
_SE = "F.squared_error(model.out(h), y)"
_PADDED = "F.pad_sequence([model.step(each) for each in xs])"


def _family(name: str, names: str, *bodies: str, **options: Any) -> list[Family]:
    return [Family(name, names, body, **options) for body in bodies]


_UNSAID = (
    _family("a hand division, no weight", "y c m t",
        f"loss = F.sum({_SE}) / len(x)",
        f"loss = F.sum({_CE} * m) / max(1, m.sum())",
        f"loss = F.sum({_SE}) / y.size",
        f"loss = F.average({_CE}, weights=m + 0.5)",
        "loss = F.softmax_cross_entropy(model.l2(h), t, enable_double_backprop=True)",
        f"each = F.expand_dims({_CE}, 1)\n"
        "loss = F.matmul(np.full((1, len(x)), 1 / len(x), x.dtype), each)[0, 0]",
        f"loss = F.sum({_CE} * (1 / len(x)))",
        f"loss = F.mean({_CE}, axis=0)",
        f"loss = F.sum(F.mean({_SE}, axis=0))",
        f"loss = F.mean({_CE}, keepdims=True)[0]"),
    _family("a sum, no weight", "y c",
        f"loss = F.sum({_SE})",
        "loss = F.gaussian_nll(y, model.out(h), model.out(h) * 0.1)",
        f"loss = F.sum({_CE}) + F.mean({_SE})",
        f"loss = F.mean({_CE}) * len(x)",
        f"loss = F.mean({_CE}) * len(x) / 16"),
    _family("samples in a loop", "y c",
        f"loss = F.mean(F.stack([F.sum({_SE}[i]) for i in range(len(x))]))",
        "loss = F.mean(F.stack([F.softmax_cross_entropy(model.l2(h[i:i + 1]), c[i:i + 1]) "
        "for i in range(len(x))]))",
        "loss = sum(F.softmax_cross_entropy(model.l2(h[i:i + 1]), c[i:i + 1]) "
        "for i in range(len(x))) / len(x)",
        "loss = sum(F.mean_squared_error(model.out(h[i:i + 1]), y[i:i + 1]) "
        "for i in range(len(x)))",
        "loss = F.mean(F.concat([F.reshape(F.sum((model.out(h[i:i + 1]) - y[i]) ** 2), (1,)) "
        "for i in reversed(range(len(x)))], axis=0))"),
    _family("samples in a loop, weight=", "y c",
        "loss = sum(F.softmax_cross_entropy(model.l2(h[i:i + 1]), c[i:i + 1]) "
        "for i in range(len(x))) / len(x)", weight="len(x)"),
    _family("chunks of two", "y c t",
        "loss = F.mean(F.stack([F.softmax_cross_entropy(model.l2(h[i:i + 2]), t[i:i + 2]) "
        "for i in range(0, len(x), 2)]))",
        "loss = F.mean(F.stack([F.mean_squared_error(model.out(h[i:i + 2]), y[i:i + 2]) "
        "for i in range(0, len(x), 2)]))"),
)  # fmt: skip

_SEQUENCES = (
    _family("padded to the part", "xs ts",
        f"loss = F.mean({_PADDED} ** 2 + 0.1 * F.softplus({_PADDED}))",
        "loss = F.mean_squared_error(F.pad_sequence([model.step(each)[:, :4] for each in xs]), "
        "F.pad_sequence(xs))",
        "loss = F.softmax_cross_entropy(F.transpose(F.pad_sequence([model.l2(model.step(each)) "
        "for each in xs]), (0, 2, 1)), F.pad_sequence(ts, padding=0).array)",
        "wide = F.pad_sequence([model.step(each)[:, 0] for each in xs])\n"
        "loss = F.sigmoid_cross_entropy(wide, F.pad_sequence([each % 2 for each in ts]).array)",
        f"loss = F.mean(F.sum({_PADDED} ** 2, axis=2))"),
    _family("padded to the part, normalize=False", "xs ts",
        "wide = F.transpose_sequence([model.l2(model.step(each)) for each in "
        "sorted(xs, key=len, reverse=True)])\n"
        "loss = sum(F.softmax_cross_entropy(each, np.zeros(len(each), 'i'), normalize=False) "
        "for each in wide)",
        "wide = F.pad_sequence([model.l2(model.step(each)) for each in xs])\n"
        "label = F.pad_sequence(ts, padding=-1).array\n"
        "loss = sum(F.softmax_cross_entropy(wide[:, i], label[:, i], normalize=False) "
        "for i in range(wide.shape[1]))",
        "wide = F.pad_sequence([model.l2(model.step(each)) for each in xs])\n"
        "label = F.pad_sequence(ts, padding=-1).array\n"
        "loss = sum(F.softmax_cross_entropy(wide[:, i], label[:, i]) "
        "for i in range(wide.shape[1]))",
        "wide = F.pad_sequence([model.l2(model.step(each)) for each in xs])\n"
        "label = F.pad_sequence(ts, padding=-1).array\n"
        "loss = sum(F.softmax_cross_entropy(wide[:, i], label[:, i]) "
        "for i in reversed(range(wide.shape[1]))) / wide.shape[1]"),
    _family("depends on the padded length", "xs ts",
        "hidden = None\nwide = F.pad_sequence([model.step(each) for each in xs])\n"
        "for i in range(wide.shape[1]):\n"
        "    hidden = F.tanh(wide[:, i] if hidden is None else model.l3(hidden) + wide[:, i])\n"
        "loss = F.softmax_cross_entropy(model.l2(hidden), np.array([each[0] for each in ts]))",
        f"wide = {_PADDED}\nattention = F.softmax(F.sum(wide, axis=2), axis=1)\n"
        "mixed = F.sum(wide * F.broadcast_to(attention[:, :, None], wide.shape), axis=1)\n"
        "loss = F.softmax_cross_entropy(model.l2(mixed), np.array([each[0] for each in ts]))",
        f"loss = F.mean(F.mean({_PADDED}, axis=1) ** 2)",
        f"loss = F.mean(F.max({_PADDED}, axis=1))",
        "longest = max(map(len, xs))\n"
        "loss = F.mean(F.stack([F.sum(model.step(each)) / longest for each in xs]) ** 2)",
        "longest = max(map(len, xs))\nplaces = np.concatenate([np.arange(len(each)) / longest "
        "for each in xs]).astype(x.dtype)\n"
        "loss = F.mean(F.concat([model.step(each)[:, 0] for each in xs], axis=0) * places)"),
    _family("cut to the shortest", "xs ts",
        "least = min(map(len, xs))\nloss = F.softmax_cross_entropy(model.l2(F.concat("
        "[model.step(each[:least]) for each in xs], axis=0)), "
        "np.concatenate([each[:least] for each in ts]))",
        "least = min(map(len, xs))\n"
        "loss = F.mean(F.stack([model.step(each[:least]) for each in xs]) ** 2)"),
    _family("ragged beside another term", "xs ts y",
        "loss = F.softmax_cross_entropy(model.l2(F.concat([model.step(each) for each in xs], "
        f"axis=0)), np.concatenate(ts)) + F.mean({_SE})",
        "loss = F.mean(F.concat([model.step(each) for each in xs], axis=0) ** 2) "
        "- 0.1 * F.softmax_cross_entropy(model.l2(F.stack([F.tanh(model.step(each))[0] "
        "for each in xs])), np.array([each[0] for each in ts]))",
        "loss = F.mean(F.concat([model.step(each) for each in xs], axis=0) ** 2) "
        "+ F.sum(model.step.W ** 2)"),
    _family("a mean over steps", "e tt",
        "loss = F.mean(F.stack([F.softmax_cross_entropy(model.l2(model.emb(e[:, i])), tt[:, i]) "
        "for i in range(3)]))",
        "loss = F.mean(F.concat([F.reshape(F.mean(model.emb(e[:, i]) ** 2), (1,)) "
        "for i in range(3)], axis=0))",
        "loss = F.sum(F.mean(F.mean(model.emb(e) ** 2, axis=0), axis=0)) / 6",
        "loss = F.mean(F.sum(model.emb(e), axis=0) ** 2)",
        "loss = F.mean(F.max(model.emb(e), axis=0))"),
    _family("a mean over samples, ragged lengths", "xs ts",
        "loss = F.mean(F.stack([F.softmax_cross_entropy(model.l2(model.step(a)), b) "
        "for a, b in zip(xs, ts)]))",
        "loss = sum(F.softmax_cross_entropy(model.l2(model.step(a)), b) "
        "for a, b in zip(xs, ts)) / len(xs)",
        "loss = sum(F.mean(model.step(a)) for a in xs) / sum(map(len, xs))"),
    _family("an LSTM that carries its state", "e tt",
        "loss = F.softmax_cross_entropy(model.l2(model.lstm(model.emb(e[:, 0]))), tt[:, 0])",
        "if len(e) != state.size:\n    model.lstm.reset_state()\nstate.size = len(e)\n"
        "loss = 0\nfor i in range(2):\n    loss += F.softmax_cross_entropy("
        "model.l2(model.lstm(model.emb(e[:, i]))), tt[:, i])"),
)  # fmt: skip

_MIXED = (
    _family("a softmax over the batch", "c y",
        "loss = -F.mean(F.log_softmax(model.d(h), axis=0))",
        f"loss = F.mean(F.softmax(model.l2(h), axis=0) * {_CE}[:, None])"
        .replace("[:, None]", ".reshape(-1, 1).array"),
        "loss = F.mean(F.softmax(F.transpose(model.l2(h))) ** 2)",
        "loss = F.softmax_cross_entropy(F.transpose(model.d(h)), np.zeros(1, 'i'))",
        "weight = F.softmax(F.reshape(model.d(h), (1, -1)))[0]\n"
        f"loss = F.mean(weight * {_CE})"),
    _family("a mean taken away", "y c",
        "z = model.out(h)\nloss = F.mean((z - F.broadcast_to(F.mean(z, axis=0), z.shape)) ** 2)",
        "z = model.out(h)\nloss = F.mean_squared_error(z, F.broadcast_to(F.mean(z), z.shape))",
        "z = model.out(h)\nwith chainer.no_backprop_mode():\n    middle = F.mean(z, axis=0)\n"
        "loss = F.mean_squared_error(z - F.broadcast_to(middle, z.shape), y)",
        "z = model.out(h)\nloss = F.mean_squared_error(z - z.array.mean(axis=0), y)",
        "z = model.out(h)\nloss = F.mean((z - F.broadcast_to(F.sum(z, axis=0) / len(z), z.shape))"
        " ** 2)"),
    _family("targets by the batch, in NumPy", "y c",
        "loss = F.mean_squared_error(model.out(h), y - y.mean(axis=0))",
        "loss = F.mean_squared_error(model.out(h), (y - y.mean()) / (y.std() + 1e-3))",
        "x = x - x.mean(axis=0)\nloss = F.mean_squared_error(model.out(F.tanh(model.l1(x))), y)",
        "_, label = np.unique(c, return_inverse=True)\n"
        "loss = F.softmax_cross_entropy(model.l2(h), label.astype('i'))",
        "gain = y[:, 0] - y[:, 0].mean()\n"
        "loss = -F.mean(F.select_item(F.log_softmax(model.l2(h)), c) * gain)",
        "loss = F.mean_squared_error(model.out(h), y / max(1, abs(y).max()))",
        "top = y[:, 0] >= np.median(y[:, 0])\n"
        "loss = F.softmax_cross_entropy(model.l2(h), top * 1)"),
    _family("batch normalization", "y t",
        "loss = F.softmax_cross_entropy(model.l2(F.tanh(model.bn(h))), t)",
        "loss = F.mean_squared_error(model.out(model.bn(h) * 0.5), y)",
        "one, zero = np.ones(6, x.dtype), np.zeros(6, x.dtype)\n"
        "loss = F.mean(model.d(F.tanh(F.batch_normalization(h, one, zero))) ** 2)",
        "loss = F.mean_squared_error(model.out(model.brn(h)), y)",
        "with chainer.using_config('train', False):\n    z = model.bn(h)\n"
        "loss = F.mean_squared_error(model.out(z), y)"),
    _family("negatives of the batch", "v",
        "logits = F.matmul(h, F.tanh(model.l1(v)), transb=True)\n"
        "loss = F.softmax_cross_entropy(logits, np.arange(len(x), dtype='i'))",
        "z = F.normalize(h)\nlogits = F.matmul(z, F.normalize(model.l1(v)), transb=True) / 0.5\n"
        "label = np.arange(len(x), dtype='i')\nloss = 0.5 * (F.softmax_cross_entropy(logits, label)"
        " + F.softmax_cross_entropy(F.transpose(logits), label))",
        "loss = F.triplet(h, F.tanh(model.l1(v)), F.tanh(model.l1(v[::-1])), margin=2)",
        "far = np.roll(np.arange(len(x)), 1)\n"
        "loss = F.contrastive(h, F.tanh(model.l1(v[far])), np.arange(len(x)) % 2)"),
    _family("the batch by itself", "y",
        "loss = F.mean((F.matmul(h, h, transa=True) / len(x) - np.eye(6, dtype=x.dtype)) ** 2)",
        "loss = F.mean(F.matmul(h, h, transb=True) ** 2)",
        "loss = F.decov(h)",
        "loss = F.cross_covariance(model.out(h), model.l2(h))",
        "loss = F.mean(F.softplus(model.d(h) - F.transpose(model.d(h))))",
        "z = model.out(h)\nloss = F.mean((F.expand_dims(z, 0) - F.expand_dims(z, 1)) ** 2)"
        .replace("F.expand_dims(z, 0)", "F.broadcast_to(z, (len(x), len(x), 3))")
        .replace("F.expand_dims(z, 1)",
                 "F.broadcast_to(F.expand_dims(z, 1), (len(x), len(x), 3))"),
        "loss = F.mean(F.tensordot(h, h, axes=((0,), (0,))) ** 2)",
        "loss = F.mean(F.cumsum(model.out(h), axis=0) ** 2)",
        "loss = F.mean(F.einsum('ij,kj->ik', h, h))"),
    _family("pairs of the batch", "y c",
        "z, k = model.out(h), len(x) // 2\nloss = F.mean_squared_error(z[:k], z[k:2 * k])",
        "z, k = model.out(h), (len(x) + 1) // 2\nloss = F.mean_squared_error(z[:k], z[-k:])"
        " + F.mean_squared_error(z, y)",
        "z = model.out(h)\nloss = F.mean((z - z[::-1]) ** 2)",
        "z = model.out(h)\nloss = F.mean((z - F.flip(z, 0)) ** 2)",
        "z = model.out(h)\nloss = F.mean((z - F.concat([z[1:], z[:1]], axis=0)) ** 2)",
        "z = model.out(h)\nloss = F.mean((z[1:] - z[:-1]) ** 2)",
        "z = model.out(h)\nloss = F.mean(F.maximum(z[::2][:len(x) // 2], z[1::2]))",
        "mixed = 0.7 * x + 0.3 * x[::-1]\n"
        "loss = F.mean_squared_error(model.out(F.tanh(model.l1(mixed))), 0.7 * y + 0.3 * y[::-1])",
        "order = np.random.RandomState(0).permutation(len(x))\n"
        "loss = F.mean_squared_error(model.out(h)[order], y)",
        "z = model.out(h)\nloss = F.mean(F.reshape(F.transpose(z), (-1, 3)) * y)",
        "z = model.out(h)\nloss = F.mean(F.reshape(z, (3, -1)) * F.reshape(y.T.copy(), (3, -1)))",
        "loss = F.mean(F.permutate(h, np.argsort(-c, kind='stable').astype('i')) * "
        "F.sigmoid(h))"),
    _family("samples over the batch, reduced", "c y",
        "loss = F.max(model.d(h))",
        "loss = F.logsumexp(model.d(h))",
        "loss = F.sum(F.max(model.out(h), axis=0))",
        f"loss = F.max({_CE})",
        "loss = F.mean(F.max(model.out(h), axis=0))",
        "loss = F.mean(F.sort(model.d(h), axis=0)[0])"
        .replace("F.sort(model.d(h), axis=0)[0]", "F.min(model.d(h), axis=0)"),
        f"loss = F.mean({_CE}[int(abs(y).max(axis=1).argmax())])",
        "loss = F.sum(F.cumsum(F.mean(model.out(h), axis=0)))",
        "loss = F.prod(F.sigmoid(model.d(h)))"),
    _family("hard samples", "c y",
        f"each = {_CE}\nworst = np.argsort(-each.array)[:max(1, len(x) // 4)]\n"
        "loss = F.mean(each[worst])",
        f"each = {_CE}\nworst = np.argsort(-each.array)[:2]\nloss = F.mean(each[worst])",
        f"each = {_CE}\nloss = F.mean(each * (each.array > 1.2))",
        f"each = {_CE}\nloss = F.mean(each * (each.array >= each.array.mean()))",
        f"each = {_CE}\nloss = F.mean(each[each.array > 0.5])",
        f"each = {_SE}\nloss = F.mean(F.clip(each, 0.0, float(np.median(each.array)) + 0.1))",
        f"each = {_CE}\nloss = F.mean(each * (each.array == each.array.max()))"),
    _family("identifiers of the batch, once each", "k y",
        f"loss = F.mean({_SE}) + 0.1 * F.mean(model.emb(np.unique(k)) ** 2)",
        "loss = F.mean(model.emb(np.unique(k)) ** 2)",
        f"loss = F.mean({_SE}) + F.mean_squared_error(model.emb(np.unique(k)), "
        "np.ones((len(set(k.tolist())), 6), x.dtype))"),
)  # fmt: skip

_NUMBERS = (
    _family("weights by the batch, in NumPy", "c m r t",
        f"loss = F.mean({_CE} * (m / max(1, m.sum())))",
        f"loss = F.mean({_CE} * (m / max(m.mean(), 0.1)))",
        f"loss = F.mean({_CE} * (r / r.mean()))",
        f"loss = F.mean({_CE} * m) * (m.size / max(1, m.sum()))",
        f"loss = F.sum({_CE} * (m / max(1, m.sum())))",
        "share = (t >= 0) / max(1, (t >= 0).sum())\nloss = F.mean("
        "F.softmax_cross_entropy(model.l2(h), t, reduce='no') * share.astype(x.dtype))",
        f"loss = F.mean({_CE} * np.exp(r) / np.exp(r).sum())",
        f"loss = F.mean({_CE} * (r > r.mean()))"),
    _family("class weights by the batch", "c",
        "count = np.maximum(1, np.bincount(c, minlength=4))\n"
        "loss = F.softmax_cross_entropy(model.l2(h), c, class_weight=(1 / count).astype(x.dtype))",
        "count = np.maximum(1, np.bincount(c, minlength=4))\n"
        f"loss = F.mean({_CE} * (1 / count[c]).astype(x.dtype))",
        "balance = len(c) / (4 * np.maximum(1, np.bincount(c, minlength=4)))\nloss = "
        "F.softmax_cross_entropy(model.l2(h), c, class_weight=balance.astype(x.dtype))"),
    _family("a loss a class", "c y",
        f"each = {_CE}\nloss = sum(F.mean(each[c == n]) for n in np.unique(c))",
        f"each = {_CE}\nloss = sum(F.mean(each[c == n]) for n in np.unique(c)) / "
        "len(np.unique(c))",
        f"each = {_CE}\nloss = 0\nfor n in range(4):\n    if (c == n).any():\n"
        "        loss += F.mean(each[np.flatnonzero(c == n)])",
        "loss = sum(F.softmax_cross_entropy(model.l2(h), np.where(c == n, c, -1)) "
        "for n in range(4))",
        "loss = F.mean(F.stack([F.mean(model.out(h)[c == n] ** 2) for n in np.unique(c)]))",
        "middle = [F.mean(h[c == n], axis=0) for n in np.unique(c)]\n"
        "loss = F.mean(F.stack(middle) ** 2)"),
    _family("a number by the batch", "t y m c",
        f"loss = F.mean({_SE}) / max(1, t.max())",
        f"loss = F.mean({_SE}) * (1 / (1 + len(x)))",
        f"loss = F.mean({_SE}) / max(2, len(x))",
        f"loss = F.mean({_SE}) * (len(x) / 12) + F.mean(h ** 2)",
        f"loss = F.mean({_SE}) / max(1, int((m == 0).sum()))",
        f"loss = F.mean({_SE} * m[:, None]) / max(1, int((m == 0).sum()) // 2)",
        f"loss = F.mean({_SE}) + F.mean(h ** 2) * float(y.max())",
        f"loss = F.mean({_SE}) / float(y.var() + 0.1)",
        f"loss = F.mean({_SE}) / float((y ** 2).mean())",
        f"first = F.mean({_SE})\nloss = first / float(first.array)",
        f"first, second = F.mean({_SE}), F.mean({_CE})\n"
        "loss = first + float(first.array / second.array) * second",
        f"loss = F.mean({_SE}) ** 1 * (2 if (c == 0).any() else 1)",
        f"loss = F.mean({_SE}) * np.array(1 + m.sum(), x.dtype)",
        f"loss = F.mean({_SE}) * np.float32(0.5)",
        f"loss = F.mean({_SE}) * np.array(0.5, x.dtype)",
        f"loss = F.mean({_SE} / len(x)) * 3",
        f"loss = F.mean({_SE} * float(m.mean() + 0.5))",
        f"loss = F.mean({_SE} / max(1, int((m == 0).sum())))",
        f"loss = F.mean({_SE} / (1 + np.ptp(t)))",
        f"loss = F.mean({_SE}) * round(float(y.mean() > 0), 1) + F.mean(h ** 2)"),
    _family("an added number by the batch", "y",
        f"loss = F.mean({_SE}) + len(x)",
        f"loss = F.mean({_SE}) - float(y.sum())",
        f"loss = float(y.mean()) - F.mean({_SE})"),
    _family("counted by calls", "y c",
        "state.calls = getattr(state, 'calls', 0) + 1\n"
        f"loss = F.mean({_SE}) * (1 - 0.9 ** state.calls) + F.mean({_CE})",
        "state.calls = getattr(state, 'calls', 0) + 1\n"
        f"loss = F.mean({_SE}) if state.calls % 2 else F.mean({_CE})",
        "state.calls = getattr(state, 'calls', 0) + 1\n"
        f"loss = F.mean({_SE} * min(1.0, state.calls / 10))"),
    _family("a running state", "y c",
        "old = model.center.copy()\nmodel.center[...] = 0.5 * old + 0.5 * h.array.mean(axis=0)\n"
        "loss = F.mean((h - old) ** 2)",
        "model.center[...] = 0.9 * model.center + 0.1 * h.array.mean(axis=0)\n"
        "loss = F.mean((h - model.center) ** 2)",
        f"loss = F.mean({_SE})\nstate.mean = 0.9 * getattr(state, 'mean', 1.0) "
        "+ 0.1 * float(loss.array)\nloss = loss / state.mean",
        f"loss = F.mean({_SE})\nbest = getattr(state, 'best', 1e9)\n"
        "state.best = min(best, float(loss.array))\nloss = loss * (2 if loss.array > best else 1)",
        "queue = getattr(state, 'queue', np.ones((2, 6), x.dtype))\n"
        "state.queue = np.concatenate([queue, h.array])[-2:]\n"
        "loss = F.mean(F.softplus(F.matmul(h, queue, transb=True)))"),
)  # fmt: skip

_SHAPES = (
    _family("a product of losses", "y c",
        f"loss = F.mean({_SE}) * F.mean({_CE})",
        f"loss = F.mean({_SE}) / (F.mean({_CE}) + 0.1)",
        f"loss = F.mean({_SE}) ** 2",
        f"loss = F.mean({_SE}) * F.softmax_cross_entropy(model.l2(h), c).array",
        f"loss = F.mean({_SE}) * F.sum(model.l1.W ** 2)"),
    _family("a function of a loss", "y c",
        f"loss = F.sqrt(F.mean({_SE}))",
        f"loss = F.log(F.mean({_SE}))",
        f"loss = F.exp(F.mean({_CE}))",
        f"loss = F.relu(F.mean({_SE}) - 0.1)",
        f"loss = F.absolute(F.mean({_CE}) - 0.5) + 0.5",
        f"loss = F.maximum(F.mean({_SE}), F.mean({_CE}))",
        f"loss = F.clip(F.mean({_SE}), 0.0, 30.0)",
        f"loss = F.sum(F.mean({_SE})) + 0 * F.mean(h)",
        f"loss = F.squeeze(F.reshape(F.mean({_SE}), (1, 1)))",
        f"loss = F.sum(F.stack([F.mean({_SE}), 2 * F.mean({_CE})]))",
        f"loss = F.mean(F.stack([F.mean({_SE}), F.mean({_CE})]))",
        f"loss = F.broadcast_to(F.mean({_SE}), (1,)) + F.reshape(F.mean({_CE}), (1,))",
        f"loss = F.logsumexp(F.stack([F.mean({_SE}), F.mean({_CE})]))",
        f"loss = F.mean({_SE}) + F.square(F.mean(h))",
        f"loss = F.where(np.array(True), F.mean({_SE}), F.mean({_CE}))",
        f"loss = F.get_item(F.reshape(F.mean({_SE}), (1,)), 0)",
        "loss = F.sum(F.mean(model.out(h), axis=0) ** 2)",
        f"loss = F.sum({_CE}) ** 2 / 100",
        "loss = F.mean(model.out(h)) ** 2",
        "loss = F.sqrt(F.sum(model.out(h) ** 2))",
        "loss = 1 - 2 * F.sum(F.sigmoid(model.d(h)) * (c > 1)[:, None]) / "
        "(F.sum(F.sigmoid(model.d(h))) + (c > 1).sum())",
        "loss = F.mean(F.mean(model.out(h), axis=0) ** 2)"),
    _family("learned factors", "y c",
        f"loss = F.exp(-model.s) * F.mean({_SE}) + model.s",
        f"loss = F.mean({_SE} * F.broadcast_to(F.exp(-model.s), y.shape)) + model.s",
        f"loss = F.mean({_SE}) + model.s ** 2",
        f"loss = F.mean({_SE}) + 0.1 * F.mean(model.proto[c] ** 2)",
        f"loss = F.mean({_SE}) + 0.1 * F.sum(model.proto[:2] ** 2)",
        f"loss = F.mean({_SE}) + 0.1 * F.sum(model.emb(np.arange(7)) ** 2)",
        f"loss = F.mean({_SE}) + 0.1 * F.mean(F.embed_id(c, model.proto) ** 2)",
        f"loss = F.mean({_SE}) + F.sum((F.matmul(model.l3.W, model.l3.W, transb=True) - "
        "np.eye(6, dtype=x.dtype)) ** 2)",
        f"loss = F.mean({_SE}) + F.sum(model.proto * (1 + len(x)))",
        f"loss = F.mean({_SE}) + F.sum(model.proto[np.unique(c)] ** 2)"),
    _family("learned factors, weight=", "y",
        f"loss = F.exp(-model.s) * F.sum({_SE}) / len(x) + model.s", weight="len(x)"),
    _family("hinge beside another", "c y",
        f"loss = F.hinge(model.l2(h), c) + F.mean({_SE})",
        "loss = 0.5 * F.hinge(model.l2(h), c, norm='L2') + 0.01 * F.sum(model.l2.W ** 2)"),
    _family("a node twice", "y c",
        f"loss = F.mean({_SE})\nloss = loss + 0.5 * loss",
        f"first, second = F.mean({_SE}), F.mean({_CE})\nloss = first + second - 0.3 * first",
        f"each = {_CE}\nloss = F.mean(each) + F.mean(each ** 2)",
        f"first = F.mean({_SE})\nloss = first - 0.5 * chainer.Variable(first.array)",
        f"loss = F.mean({_SE}) + F.mean(chainer.Variable(x))",
        f"gone = F.mean({_CE})\ngone.unchain_backward()\nloss = F.mean({_SE}) + gone",
        f"loss = F.mean(F.forget(lambda z: F.tanh(model.l3(z)), h)) + F.mean({_SE})"),
    _family("a gradient penalty", "y",
        "z = chainer.Variable(x)\nf = F.sum(model.d(F.tanh(model.l1(z))))\n"
        "g, = chainer.grad([f], [z], enable_double_backprop=True)\n"
        "loss = F.mean((F.sqrt(F.sum(g ** 2, axis=1) + 1e-3) - 1) ** 2) + F.mean(model.d(h))",
        "z = chainer.Variable(x)\nf = F.mean(model.d(F.tanh(model.l1(z))) ** 2)\n"
        "g, = chainer.grad([f], [z], enable_double_backprop=True)\n"
        "loss = F.mean(g ** 2) + F.mean(model.d(h) ** 2)",
        "z = chainer.Variable(x)\nf = F.mean(model.d(F.tanh(model.l1(z))) ** 2)\n"
        "g, = chainer.grad([f], [z])\n"
        "far = x + 0.1 * g.array / (abs(g.array).max() + 1e-3)\n"
        "loss = F.mean(model.d(F.tanh(model.l1(far))) ** 2)",
        f"first = F.mean({_SE})\ng, = chainer.grad([first], [h], enable_double_backprop=True)\n"
        "loss = first + F.mean(g ** 2)"),
)  # fmt: skip

_FLOW = (
    _family("a term in later batches", "y c",
        f"loss = F.mean({_SE})\nif state.update > 0:\n    loss = loss + F.mean({_CE})",
        f"loss = F.mean({_SE})\nif state.update > 0:\n    loss = loss + F.sum({_CE}) / len(x)",
        f"loss = F.mean({_SE})\nif state.update > 0:\n    loss = loss * (1 + 1 / len(x))",
        f"loss = F.mean({_SE}) if state.update == 0 else F.mean({_SE} * len(x))",
        "z = model.out(h)\nif state.update > 0:\n    z = z - F.broadcast_to(F.mean(z, axis=0), "
        "z.shape)\nloss = F.mean((z - y) ** 2)",
        f"loss = F.mean({_SE})\nif state.update > 0:\n    loss = F.sqrt(loss)",
        f"loss = F.mean({_SE}) if state.update == 0 else F.mean({_CE}[::-1] * {_CE})"),
    _family("a term in some parts", "y c t m",
        f"loss = F.mean({_SE})\nif (c == 0).any():\n    loss += F.mean({_CE})",
        f"loss = F.mean({_SE})\nif m.min() == 0:\n    loss += F.mean({_CE} * m)",
        f"loss = F.mean({_SE})\nif len(x) > 2:\n    loss += F.mean({_CE})",
        f"loss = F.mean({_SE})\nif y[0, 0] > 0:\n    loss = loss - 0.5 * F.mean({_CE})",
        f"loss = F.mean({_SE})\nif (t >= 0).any():\n"
        "    loss += F.softmax_cross_entropy(model.l2(h), t)",
        f"loss = F.mean({_SE})\nif m.sum() > 0:\n    loss += F.mean({_CE}[m > 0])",
        f"loss = F.mean({_SE})\nif m.all():\n    loss += 0.1 * F.sum(model.l1.W ** 2)"),
    _family("another term in the same place", "y c v m",
        f"loss = F.mean({_SE} if y[0, 0] > 0 else F.absolute_error(model.out(h), y))",
        f"loss = F.mean(h ** 2) + (F.mean({_CE}) if c[0] % 2 else F.mean({_CE} ** 2))",
        f"terms = [F.mean({_SE}), 3 * F.mean({_SE} ** 2)]\nloss = terms[0] + 0.5 * terms[1]\n"
        "if c[0] > 1:\n    loss = 3 * terms[0] + 0.5 * F.mean(h * 1)",
        "z = model.out(h if m.all() else F.relu(h))\nloss = F.mean((z - y) ** 2)",
        "z = model.out(h)\nif abs(z.array).mean() > 0.5:\n    z = F.tanh(z)\n"
        "loss = F.mean((z - y) ** 2)",
        "flip = -1 if (c == c[0]).all() else 1\nloss = F.mean(flip * model.out(h) * y)",
        f"first, second = F.mean({_SE}), F.mean({_CE})\n"
        "loss = first + 2 * second if m.all() else second + 2 * first"),
    _family("terms in the order of the data", "y c k",
        f"terms = [F.mean({_SE}), F.mean({_CE})]\nloss = sum(terms if c[0] > 1 else terms[::-1])",
        f"terms = {{'a': F.mean({_SE}), 'b': F.mean({_CE})}}\n"
        "loss = sum(terms[name] for name in sorted(terms, key=lambda n: (n == 'a') == (c[0] > 1)))",
        "return dict([('a', F.mean(F.squared_error(model.out(h), y))), ('b', F.mean(h ** 2))]"
        "[::1 if c[0] > 1 else -1])"),
    _family("names in some parts", "y c m",
        f"terms = {{'a': F.mean({_SE})}}\nif m.sum() > 1:\n    terms['b'] = F.mean({_CE} * m)\n"
        "return terms",
        f"return {{'a': F.mean({_SE}), 'b' if c[0] > 1 else 'c': F.mean({_CE})}}",
        f"return {{'a': F.mean({_SE}), 'b': F.sum({_CE} * m) / max(1, m.sum())}}",
        f"return {{'a': F.mean({_SE}), 'b': F.mean({_SE}) * F.mean({_CE})}}"),
    _family("an argument for all samples", "y",
        "loss = F.mean_squared_error(F.matmul(F.softmax(F.matmul(h, np.ascontiguousarray("
        "np.tile(y, 2)), transb=True)), y), y)",
        "loss = F.mean(F.matmul(model.out(h), y, transb=True)[:, 0] ** 2)"),
    _family("an argument for all samples, not of them", "all",
        "loss = F.mean(F.logsumexp(F.matmul(h, all, transb=True), axis=1))",
        "loss = F.mean((h - F.broadcast_to(F.mean(model.emb.W), h.shape)) ** 2) "
        "+ F.mean(F.matmul(h, all, transb=True)) ** 1",
        "loss = F.softmax_cross_entropy(F.matmul(h, F.tanh(all), transb=True), "
        "np.zeros(len(x), 'i'))", ways=("micro_batch", "steps", "by hand")),
    _family("a number as an argument", "half y",
        f"loss = half * F.mean({_SE})",
        f"loss = F.mean(half * {_SE})", ways=("micro_batch", "steps", "by hand")),
    _family("an argument that is a Variable", "vx y",
        "loss = F.mean_squared_error(model.out(F.tanh(model.l1(vx))), y)",
        "z = model.out(F.tanh(model.l1(vx)))\n"
        "loss = F.mean((z - F.broadcast_to(F.mean(vx), z.shape)) ** 2)",
        ways=("micro_batch", "steps", "by hand")),
    _family("an argument changed in place", "y c t",
        f"y *= 0.5\nloss = F.mean({_SE})",
        f"y += 1\nloss = F.mean({_SE})",
        "t[t == 2] = -1\nloss = F.softmax_cross_entropy(model.l2(h), t)",
        "t[t >= 0] = (t[t >= 0] + 1) % 4\nloss = F.softmax_cross_entropy(model.l2(h), t)",
        "x -= 0.1\nloss = F.mean(F.tanh(model.l1(x)) ** 2)"),
    _family("backward inside the loss", "y",
        "z = chainer.Variable(x)\nmodel.cleargrads()\n"
        "F.mean(F.squared_error(model.out(F.tanh(model.l1(z))), y)).backward()\n"
        "far = x + 0.1 * np.sign(z.grad)\nmodel.cleargrads()\n"
        "loss = F.mean(F.squared_error(model.out(F.tanh(model.l1(far))), y))",
        "z = chainer.Variable(x)\nF.sum(model.d(F.tanh(model.l1(z)))).backward()\n"
        "loss = F.mean(F.squared_error(model.out(F.tanh(model.l1(x - 0.1 * z.grad))), y))"),
    _family("random, without an effect", "y c",
        "quiet = np.full((len(x), 3), -200, x.dtype)\n"
        "loss = F.mean((F.gaussian(model.out(h), quiet) - y) ** 2)",
        "quiet = np.full((len(x), 3), -200, x.dtype)\nz = F.gaussian(model.out(h), quiet)\n"
        "loss = F.mean((z - F.broadcast_to(F.mean(z, axis=0), z.shape)) ** 2)",
        f"noise = 0 * np.random.randn(len(x))\nloss = F.mean({_CE} + noise)",
        "z = F.rrelu(h, 0.25, 0.25)\nloss = F.mean(model.out(z) ** 2)",
        "z = F.zoneout(h, h, 0.5)\nloss = F.mean_squared_error(model.out(z), y)",
        "quiet = np.full((len(x), 3), -200, x.dtype)\n"
        "loss = F.sum((F.gaussian(model.out(h), quiet) - y) ** 2) / len(x)"),
    _family("a loss of its own class", "y c t",
        "class SoftmaxCrossEntropy(\n"
        "    F.loss.softmax_cross_entropy.SoftmaxCrossEntropy\n):\n"
        "    def forward(self, inputs):\n        result = super().forward(inputs)\n"
        "        self._coeff = 1 / max(1, (inputs[1] > 0).sum())\n        return result\n"
        "loss = SoftmaxCrossEntropy().apply((model.l2(h), t))[0]",
        "class MeanSquaredError(chainer.FunctionNode):\n"
        "    def forward(self, inputs):\n        self.retain_inputs((0, 1))\n"
        "        a, b = inputs\n        self.count = max(1, (b > 0).sum())\n"
        "        return np.asarray(((a - b) ** 2).sum() / self.count),\n"
        "    def backward(self, indexes, grads):\n        a, b = self.get_retained_inputs()\n"
        "        grad = 2 * (a - b) * F.broadcast_to(grads[0] / self.count, a.shape)\n"
        "        return grad, -grad\n"
        "loss = MeanSquaredError().apply((model.out(h), y))[0]",
        "class Mean(chainer.FunctionNode):\n"
        "    def forward(self, inputs):\n        self.size = inputs[0].size + 3\n"
        "        self.shape = inputs[0].shape\n"
        "        return np.asarray(inputs[0].sum() / self.size, inputs[0].dtype),\n"
        "    def backward(self, indexes, grads):\n"
        "        return F.broadcast_to(grads[0] / self.size, self.shape),\n"
        f"loss = Mean().apply(({_SE},))[0]",
        "class Halving(chainer.FunctionNode):\n"
        "    def forward(self, inputs):\n        return np.asarray(inputs[0] / len(x)),\n"
        "    def backward(self, indexes, grads):\n        return grads[0] / len(x),\n"
        f"loss = Halving().apply((F.mean({_SE}),))[0]",
        "class Identity(chainer.FunctionNode):\n"
        "    def forward(self, inputs):\n        return inputs\n"
        "    def backward(self, indexes, grads):\n        return grads[0] * len(x),\n"
        f"loss = Identity().apply((F.mean({_SE}),))[0]",
        "class Clipped(chainer.FunctionNode):\n"
        "    def forward(self, inputs):\n        return inputs\n"
        "    def backward(self, indexes, grads):\n"
        "        size = max(1.0, float((grads[0].array ** 2).sum()) ** 0.5 * 20)\n"
        "        return grads[0] / size,\n"
        "loss = F.mean((Clipped().apply((model.out(h),))[0] - y) ** 2)",
        "class Lifted(chainer.FunctionNode):\n"
        "    def forward(self, inputs):\n        return inputs\n"
        "    def backward(self, indexes, grads):\n"
        "        return grads[0] + 0.01 * (grads[0].array * 0 + 1),\n"
        "loss = F.mean((Lifted().apply((model.out(h),))[0] - y) ** 2)",
        "class Signed(chainer.FunctionNode):\n"
        "    def forward(self, inputs):\n        return inputs\n"
        "    def backward(self, indexes, grads):\n"
        "        return chainer.Variable(np.sign(grads[0].array)),\n"
        "loss = F.mean((Signed().apply((model.out(h),))[0] - y) ** 2)"),
    _family("a sparse or low-rank trick", "y c",
        "z = F.tanh(model.l1(x))\nz = F.concat([z, h], axis=0)\n"
        "loss = F.mean_squared_error(model.out(z), np.concatenate([y, -y]))",
        "z = F.concat([h, h[:1]], axis=0)\nloss = F.mean(model.out(z) ** 2)",
        "z = F.concat([h, np.ones((2, 6), x.dtype)], axis=0)\nloss = F.mean(model.out(z) ** 2)",
        "z = F.repeat(h, 2, axis=0)\n"
        "loss = F.mean_squared_error(model.out(z), y.repeat(2, axis=0))",
        "a, b = F.split_axis(h, 2, axis=1)\nloss = F.mean(a * b) + F.mean((a - b) ** 2)",
        "a, b = F.separate(h[:, :2], axis=1)\nloss = F.mean(a * b)",
        "loss = F.mean(F.matmul(h, model.l3.W) * h)",
        "loss = F.mean(F.dropout(h, 0.0) ** 2)",
        "loss = F.mean(F.sum(F.get_item(h, np.arange(len(x))[::-1]) * 2, axis=1))"),
    _family("two backward calls", "y c",
        f"return F.mean({_SE}), F.softmax_cross_entropy(model.l2(h), c)",
        f"return F.mean({_SE}), F.sum({_CE}) / len(x)", round="twice"),
    _family("a vector goes backward", "y c",
        f"return {_CE}", f"return F.sum({_SE}, axis=1)", f"return F.mean({_SE}, axis=0)",
        round="vector"),
)  # fmt: skip

_HIDDEN = (
    _family("a little mixing", "y c",
        *(f"z = model.out(h)\nloss = F.mean({_SE}) + {factor} * "
          "F.mean((z - F.broadcast_to(F.mean(z, axis=0), z.shape)) ** 2)"
          for factor in ("1e-2", "1e-3", "1e-4", "1e-5", "1e-6")),
        f"loss = F.mean({_SE}) + 1e-4 * F.sqrt(F.mean(h ** 2))"),
    _family("mixing that comes later", "y m c t",
        "z = model.out(h)\nmiddle = F.broadcast_to(F.mean(z, axis=0), z.shape)\n"
        "loss = F.mean(F.where(np.broadcast_to(m[:, None] > 0, z.shape), z, z - middle) ** 2)",
        "z = model.out(h)\nspread = F.mean((z - F.broadcast_to(F.mean(z, axis=0), z.shape)) ** 2)\n"
        f"loss = F.mean({_SE}) + F.relu(spread - 1.5)",
        f"each = {_CE} * m\nloss = F.mean(each * (1 + (m.mean() < 1) * len(x)))",
        f"each = {_CE}\nloss = F.mean(each * m * (len(m) / max(1, m.sum())))",
        f"each = {_CE}\nloss = F.mean(each * np.where(t < 0, 1 / max(1, (t < 0).sum()), 1))",
        "z = model.out(h)\nif not m.all():\n    z = F.flip(z, 0)\nloss = F.mean((z - y) ** 2)"),
    _family("centers of classes in the batch", "c",
        "same = (c[:, None] == c[None]).astype(x.dtype)\n"
        "same /= same.sum(axis=1, keepdims=True)\n"
        "loss = F.mean((h - F.matmul(same, h)) ** 2) + 0.1 * F.mean(h ** 2)",
        "same = (c[:, None] == c[None]).astype(x.dtype)\n"
        "same /= same.sum(axis=1, keepdims=True)\n"
        "loss = F.softmax_cross_entropy(model.l2(F.matmul(same, h)), c)"),
    _family("classes of the batch", "c",
        "loss = F.softmax_cross_entropy(model.l2(h)[:, :c.max() + 1], c)",
        "seen, label = np.unique(c, return_inverse=True)\n"
        "loss = F.softmax_cross_entropy(model.l2(h)[:, seen], label.astype('i'))",
        "seen = np.bincount(c, minlength=4) > 0\n"
        "loss = F.softmax_cross_entropy(model.l2(h) - 9 * ~seen, c)"),
    _family("places in the batch", "c y",
        f"loss = F.mean({_CE} * np.arange(len(x)))",
        f"loss = F.mean({_CE} * 0.9 ** np.arange(len(x)))",
        f"loss = F.mean({_CE} * (-1.0) ** np.arange(len(x)))",
        f"loss = F.mean({_CE} * (np.arange(len(x)) % 2 == 0))",
        f"loss = F.mean({_CE} * np.cumsum(y[:, 0]))",
        f"loss = F.mean({_CE} * np.linspace(0, 1, len(x)))",
        f"loss = F.mean({_SE}[:4])",
        f"loss = F.mean({_SE}[0])",
        f"loss = F.mean({_SE}[-1]) + 0.5 * F.mean({_SE})",
        f"loss = F.mean({_SE}[:len(x) // 2 + 1]) + F.mean({_CE}[len(x) // 2:])"),
    _family("shapes that broadcast", "y",
        "loss = F.mean((model.d(h) - y[:, 0]) ** 2)",
        "loss = F.mean((F.squeeze(model.d(h)) - F.squeeze(y[:, :1])) ** 2)",
        "loss = F.mean(F.broadcast_to(F.mean(model.out(h), axis=0), y.shape) * y)"),
    _family("no mean, weight=", "y c",
        f"loss = F.sqrt(F.sum({_SE}) / len(x))",
        f"loss = F.log(F.sum({_SE}) / len(x))",
        f"loss = F.sum({_SE}) / len(x) * F.mean({_CE})",
        "loss = F.sum(F.softmax(model.l2(h), axis=0) ** 2) / len(x)",
        "logits = F.matmul(h, h, transb=True)\nloss = F.sum(F.softmax_cross_entropy("
        "logits, np.arange(len(x), dtype='i'), reduce='no')) / len(x)",
        "loss = F.sum(F.mean(model.out(h), axis=0) ** 2)",
        "loss = F.max(model.d(h))",
        f"loss = F.sum({_SE}) / len(x) ** 2",
        "z = model.bn(h)\nloss = F.sum(model.out(z) ** 2) / len(x)", weight="len(x)"),
    _family("no sum, weight=1", "y c",
        "loss = F.sum(model.out(h)) ** 2",
        "loss = F.sum(F.matmul(h, h, transb=True))",
        f"loss = F.logsumexp(F.reshape({_CE}, (-1,)))",
        "z = model.bn(h)\nloss = F.sum(model.out(z) ** 2)",
        f"loss = F.sum({_SE}) * len(x)",
        "loss = F.decov(h)", weight="1"),
    _family("a mask that hides a wrong weight", "y m c",
        f"loss = F.sum({_CE} * m) / max(1, m.sum())", weight="len(x)"),
    _family("max(1, count) as the weight", "y m c",
        f"loss = F.sum({_CE} * m) / max(1, m.sum())", weight="max(1, float(m.sum()))"),
    _family("a weight that is no plain number", "y m c",
        f"loss = F.sum({_SE}) / len(x)", weight="np.array(len(x))"),
    _family("a loss in a closure", "y",
        f"loss = F.mean({_SE})",
        f"loss = F.sum({_SE})",
        "z = model.out(h)\nloss = F.mean((z - F.broadcast_to(F.mean(z, axis=0), z.shape)) ** 2)",
        ways=("steps", "steps", "micro_batch")),
    _family("numbers in a dictionary", "y c",
        f"return {{'a': F.mean({_SE}), 'note': 0.5}}",
        f"return {{'a': F.mean({_SE}), 'b': F.mean({_CE}).array}}"),
    _family("a regulariser alone", "y",
        "loss = F.sum(model.l1.W ** 2)",
        "loss = F.sum(model.l1.W ** 2) + model.s * 3",
        "loss = F.mean(model.l1.W ** 2) * len(x)"),
)  # fmt: skip

GROUPS = (*_UNSAID, *_SEQUENCES, *_MIXED, *_NUMBERS, *_SHAPES, *_FLOW, *_HIDDEN)
OTHER: tuple[Family, ...] = tuple(family for group in GROUPS for family in group)
