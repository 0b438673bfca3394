"""The losses that random training programs are made of (`random_losses`).

Terms are source text of ``x`` (the input), ``h`` (the network's features of it, a row a sample)
and other arguments:

    x u v (n, 5)  y noise (n, 3) real; p (n, 3) in 0..1; s (n, 4) soft labels; r (n,) positive
    t (n,) labels, -1 where there is none; c (n,) labels; b (n, 3) of 0, 1, -1; q (n,) of 0, 1
    m (n,) a mask of 0 and 1; k (n,) identifiers; e (n, T) identifiers; tt (n, T) labels or -1
    il, lab: lengths and labels of CTC; xs, ts: lists of sequences, of their labels
"""

from __future__ import annotations

Term = tuple[str, str, str]
"""A name, the arguments, and the text."""

_LOGP = "F.select_item(F.log_softmax(model.l2(h)), c)"
KNOWN: tuple[Term, ...] = (
    ("softmax CE", "t", "F.softmax_cross_entropy(model.l2(h), t)"),
    ("softmax CE", "t", "F.softmax_cross_entropy(model.l2(h), t)"),
    ("softmax CE", "t", "F.softmax_cross_entropy(model.l2(h), t, cache_score=False)"),
    ("softmax CE, normalize=False", "t",
     "F.softmax_cross_entropy(model.l2(h), t, normalize=False)"),
    ("softmax CE, class_weight", "t",
     "F.softmax_cross_entropy(model.l2(h), t, class_weight=np.array([0.5, 1, 2, 0.1], h.dtype))"),
    ("softmax CE, ignore_label", "c", "F.softmax_cross_entropy(model.l2(h), c, ignore_label=2)"),
    ("softmax CE, soft targets", "s", "F.softmax_cross_entropy(model.l2(h), s)"),
    ("softmax CE, KL", "s",
     "F.softmax_cross_entropy(model.l2(h), s, soft_target_loss='kl-divergence')"),
    ("softmax CE over steps", "e tt",
     "F.softmax_cross_entropy(F.transpose(model.l2(model.emb(e), n_batch_axes=2), (0, 2, 1)), tt)"),
    ("softmax CE over steps, normalize=False", "e tt",
     "F.softmax_cross_entropy(F.transpose(model.l2(model.emb(e), n_batch_axes=2), (0, 2, 1)), tt, "
     "normalize=False)"),
    ("softmax CE, rows", "e tt",
     "F.softmax_cross_entropy(F.reshape(model.l2(model.emb(e), n_batch_axes=2), (-1, 4)), "
     "tt.ravel())"),
    ("softmax CE, temperature", "t",
     "F.softmax_cross_entropy(model.l2(h) / F.broadcast_to(F.exp(model.s), (len(x), 4)), t)"),
    ("softmax CE, tied weights", "k",
     "F.softmax_cross_entropy(F.linear(F.tanh(model.emb(k)) + h, model.emb.W), k)"),
    ("sigmoid CE", "b", "F.sigmoid_cross_entropy(model.out(h), b)"),
    ("sigmoid CE", "b", "F.sigmoid_cross_entropy(model.out(h), b)"),
    ("sigmoid CE, normalize=False", "b",
     "F.sigmoid_cross_entropy(model.out(h), b, normalize=False)"),
    ("mean_squared_error", "y", "F.mean_squared_error(model.out(h), y)"),
    ("mean_squared_error", "y", "F.mean_squared_error(y, model.out(h)[:, :])"),
    ("mean_squared_error of one column", "y", "F.mean_squared_error(model.d(h), y[:, :1])"),
    ("mean_squared_error of two nets", "v", "F.mean_squared_error(h, F.tanh(model.l1(v)))"),
    ("mean_absolute_error", "y", "F.mean_absolute_error(model.out(h), y)"),
    ("contrastive", "v q", "F.contrastive(h, F.tanh(model.l1(v)), q)"),
    ("triplet", "u v",
     "F.triplet(h, F.tanh(model.l1(u)), F.tanh(model.l1(v)), margin=1)"),
    ("ctc", "e il lab",
     "F.connectionist_temporal_classification([model.l2(model.emb(e[:, i])) for i in range(3)], "
     "lab, 0, il)"),
    ("mean of CE", "t", "F.mean(F.softmax_cross_entropy(model.l2(h), t, reduce='no'))"),
    ("mean of masked CE", "c m",
     "F.mean(F.softmax_cross_entropy(model.l2(h), c, reduce='no') * m)"),
    ("mean of sigmoid CE", "b", "F.mean(F.sigmoid_cross_entropy(model.out(h), b, reduce='no'))"),
    ("mean of huber", "y", "F.mean(F.huber_loss(model.out(h), y, 1.0, reduce='no'))"),
    ("mean of huber rows", "y", "F.mean(F.huber_loss(model.out(h), y, 0.5))"),
    ("mean of squared_error", "y", "F.mean(F.squared_error(model.out(h), y))"),
    ("mean of ** 2", "y", "F.average((model.out(h) - y) ** 2)"),
    ("mean of absolute_error", "y", "F.average(F.absolute_error(model.out(h), y))"),
    ("mean of softplus", "", "F.mean(F.softplus(-model.d(h)))"),
    ("mean of row sums", "", "F.mean(F.sum(h * h, axis=1))"),
    ("mean of row means", "y", "F.mean(F.mean(F.squared_error(model.out(h), y), axis=1))"),
    ("mean of row maxima", "", "F.mean(F.max(h, axis=1))"),
    ("mean of logsumexp", "", "F.mean(F.logsumexp(model.l2(h), axis=1))"),
    ("mean of l2 norms", "", "F.mean(F.batch_l2_norm_squared(h))"),
    ("mean of contrastive", "v q",
     "F.mean(F.contrastive(h, F.tanh(model.l1(v)), q, reduce='no'))"),
    ("mean of hinge", "c", "F.mean(F.hinge(model.l2(h), c, reduce='no'))"),
    ("mean of log_softmax items", "c", f"-F.mean({_LOGP})"),
    ("mean of fancy items", "c", "-F.mean(F.log_softmax(model.l2(h))[np.arange(len(c)), c])"),
    ("mean of focal", "c", f"F.mean((1 - F.exp({_LOGP})) ** 2 * -{_LOGP})"),
    ("mean of cosine", "v",
     "F.mean(1 - F.sum(F.normalize(h) * F.normalize(model.l1(v)), axis=1))"),
    ("mean of entropy", "",
     "F.mean(F.sum(F.softmax(model.l2(h)) * F.log_softmax(model.l2(h)), axis=1))"),
    ("mean of quantile loss", "y",
     "F.mean(F.maximum(0.9 * (y - model.out(h)), -0.1 * (y - model.out(h))))"),
    ("mean of where", "y",
     "F.mean(F.where(y > 0, F.squared_error(model.out(h), y), F.absolute(model.out(h))))"),
    ("mean of ppo", "c r",
     f"-F.mean(F.minimum(F.exp({_LOGP} + 1) * r, F.clip(F.exp({_LOGP} + 1), 0.8, 1.2) * r))"),
    ("mean of bootstrapped target", "y",
     "F.mean_squared_error(model.out(h), y + 0.9 * F.max(model.l2(h), axis=1, "
     "keepdims=True).array)"),
    ("mean of label smoothing", "c",
     f"0.9 * -F.mean({_LOGP}) + 0.1 * -F.mean(F.log_softmax(model.l2(h)))"),
    ("gaussian_nll mean", "y",
     "F.gaussian_nll(y, model.out(h), F.tanh(model.lv(h)), reduce='mean')"),
    ("gaussian_kl mean", "",
     "F.gaussian_kl_divergence(model.out(h), model.lv(h), reduce='mean')"),
    ("bernoulli_nll mean", "p", "F.bernoulli_nll(p, model.out(h), reduce='mean')"),
    ("black_out", "k",
     "F.black_out(h, k, model.emb.W, np.tile(np.array([1, 3], 'i'), (len(x), 1)))"),
    ("mean of noised code", "noise y",
     "F.mean_squared_error(model.out(F.tanh(model.back(F.tanh(model.out(h)) + 0.1 * noise))), y)"),
    ("mean of sliced", "y", "F.mean((model.out(h) - y)[:, 1:] ** 2)"),
    ("mean of an axis given", "y", "F.mean(F.squared_error(model.out(h), y), axis=None)"),
    ("mean of embedded", "e", "F.mean(F.sum(model.emb(e), axis=1) ** 2)"),
    ("two halves of one mean", "y",
     "F.mean_squared_error(model.out(h)[:, :2], y[:, :2]) + "
     "F.mean_absolute_error(model.out(h)[:, 2], y[:, 2])"),
    ("mean of class c", "c",
     "F.mean(F.softmax_cross_entropy(model.l2(h), c, reduce='no') * (c == 1))"),
    ("mean of log1p", "y", "F.mean(F.log1p(F.squared_error(model.out(h), y)))"),
)  # fmt: skip

