"""Tests where FlashAttention-4's compiled kernels are kept, with a stand-in for flash-attn-4's caches."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from attn_core.backends.flash4 import disk_cache

torch = pytest.importorskip("torch")


class MemoryCache:
    def __init__(self) -> None:
        self.cache: dict[Any, Any] = {}


class DiskCache(MemoryCache):
    """As flash-attn-4's: a missing folder or lock raises an error. ``broken``: the disk is."""

    broken: type[Exception] | None = None

    def __init__(self, folder: Path) -> None:
        super().__init__()
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder

    def _try_load_from_storage(self, key: str) -> bool:
        if self.broken:
            raise self.broken("disk")
        if (self.folder / key).exists():
            self.cache[key] = (self.folder / key).read_text()
        return key in self.cache

    def _try_export_to_storage(self, key: str, function: str) -> None:
        if self.broken:
            raise self.broken("disk")
        (self.folder / key).write_text(function)

    def __contains__(self, key: str) -> bool:
        return key in self.cache or self._try_load_from_storage(key)

    def __setitem__(self, key: str, function: str) -> None:
        self.cache[key] = function
        self._try_export_to_storage(key, function)


@pytest.fixture
def interface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A stand-in for flash_attn.cute.interface with one entry point, which has compiled one kernel."""
    module, cute, utils = (ModuleType(f"flash_attn.cute{end}") for end in (".interface", "", ".cache_utils"))
    entry = SimpleNamespace(compile_cache=MemoryCache())
    entry.compile_cache.cache["early"] = "code"
    vars(module).update(_flash_attn_fwd=entry)
    vars(cute).update(interface=module, cache_utils=utils)
    vars(utils).update(
        JITPersistentCache=DiskCache,
        get_jit_cache=lambda name: MemoryCache(),
        _compute_source_fingerprint=lambda: "sources",
    )
    for part in (ModuleType("flash_attn"), cute, module, utils):
        monkeypatch.setitem(sys.modules, part.__name__, part)
    for name in disk_cache.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setattr(metadata, "version", lambda name: "1.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    gpu = SimpleNamespace(name="H200", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(DiskCache, "broken", None)
    disk_cache.use.cache_clear()
    yield module
    disk_cache.use.cache_clear()


def test_kernels_are_found_again_in_the_users_cache_folder(interface: ModuleType, tmp_path: Path) -> None:
    folder = disk_cache.use()
    assert folder == tmp_path / "caches" / "attn_core" / "flash4" / disk_cache.fingerprint()
    cache = interface._flash_attn_fwd.compile_cache
    assert cache.folder == folder / "_flash_attn_fwd"
    assert "early" in cache and "kernel" not in cache
    cache["kernel"] = "compiled"
    interface._flash_attn_fwd.compile_cache = MemoryCache()  # as in another process
    disk_cache.use.cache_clear()
    disk_cache.use()
    assert "kernel" in interface._flash_attn_fwd.compile_cache
    assert disk_cache.named_cache("ours").folder == folder / "ours"


@pytest.mark.parametrize("name", disk_cache.SETTINGS)
@pytest.mark.parametrize("value", ["0", "1"])
def test_the_users_own_setting_stays(
    name: str, value: str, interface: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert disk_cache.use() is None
    assert type(interface._flash_attn_fwd.compile_cache) is MemoryCache
    assert type(disk_cache.named_cache("ours")) is MemoryCache


def test_without_a_gpu_nothing_is_kept(interface: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert disk_cache.use() is None


def test_a_folder_that_cannot_be_written_is_no_error(interface: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "caches").write_text("a file where the folder should be")
    assert disk_cache.use() is None
    assert type(interface._flash_attn_fwd.compile_cache) is MemoryCache


@pytest.mark.parametrize("error", [OSError, RuntimeError, ValueError, EOFError, MemoryError])
def test_a_disk_that_breaks_later_is_no_error(error: type[Exception], interface: ModuleType) -> None:
    disk_cache.use()
    cache = interface._flash_attn_fwd.compile_cache
    DiskCache.broken = error
    assert "kernel" not in cache
    cache["kernel"] = "compiled"
    assert "kernel" in cache


LEVELS = ("ours", "flash4", "kernels")


def place_of(level: str, caches: Path) -> Path:
    """A folder of the cache by its name; "kernels" is the one that has the files."""
    return caches / {"ours": "attn_core", "flash4": "attn_core/flash4"}.get(
        level, f"attn_core/flash4/{disk_cache.fingerprint()}"
    )


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_a_folder_that_others_may_write_into_is_not_used(
    level: str, mode: int, interface: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = place_of(level, tmp_path / "caches")
    place.mkdir(parents=True)
    for folder in (place, *place.parents):
        if folder == tmp_path:
            break
        folder.chmod(0o700)
    place.chmod(mode)
    for _ in range(3):
        assert disk_cache.use() is None
    assert type(interface._flash_attn_fwd.compile_cache) is MemoryCache
    (record,) = caplog.records
    assert record.levelname == "WARNING" and f"others may write into {place}" in record.getMessage()


@pytest.mark.parametrize("level", LEVELS)
def test_a_folder_of_another_user_is_not_used(
    level: str, interface: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert disk_cache.use() is not None
    disk_cache.use.cache_clear()
    interface._flash_attn_fwd.compile_cache = MemoryCache()
    place, of_path = place_of(level, tmp_path / "caches"), Path.stat

    def stat_of(path: Path, **options: Any) -> Any:
        status = of_path(path, **options)
        owner = os.getuid() + 1 if path == place else status.st_uid
        return SimpleNamespace(st_uid=owner, st_mode=status.st_mode)

    monkeypatch.setattr(Path, "stat", stat_of)
    assert disk_cache.use() is None
    assert type(interface._flash_attn_fwd.compile_cache) is MemoryCache
    assert f"{place} belongs to another user" in caplog.text


def test_every_folder_of_ours_is_private(interface: ModuleType, tmp_path: Path) -> None:
    before = os.umask(0o000)
    try:
        assert disk_cache.use() is not None
    finally:
        os.umask(before)
    for level in LEVELS:
        assert place_of(level, tmp_path / "caches").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_full_or_read_only_disk_is_no_error(
    code: int, interface: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "mkdir", fail)
    assert disk_cache.use() is None
    assert type(interface._flash_attn_fwd.compile_cache) is MemoryCache


def test_an_interface_that_changed_is_no_error(interface: ModuleType) -> None:
    del interface._flash_attn_fwd.compile_cache.cache
    assert disk_cache.use() is None
    assert type(interface._flash_attn_fwd.compile_cache) is MemoryCache


def test_the_fingerprint_names_what_kernels_depend_on(interface: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {disk_cache.fingerprint()}
    other = SimpleNamespace(name="B200", major=10, minor=0, multi_processor_count=148)
    changes = [
        lambda: monkeypatch.setattr(metadata, "version", lambda name: "2.0" if name == "quack-kernels" else "1.0"),
        lambda: monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: other),
        lambda: monkeypatch.setattr(torch.version, "cuda", "99.9"),
        lambda: monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a"),
        lambda: monkeypatch.setattr(
            sys.modules["flash_attn.cute.cache_utils"], "_compute_source_fingerprint", lambda: "others"
        ),
        lambda: monkeypatch.setattr(Path, "read_bytes", lambda self: b"changed"),
    ]
    for change in changes:
        change()
        assert disk_cache.fingerprint() not in seen
        seen.add(disk_cache.fingerprint())
