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


CE = "F.softmax_cross_entropy(model.l2(h), c, reduce='no')"
SE = "F.squared_error(model.out(h), y)"
_PADDED = "F.pad_sequence([model.step(each) for each in xs])"


def family(name: str, names: str, *bodies: str, **options: Any) -> list[Family]:
    return [Family(name, names, body, **options) for body in bodies]


_UNSAID = (
    family("a hand division, no weight", "y c m t",
        f"loss = F.sum({SE}) / len(x)",
        f"loss = F.sum({CE} * m) / max(1, m.sum())",
        f"loss = F.sum({SE}) / y.size",
        f"loss = F.average({CE}, weights=m + 0.5)",
        "loss = F.softmax_cross_entropy(model.l2(h), t, enable_double_backprop=True)",
        f"each = F.expand_dims({CE}, 1)\n"
        "loss = F.matmul(np.full((1, len(x)), 1 / len(x), x.dtype), each)[0, 0]",
        f"loss = F.sum({CE} * (1 / len(x)))",
        f"loss = F.mean({CE}, axis=0)",
        f"loss = F.sum(F.mean({SE}, axis=0))",
        f"loss = F.mean({CE}, keepdims=True)[0]"),
    family("a sum, no weight", "y c",
        f"loss = F.sum({SE})",
        "loss = F.gaussian_nll(y, model.out(h), model.out(h) * 0.1)",
        f"loss = F.sum({CE}) + F.mean({SE})",
        f"loss = F.mean({CE}) * len(x)",
        f"loss = F.mean({CE}) * len(x) / 16"),
    family("samples in a loop", "y c",
        f"loss = F.mean(F.stack([F.sum({SE}[i]) for i in range(len(x))]))",
        "loss = F.mean(F.stack([F.softmax_cross_entropy(model.l2(h[i:i + 1]), c[i:i + 1]) "
        "for i in range(len(x))]))",
        "loss = sum(F.softmax_cross_entropy(model.l2(h[i:i + 1]), c[i:i + 1]) "
        "for i in range(len(x))) / len(x)",
        "loss = sum(F.mean_squared_error(model.out(h[i:i + 1]), y[i:i + 1]) "
        "for i in range(len(x)))",
        "loss = F.mean(F.concat([F.reshape(F.sum((model.out(h[i:i + 1]) - y[i]) ** 2), (1,)) "
        "for i in reversed(range(len(x)))], axis=0))"),
    family("samples in a loop, weight=", "y c",
        "loss = sum(F.softmax_cross_entropy(model.l2(h[i:i + 1]), c[i:i + 1]) "
        "for i in range(len(x))) / len(x)", weight="len(x)"),
    family("chunks of two", "y c t",
        "loss = F.mean(F.stack([F.softmax_cross_entropy(model.l2(h[i:i + 2]), t[i:i + 2]) "
        "for i in range(0, len(x), 2)]))",
        "loss = F.mean(F.stack([F.mean_squared_error(model.out(h[i:i + 2]), y[i:i + 2]) "
        "for i in range(0, len(x), 2)]))"),
)  # fmt: skip