REGULARISERS: tuple[Term, ...] = (
    ("regulariser, sum", "", "0.01 * F.sum(model.l1.W ** 2)"),
    ("regulariser, sum", "", "F.sum(F.absolute(model.l1.W))"),
    ("regulariser, sum", "", "0.1 * F.sum(model.l1.W * model.l1.W)"),
    ("regulariser, mean", "", "F.mean(model.l1.W ** 2)"),
    ("regulariser, mean_squared_error", "", "F.mean_squared_error(model.l1.W, model.l4.W)"),
    ("regulariser, norm", "", "F.sqrt(F.sum(model.l1.W ** 2) + 1e-3)"),
    ("regulariser, two weights", "", "0.01 * (F.sum(model.l1.W ** 2) + F.sum(model.l1.b ** 2))"),
    ("regulariser, group lasso", "", "F.sum(F.sqrt(F.sum(model.l1.W ** 2, axis=0) + 1e-3))"),
)

_STEPS = "F.concat([model.l2(F.tanh(model.step(each))) for each in xs], axis=0)"
_GRU = "F.concat([model.l2(each) for each in model.gru(None, xs)[1]], axis=0)"
RAGGED: tuple[Term, ...] = (
    ("sequences, CE", "xs ts", f"F.softmax_cross_entropy({_STEPS}, np.concatenate(ts))"),
    ("sequences, CE", "xs ts",
     f"F.softmax_cross_entropy({_STEPS}, np.concatenate(ts), ignore_label=1)"),
    ("sequences, normalize=False", "xs ts",
     f"F.softmax_cross_entropy({_STEPS}, np.concatenate(ts), normalize=False)"),
    ("sequences, mean", "xs", f"F.mean({_STEPS} ** 2)"),
    ("sequences, GRU", "xs ts", f"F.softmax_cross_entropy({_GRU}, np.concatenate(ts))"),
    ("sequences, mean_squared_error", "xs",
     "F.mean_squared_error(F.concat([model.step(each)[:, :4] for each in xs], axis=0), "
     "np.concatenate(xs))"),
    ("sequences, last", "xs",
     "F.mean(F.stack([F.tanh(model.step(each))[-1] for each in xs]) ** 2)"),
    ("sequences, padded CE", "xs ts",
     "F.softmax_cross_entropy(F.transpose(F.pad_sequence([model.l2(model.step(each)) for each in "
     "xs]), (0, 2, 1)), F.pad_sequence(ts, padding=-1).array)"),
    ("sequences, padded CE, normalize=False", "xs ts",
     "F.softmax_cross_entropy(F.transpose(F.pad_sequence([model.l2(model.step(each)) for each in "
     "xs]), (0, 2, 1)), F.pad_sequence(ts, padding=-1).array, normalize=False)"),
    ("a mask as an index", "e", "F.mean(model.emb(e)[e > -1] ** 2)"),
)  # fmt: skip

