"""Odd programs: control flow, arguments, functions of a user's own, and mixing that hides itself.

Like `odd_losses`, whose ``CE`` and ``SE`` are a loss a sample and a loss an element.
"""

from __future__ import annotations

from odd_losses import CE, SE, Family, family

_FLOW = (
    family("a term in later batches", "y c",
        f"loss = F.mean({SE})\nif state.update > 0:\n    loss = loss + F.mean({CE})",
        f"loss = F.mean({SE})\nif state.update > 0:\n    loss = loss + F.sum({CE}) / len(x)",
        f"loss = F.mean({SE})\nif state.update > 0:\n    loss = loss * (1 + 1 / len(x))",
        f"loss = F.mean({SE}) if state.update == 0 else F.mean({SE} * len(x))",
        "z = model.out(h)\nif state.update > 0:\n    z = z - F.broadcast_to(F.mean(z, axis=0), "
        "z.shape)\nloss = F.mean((z - y) ** 2)",
        f"loss = F.mean({SE})\nif state.update > 0:\n    loss = F.sqrt(loss)",
        f"loss = F.mean({SE}) if state.update == 0 else F.mean({CE}[::-1] * {CE})"),
    family("a term in some parts", "y c t m",
        f"loss = F.mean({SE})\nif (c == 0).any():\n    loss += F.mean({CE})",
        f"loss = F.mean({SE})\nif m.min() == 0:\n    loss += F.mean({CE} * m)",
        f"loss = F.mean({SE})\nif len(x) > 2:\n    loss += F.mean({CE})",
        f"loss = F.mean({SE})\nif y[0, 0] > 0:\n    loss = loss - 0.5 * F.mean({CE})",
        f"loss = F.mean({SE})\nif (t >= 0).any():\n"
        "    loss += F.softmax_cross_entropy(model.l2(h), t)",
        f"loss = F.mean({SE})\nif m.sum() > 0:\n    loss += F.mean({CE}[m > 0])",
        f"loss = F.mean({SE})\nif m.all():\n    loss += 0.1 * F.sum(model.l1.W ** 2)"),
    family("another term in the same place", "y c v m",
        f"loss = F.mean({SE} if y[0, 0] > 0 else F.absolute_error(model.out(h), y))",
        f"loss = F.mean(h ** 2) + (F.mean({CE}) if c[0] % 2 else F.mean({CE} ** 2))",
        f"terms = [F.mean({SE}), 3 * F.mean({SE} ** 2)]\nloss = terms[0] + 0.5 * terms[1]\n"
        "if c[0] > 1:\n    loss = 3 * terms[0] + 0.5 * F.mean(h * 1)",
        "z = model.out(h if m.all() else F.relu(h))\nloss = F.mean((z - y) ** 2)",
        "z = model.out(h)\nif abs(z.array).mean() > 0.5:\n    z = F.tanh(z)\n"
        "loss = F.mean((z - y) ** 2)",
        "flip = -1 if (c == c[0]).all() else 1\nloss = F.mean(flip * model.out(h) * y)",
        f"first, second = F.mean({SE}), F.mean({CE})\n"
        "loss = first + 2 * second if m.all() else second + 2 * first"),
    family("terms in the order of the data", "y c k",
        f"terms = [F.mean({SE}), F.mean({CE})]\nloss = sum(terms if c[0] > 1 else terms[::-1])",
        f"terms = {{'a': F.mean({SE}), 'b': F.mean({CE})}}\n"
        "loss = sum(terms[name] for name in sorted(terms, key=lambda n: (n == 'a') == (c[0] > 1)))",
        "return dict([('a', F.mean(F.squared_error(model.out(h), y))), ('b', F.mean(h ** 2))]"
        "[::1 if c[0] > 1 else -1])"),
    family("names in some parts", "y c m",
        f"terms = {{'a': F.mean({SE})}}\nif m.sum() > 1:\n    terms['b'] = F.mean({CE} * m)\n"
        "return terms",
        f"return {{'a': F.mean({SE}), 'b' if c[0] > 1 else 'c': F.mean({CE})}}",
        f"return {{'a': F.mean({SE}), 'b': F.sum({CE} * m) / max(1, m.sum())}}",
        f"return {{'a': F.mean({SE}), 'b': F.mean({SE}) * F.mean({CE})}}"),
    family("an argument for all samples", "y",
        "loss = F.mean_squared_error(F.matmul(F.softmax(F.matmul(h, np.ascontiguousarray("
        "np.tile(y, 2)), transb=True)), y), y)",
        "loss = F.mean(F.matmul(model.out(h), y, transb=True)[:, 0] ** 2)"),
    family("an argument for all samples, not of them", "all",
        "loss = F.mean(F.logsumexp(F.matmul(h, all, transb=True), axis=1))",
        "loss = F.mean((h - F.broadcast_to(F.mean(model.emb.W), h.shape)) ** 2) "
        "+ F.mean(F.matmul(h, all, transb=True)) ** 1",
        "loss = F.softmax_cross_entropy(F.matmul(h, F.tanh(all), transb=True), "
        "np.zeros(len(x), 'i'))", ways=("micro_batch", "steps", "by hand")),
    family("a number as an argument", "half y",
        f"loss = half * F.mean({SE})",
        f"loss = F.mean(half * {SE})", ways=("micro_batch", "steps", "by hand")),
    family("an argument that is a Variable", "vx y",
        "loss = F.mean_squared_error(model.out(F.tanh(model.l1(vx))), y)",
        "z = model.out(F.tanh(model.l1(vx)))\n"
        "loss = F.mean((z - F.broadcast_to(F.mean(vx), z.shape)) ** 2)",
        ways=("micro_batch", "steps", "by hand")),
    family("an argument changed in place", "y c t",
        f"y *= 0.5\nloss = F.mean({SE})",
        f"y += 1\nloss = F.mean({SE})",
        "t[t == 2] = -1\nloss = F.softmax_cross_entropy(model.l2(h), t)",
        "t[t >= 0] = (t[t >= 0] + 1) % 4\nloss = F.softmax_cross_entropy(model.l2(h), t)",
        "x -= 0.1\nloss = F.mean(F.tanh(model.l1(x)) ** 2)"),
    family("backward inside the loss", "y",
        "z = chainer.Variable(x)\nmodel.cleargrads()\n"
        "F.mean(F.squared_error(model.out(F.tanh(model.l1(z))), y)).backward()\n"
        "far = x + 0.1 * np.sign(z.grad)\nmodel.cleargrads()\n"
        "loss = F.mean(F.squared_error(model.out(F.tanh(model.l1(far))), y))",
        "z = chainer.Variable(x)\nF.sum(model.d(F.tanh(model.l1(z)))).backward()\n"
        "loss = F.mean(F.squared_error(model.out(F.tanh(model.l1(x - 0.1 * z.grad))), y))"),
    family("random, without an effect", "y c",
        "quiet = np.full((len(x), 3), -200, x.dtype)\n"
        "loss = F.mean((F.gaussian(model.out(h), quiet) - y) ** 2)",
        "quiet = np.full((len(x), 3), -200, x.dtype)\nz = F.gaussian(model.out(h), quiet)\n"
        "loss = F.mean((z - F.broadcast_to(F.mean(z, axis=0), z.shape)) ** 2)",
        f"noise = 0 * np.random.randn(len(x))\nloss = F.mean({CE} + noise)",
        "z = F.rrelu(h, 0.0, 1e-12)\nloss = F.mean(model.out(z) ** 2)",
        "z = F.zoneout(h, h, 0.5)\nloss = F.mean_squared_error(model.out(z), y)",
        "quiet = np.full((len(x), 3), -200, x.dtype)\n"
        "loss = F.sum((F.gaussian(model.out(h), quiet) - y) ** 2) / len(x)"),
    family("a loss of its own class", "y c t",
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
        f"loss = Mean().apply(({SE},))[0]",
        "class Halving(chainer.FunctionNode):\n"
        "    def forward(self, inputs):\n        return np.asarray(inputs[0] / len(x)),\n"
        "    def backward(self, indexes, grads):\n        return grads[0] / len(x),\n"
        f"loss = Halving().apply((F.mean({SE}),))[0]",
        "class Identity(chainer.FunctionNode):\n"
        "    def forward(self, inputs):\n        return inputs\n"
        "    def backward(self, indexes, grads):\n        return grads[0] * len(x),\n"
        f"loss = Identity().apply((F.mean({SE}),))[0]",
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
    family("a sparse or low-rank trick", "y c",
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
    family("two backward calls", "y c",
        f"return F.mean({SE}), F.softmax_cross_entropy(model.l2(h), c)",
        f"return F.mean({SE}), F.sum({CE}) / len(x)", round="twice"),
    family("a vector goes backward", "y c",
        f"return {CE}", f"return F.sum({SE}, axis=1)", f"return F.mean({SE}, axis=0)",
        round="vector"),
)  # fmt: skip

_HIDDEN = (
    family("a little mixing", "y c",
        *(f"z = model.out(h)\nloss = F.mean({SE}) + {factor} * "
          "F.mean((z - F.broadcast_to(F.mean(z, axis=0), z.shape)) ** 2)"
          for factor in ("1e-2", "1e-3", "1e-4", "1e-5", "1e-6")),
        f"loss = F.mean({SE}) + 1e-4 * F.sqrt(F.mean(h ** 2))"),
    family("mixing that comes later", "y m c t",
        "z = model.out(h)\nmiddle = F.broadcast_to(F.mean(z, axis=0), z.shape)\n"
        "loss = F.mean(F.where(np.broadcast_to(m[:, None] > 0, z.shape), z, z - middle) ** 2)",
        "z = model.out(h)\nspread = F.mean((z - F.broadcast_to(F.mean(z, axis=0), z.shape)) ** 2)\n"
        f"loss = F.mean({SE}) + F.relu(spread - 1.5)",
        f"each = {CE} * m\nloss = F.mean(each * (1 + (m.mean() < 1) * len(x)))",
        f"each = {CE}\nloss = F.mean(each * m * (len(m) / max(1, m.sum())))",
        f"each = {CE}\nloss = F.mean(each * np.where(t < 0, 1 / max(1, (t < 0).sum()), 1))",
        "z = model.out(h)\nif not m.all():\n    z = F.flip(z, 0)\nloss = F.mean((z - y) ** 2)"),
    family("centers of classes in the batch", "c",
        "same = (c[:, None] == c[None]).astype(x.dtype)\n"
        "same /= same.sum(axis=1, keepdims=True)\n"
        "loss = F.mean((h - F.matmul(same, h)) ** 2) + 0.1 * F.mean(h ** 2)",
        "same = (c[:, None] == c[None]).astype(x.dtype)\n"
        "same /= same.sum(axis=1, keepdims=True)\n"
        "loss = F.softmax_cross_entropy(model.l2(F.matmul(same, h)), c)"),
    family("classes of the batch", "c",
        "loss = F.softmax_cross_entropy(model.l2(h)[:, :c.max() + 1], c)",
        "seen, label = np.unique(c, return_inverse=True)\n"
        "loss = F.softmax_cross_entropy(model.l2(h)[:, seen], label.astype('i'))",
        "seen = np.bincount(c, minlength=4) > 0\n"
        "loss = F.softmax_cross_entropy(model.l2(h) - 9 * ~seen, c)"),
    family("places in the batch", "c y",
        f"loss = F.mean({CE} * np.arange(len(x)))",
        f"loss = F.mean({CE} * 0.9 ** np.arange(len(x)))",
        f"loss = F.mean({CE} * (-1.0) ** np.arange(len(x)))",
        f"loss = F.mean({CE} * (np.arange(len(x)) % 2 == 0))",
        f"loss = F.mean({CE} * np.cumsum(y[:, 0]))",
        f"loss = F.mean({CE} * np.linspace(0, 1, len(x)))",
        f"loss = F.mean({SE}[:4])",
        f"loss = F.mean({SE}[0])",
        f"loss = F.mean({SE}[-1]) + 0.5 * F.mean({SE})",
        f"loss = F.mean({SE}[:len(x) // 2 + 1]) + F.mean({CE}[len(x) // 2:])"),
    family("shapes that broadcast", "y",
        "loss = F.mean((model.d(h) - y[:, 0]) ** 2)",
        "loss = F.mean((F.squeeze(model.d(h)) - F.squeeze(y[:, :1])) ** 2)",
        "loss = F.mean(F.broadcast_to(F.mean(model.out(h), axis=0), y.shape) * y)"),
    family("no mean, weight=", "y c",
        f"loss = F.sqrt(F.sum({SE}) / len(x))",
        f"loss = F.log(F.sum({SE}) / len(x))",
        f"loss = F.sum({SE}) / len(x) * F.mean({CE})",
        "loss = F.sum(F.softmax(model.l2(h), axis=0) ** 2) / len(x)",
        "logits = F.matmul(h, h, transb=True)\nloss = F.sum(F.softmax_cross_entropy("
        "logits, np.arange(len(x), dtype='i'), reduce='no')) / len(x)",
        "loss = F.sum(F.mean(model.out(h), axis=0) ** 2)",
        "loss = F.max(model.d(h))",
        f"loss = F.sum({SE}) / len(x) ** 2",
        "z = model.bn(h)\nloss = F.sum(model.out(z) ** 2) / len(x)", weight="len(x)"),
    family("no sum, weight=1", "y c",
        "loss = F.sum(model.out(h)) ** 2",
        "loss = F.sum(F.matmul(h, h, transb=True))",
        f"loss = F.logsumexp(F.reshape({CE}, (-1,)))",
        "z = model.bn(h)\nloss = F.sum(model.out(z) ** 2)",
        f"loss = F.sum({SE}) * len(x)",
        "loss = F.decov(h)", weight="1"),
    family("a mask that hides a wrong weight", "y m c",
        f"loss = F.sum({CE} * m) / max(1, m.sum())", weight="len(x)"),
    family("max(1, count) as the weight", "y m c",
        f"loss = F.sum({CE} * m) / max(1, m.sum())", weight="max(1, float(m.sum()))"),
    family("a weight that is no plain number", "y m c",
        f"loss = F.sum({SE}) / len(x)", weight="np.array(len(x))"),
    family("a loss in a closure", "y",
        f"loss = F.mean({SE})",
        f"loss = F.sum({SE})",
        "z = model.out(h)\nloss = F.mean((z - F.broadcast_to(F.mean(z, axis=0), z.shape)) ** 2)",
        ways=("steps", "steps", "micro_batch")),
    family("numbers in a dictionary", "y c",
        f"return {{'a': F.mean({SE}), 'note': 0.5}}",
        f"return {{'a': F.mean({SE}), 'b': F.mean({CE}).array}}"),
    family("a regulariser alone", "y",
        "loss = F.sum(model.l1.W ** 2)",
        "loss = F.sum(model.l1.W ** 2) + model.s * 3",
        "loss = F.mean(model.l1.W ** 2) * len(x)"),
)  # fmt: skip

MORE: tuple[list[Family], ...] = (*_FLOW, *_HIDDEN)
