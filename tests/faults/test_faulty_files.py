"""Tests files that cannot be read or written. For a file that the user names, the answer is one sentence and an exit
code; for one that is found by itself, a warning."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from attn_core.cli.app import app
from attn_core.errors import SpecError
from attn_core.selection import tables, whole_file
from attn_core.selection.tables import device_name, shipped_table, table_in_force, user_path, versions
from attn_core.selection.whole_file import check_place, read_json, write_whole
from benchmarks.fit.records import read

CALL = ("--heads", "2", "--head-dim", "8", "--q-len", "4")
EARLIER = "the earlier content"

WRITERS: dict[str, tuple[str, ...]] = {
    "mask": ("mask", *CALL, "--png"),
}
"""Every command that writes a file, without the file's name, which comes last."""

LONG = ("explain", "--all", "--assume-installed", "--device", "h100", "--softcap", "50", "--mask", "--bias")
"""A command whose output is longer than the buffer of a stream, so that it fails before the end."""


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1"})


def fail_to_write(code: int, patch: pytest.MonkeyPatch) -> None:
    """Makes every write of a whole file fail after a few bytes. Root may write into a read-only folder, so a test
    cannot rely on permissions."""

    def write_some(path: Path, content: bytes) -> int:
        with open(path, "wb") as file:
            file.write(content[:5])
        raise OSError(code, os.strerror(code))

    patch.setattr(Path, "write_bytes", write_some)


@pytest.mark.parametrize("command", WRITERS)
@pytest.mark.parametrize("place", ["a folder", "in a file", "in a folder that does not exist"])
def test_a_command_names_a_place_that_it_cannot_write(command: str, place: str, tmp_path: Path) -> None:
    (tmp_path / "a folder.png").mkdir()
    (tmp_path / "in a file").write_text("")
    path = {"a folder": "a folder.png", "in a file": "in a file/x.png"}.get(place, "missing/x.png")
    result = run(*WRITERS[command], str(tmp_path / path))
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output and not isinstance(result.exception, OSError)
    text = " ".join(result.stderr.split())
    assert text.startswith("attn: ") and "cannot be written: " in text
    assert Path(path).name in text.replace(" ", "") or path in text
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a folder.png", "in a file"]