STEPWISE: tuple[Term, ...] = (
    ("CE a step, LSTM", "e tt", """model.lstm.reset_state()
    loss = 0
    for i in range(3):
        loss += F.softmax_cross_entropy(model.l2(model.lstm(model.emb(e[:, i]))), tt[:, i])
    return loss"""),
    ("CE a step, backwards", "e tt", """loss, h = 0, None
    for i in reversed(range(3)):
        h = model.emb(e[:, i]) if h is None else F.tanh(model.l3(h)) + model.emb(e[:, i])
        loss = F.softmax_cross_entropy(model.l2(h), tt[:, i]) + loss
    return loss / 3"""),
    ("CE a step, sum()", "e tt", """return sum(
        F.softmax_cross_entropy(model.l2(model.emb(e[:, i])), tt[:, i], normalize=False)
        for i in range(3)
    )"""),
    ("CE a step, growing factor", "e tt", """losses = [
        0.5 ** i * F.softmax_cross_entropy(model.l2(model.emb(e[:, i])), tt[:, i])
        for i in range(3)
    ]
    return F.add(*losses)"""),
    ("a mean a class", "x c", """h = F.tanh(model.l1(x))
    each = F.softmax_cross_entropy(model.l2(h), c, reduce='no')
    loss = 0
    for label, factor in enumerate((1, 0.5, 2, 0.1)):
        loss += factor * F.mean(each * (c == label))
    return loss"""),
    ("deep supervision", "x t y", """loss, h = 0.0, F.tanh(model.l1(x))
    for factor in (0.3, 0.3, 1.0):
        h = F.tanh(model.l3(h))
        loss += factor * F.softmax_cross_entropy(model.l2(h), t)
        loss += factor * F.mean_squared_error(model.out(h), y)
    return loss"""),
    ("a weight decay a parameter", "x t", """h = F.tanh(model.l1(x))
    loss = F.softmax_cross_entropy(model.l2(h), t)
    for parameter in model.params():
        loss += 1e-2 * F.sum(parameter ** 2)
    return loss"""),
    ("annealed by the update", "x y t", """h = F.tanh(model.l1(x))
    share = min(1.0, 0.3 * state.update)
    return (1 - share) * F.mean_squared_error(model.out(h), y) + share * F.softmax_cross_entropy(
        model.l2(h), t)"""),
    ("reported", "x t y", """h = F.tanh(model.l1(x))
    first = F.softmax_cross_entropy(model.l2(h), t)
    second = F.mean_absolute_error(model.out(h), y)
    loss = first + 0.1 * second
    chainer.report({'loss': loss.array, 'first': first, 'accuracy': F.accuracy(model.l2(h), t,
                    ignore_label=-1)}, model)
    return loss"""),
    ("one loss, then another", "x t y", """h = F.tanh(model.l1(x))
    if state.update % 2:
        return F.mean_squared_error(model.out(h), y)
    return 0.5 * F.softmax_cross_entropy(model.l2(h), t) + F.mean(h ** 2)"""),
    ("Classifier", "x t",
     "return L.Classifier(lambda v: model.l2(F.tanh(model.l1(v))))(x, t)"),
    ("a term after the first update", "x t y", """h = F.tanh(model.l1(x))
    loss = F.softmax_cross_entropy(model.l2(h), t)
    if state.update > 0:
        loss += 0.5 ** state.update * F.mean_absolute_error(model.out(h), y)
    return loss"""),
    ("a dictionary of known terms", "x t y", """h = F.tanh(model.l1(x))
    terms = {'class': F.softmax_cross_entropy(model.l2(h), t)}
    terms['box'] = 0.2 * F.mean_squared_error(model.out(h), y)
    return terms"""),
)  # fmt: skip

