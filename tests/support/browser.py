"""A headless Chromium for tests, driven over the DevTools protocol through two pipes.

No port is opened and no package is needed: Chromium reads commands from file descriptor 3 and
writes answers to 4, each a JSON text that ends in a zero byte.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
OPTIONS = (
    "--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run",
    "--disable-extensions", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND", "--force-color-profile=srgb",
)  # fmt: skip
CONNECT = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
TIMEOUT_SECONDS = 40


def executable() -> str | None:
    """Where Chromium is, None where it is not installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class BrowserError(AssertionError):
    """The browser, or the page's script, reported an error."""


class Browser:
    """One Chromium with one page; use it as a context manager."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._count = 0
        self._session: str | None = None
        self._text = b""

    def __enter__(self) -> Browser:
        self._start()
        try:
            self._attach()
        except BaseException:
            self.close()
            raise
        return self

    def _start(self) -> None:
        """Start Chromium on pipes of its own, with an empty profile, on a blank page."""
        program = executable()
        assert program is not None
        self._folder = tempfile.mkdtemp(prefix="umem-chromium-")
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs_in, theirs_out)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", CONNECT, *map(str, high), program, *OPTIONS,
             f"--user-data-dir={self._folder}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=high,
        )  # fmt: skip
        for fd in (theirs_in, theirs_out, *high):
            os.close(fd)

    def _attach(self) -> None:
        targets = self.send("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        attached = self.send("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the browser; nothing of it stays behind."""
        with contextlib.suppress(BrowserError, OSError):
            self._session = None
            self.send("Browser.close")
        try:
            self._process.wait(300)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- the protocol ----------------------------------------------------------------------

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        for answer in self._messages():
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']['message']}")
                result: dict[str, Any] = answer["result"]
                return result
        raise BrowserError(f"{method}: no answer")

    def _messages(self, until: float | None = None) -> Iterator[dict[str, Any]]:
        """Yield what Chromium sends, until nothing has come up to a moment; note each."""
        end = time.monotonic() + TIMEOUT_SECONDS if until is None else until
        while True:
            while b"\0" in self._text:
                text, _, self._text = self._text.partition(b"\0")
                message = json.loads(text)
                self._note(message)
                yield message
            ready, _, _ = select.select([self._in], [], [], max(0, end - time.monotonic()))
            if not ready:
                return
            more = os.read(self._in, 1 << 16)
            if not more:
                raise BrowserError("Chromium has ended")
            self._text += more

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:600])
        elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])

    # -- what tests do ---------------------------------------------------------------------

    def open(self, path: Path, width: int = 1200, height: int = 900, scheme: str = "light") -> None:
        """Open a file in a window of that size, and wait until it is loaded."""
        self.requests.clear()
        self.errors.clear()
        self.resize(width, height)
        self.prefer(scheme)
        self.send("Page.navigate", url=path.resolve().as_uri())
        for message in self._messages():
            if message.get("method") == "Page.loadEventFired":
                break
        self.settle()

    def resize(self, width: int, height: int) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def prefer(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", features=features)

    def settle(self) -> None:
        """Wait until what has changed is drawn."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in found:
            raise BrowserError(json.dumps(found["exceptionDetails"])[:600])
        return found["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.send("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **more)

    def move(self, x: float, y: float) -> None:
        self.mouse("Moved", x, y)

    def click(self, x: float, y: float, count: int = 1) -> None:
        for number in range(1, count + 1):
            for kind in ("Pressed", "Released"):
                self.mouse(kind, x, y, button="left", clickCount=number)

    def drag(self, x: float, y: float, to: float) -> None:
        self.mouse("Pressed", x, y, button="left", clickCount=1)
        for place in (x + (to - x) / 2, to):
            self.mouse("Moved", place, y, button="left", buttons=1)
        self.mouse("Released", to, y, button="left", clickCount=1)

    def key(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Write a PNG of the window, or of the whole page."""
        taken = self.send(
            "Page.captureScreenshot",
            captureBeyondViewport=whole,
            format="png",
            **({"clip": self._whole()} if whole else {}),
        )
        path.write_bytes(base64.b64decode(taken["data"]))

    def _whole(self) -> dict[str, float]:
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        return {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
