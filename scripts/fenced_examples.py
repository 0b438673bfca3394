"""An extension of griffe: the examples of a docstring are code, without a heading above them."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class FencedExamples(griffe.Extension):
    """Puts what begins with >>>, up to the next empty line, between fences."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
