"""RoBERTa-style encoder with its masked language modelling loss, in plain Chainer.

Nothing in this file knows umem: each technique is switched on from outside.
"""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

HEAD_WIDTH = 64


def gelu(x):
    """x times the normal distribution's probability below x."""
    return x * 0.5 * (F.erf(x * 0.5**0.5) + 1)


class Layer(chainer.Chain):
    """Self-attention and two products, each followed by dropout, addition and normalisation."""

    def __init__(self, hidden):
        super().__init__()
        self.heads = max(1, hidden // HEAD_WIDTH)
        with self.init_scope():
            self.query, self.key = L.Linear(hidden, hidden), L.Linear(hidden, hidden)
            self.value, self.out = L.Linear(hidden, hidden), L.Linear(hidden, hidden)
            self.norm1, self.norm2 = L.LayerNormalization(hidden), L.LayerNormalization(hidden)
            self.wide, self.narrow = L.Linear(hidden, 4 * hidden), L.Linear(4 * hidden, hidden)

    def forward(self, x, batch):
        x = self.norm1(x + F.dropout(self.attend(x, batch), 0.1))
        return self.norm2(x + F.dropout(self.narrow(gelu(self.wide(x))), 0.1))

    def attend(self, x, batch):
        def by_heads(x):
            x = F.reshape(x, (batch, -1, self.heads, x.shape[1] // self.heads))
            return F.transpose(x, (0, 2, 1, 3))

        query, key, value = (by_heads(link(x)) for link in (self.query, self.key, self.value))
        scores = F.matmul(query, key, transb=True) * query.shape[-1] ** -0.5
        weights = F.dropout(F.softmax(scores, axis=3), 0.1)
        y = F.transpose(F.matmul(weights, value), (0, 2, 1, 3))
        return self.out(F.reshape(y, x.shape))


class MaskedLanguageModel(chainer.Chain):
    """Words from the words around them; the output's weight is that of the embedding.

    Called with tokens and targets, both (batch, length) of int32, it gives the mean loss of the
    targets that are not -1.
    """

    def __init__(self, vocabulary=8192, hidden=384, layers=6, length=128):
        super().__init__()
        with self.init_scope():
            scale = chainer.initializers.Normal(0.02)
            self.words = L.EmbedID(vocabulary, hidden, initialW=scale)
            self.places = L.EmbedID(length, hidden, initialW=scale)
            self.norm = L.LayerNormalization(hidden)
            self.layers = chainer.ChainList(*[Layer(hidden) for _ in range(layers)])
            self.dense, self.dense_norm = L.Linear(hidden, hidden), L.LayerNormalization(hidden)
            self.bias = chainer.Parameter(0, vocabulary)

    def forward(self, tokens, targets):
        batch, length = tokens.shape
        places = self.xp.broadcast_to(self.xp.arange(length, dtype=np.int32), tokens.shape)
        x = F.reshape(self.words(tokens) + self.places(places), (batch * length, -1))
        x = F.dropout(self.norm(x), 0.1)
        for layer in self.layers:
            x = layer(x, batch)
        x = self.dense_norm(gelu(self.dense(x)))
        scores = F.linear(x, self.words.W, self.bias)
        loss = F.softmax_cross_entropy(scores, targets.reshape(-1), ignore_label=-1)
        chainer.report({"loss": loss}, self)
        return loss