LEN = "len(x)"
COUNT = "int((t >= 0).sum())"
_CE = "F.softmax_cross_entropy(model.l2(h), c, reduce='no')"
_SE = "F.squared_error(model.out(h), y)"
SAID: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (
    # a name, the arguments, the term, what it is divided by, what one may take it for
    ("sum / len", "y r", f"F.sum({_SE}) / len(x)", LEN, ("1", "float(r.sum())", "len(x) ** 2")),
    ("sum / x.shape[0]", "y", f"F.sum({_SE}) / x.shape[0]", LEN, ("1", "len(x) + 8")),
    ("half sum / len", "y", f"0.5 * F.sum({_SE}) / len(x)", LEN, ("1",)),
    ("1 / len * sum", "y", f"F.sum({_SE}) * (1 / len(x))", LEN, ("1",)),
    ("sum / size", "y", f"F.sum({_SE}) / y.size", "y.size", ("1", "y.size ** 0.5")),
    ("sum / (len * number)", "y", f"F.sum({_SE}) / (len(x) * 4)", LEN, ("1",)),
    ("sum of rows / len", "c", f"F.sum({_CE}) / len(c)", LEN, ("1",)),
    ("sum of CE / len", "t b",
     "F.sum(F.softmax_cross_entropy(model.l2(h), t, reduce='no')) / len(t)", LEN, (COUNT, "1")),
    ("sum of CE / count", "t",
     "F.sum(F.softmax_cross_entropy(model.l2(h), t, reduce='no')) / max(1, (t >= 0).sum())",
     COUNT, (LEN, "1")),
    ("double backprop CE", "t",
     "F.softmax_cross_entropy(model.l2(h), t, enable_double_backprop=True)", COUNT, (LEN, "1")),
    ("double backprop CE, normalize=False", "t",
     "F.softmax_cross_entropy(model.l2(h), t, normalize=False, enable_double_backprop=True)",
     LEN, (COUNT, "1")),
    ("masked sum / count", "c m", f"F.sum({_CE} * m) / max(1, m.sum())", "float(m.sum())",
     (LEN, "1")),
    ("masked sum / count, nan", "c m", f"F.sum({_CE} * m) / m.sum()", "m.sum()", (LEN, "1")),
    ("masked sum / float count", "c m", f"F.sum({_CE} * m) / max(1.0, float(m.sum()))",
     "int(m.sum())", (LEN, "1")),
    ("weighted sum / sum of weights", "c r", f"F.sum({_CE} * r) / float(r.sum())",
     "float(r.sum())", (LEN, "1", "float((r ** 2).sum())")),
    ("sum of normalized weights", "c r", f"F.sum({_CE} * (r / r.sum()))", "r.sum()", (LEN, "1")),
    ("F.average with weights", "c r", f"F.average({_CE}, weights=r)", "float(r.sum())",
     (LEN, "1")),
    ("matmul of weights", "c r", f"F.matmul(r / r.sum(), {_CE})", "float(r.sum())", (LEN, "1")),
    ("sum by class weights", "c",
     f"F.sum({_CE} * np.array([1, 9, 0.2, 3], x.dtype)[c]) / np.array([1, 9, 0.2, 3])[c].sum()",
     "np.array([1, 9, 0.2, 3])[c].sum()", (LEN, "1")),
    ("crf1d", "e", "model.crf([model.l2(model.emb(e[:, i])) for i in range(3)], "
     "[abs(e[:, i]) % 4 for i in range(3)])", LEN, ("1",)),
    ("negative sampling", "k",
     "F.negative_sampling(h, k, model.emb.W, lambda shape: np.ones(shape, 'i'), 2)",
     "1", (LEN, "len(k) ** 2")),
    ("negative sampling / len", "k",
     "F.negative_sampling(h, k, model.emb.W, lambda shape: np.ones(shape, 'i'), 2) / len(k)",
     LEN, ("1",)),
    ("sum() of samples / len", "y",
     "sum(F.sum((model.out(h[i:i + 1]) - y[i]) ** 2) for i in range(len(x))) / len(x)",
     LEN, ("1",)),
    ("sum of a stack / len", "y",
     "F.sum(F.stack([F.mean((model.out(h)[i] - y[i]) ** 2) for i in range(len(x))])) / len(x)",
     LEN, ("1",)),
    ("vae", "p noise",
     "F.bernoulli_nll(p, model.out(F.tanh(model.back(model.out(h) + 0.1 * noise)))) / len(x) "
     "+ 0.5 * F.gaussian_kl_divergence(model.out(h), model.lv(h)) / len(x)", LEN, ("1",)),
    ("gan", "", "F.sum(F.softplus(-model.d(h))) / len(x)", LEN, ("1",)),
    ("gan, two halves", "v",
     "F.sum(F.softplus(-model.d(h))) / len(x) + F.sum(F.softplus(model.d(F.tanh(model.l1(v))))) "
     "/ len(v)", LEN, ("1",)),
    ("sum", "y", f"F.sum({_SE})", "1", (LEN, "y.size")),
    ("sum of rows", "c", f"0.01 * F.sum({_CE})", "1", (LEN,)),
    ("sum / constant", "y", f"F.sum({_SE}) / 64", "1", (LEN,)),
    ("gaussian_nll", "y", "F.gaussian_nll(y, model.out(h), F.tanh(model.lv(h)))", "1", (LEN,)),
    ("sum of means over the batch", "y", f"F.sum(F.mean({_SE}, axis=0))", LEN, ("1",)),
    ("sum of masked squares / mask", "y b",
     f"F.sum({_SE} * (b >= 0)) / max(1, (b >= 0).sum())", "int((b >= 0).sum())", (LEN, "1")),
    ("sum of masked squares / len", "y b", f"F.sum({_SE} * (b >= 0)) / len(x)", LEN,
     ("int((b >= 0).sum())", "1")),
    ("sequences, sum / steps", "xs ts",
     f"F.sum(F.softmax_cross_entropy({_STEPS}, np.concatenate(ts), reduce='no')) "
     "/ sum(map(len, ts))", "sum(map(len, ts))", ("1", "len(xs) ** 2")),
    ("sequences, sum / sequences", "xs ts",
     f"F.sum(F.softmax_cross_entropy({_STEPS}, np.concatenate(ts), reduce='no')) / len(xs)",
     "len(xs)", ("1",)),
    ("sequences, sum() / sequences", "xs ts",
     "sum(F.sum(F.softmax_cross_entropy(model.l2(model.step(a)), b, reduce='no')) "
     "for a, b in zip(xs, ts)) / len(xs)", "len(xs)", ("1",)),
    ("sequences, padded squares / steps", "xs",
     "F.sum(F.pad_sequence([model.step(each) for each in xs]) ** 2) / sum(map(len, xs))",
     "sum(map(len, xs))", ("1",)),
)  # fmt: skip

