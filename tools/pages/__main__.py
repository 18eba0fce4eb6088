"""Writes pages of docs and plans in docs/images from the code, most from data of the backends: ``make support``.

    python -m tools.pages [--check]

``--check`` writes nothing, and exits with code 1 if a page is not current.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.pages import devices, known_bad, plans, support, tree

FOLDER = Path(__file__).resolve().parents[2] / "docs"
PAGES = {
    "reference/support.md": support.render,
    "reference/devices.md": devices.render,
    "reference/known_bad.md": known_bad.render,
    "explanation/architecture.md": tree.render_architecture,
    "lab/watched_reports.md": known_bad.render_watched,
    "lab/modules.md": tree.render_modules,
    **{f"images/{name}": draw for name, draw in plans.PICTURES.items()},
}


def main(arguments: list[str] | None = None) -> None:
    """Writes or checks the pages."""
    parser = argparse.ArgumentParser(prog="python -m tools.pages")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with code 1 if a page is not current")
    if not parser.parse_args(arguments).check:
        for name, render in PAGES.items():
            (FOLDER / name).write_text(render(), encoding="utf-8")
    elif stale := [name for name in PAGES if not is_current(name)]:
        sys.exit(f"stale: {', '.join(stale)}; run `make support`")


def is_current(name: str) -> bool:
    """Returns whether a page has what the backends declare now."""
    page = FOLDER / name
    return page.is_file() and page.read_text(encoding="utf-8") == PAGES[name]()


if __name__ == "__main__":
    main()
