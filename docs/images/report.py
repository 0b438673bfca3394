"""Makes report.png: the page of `umem report`, of two steps of a small convolutional network.

Needs Chainer and Chromium. Run it from the repository's root: python docs/images/report.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from umem import Trace
from umem.trace import Alloc

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from browser import Browser  # noqa: E402

WIDTH, HEIGHT = 1200, 850


def main() -> None:
    """Record the network, write its page and photograph it."""
    with tempfile.TemporaryDirectory() as name:
        trace, page = Path(name) / "convnet.umem.gz", Path(name) / "page.html"
        umem("run", "--record", trace, "--stacks", "--no-workspace", HERE / "convnet.py")
        without_folders(Trace.load(trace)).save(trace, force=True)
        umem("report", trace, "--html", page, "--vram", "96MiB")
        photograph(page, HERE / "report.png")


def umem(*arguments: object) -> None:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "umem", *map(str, arguments)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path})


def without_folders(trace: Trace) -> Trace:
    """The trace with the script's name in its stacks, whatever folder it lies in."""
    folder = f"{HERE}{os.sep}"
    events = [
        event._replace(stack=tuple(place.replace(folder, "") for place in event.stack))
        if isinstance(event, Alloc)
        else event
        for event in trace.events
    ]
    return Trace(events, trace.backend, trace.meta)


def photograph(page: Path, picture: Path) -> None:
    """The page with the pointer on a band of the first step."""
    with Browser() as browser:
        browser.open(page, WIDTH, HEIGHT)
        left, top, width, height = browser.run(
            "(r => [r.left, r.top, r.width, r.height])(byId('bands').getBoundingClientRect())"
        )
        browser.move(left + 0.36 * width, top + 0.62 * height)
        browser.settle()
        browser.picture(picture)


if __name__ == "__main__":
    main()
