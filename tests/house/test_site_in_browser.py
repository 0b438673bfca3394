"""The built site in a browser, opened from the disk: copy buttons, a phone, the dark.

`make docs` builds it; without site/ these are skipped, as without Chromium.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser import Browser, executable
from project import ROOT

SITE = ROOT / "site"
PAGES = sorted(
    path for path in SITE.rglob("*.html") if path.name not in ("404.html", "python.html")
)
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(executable() is None, reason="Chromium is not installed"),
    pytest.mark.skipif(not PAGES, reason="make docs has not built the site"),
]

# The theme copies the innerText of a block that has this attribute for the moment.
COPIED = """
(() => {
  const blocks = [...document.querySelectorAll(".md-typeset .highlight")]
  return blocks.map((block) => {
    const code = block.querySelector("code")
    code.setAttribute("data-md-copying", "")
    const text = code.innerText
    code.removeAttribute("data-md-copying")
    const shown = [...block.querySelectorAll("button")].some((b) => b.offsetParent !== null)
    return [block.className, text, shown]
  })
})()
"""
WIDER = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
BACKGROUND = "getComputedStyle(document.body).backgroundColor"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


def test_copying_leaves_out_prompts_and_output(browser: Browser) -> None:
    consoles = outputs = 0
    for path in PAGES:
        browser.open(path, 1280, 900)
        for kinds, text, has_button in browser.run(COPIED):
            if "language-console" in kinds or "language-pycon" in kinds:
                consoles += 1
                lines = [line for line in text.splitlines() if line.strip()]
                assert lines, f"{path.name}: nothing is copied"
                assert not any(line.startswith(("$ ", ">>> ")) for line in lines), path.name
            if "language-text" in kinds:
                outputs += 1
                assert not has_button, path.name
    assert consoles > 20 and outputs > 20


def test_no_page_is_wider_than_a_phone(browser: Browser) -> None:
    wide = []
    for path in PAGES:
        browser.open(path, 390, 844)
        if browser.run(WIDER):
            wide.append(path.name)
        assert all(url.startswith(("file:", "data:", "blob:")) for url in browser.requests)
        assert browser.errors == []
    assert wide == []


def test_the_dark_is_dark(browser: Browser) -> None:
    colors = []
    for scheme in ("light", "dark"):
        browser.open(SITE / "index.html", 1280, 900, scheme)
        colors.append(sum(map(int, browser.run(BACKGROUND).strip("rgba()").split(",")[:3])))
    light, dark = colors
    assert light > 3 * 200 and dark < 3 * 80  # of three colours, each up to 255