_SEQUENCES = (
    family("padded to the part", "xs ts",
        f"loss = F.mean({_PADDED} ** 2 + 0.1 * F.softplus({_PADDED}))",
        "loss = F.mean_squared_error(F.pad_sequence([model.step(each)[:, :4] for each in xs]), "
        "F.pad_sequence(xs))",
        "loss = F.softmax_cross_entropy(F.transpose(F.pad_sequence([model.l2(model.step(each)) "
        "for each in xs]), (0, 2, 1)), F.pad_sequence(ts, padding=0).array)",
        "wide = F.pad_sequence([model.step(each)[:, 0] for each in xs])\n"
        "loss = F.sigmoid_cross_entropy(wide, F.pad_sequence([each % 2 for each in ts]).array)",
        f"loss = F.mean(F.sum({_PADDED} ** 2, axis=2))"),
    family("padded to the part, normalize=False", "xs ts",
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
    family("depends on the padded length", "xs ts",
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
    family("cut to the shortest", "xs ts",
        "least = min(map(len, xs))\nloss = F.softmax_cross_entropy(model.l2(F.concat("
        "[model.step(each[:least]) for each in xs], axis=0)), "
        "np.concatenate([each[:least] for each in ts]))",
        "least = min(map(len, xs))\n"
        "loss = F.mean(F.stack([model.step(each[:least]) for each in xs]) ** 2)"),
    family("ragged beside another term", "xs ts y",
        "loss = F.softmax_cross_entropy(model.l2(F.concat([model.step(each) for each in xs], "
        f"axis=0)), np.concatenate(ts)) + F.mean({SE})",
        "loss = F.mean(F.concat([model.step(each) for each in xs], axis=0) ** 2) "
        "- 0.1 * F.softmax_cross_entropy(model.l2(F.stack([F.tanh(model.step(each))[0] "
        "for each in xs])), np.array([each[0] for each in ts]))",
        "loss = F.mean(F.concat([model.step(each) for each in xs], axis=0) ** 2) "
        "+ F.sum(model.step.W ** 2)"),
    family("a mean over steps", "e tt",
        "loss = F.mean(F.stack([F.softmax_cross_entropy(model.l2(model.emb(e[:, i])), tt[:, i]) "
        "for i in range(3)]))",
        "loss = F.mean(F.concat([F.reshape(F.mean(model.emb(e[:, i]) ** 2), (1,)) "
        "for i in range(3)], axis=0))",
        "loss = F.sum(F.mean(F.mean(model.emb(e) ** 2, axis=0), axis=0)) / 6",
        "loss = F.mean(F.sum(model.emb(e), axis=0) ** 2)",
        "loss = F.mean(F.max(model.emb(e), axis=0))"),
    family("a mean over samples, ragged lengths", "xs ts",
        "loss = F.mean(F.stack([F.softmax_cross_entropy(model.l2(model.step(a)), b) "
        "for a, b in zip(xs, ts)]))",
        "loss = sum(F.softmax_cross_entropy(model.l2(model.step(a)), b) "
        "for a, b in zip(xs, ts)) / len(xs)",
        "loss = sum(F.mean(model.step(a)) for a in xs) / sum(map(len, xs))"),
    family("an LSTM that carries its state", "e tt",
        "loss = F.softmax_cross_entropy(model.l2(model.lstm(model.emb(e[:, 0]))), tt[:, 0])",
        "if len(e) != state.size:\n    model.lstm.reset_state()\nstate.size = len(e)\n"
        "loss = 0\nfor i in range(2):\n    loss += F.softmax_cross_entropy("
        "model.l2(model.lstm(model.emb(e[:, i]))), tt[:, i])"),
)  # fmt: skip

_MIXED = (
    family("a softmax over the batch", "c y",
        "loss = -F.mean(F.log_softmax(model.d(h), axis=0))",
        f"loss = F.mean(F.softmax(model.l2(h), axis=0) * {CE}[:, None])"
        .replace("[:, None]", ".reshape(-1, 1).array"),
        "loss = F.mean(F.softmax(F.transpose(model.l2(h))) ** 2)",
        "loss = F.softmax_cross_entropy(F.transpose(model.d(h)), np.zeros(1, 'i'))",
        "weight = F.softmax(F.reshape(model.d(h), (1, -1)))[0]\n"
        f"loss = F.mean(weight * {CE})"),
    family("a mean taken away", "y c",
        "z = model.out(h)\nloss = F.mean((z - F.broadcast_to(F.mean(z, axis=0), z.shape)) ** 2)",
        "z = model.out(h)\nloss = F.mean_squared_error(z, F.broadcast_to(F.mean(z), z.shape))",
        "z = model.out(h)\nwith chainer.no_backprop_mode():\n    middle = F.mean(z, axis=0)\n"
        "loss = F.mean_squared_error(z - F.broadcast_to(middle, z.shape), y)",
        "z = model.out(h)\nloss = F.mean_squared_error(z - z.array.mean(axis=0), y)",
        "z = model.out(h)\nloss = F.mean((z - F.broadcast_to(F.sum(z, axis=0) / len(z), z.shape))"
        " ** 2)"),
    family("targets by the batch, in NumPy", "y c",
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
    family("batch normalization", "y t",
        "loss = F.softmax_cross_entropy(model.l2(F.tanh(model.bn(h))), t)",
        "loss = F.mean_squared_error(model.out(model.bn(h) * 0.5), y)",
        "one, zero = np.ones(6, x.dtype), np.zeros(6, x.dtype)\n"
        "loss = F.mean(model.d(F.tanh(F.batch_normalization(h, one, zero))) ** 2)",
        "loss = F.mean_squared_error(model.out(model.brn(h)), y)",
        "with chainer.using_config('train', False):\n    z = model.bn(h)\n"
        "loss = F.mean_squared_error(model.out(z), y)"),
    family("negatives of the batch", "v",
        "logits = F.matmul(h, F.tanh(model.l1(v)), transb=True)\n"
        "loss = F.softmax_cross_entropy(logits, np.arange(len(x), dtype='i'))",
        "z = F.normalize(h)\nlogits = F.matmul(z, F.normalize(model.l1(v)), transb=True) / 0.5\n"
        "label = np.arange(len(x), dtype='i')\nloss = 0.5 * (F.softmax_cross_entropy(logits, label)"
        " + F.softmax_cross_entropy(F.transpose(logits), label))",
        "loss = F.triplet(h, F.tanh(model.l1(v)), F.tanh(model.l1(v[::-1])), margin=2)",
        "far = np.roll(np.arange(len(x)), 1)\n"
        "loss = F.contrastive(h, F.tanh(model.l1(v[far])), np.arange(len(x)) % 2)"),
    family("the batch by itself", "y",
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
    family("pairs of the batch", "y c",
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
    family("samples over the batch, reduced", "c y",
        "loss = F.max(model.d(h))",
        "loss = F.logsumexp(model.d(h))",
        "loss = F.sum(F.max(model.out(h), axis=0))",
        f"loss = F.max({CE})",
        "loss = F.mean(F.max(model.out(h), axis=0))",
        "loss = F.mean(F.sort(model.d(h), axis=0)[0])"
        .replace("F.sort(model.d(h), axis=0)[0]", "F.min(model.d(h), axis=0)"),
        f"loss = F.mean({CE}[int(abs(y).max(axis=1).argmax())])",
        "loss = F.sum(F.cumsum(F.mean(model.out(h), axis=0)))",
        "loss = F.prod(F.sigmoid(model.d(h)))"),
    family("hard samples", "c y",
        f"each = {CE}\nworst = np.argsort(-each.array)[:max(1, len(x) // 4)]\n"
        "loss = F.mean(each[worst])",
        f"each = {CE}\nworst = np.argsort(-each.array)[:2]\nloss = F.mean(each[worst])",
        f"each = {CE}\nloss = F.mean(each * (each.array > 1.2))",
        f"each = {CE}\nloss = F.mean(each * (each.array >= each.array.mean()))",
        f"each = {CE}\nloss = F.mean(each[each.array > 0.5])",
        f"each = {SE}\nloss = F.mean(F.clip(each, 0.0, float(np.median(each.array)) + 0.1))",
        f"each = {CE}\nloss = F.mean(each * (each.array == each.array.max()))"),
    family("identifiers of the batch, once each", "k y",
        f"loss = F.mean({SE}) + 0.1 * F.mean(model.emb(np.unique(k)) ** 2)",
        "loss = F.mean(model.emb(np.unique(k)) ** 2)",
        f"loss = F.mean({SE}) + F.mean_squared_error(model.emb(np.unique(k)), "
        "np.ones((len(set(k.tolist())), 6), x.dtype))"),
)  # fmt: skip

_NUMBERS = (
    family("weights by the batch, in NumPy", "c m r t",
        f"loss = F.mean({CE} * (m / max(1, m.sum())))",
        f"loss = F.mean({CE} * (m / max(m.mean(), 0.1)))",
        f"loss = F.mean({CE} * (r / r.mean()))",
        f"loss = F.mean({CE} * m) * (m.size / max(1, m.sum()))",
        f"loss = F.sum({CE} * (m / max(1, m.sum())))",
        "share = (t >= 0) / max(1, (t >= 0).sum())\nloss = F.mean("
        "F.softmax_cross_entropy(model.l2(h), t, reduce='no') * share.astype(x.dtype))",
        f"loss = F.mean({CE} * np.exp(r) / np.exp(r).sum())",
        f"loss = F.mean({CE} * (r > r.mean()))"),
    family("class weights by the batch", "c",
        "count = np.maximum(1, np.bincount(c, minlength=4))\n"
        "loss = F.softmax_cross_entropy(model.l2(h), c, class_weight=(1 / count).astype(x.dtype))",
        "count = np.maximum(1, np.bincount(c, minlength=4))\n"
        f"loss = F.mean({CE} * (1 / count[c]).astype(x.dtype))",
        "balance = len(c) / (4 * np.maximum(1, np.bincount(c, minlength=4)))\nloss = "
        "F.softmax_cross_entropy(model.l2(h), c, class_weight=balance.astype(x.dtype))"),
    family("a loss a class", "c y",
        f"each = {CE}\nloss = sum(F.mean(each[c == n]) for n in np.unique(c))",
        f"each = {CE}\nloss = sum(F.mean(each[c == n]) for n in np.unique(c)) / "
        "len(np.unique(c))",
        f"each = {CE}\nloss = 0\nfor n in range(4):\n    if (c == n).any():\n"
        "        loss += F.mean(each[np.flatnonzero(c == n)])",
        "loss = sum(F.softmax_cross_entropy(model.l2(h), np.where(c == n, c, -1)) "
        "for n in range(4))",
        "loss = F.mean(F.stack([F.mean(model.out(h)[c == n] ** 2) for n in np.unique(c)]))",
        "middle = [F.mean(h[c == n], axis=0) for n in np.unique(c)]\n"
        "loss = F.mean(F.stack(middle) ** 2)"),
    family("a number by the batch", "t y m c",
        f"loss = F.mean({SE}) / max(1, t.max())",
        f"loss = F.mean({SE}) * (1 / (1 + len(x)))",
        f"loss = F.mean({SE}) / max(2, len(x))",
        f"loss = F.mean({SE}) * (len(x) / 12) + F.mean(h ** 2)",
        f"loss = F.mean({SE}) / max(1, int((m == 0).sum()))",
        f"loss = F.mean({SE} * m[:, None]) / max(1, int((m == 0).sum()) // 2)",
        f"loss = F.mean({SE}) + F.mean(h ** 2) * float(y.max())",
        f"loss = F.mean({SE}) / float(y.var() + 0.1)",
        f"loss = F.mean({SE}) / float((y ** 2).mean())",
        f"first = F.mean({SE})\nloss = first / float(first.array)",
        f"first, second = F.mean({SE}), F.mean({CE})\n"
        "loss = first + float(first.array / second.array) * second",
        f"loss = F.mean({SE}) ** 1 * (2 if (c == 0).any() else 1)",
        f"loss = F.mean({SE}) * np.array(1 + m.sum(), x.dtype)",
        f"loss = F.mean({SE}) * np.float32(0.5)",
        f"loss = F.mean({SE}) * np.array(0.5, x.dtype)",
        f"loss = F.mean({SE} / len(x)) * 3",
        f"loss = F.mean({SE} * float(m.mean() + 0.5))",
        f"loss = F.mean({SE} / max(1, int((m == 0).sum())))",
        f"loss = F.mean({SE} / (1 + np.ptp(t)))",
        f"loss = F.mean({SE}) * round(float(y.mean() > 0), 1) + F.mean(h ** 2)"),
    family("an added number by the batch", "y",
        f"loss = F.mean({SE}) + len(x)",
        f"loss = F.mean({SE}) - float(y.sum())",
        f"loss = float(y.mean()) - F.mean({SE})"),
    family("counted by calls", "y c",
        "state.calls = getattr(state, 'calls', 0) + 1\n"
        f"loss = F.mean({SE}) * (1 - 0.9 ** state.calls) + F.mean({CE})",
        "state.calls = getattr(state, 'calls', 0) + 1\n"
        f"loss = F.mean({SE}) if state.calls % 2 else F.mean({CE})",
        "state.calls = getattr(state, 'calls', 0) + 1\n"
        f"loss = F.mean({SE} * min(1.0, state.calls / 10))"),
    family("a running state", "y c",
        "old = model.center.copy()\nmodel.center[...] = 0.5 * old + 0.5 * h.array.mean(axis=0)\n"
        "loss = F.mean((h - old) ** 2)",
        "model.center[...] = 0.9 * model.center + 0.1 * h.array.mean(axis=0)\n"
        "loss = F.mean((h - model.center) ** 2)",
        f"loss = F.mean({SE})\nstate.mean = 0.9 * getattr(state, 'mean', 1.0) "
        "+ 0.1 * float(loss.array)\nloss = loss / state.mean",
        f"loss = F.mean({SE})\nbest = getattr(state, 'best', 1e9)\n"
        "state.best = min(best, float(loss.array))\nloss = loss * (2 if loss.array > best else 1)",
        "queue = getattr(state, 'queue', np.ones((2, 6), x.dtype))\n"
        "state.queue = np.concatenate([queue, h.array])[-2:]\n"
        "loss = F.mean(F.softplus(F.matmul(h, queue, transb=True)))"),
)  # fmt: skip

_SHAPES = (
    family("a product of losses", "y c",
        f"loss = F.mean({SE}) * F.mean({CE})",
        f"loss = F.mean({SE}) / (F.mean({CE}) + 0.1)",
        f"loss = F.mean({SE}) ** 2",
        f"loss = F.mean({SE}) * F.softmax_cross_entropy(model.l2(h), c).array",
        f"loss = F.mean({SE}) * F.sum(model.l1.W ** 2)"),
    family("a function of a loss", "y c",
        f"loss = F.sqrt(F.mean({SE}))",
        f"loss = F.log(F.mean({SE}))",
        f"loss = F.exp(F.mean({CE}))",
        f"loss = F.relu(F.mean({SE}) - 0.1)",
        f"loss = F.absolute(F.mean({CE}) - 0.5) + 0.5",
        f"loss = F.maximum(F.mean({SE}), F.mean({CE}))",
        f"loss = F.clip(F.mean({SE}), 0.0, 30.0)",
        f"loss = F.sum(F.mean({SE})) + 0 * F.mean(h)",
        f"loss = F.squeeze(F.reshape(F.mean({SE}), (1, 1)))",
        f"loss = F.sum(F.stack([F.mean({SE}), 2 * F.mean({CE})]))",
        f"loss = F.mean(F.stack([F.mean({SE}), F.mean({CE})]))",
        f"loss = F.broadcast_to(F.mean({SE}), (1,)) + F.reshape(F.mean({CE}), (1,))",
        f"loss = F.logsumexp(F.stack([F.mean({SE}), F.mean({CE})]))",
        f"loss = F.mean({SE}) + F.square(F.mean(h))",
        f"loss = F.where(np.array(True), F.mean({SE}), F.mean({CE}))",
        f"loss = F.get_item(F.reshape(F.mean({SE}), (1,)), 0)",
        "loss = F.sum(F.mean(model.out(h), axis=0) ** 2)",
        f"loss = F.sum({CE}) ** 2 / 100",
        "loss = F.mean(model.out(h)) ** 2",
        "loss = F.sqrt(F.sum(model.out(h) ** 2))",
        "loss = 1 - 2 * F.sum(F.sigmoid(model.d(h)) * (c > 1)[:, None]) / "
        "(F.sum(F.sigmoid(model.d(h))) + (c > 1).sum())",
        "loss = F.mean(F.mean(model.out(h), axis=0) ** 2)"),
    family("learned factors", "y c",
        f"loss = F.exp(-model.s) * F.mean({SE}) + model.s",
        f"loss = F.mean({SE} * F.broadcast_to(F.exp(-model.s), y.shape)) + model.s",
        f"loss = F.mean({SE}) + model.s ** 2",
        f"loss = F.mean({SE}) + 0.1 * F.mean(model.proto[c] ** 2)",
        f"loss = F.mean({SE}) + 0.1 * F.sum(model.proto[:2] ** 2)",
        f"loss = F.mean({SE}) + 0.1 * F.sum(model.emb(np.arange(7)) ** 2)",
        f"loss = F.mean({SE}) + 0.1 * F.mean(F.embed_id(c, model.proto) ** 2)",
        f"loss = F.mean({SE}) + F.sum((F.matmul(model.l3.W, model.l3.W, transb=True) - "
        "np.eye(6, dtype=x.dtype)) ** 2)",
        f"loss = F.mean({SE}) + F.sum(model.proto * (1 + len(x)))",
        f"loss = F.mean({SE}) + F.sum(model.proto[np.unique(c)] ** 2)"),
    family("learned factors, weight=", "y",
        f"loss = F.exp(-model.s) * F.sum({SE}) / len(x) + model.s", weight="len(x)"),
    family("hinge beside another", "c y",
        f"loss = F.hinge(model.l2(h), c) + F.mean({SE})",
        "loss = 0.5 * F.hinge(model.l2(h), c, norm='L2') + 0.01 * F.sum(model.l2.W ** 2)"),
    family("a node twice", "y c",
        f"loss = F.mean({SE})\nloss = loss + 0.5 * loss",
        f"first, second = F.mean({SE}), F.mean({CE})\nloss = first + second - 0.3 * first",
        f"each = {CE}\nloss = F.mean(each) + F.mean(each ** 2)",
        f"first = F.mean({SE})\nloss = first - 0.5 * chainer.Variable(first.array)",
        f"loss = F.mean({SE}) + F.mean(chainer.Variable(x))",
        f"gone = F.mean({CE})\ngone.unchain_backward()\nloss = F.mean({SE}) + gone",
        f"loss = F.mean(F.forget(lambda z: F.tanh(model.l3(z)), h)) + F.mean({SE})"),
    family("a gradient penalty", "y",
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
        f"first = F.mean({SE})\ng, = chainer.grad([first], [h], enable_double_backprop=True)\n"
        "loss = first + F.mean(g ** 2)"),
)  # fmt: skip

GROUPS: tuple[list[Family], ...] = (*_UNSAID, *_SEQUENCES, *_MIXED, *_NUMBERS, *_SHAPES)
