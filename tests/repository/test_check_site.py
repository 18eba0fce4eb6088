"""Tests that the check of the documentation's pages finds what a reader would stumble over."""

from __future__ import annotations

import shutil
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).with_name("check_site.py")


@pytest.fixture(scope="module")
def check_site() -> Any:
    spec = spec_from_file_location("check_site", FILE)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def site(tmp_path: Path) -> Path:
    head = '<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
    pages = {
        "good": '<h1 id="a-heading">a</h1><a href="#a-heading">a</a>',
        "links": '<a href="../good/">1</a><a href="../good/#other">2</a><a href="../missing/">3</a>',
        "wide": '<div style="width: 700px">wide</div>',
        "script": "<script>undefinedFunction()</script>",
        "picture": '<img src="missing.png">',
    }
    for name, body in pages.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").write_text(f"<html><head>{head}</head><body>{body}</body></html>", "utf-8")
    return tmp_path


def test_links_to_missing_pages_and_headings_are_found(check_site: Any, site: Path) -> None:
    links = ["good/", "good/#a-heading", "good/index.html", "good/#other", "missing/"]
    assert check_site.dead_links(site, links) == ["good/#other: no such heading", "missing/: no such page"]


def test_chromium_finds_each_planted_fault(check_site: Any, site: Path, tmp_path: Path) -> None:
    pytest.importorskip("playwright")
    if not any(map(shutil.which, check_site.BROWSERS)):
        pytest.skip("no Chromium on PATH")

    def faults(page: str) -> list[str]:
        return check_site.faults_of(site, (f"{page}/",), None, tmp_path / "shots")  # type: ignore[no-any-return]

    assert faults("good") == []
    assert faults("links") == ["good/#other: no such heading", "missing/: no such page"]
    assert faults("wide") == ["wide/ (phone): scrolls sideways, 708 pixels in a width of 390"]
    assert any("undefinedFunction" in fault for fault in faults("script"))
    assert any("404" in fault for fault in faults("picture"))
    assert sorted(file.name for file in (tmp_path / "shots").iterdir())[:2] == ["good-laptop.png", "good-phone.png"]


def test_every_page_is_opened(check_site: Any, site: Path) -> None:
    (site / "index.html").write_text("", "utf-8")
    assert check_site.pages_of(site) == ["", "good/", "links/", "picture/", "script/", "wide/"]
