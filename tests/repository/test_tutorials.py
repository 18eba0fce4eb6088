"""Runs every tutorial in a fresh kernel, and checks the outputs, the form and the links of the committed notebook."""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import yaml

from tools import notebook_links

pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
from nbclient.exceptions import CellExecutionError
from nbformat import v4

from tools import tutorials

pytestmark = pytest.mark.sampled

ROOT = Path(__file__).resolve().parents[2]
PATHS = tutorials.paths()
each = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
PLACE = re.compile(r"""(?:^|[\s"'(=:])(?:/(?:home|work|tmp|root|Users|private|var|usr|opt)/|[A-Z]:\\)""")
"""The beginning of a path on one machine."""


def text_of(output: Any) -> str:
    """Everything that a reader sees of an output, pictures left out."""
    data = {kind: text for kind, text in output.get("data", {}).items() if not kind.startswith("image/png")}
    return "\n".join([output.get("text", ""), *map(str, data.values())])


def kinds(cell: Any) -> list[tuple[str, list[str]]]:
    """The type of each output of a cell, with the formats of its data."""
    return [(output.output_type, sorted(output.get("data", {}))) for output in cell.get("outputs", [])]


def faults(notebook: Any) -> list[str]:
    """Returns a sentence for each thing that a reader of the notebook would stumble over."""
    found = []
    cells = notebook.cells
    first, last = cells[0], cells[-1]
    if first.cell_type != "markdown" or not first.source.startswith("# "):
        found.append("the first cell: expected markdown that begins with the title")
    if "pip install" not in first.source or not re.search(r"\b(minute|second)s?\b", first.source):
        found.append("the first cell: expected the install command, and how long the tutorial takes")
    if last.cell_type != "markdown" or "](../" not in last.source:
        found.append("the last cell: expected markdown with links to other pages")
    if notebook.metadata != tutorials.METADATA:
        found.append(f"metadata: expected {tutorials.METADATA}, got {notebook.metadata}; run `make tutorials`")
    code = [cell for cell in cells if cell.cell_type == "code"]
    if [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
        found.append("cells did not run once each, from top to bottom; run `make tutorials`")
    if not any("assert" in cell.source for cell in code):
        found.append("no cell has an assert; every claim must be checked")
    for number, cell in enumerate(code, start=1):
        for output in cell.outputs:
            if output.output_type == "error" or output.get("name") == "stderr":
                found.append(f"cell {number}: an error or a warning: {text_of(output) or output.get('evalue')}")
            if place := PLACE.search(text_of(output)):
                found.append(f"cell {number}: a path of one machine: {place[0].strip()}")
    return found


@each
def test_a_committed_tutorial_is_what_a_reader_expects(path: Path) -> None:
    notebook = tutorials.read(path)
    assert not faults(notebook)
    assert any(cell.get("outputs") for cell in notebook.cells), "no outputs: run `make tutorials`"


@each
@pytest.mark.slow
def test_a_tutorial_runs(path: Path) -> None:
    committed, notebook = tutorials.read(path), tutorials.read(path)
    for package in ("torch", "jax", "flax", "equinox"):
        if any(re.search(rf"^(import|from) {package}\b", cell.source, re.MULTILINE) for cell in notebook.cells):
            pytest.importorskip(package)
    try:
        tutorials.executed(notebook)
    except CellExecutionError as error:
        # gloo rarely aborts a rank on a busy machine ("terminate called ..."), which says nothing about the tutorial.
        if "terminate called without an active exception" not in str(error):
            raise
        notebook = tutorials.read(path)
        tutorials.executed(notebook)
    for before, now in zip(committed.cells, notebook.cells, strict=True):
        assert kinds(before) == kinds(now), f"stale outputs: run `make tutorials`\n{now.source}"


def test_every_tutorial_is_in_the_navigation_and_in_the_table() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    index = (tutorials.FOLDER / "index.md").read_text(encoding="utf-8")
    names = [path.name for path in PATHS]
    assert names
    assert sorted(re.findall(r": tutorials/(\w+\.ipynb)$", navigation, re.MULTILINE)) == names
    assert sorted(re.findall(r"^\| \[[^\]]+\]\((\w+\.ipynb)\)", index, re.MULTILINE)) == names
    assert yaml.safe_load(f"nav:{navigation}")


GOOD = [
    ("markdown", "# Title\n\nThree minutes.\n\n```bash\npip install x\n```"),
    ("code", "print(1 + 1)\nassert 1 + 1 == 2"),
    ("markdown", "[Semantics](../reference/semantics.md)"),
]


def notebook_of(cells: list[tuple[str, str]]) -> Any:
    make = {"markdown": v4.new_markdown_cell, "code": v4.new_code_cell}
    return v4.new_notebook(cells=[make[kind](source) for kind, source in cells])


FAULTY = [
    (0, ("markdown", "No title, three minutes, pip install"), "expected markdown that begins with the title"),
    (0, ("markdown", "# Title\n\nThree minutes."), "expected the install command"),
    (1, ("code", "print(1 + 1)"), "no cell has an assert"),
    (1, ("code", "assert 1\nprint('in /tmp/x')"), "a path of one machine: /tmp/"),
    (1, ("code", "assert 1\nimport sys\nprint(1, file=sys.stderr)"), "an error or a warning"),
    (2, ("markdown", "The end."), "expected markdown with links"),
]
"""Cells in the place of one of GOOD, and the fault that a notebook with each has."""


@pytest.mark.slow
def test_faults_of_a_tutorial_are_found() -> None:
    notebook = tutorials.executed(notebook_of([*GOOD, *(cell for _, cell, _ in FAULTY)]))
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.execution_count = 1  # as if it had run alone
    good, faulty = notebook.cells[: len(GOOD)], notebook.cells[len(GOOD) :]
    for (at, _, fault), cell in zip(FAULTY, faulty, strict=True):
        notebook.cells = [*good[:at], cell, *good[at + 1 :]]
        assert len(found := faults(notebook)) == 1 and fault in found[0], found
    notebook.cells = good
    assert not faults(notebook)


@pytest.mark.slow
def test_a_failing_cell_fails_the_run_and_a_kernel_has_this_python_and_an_empty_folder() -> None:
    source = "import os, sys, attn_core\nprint(sys.executable, os.listdir(), attn_core.__file__, sep='\\n')"
    notebook = tutorials.executed(notebook_of([("code", source)]))
    assert notebook.cells[0].outputs[0].text.split("\n")[:3] == [
        sys.executable,
        "[]",
        str(ROOT / "attn_core/__init__.py"),
    ]
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        tutorials.executed(notebook_of([("code", "1 / 0")]))


class Files:
    """The two methods of mkdocs that the hook calls, for two pages with URLs that are folders."""

    URLS: ClassVar = {"tutorials/one.ipynb": "tutorials/one/", "reference/semantics.md": "reference/semantics/"}

    def get_file_from_path(self, path: str) -> Any:
        return Page(self.URLS[path]) if path in self.URLS else None


class Page(NamedTuple):
    url: str

    def url_relative_to(self, other: Page) -> str:
        return posixpath.relpath(self.url, other.url) + "/"


def test_links_from_tutorials_lead_to_pages_of_the_site() -> None:
    html = '<a href="../reference/semantics.md#masks">1</a> <a href="https://a.b/c.md">2</a> <a href="#top">3</a>'
    shown, missing = notebook_links.with_links(html, "tutorials/one.ipynb", Files())
    assert shown == html.replace("../reference/semantics.md#masks", "../../reference/semantics/#masks")
    assert not missing
    assert notebook_links.with_links('<a href="../none.md">', "tutorials/one.ipynb", Files())[1] == ["../none.md"]
