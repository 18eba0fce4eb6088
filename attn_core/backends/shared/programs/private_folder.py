"""The folders of compiled code in the user's cache folder, which no other user may write into."""

from __future__ import annotations

import os
import stat
from pathlib import Path


class UnsafeFolderError(Exception):
    """Another user may write into a folder of compiled code."""


def private_folder(*names: str) -> Path:
    """Creates and returns the folder ``attn_core/<names>`` in ``$XDG_CACHE_HOME``, else in ``~/.cache``.

    Raises:
        OSError: if it cannot be created.
        UnsafeFolderError: if another user may write into it, because its files are code that this process runs.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("attn_core", *names):  # one by one, because mkdir gives parents another mode
        folder /= name
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.stat()
        if status.st_uid != os.getuid():
            raise UnsafeFolderError(f"{folder} belongs to another user (uid {status.st_uid}); delete it")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise UnsafeFolderError(f"others may write into {folder}; delete it, or chmod it to 700")
    return folder
