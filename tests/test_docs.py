"""The documents that are made of the code, and the code that stands in documents."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from attn_core import backends
from attn_core.cli.support_table import FEATURES, render
from attn_core.support import Support

ROOT = Path(__file__).resolve().parent.parent


def test_support_page_is_current() -> None:
    page = ROOT / "docs/support.md"
    assert page.is_file() and page.read_text(encoding="utf-8") == render(), "stale: run `make support`"


def test_support_page_shows_every_claim() -> None:
    claims = {field.name for field in fields(Support) if field.default is False}
    assert claims == set(FEATURES)


def test_support_page_tells_forward_from_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stub:
        FRAMEWORK, REQUIRES = "torch", "stub>=1"
        FORWARD = Support(kernel="a stub", devices=("cpu",), dtypes=("float32",), softcap=True, causal=True)
        BACKWARD = Support(kernel="a stub", devices=("cpu",), dtypes=("float32",), causal=True)

    monkeypatch.setattr(backends, "load", lambda name: Stub if name == "math" else None)
    lines = render().splitlines()
    assert "| `softcap` | forward |" in lines
    assert "| `causal` | ✓ |" in lines
    assert "| `window` | — |" in lines


def test_links_between_documents_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")]:
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)}: {target}"


def test_readme_names_the_commands_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make ([a-z-]+)", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def _examples() -> list[str]:
    return re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


@pytest.mark.parametrize("example", _examples(), ids=lambda code: code.split("\n")[0].removeprefix("import "))
def test_readme_examples_run(example: str) -> None:
    pytest.importorskip(example.split("\n")[0].removeprefix("import "))
    exec(compile(example, "README.md", "exec"), {"__name__": "readme"})