DICTIONARIES: tuple[tuple[str, str, str, str, tuple[tuple[str, str, str], ...]], ...] = (
    # a name, the arguments, the body, the weights (expressions between bars), and wrong weights:
    # the dictionary, the wrong expression, and the right one
    ("dict: known, said", "x t y", """loss = {'class': F.softmax_cross_entropy(model.l2(h), t)}
    loss['box'] = F.sum(F.squared_error(model.out(h), y)) / len(x)
    return loss""", "{'box': |len(x)|}", (("{'box': 1}", "1", LEN),)),
    ("dict: both said, one known", "x t y r",
     """first = F.sum(F.squared_error(model.out(h), y)) / len(x)
    second = F.softmax_cross_entropy(model.l2(h), t)
    return {'a': 3 * first, 'b': second}""", "{'a': |len(x)|, 'b': |int((t >= 0).sum())|}",
     (("{'a': |float(r.sum())|}", "float(r.sum())", LEN),)),
    ("dict: two denominators", "x y c r", f"""each = {_CE}
    return {{'masked': F.sum(each * r) / r.sum(), 'box': 0.1 * F.sum({_SE}) / len(x)}}""",
     "{'masked': |float(r.sum())|, 'box': |len(x)|}",
     (("{'masked': |len(x)|, 'box': |len(x)|}", LEN, "float(r.sum())"),
      ("{'masked': |float(r.sum())|, 'box': |float(r.sum())|}", "float(r.sum())", LEN),
      ("{'masked': |len(x)|, 'box': |float(r.sum())|}", LEN, "float(r.sum())"))),
    ("dict: a sum and a mean", "x y c",
     f"""return {{'sum': 0.1 * F.sum({_CE}), 'mean': F.sum({_SE}) / len(x)}}""",
     "{'sum': 1, 'mean': |len(x)|}",
     (("{'sum': |len(x)|, 'mean': |len(x)|}", LEN, "1"), ("{'sum': 1, 'mean': 1}", "1", LEN))),
    ("dict: vae", "x p noise",
     """mean, ln_var = model.out(h), model.lv(h)
    again = model.out(F.tanh(model.back(mean + F.exp(0.5 * ln_var) * noise)))
    return {'rec': F.bernoulli_nll(p, again) / len(x),
            'kl': 0.5 * F.gaussian_kl_divergence(mean, ln_var) / len(x)}""",
     "{'rec': |len(x)|, 'kl': |len(x)|}", (("{'rec': |len(x)|, 'kl': 1}", "1", LEN),)),
    ("dict: a term a step", "x e tt", """return {
        f't{i}': F.sum(F.softmax_cross_entropy(model.l2(model.emb(e[:, i])), tt[:, i],
                       reduce='no')) / max(1, (tt[:, i] >= 0).sum()) for i in range(3)}""",
     "{f't{i}': (lambda i: |(tt[:, i] >= 0).sum()|)(i) for i in range(3)}", ()),
    ("dict: mask of no sample", "x y c m", f"""return {{
        'masked': F.sum({_CE} * m) / max(1, m.sum()), 'box': F.mean({_SE})}}""",
     "{'masked': |int(m.sum())|}", (("{'masked': 1}", "1", "float(m.sum())"),)),
    ("dict: order of names", "x y c r", f"""terms = [
        ('masked', F.sum({_CE} * r) / r.sum()), ('box', F.sum({_SE}) / len(x))]
    return dict(terms if c[0] % 2 else terms[::-1])""",
     "{'masked': |float(r.sum())|, 'box': |len(x)|}",
     (("{'masked': |len(x)|, 'box': |float(r.sum())|}", LEN, "float(r.sum())"),)),
    ("dict: and a regulariser", "x y", f"""return {{'box': F.sum({_SE}) / len(x),
            'decay': 0.01 * F.sum(model.l1.W ** 2)}}""",
     "{'box': |len(x)|}", (("{'box': 1}", "1", LEN),)),
    ("dict: two nodes in an entry", "x y c", f"""return {{
        'both': F.sum({_SE}) / len(x) + 0.5 * (F.sum({_CE}) / len(x)), 'mean': F.mean(h ** 2)}}""",
     "{'both': |len(x)|}", (("{'both': 1}", "1", LEN),)),
)  # fmt: skip
