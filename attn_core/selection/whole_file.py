"""write_whole: writes a text file in one step."""

from __future__ import annotations

from pathlib import Path


def write_whole(text: str, path: Path) -> None:
    """Writes a file in one step: nobody reads half of it, and an interrupted write keeps the earlier content."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
