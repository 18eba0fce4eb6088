"""A hook of mkdocs that turns links in a notebook into links of the site, and adds one that downloads the notebook.

mkdocs itself turns links of Markdown files only.
"""

from __future__ import annotations

import logging
import posixpath
import re
from typing import Any
from urllib.parse import urldefrag

LINK = re.compile(r'(?<=href=")(?!https?:|#|mailto:)[^"]+\.(?:md|ipynb)(?:#[^"]*)?(?=")')
logger = logging.getLogger("mkdocs.hooks.notebook_links")


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Returns the content of a notebook's page. A link that leads to no page is a warning, so --strict fails."""
    source = page.file.src_uri
    if not source.endswith(".ipynb"):
        return html
    shown, missing = with_links(html, source, files)
    for target in missing:
        logger.warning("%s: a link leads to no page: %s", source, target)
    download = f'<p><a href="{posixpath.basename(source)}" download>Download this notebook</a></p>'
    return shown.replace("</h1>", f"</h1>{download}", 1)


def with_links(html: str, source: str, files: Any) -> tuple[str, list[str]]:
    """Returns the HTML of a notebook with links from its page, and the targets that are no page."""
    here, missing = files.get_file_from_path(source), []

    def url(link: re.Match[str]) -> str:
        target, fragment = urldefrag(link[0])
        file = files.get_file_from_path(posixpath.normpath(posixpath.join(posixpath.dirname(source), target)))
        if file is None:
            missing.append(target)
            return link[0]
        return file.url_relative_to(here) + (f"#{fragment}" if fragment else "")

    return LINK.sub(url, html), missing
