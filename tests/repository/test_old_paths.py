"""Tests the import paths that the documentation named before the modules were moved into folders."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from attn_core.dropins.old_paths import MOVED


@pytest.mark.parametrize("old", MOVED)
def test_an_old_path_gives_the_names_of_the_new_module_and_a_warning(old: str) -> None:
    for package in ("torch", "jax"):
        if old.startswith(f"{package}_frontend"):
            pytest.importorskip(package)
    new = importlib.import_module(MOVED[old])
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{old} is now {MOVED[old]}"):
        module = importlib.import_module(old)
    public = [name for name in vars(new) if not name.startswith("_")]
    assert public and all(getattr(module, name) is getattr(new, name) for name in public)
    assert module.__doc__ == new.__doc__ and set(public) <= set(dir(module))


def test_an_old_path_can_be_imported_from() -> None:
    code = "from attn_core.seq_info import SeqInfo; import attn_core; assert SeqInfo is attn_core.SeqInfo"
    done = subprocess.run([sys.executable, "-W", "default", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "<string>:1: DeprecationWarning: attn_core.seq_info is now attn_core.call.seq_info" in done.stderr


def test_the_old_names_of_a_path_that_has_a_new_module() -> None:
    from attn_core import masks
    from attn_core.call.masks import visible

    with pytest.warns(DeprecationWarning, match=r"attn_core.masks.visible is now attn_core.call.masks.visible"):
        assert masks.visible is visible
    with pytest.raises(AttributeError, match="no attribute 'never_was'"):
        _ = masks.never_was


def test_an_unknown_path_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("attn_core.never_was")
