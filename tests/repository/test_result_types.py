"""Tests what type checkers conclude about a user's calls: the type of every result, and mistakes in the arguments."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from operator import attrgetter
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from attn_core.call.keywords import (
    AttentionKeywords,
    CachedKeywords,
    ContextParallelKeywords,
    PagedKeywords,
    QkvPackedKeywords,
)

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = [f"tests/typing/{framework}_program.py" for framework in ("torch", "jax")]


def lines_with_errors(*command: str) -> set[tuple[str, int]]:
    done = subprocess.run(
        [sys.executable, "-m", *command, *PROGRAMS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    errors = re.findall(r"(tests/typing/\w+\.py):(\d+):(?:\d+ -)? error: ", done.stdout)
    assert errors, done.stdout + done.stderr
    return {(name, int(line)) for name, line in errors}


def marked_lines() -> set[tuple[str, int]]:
    return {
        (name, number)
        for name in PROGRAMS
        for number, line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), start=1)
        if "  # error: " in line
    }


@pytest.fixture(autouse=True)
def both_frameworks() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("jax")


@pytest.mark.slow
def test_mypy_finds_exactly_the_mistakes(tmp_path: Path) -> None:
    # A user's settings: none of this project's, and errors only of the user's own files.
    own = ("--config-file=", f"--cache-dir={tmp_path}", "--strict", "--follow-imports=silent", "--no-pretty")
    assert lines_with_errors("mypy", *own) == marked_lines()


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("pyright") or not shutil.which("node"), reason="needs pyright, which needs node")
def test_pyright_finds_exactly_the_mistakes() -> None:
    assert lines_with_errors("pyright", "--pythonpath", sys.executable) == marked_lines()


@pytest.mark.parametrize("frontend", ["torch_frontend", "jax_frontend"])
@pytest.mark.parametrize(
    ("function", "keywords"),
    [
        ("attention", AttentionKeywords),
        ("attention_qkvpacked", QkvPackedKeywords),
        ("paged_attention", PagedKeywords),
        ("PagedKVCache.attend", CachedKeywords),
        ("context_parallel_attention", ContextParallelKeywords),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_the_overloads_have_every_keyword(frontend: str, function: str, keywords: Any) -> None:
    parameters = signature(attrgetter(function)(import_module(frontend))).parameters.values()
    # The overloads have them; only torch has out.
    spelled = ("return_lse", "return_max_logit", "mesh", "axis_name", "partition_spec", "out")
    expected = [each for each in parameters if each.kind is each.KEYWORD_ONLY and each.name not in spelled]
    assert set(keywords.__annotations__) == {each.name for each in expected}
    assert keywords.__required_keys__ == {each.name for each in expected if each.default is each.empty}


@pytest.mark.parametrize("frontend", ["torch_frontend", "jax_frontend"])
def test_names_that_load_at_first_use_are_listed(frontend: str) -> None:
    code = f"import {frontend} as f; assert 'run_attention' not in vars(f); print(set(f.__all__) <= set(dir(f)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize("module", ["linen", "nnx"])
def test_the_types_of_a_layers_fields_can_be_read(module: str) -> None:
    pytest.importorskip("flax")
    hints = get_type_hints(import_module(f"jax_frontend.{module}").Attention.__init__)
    assert {"num_heads", "rotary"} <= hints.keys()
