"""Keeps FlashAttention-4's compiled kernels on disk between processes, because compiling one takes seconds.

The folder is ``flash4`` in ``attn_core`` in the user's cache folder (``$XDG_CACHE_HOME``, else ``~/.cache``). It has a
folder for each set of package versions, GPUs, compiler settings and sources of ours that a kernel may depend on. The
user's own ``FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED`` (0 turns the cache off) or ``FLASH_ATTENTION_CUTE_DSL_CACHE_DIR``
takes precedence. flash-attn-4's own cache does the work: it writes a file under another name and renames it, and
compiles again what it cannot load. Here a folder that cannot be read, written or locked is no error either. A folder
that belongs to another user, or that others may write into, is not used: its files are code.
Upstream: flash-attn-4 4.0.0b36, ``flash_attn.cute.cache_utils``.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
from collections.abc import Hashable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_core import expressions
from attn_core.backends.shared.caches import cached_once

if TYPE_CHECKING:
    from flash_attn.cute.cache_utils import JITPersistentCache

log = logging.getLogger("attn_core.flash4")

PACKAGES = ("flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels", "apache-tvm-ffi")
"""The packages that the compiled code depends on."""
SETTINGS = ("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")
"""flash-attn-4's own environment variables. If one is set, flash-attn-4 does what it says."""


class UnsafeFolderError(Exception):
    """Another user may write into a folder of compiled code."""


@cached_once
def use() -> Path | None:
    """Makes flash-attn-4 keep its kernels on disk; returns the folder, or None if it does not. Needs a GPU."""
    import torch

    if any(name in os.environ for name in SETTINGS) or not torch.cuda.is_available():
        return None
    try:
        from flash_attn.cute import interface

        folder = _usable_folder()
        entries = {name: value for name, value in vars(interface).items() if hasattr(value, "compile_cache")}
        caches = {name: _cache(folder / name) for name in entries}
        for name, entry in entries.items():
            caches[name].cache.update(entry.compile_cache.cache)  # kernels that were compiled before
        for name, entry in entries.items():
            entry.compile_cache = caches[name]
    except UnsafeFolderError as error:
        log.warning("FlashAttention-4's kernels are not kept on disk: %s", error)
        return None
    except Exception as error:  # an interface that changed upstream can raise anything, and compiling always works
        log.info("FlashAttention-4's kernels are not kept on disk: %s: %s", type(error).__name__, error)
        return None
    return folder


def named_cache(name: str) -> Any:
    """Returns flash-attn-4's cache of compiled code with a name: on disk, or in this process."""
    from flash_attn.cute.cache_utils import get_jit_cache

    folder = use()
    return get_jit_cache(name) if folder is None else _cache(folder / name)


def _cache(folder: Path) -> JITPersistentCache:
    from flash_attn.cute.cache_utils import JITPersistentCache

    class Cache(JITPersistentCache):  # type: ignore[misc]
        """A cache on disk for which a full or read-only disk, a damaged file, or a lock that it does not get, is no
        error."""

        def _try_load_from_storage(self, key: Hashable) -> bool:
            try:
                return bool(super()._try_load_from_storage(key))
            except Exception as error:  # a damaged file may fail in any way, and compiling always works
                log.info("compiled code is not read from %s: %s", folder, error)
                return False

        def _try_export_to_storage(self, key: Hashable, function: object) -> None:
            try:
                super()._try_export_to_storage(key, function)
            except Exception as error:
                log.info("compiled code is not written to %s: %s", folder, error)

    return Cache(folder)


def _usable_folder() -> Path:
    """Creates and returns the folder.

    Raises:
        OSError: if it cannot be created, or files in it cannot be written or locked.
        UnsafeFolderError: if another user may write into it, because its kernels are code that this process runs.
    """
    import fcntl  # flash-attn-4 runs on Linux alone; this module is imported everywhere

    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("attn_core", "flash4", fingerprint()):  # one by one, because mkdir gives parents another mode
        folder /= name
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.stat()
        if status.st_uid != os.getuid():
            raise UnsafeFolderError(f"{folder} belongs to another user (uid {status.st_uid}); delete it")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise UnsafeFolderError(f"others may write into {folder}; delete it, or chmod it to 700")
    with open(folder / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return folder


def fingerprint() -> str:
    """Returns a digest of everything that compiled code may depend on besides the keys of flash-attn-4's caches."""
    import torch

    properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    gpus = {(gpu.name, gpu.major, gpu.minor, gpu.multi_processor_count) for gpu in properties}
    settings = {name: value for name, value in os.environ.items() if name.startswith(("CUTE_DSL_", "FLASH_ATTENTION_"))}
    versions = [metadata.version(name) for name in PACKAGES]
    digest = hashlib.sha256(repr((versions, torch.version.cuda, sorted(gpus), sorted(settings.items()))).encode())
    # flash-attn-4's sources, as they may be installed from a checkout; and ours, whose mask and score functions are
    # compiled in.
    from flash_attn.cute import cache_utils

    digest.update(cache_utils._compute_source_fingerprint().encode())
    for folder in (Path(__file__).parent, Path(expressions.__file__).parent):
        for path in sorted(folder.glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:32]