@pytest.mark.parametrize("command", ["mask"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT])
def test_a_full_or_read_only_disk_keeps_the_earlier_file(
    command: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.png"
    path.write_text(EARLIER)
    with monkeypatch.context() as patch:
        fail_to_write(code, patch)
        result = run(*WRITERS[command], str(path))
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.output
    text = " ".join(result.stderr.split())
    assert f"file.png: cannot be written: {os.strerror(code)}; an earlier file is unchanged" in text
    assert path.read_text() == EARLIER
    assert not (tmp_path / "file.png.part").exists()


def test_a_picture_with_an_unknown_ending_is_refused(tmp_path: Path) -> None:
    result = run(*WRITERS["mask"], str(tmp_path / "picture.doc"))
    assert result.exit_code == 2 and "picture.doc: cannot be drawn: " in " ".join(result.stderr.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [("mask", *CALL), LONG], ids=["short", "long"])
def test_output_to_a_full_disk_is_one_line(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            [sys.executable, "-m", "attn_core", *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert process.returncode == 1
    assert "attn: the output cannot be written: No space left on device" in process.stderr
    assert "Traceback" not in process.stderr


def test_a_write_that_is_interrupted_keeps_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_whole(EARLIER, path)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            write_whole("later", path)
    assert path.read_text() == EARLIER
    write_whole(b"later", path)  # what the interruption left behind is in nobody's way
    assert path.read_text() == "later" and [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_place_is_checked_without_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "file"
    check_place(path)
    assert list(tmp_path.iterdir()) == []
    path.write_text(EARLIER)
    check_place(path)
    assert path.read_text() == EARLIER
    for wrong in (tmp_path, path / "below", tmp_path / "missing/file"):
        with pytest.raises(SpecError, match="cannot be written"):
            check_place(wrong)


DEEP = "[" * 200_000


def a_folder(path: Path) -> None:
    path.mkdir()


def text(content: str | bytes) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(content.encode() if isinstance(content, str) else content)


UNREADABLE: dict[str, Callable[[Path], Any]] = {
    "empty": text(""),
    "garbage": text(b"\x80\x00\xff"),
    "truncated": text('{"format": 1, "cases": [{"na'),
    "nested 200,000 deep": text(DEEP),
    "a folder": a_folder,
    "a number of 5,000 digits": text("9" * 5000),
}
WRONG_SWEEP: dict[str, Callable[[Path], Any]] = {
    "a list": text("[]"),
    "another format": text('{"format": 2}'),
    "no cases": text('{"format": 1, "seconds": 1}'),
    "cases that are text": text('{"format": 1, "seconds": 1, "cases": "all"}'),
    "a case that is a number": text('{"format": 1, "seconds": 1, "cases": [7]}'),
    "seconds that are text": text('{"format": 1, "seconds": "1", "cases": []}'),
}


@pytest.mark.parametrize("make", [*UNREADABLE.values(), *WRONG_SWEEP.values()], ids=[*UNREADABLE, *WRONG_SWEEP])
def test_a_file_of_a_sweep_that_is_none(make: Callable[[Path], Any], tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    make(path)
    with pytest.raises(SpecError, match=r"file\.json: "):
        read(path)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.json"
    path.write_text("[1, 2, 3]")
    monkeypatch.setattr(whole_file, "MOST_BYTES", 8)
    with pytest.raises(SpecError, match=r"file\.json: expected at most 8 bytes, got 9"):
        read_json(path)


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    table_in_force.cache_clear()
    yield tmp_path
    table_in_force.cache_clear()


def valid_table() -> dict[str, Any]:
    content = json.loads((Path(tables.__file__).parent / "measured/torch-sm90.json").read_text(encoding="utf-8"))
    own = {"device": "cpu", "device_name": device_name("cpu"), "versions": versions(), "calls": 7, "date": "today"}
    return content | own  # type: ignore[no-any-return]


def changed(*keys: str, value: Any) -> Callable[[Path], Any]:
    """Writes a table with one entry changed."""

    def make(path: Path) -> None:
        content = valid_table()
        inner = content
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value
        path.write_text(json.dumps(content))

    return make


WRONG_TABLES: dict[str, Callable[[Path], Any]] = {
    **{name: make for name, make in UNREADABLE.items() if name != "a folder"},
    "a rate of NaN": changed("models", "forward", "math", "rates", "work", value=float("nan")),
    "a rate of infinity": changed("models", "training", "math", "rates", "host", value=float("inf")),
    "an error of NaN": changed("models", "forward", "math", "error", value=float("nan")),
    "a tile of 0": changed("tile", value=0),
    "processors below 0": changed("processors", value=-3),
    "a tile that is text": changed("tile", value="large"),
    "models that are a list": changed("models", value=[1]),
    "versions that are a number": changed("versions", value=3),
}


@pytest.mark.parametrize("make", WRONG_TABLES.values(), ids=WRONG_TABLES)
def test_a_table_that_is_found_is_ignored_with_one_warning(make: Callable[[Path], Any], user_folder: Path) -> None:
    path = user_path("torch", "cpu")
    path.parent.mkdir(parents=True)
    make(path)
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        for _ in range(3):
            assert table_in_force("torch", "cpu") is shipped_table("torch", "cpu")
    (found,) = record
    assert str(found.message).startswith(f"{path}: ignored, because it is not a table of attn tune (")
    assert "run `attn tune`, or delete the file" in str(found.message)


def test_a_table_that_may_not_be_read_is_ignored_with_one_warning(
    user_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = user_path("torch", "cpu")
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(valid_table()))

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", refuse)
        with pytest.warns(UserWarning, match="cannot be read: Permission denied"):
            assert table_in_force("torch", "cpu") is shipped_table("torch", "cpu")
    table_in_force.cache_clear()
    assert table_in_force("torch", "cpu") is not shipped_table("torch", "cpu")  # the table itself is valid


def test_tune_finds_out_before_it_measures_that_it_cannot_write(user_folder: Path) -> None:
    (user_folder / "attn-core").write_text("a file where the folder should be")
    result = run("tune", "--device", "cpu", "--minutes", "30")
    assert result.exit_code == 2 and "cannot be written" in " ".join(result.stderr.split())
