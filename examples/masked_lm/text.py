"""Lines of words as arrays, some words hidden: what a masked language model is trained on."""

import re
from collections import Counter
from pathlib import Path

import chainer
import numpy as np

PAD, MASK, UNKNOWN, FIRST = 0, 1, 2, 3
HIDDEN_SHARE = 0.15
OWN_TEXT = Path(__file__).parents[2] / "docs"


def read(path=None):
    """The text of a file, or of a folder's .md and .txt files; None: umem's own documentation."""
    path = Path(path or OWN_TEXT)
    files = sorted(path.rglob("*.[mt][dx]*")) if path.is_dir() else [path]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


class Lines(chainer.dataset.DatasetMixin):
    """Lines of one length, as tokens of int32; some are hidden, anew each time.

    A line is its tokens and its targets: -1 where nothing is asked. Of the words 15% are asked;
    80% of these become the mask, 10% another word, and 10% stay (Devlin et al. 2018).
    """

    def __init__(self, text, vocabulary, length):
        found = re.findall(r"\w+|[^\w\s]", text)
        words = (word for word, _ in Counter(found).most_common(vocabulary - FIRST))
        number = {word: index for index, word in enumerate(words, FIRST)}
        self.vocabulary = vocabulary
        self.lines = np.full((-(-len(found) // length), length), PAD, np.int32)
        self.lines.reshape(-1)[: len(found)] = [number.get(word, UNKNOWN) for word in found]

    def __len__(self):
        return len(self.lines)

    def get_example(self, index):
        line = self.lines[index]
        asked = (np.random.random(line.shape) < HIDDEN_SHARE) & (line != PAD)
        asked[0] = True  # a line without a target would have no loss
        how = np.random.random(line.shape)
        others = np.random.randint(FIRST, self.vocabulary, line.shape)
        tokens = np.where(asked & (how < 0.8), MASK, np.where(asked & (how < 0.9), others, line))
        return tokens.astype(np.int32), np.where(asked, line, -1).astype(np.int32)
