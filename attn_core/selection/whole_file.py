"""Reads and writes whole files: a write is one step, and every error is one sentence that names the file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from attn_core.errors import SpecError

MOST_BYTES = 2**28
"""The largest JSON that is read. The files of a day of measuring are a hundred times smaller."""


def write_whole(content: str | bytes, path: Path, *, with_folder: bool = False) -> None:
    """Writes a file in one step: nobody reads half of it, and an interrupted write keeps the earlier content.

    Args:
        with_folder: whether to make the folder of the file if there is none.

    Raises:
        SpecError: if the file cannot be written, for instance because the disk is full. An earlier file is unchanged.
    """
    partial = _partial(path)
    with _names_file(path):
        if with_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_bytes(content.encode() if isinstance(content, str) else content)
            partial.replace(path)
        except OSError:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise


def check_place(path: Path, *, with_folder: bool = False) -> None:
    """Raises SpecError if a file cannot be written; call it before the work that the file is for.

    Args:
        with_folder: whether the write will make the folder. It is not made yet, so that interrupted work leaves nothing
            behind.
    """
    if with_folder:
        path = next(folder for folder in path.absolute().parents if folder.exists()) / path.name
    with _names_file(path):
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        _partial(path).touch()
        _partial(path).unlink()


@contextmanager
def _names_file(path: Path) -> Iterator[None]:
    """Turns an OSError inside it into a SpecError with the file and the reason."""
    try:
        yield
    except OSError as error:
        raise SpecError(f"{path}: cannot be written: {error.strerror or error}; an earlier file is unchanged") from None


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file.

    Raises:
        SpecError: if the file cannot be read, is larger than MOST_BYTES, or is no JSON.
    """
    try:
        if (size := path.stat().st_size) > MOST_BYTES:
            raise SpecError(f"{path}: expected at most {MOST_BYTES} bytes, got {size}")
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise SpecError(f"{path}: cannot be read: its lists or objects are nested too deeply") from None
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise error if isinstance(error, SpecError) else SpecError(f"{path}: cannot be read: {error}") from None


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".part")
