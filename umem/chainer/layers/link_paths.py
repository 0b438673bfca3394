"""Links by their paths in a model, their holders, and their replacement."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import chainer

from umem.errors import LayerError


def link_at(model: Any, path: str) -> Any:
    """Return the link at a path as in ``namedlinks``; "/" is the model."""
    link = model
    for part in path.strip("/").split("/") if path.strip("/") else ():
        is_list = isinstance(link, chainer.ChainList)
        link = list(link.children())[int(part)] if is_list else getattr(link, part)
    return link


def parent_path(*paths: str) -> str:
    """Return the path of the lowest chain that contains all links at these paths."""
    parts = [path.strip("/").split("/")[:-1] for path in paths]
    common = []
    for same in zip(*parts, strict=False):
        if len(set(same)) > 1:
            break
        common.append(same[0])
    return "/" + "/".join(common)


def counterparts(chain: Any, copied: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each link of a chain with its counterpart in a copy of the chain."""
    yield chain, copied
    for old, new in _children_of_both(chain, copied):
        if isinstance(old, chainer.Link):
            yield from counterparts(old, new)


def _children_of_both(chain: Any, copied: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(chain, chainer.Sequential):  # it lists its links in another order
        yield from zip(chain, copied, strict=True)
    elif isinstance(chain, chainer.ChainList):
        yield from zip(chain.children(), copied.children(), strict=True)
    elif isinstance(chain, chainer.Chain):
        yield from ((vars(chain)[name], vars(copied)[name]) for name in chain._children)


class LinkPlace(NamedTuple):
    """A link in a model, with its path and its parent chain."""

    path: str
    link: Any
    parent: Any

    def put(self, link: Any) -> None:
        """Replace the link by another, which gets its name and device."""
        link.name = self.link.name
        if link.device != self.link.device:
            link.to_device(self.link.device)
        if isinstance(self.parent, chainer.ChainList):
            for row in _rows(self.parent):
                row[:] = [link if one is self.link else one for one in row]
        else:
            vars(self.parent)[link.name] = link

    def moved_to(self, link: Any) -> LinkPlace:
        """Return this place with another link."""
        return self._replace(link=link)


def _rows(parent: Any) -> Iterator[list[Any]]:
    """Yield the lists in which a ChainList keeps its children; a Sequential has a second one."""
    yield parent._children
    if isinstance(parent, chainer.Sequential):
        yield parent._layers


def links_by_path(model: Any) -> dict[str, LinkPlace]:
    """Map paths to the links of a model, the model itself excluded.

    Raises:
        LayerError: the model is not a link.
    """
    if not isinstance(model, chainer.Link):
        raise LayerError(f"a model must be a chainer.Link; got {type(model).__name__}")
    found = {}
    for path, link in model.namedlinks(skipself=True):
        parent = link_at(model, path.rpartition("/")[0] or "/")
        found[path] = LinkPlace(path, link, parent)
    return found


def holders(model: Any) -> dict[int, list[str]]:
    """Map ids of links and parameters to the places that hold them: children, attributes, lists.

    A link that a Sequential has twice is listed twice.
    """
    found: dict[int, list[str]] = {}
    for path, link in model.namedlinks():
        for name, value in vars(link).items():
            for place, one in _inside(link, name, value):
                if isinstance(one, (chainer.Link, chainer.Parameter)):
                    found.setdefault(id(one), []).append(f"{path.rstrip('/')}/{place}")
    return found


def _inside(link: Any, name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values of an attribute with their places: items of dictionaries and lists, or
    itself.
    """
    if isinstance(link, chainer.Sequential) and name == "_layers":
        return
    if isinstance(link, chainer.ChainList) and name == "_children":
        yield from ((str(number), one) for number, one in enumerate(value))
    elif isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", one) for key, one in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"{name}[{number}]", one) for number, one in enumerate(value))
    else:
        yield name, value
