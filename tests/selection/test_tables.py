"""Tests the user's table: where it lies, when it decides, and that one warning explains why a bad one is ignored."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attn_core.selection import tables
from attn_core.selection.tables import device_name, shipped_table, table_in_force, user_path, versions

SHIPPED = Path(tables.__file__).parent / "measured/torch-sm90.json"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    table_in_force.cache_clear()
    yield tmp_path
    table_in_force.cache_clear()


def write(**changes: Any) -> Path:
    """Writes a valid table for the CPU of this machine, with changes."""
    content = json.loads(SHIPPED.read_text(encoding="utf-8")) | {
        **{"device": "cpu", "device_name": device_name("cpu"), "versions": versions(), "calls": 7, "date": "today"},
        **changes,
    }
    path = user_path("torch", "cpu")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def warned() -> str:
    """The one warning about the table of the CPU, which then does not decide."""
    with pytest.warns(UserWarning) as caught:
        assert table_in_force("torch", "cpu") is shipped_table("torch", "cpu")
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table_in_force("torch", "cpu")  # a second look says nothing
    return str(caught[0].message)


def test_the_users_table_lies_in_the_configuration_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert user_path("torch", "sm90") == folder / "attn-core/torch-sm90.json"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert user_path("jax", "cpu") == Path("/home/somebody/.config/attn-core/jax-cpu.json")


def test_the_users_table_decides_and_is_read_once() -> None:
    path = write()
    table = table_in_force("torch", "cpu")
    assert table is not None and table.source == f"{path}: 7 calls measured on {device_name('cpu')}, today"
    path.unlink()
    assert table_in_force("torch", "cpu") is table
    table_in_force.cache_clear()
    assert table_in_force("torch", "cpu") is shipped_table("torch", "cpu")


def test_a_stale_table_is_ignored_with_a_reason() -> None:
    path = write(versions=versions() | {"torch": "1.0"})
    message = warned()
    assert message.startswith(f"{path}: ignored, because it was measured with torch 1.0, and ")
    assert message.endswith("; run `attn tune`, or delete the file")


def test_a_table_of_another_device_or_format_is_ignored() -> None:
    write(device_name="an abacus")
    assert "it was measured on an abacus, and this is " in warned()
    table_in_force.cache_clear()
    write(format=1)
    assert "its format is 1, not 4" in warned()


@pytest.mark.parametrize(
    "text", ["", "garbage", "[]", "{}", "null", '{"format": 4}', "\x00\xff", '{"format": 4, "models": 3}']
)
def test_a_damaged_table_is_ignored(text: str) -> None:
    path = write()
    path.write_text(text, encoding="latin-1")
    assert "it is not a table of attn tune" in warned()


def test_damaged_models_are_ignored() -> None:
    content = json.loads(SHIPPED.read_text(encoding="utf-8"))["models"]
    content["forward"]["math"]["rates"].pop("work")
    write(models=content)
    assert "it is not a table of attn tune (KeyError: 'work')" in warned()
    table_in_force.cache_clear()
    content["forward"]["math"]["factors"] = {"compute": {"color": 1.0}}
    write(models=content)
    assert "unknown factors: compute color" in warned()
    table_in_force.cache_clear()
    write(models={"forward": {"math": {"rates": "fast"}}})
    assert "it is not a table of attn tune" in warned()


def test_a_folder_in_place_of_the_table_is_no_table() -> None:
    user_path("torch", "cpu").mkdir(parents=True)
    assert table_in_force("torch", "cpu") is shipped_table("torch", "cpu")


def test_a_process_without_a_home_has_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert table_in_force("torch", "cpu") is shipped_table("torch", "cpu")
