"""A pipeline of spaCy's that learns a small language on a GPU, for `clients.py`.

Sentences are drawn from a grammar of eight words, so that a pipeline has learned them when it makes
no mistake. spaCy's own tests train on the CPU.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

spacy = pytest.importorskip("spacy")
NAMES = {"Ada": "PERSON", "Alan": "PERSON", "Oslo": "PLACE", "Rome": "PLACE"}
VERBS = {"visits": "TRAVEL", "leaves": "TRAVEL", "likes": "TASTE", "hates": "TASTE"}
PARTS = ("tagger", "parser", "ner", "textcat")


def example(nlp: Any, draw: random.Random) -> Any:
    """Draw a sentence such as "Ada visits Rome", with all that is to be learned of it."""
    from spacy.training import Example

    people, places = (
        [name for name, label in NAMES.items() if label == wanted] for wanted in ("PERSON", "PLACE")
    )
    who, verb, where = draw.choice(people), draw.choice(list(VERBS)), draw.choice(places)
    category = VERBS[verb]
    annotations = {
        "words": [who, verb, where],
        "tags": ["NNP", "VBZ", "NNP"],
        "heads": [1, 1, 1],
        "deps": ["nsubj", "ROOT", "dobj"],
        "entities": [f"U-{NAMES[who]}", "O", f"U-{NAMES[where]}"],
        "cats": {name: float(name == category) for name in set(VERBS.values())},
    }
    return Example.from_dict(nlp.make_doc(f"{who} {verb} {where}"), annotations)


def found(doc: Any) -> tuple[Any, ...]:
    tokens = [(token.tag_, token.dep_, token.head.i, token.ent_type_) for token in doc]
    return tokens, max(doc.cats, key=doc.cats.get)


def is_learned(nlp: Any, case: Any) -> bool:
    wanted = case.reference
    return found(nlp(wanted.text)) == found(wanted)


@pytest.fixture
def trained() -> Any:
    """A pipeline after 30 updates on a GPU, the losses of each, and cases that it has not seen."""
    spacy.require_gpu()
    spacy.util.fix_random_seed(0)
    nlp, draw = spacy.blank("en"), random.Random(0)
    for part in PARTS:
        nlp.add_pipe(part)
    cases = [example(nlp, draw) for _ in range(64)]
    optimizer = nlp.initialize(lambda: cases)
    losses = []
    for _ in range(30):
        loss: dict[str, float] = {}
        nlp.update(draw.sample(cases, 16), sgd=optimizer, losses=loss)
        losses.append(loss)
    yield nlp, losses, [example(nlp, draw) for _ in range(16)]
    spacy.require_cpu()


def test_every_part_learns(trained: Any) -> None:
    nlp, losses, cases = trained
    import cupy

    assert nlp.get_pipe("tagger").model.ops.xp is cupy
    for part in PARTS:
        assert float(losses[-1][part]) < 0.2 * float(losses[0][part]), part
    assert all(is_learned(nlp, case) for case in cases)


def test_what_was_learned_is_kept_and_computes_the_same_on_the_cpu(trained: Any) -> None:
    nlp, _, cases = trained
    import numpy as np

    texts = [case.reference.text for case in cases]
    tagged = [nlp.get_pipe("tagger").model.predict([nlp(text)])[0].get() for text in texts]
    content = nlp.to_bytes()
    spacy.require_cpu()
    loaded = spacy.blank("en")
    for part in PARTS:
        loaded.add_pipe(part)
    loaded.from_bytes(content)
    assert loaded.get_pipe("tagger").model.ops.xp is np
    for text, scores in zip(texts, tagged, strict=True):
        assert found(loaded(text)) == found(nlp(text))
        (on_cpu,) = loaded.get_pipe("tagger").model.predict([loaded(text)])
        np.testing.assert_allclose(on_cpu, scores, rtol=1e-3, atol=1e-5)
