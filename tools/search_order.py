"""A hook of mkdocs that lists pages of the lab behind all others in the search of the site."""

from __future__ import annotations

from typing import Any

BOOST = 0.1
"""The factor on the rank of a page of the lab; other pages have 1."""


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Gives a page of the lab a low rank, and returns its text as it is."""
    if page.file.src_uri.startswith("lab/"):
        page.meta["search"] = {"boost": BOOST}
    return markdown
