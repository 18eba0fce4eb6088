"""Opens the built documentation in headless Chromium, and reports what a reader would stumble over.

    python tests/repository/check_site.py site      # make docs-check builds the site before

Every page at the widths of a laptop and of a phone. Faults are errors in the console, responses that are not found,
links within the site whose page or heading does not exist, and pages that scroll sideways. Screenshots are written to
build/docs-check. The exit code is 1 if there is a fault.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urldefrag, urlparse

SCREENSHOTS = Path(__file__).resolve().parents[2] / "build/docs-check"
WIDTHS = {"laptop": 1366, "phone": 390}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main(arguments: list[str] | None = None) -> int:
    """Checks a site and prints its faults; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path, help="the folder that mkdocs wrote")
    parser.add_argument("--browser", help="path of Chromium; by default one on PATH, else playwright's own")
    options = parser.parse_args(arguments)
    pages = pages_of(options.site)
    faults = faults_of(options.site, pages, options.browser, SCREENSHOTS)
    print("\n".join(faults) or f"{len(pages)} pages at {len(WIDTHS)} widths: no faults")
    print(f"screenshots: {SCREENSHOTS}")
    return 1 if faults else 0


def pages_of(site: Path) -> list[str]:
    """Returns the folder of each page of a site, such as ``"reference/cli/"``; of the first page ``""``."""
    folders = (file.parent.relative_to(site).as_posix() for file in site.rglob("index.html"))
    return sorted("" if folder == "." else f"{folder}/" for folder in folders)


def faults_of(site: Path, pages: Sequence[str], browser: str | None, screenshots: Path) -> list[str]:
    """Returns a sentence for each fault of some pages of a site, and writes a screenshot of each page and width."""
    from playwright.sync_api import sync_playwright

    screenshots.mkdir(parents=True, exist_ok=True)
    executable = browser or next((path for path in map(shutil.which, BROWSERS) if path), None)
    faults: list[str] = []
    links: set[str] = set()
    with served(site) as root, sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=executable)
        for device, width in WIDTHS.items():
            for page in pages:
                tab = chromium.new_page(viewport={"width": width, "height": 900})
                what = f"{page or 'index'} ({device})"
                faults += _watch(tab, what, f"{root}/{page}")
                scroll = tab.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
                if scroll[0] > scroll[1]:
                    faults.append(f"{what}: scrolls sideways, {scroll[0]} pixels in a width of {scroll[1]}")
                links.update(tab.eval_on_selector_all("a[href]", "all => all.map(a => a.href)"))
                tab.screenshot(path=screenshots / f"{page.strip('/').replace('/', '-') or 'index'}-{device}.png")
                tab.close()
        chromium.close()
        inside = sorted(link.removeprefix(f"{root}/") for link in links if link.startswith(f"{root}/"))
    return [*faults, *dead_links(site, inside)]


def _watch(tab: Any, what: str, url: str) -> list[str]:
    """Opens a page and returns its errors in the console and its failed requests."""
    faults: list[str] = []
    tab.on("console", lambda text: faults.append(f"{what}: console: {text.text}") if text.type == "error" else None)
    tab.on("pageerror", lambda error: faults.append(f"{what}: {error}"))
    tab.on("requestfailed", lambda request: faults.append(f"{what}: not loaded: {request.url}"))
    tab.goto(url, wait_until="networkidle")
    return faults


def dead_links(site: Path, links: list[str]) -> list[str]:
    """Returns a sentence for each link, relative to the site's root, whose file or heading does not exist."""
    dead = []
    for link in links:
        path, fragment = urldefrag(link)
        file = site / unquote(urlparse(path).path)
        file = file / "index.html" if file.is_dir() else file
        if not file.is_file():
            dead.append(f"{link}: no such page")
        elif fragment and not re.search(rf'\bid="?{re.escape(unquote(fragment))}["\s>]', file.read_text("utf-8")):
            dead.append(f"{link}: no such heading")
    return dead


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        """Prints nothing: a request is no news."""


@contextmanager
def served(site: Path) -> Iterator[str]:
    """Serves a folder on a free port of this machine, and yields its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(site)))
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


if __name__ == "__main__":
    sys.exit(main())
