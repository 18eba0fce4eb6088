"""Tests that the pages generated from the code are current, and that the code in the documents runs."""

from __future__ import annotations

import re
import shlex
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest
from frameworks import replaced
from typer.testing import CliRunner

from attn_core import Target, backends, explain
from attn_core.backends.support import Support
from attn_core.cli.app import app
from benchmarks import report, tables
from benchmarks.masks import GALLERY
from tools import search_order
from tools.pages import __main__ as pages
from tools.pages import devices
from tools.pages.support import FEATURES, PLAIN_CALL, render

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", pages.PAGES)
def test_a_page_of_the_backends_data_is_current(name: str) -> None:
    assert pages.is_current(name), "stale: run `make support`"


def test_support_page_shows_every_claim() -> None:
    claims = {field.name for field in fields(Support) if field.default is False}
    assert claims | {"invariant", "invariant prefix"} == set(FEATURES)


def test_support_page_shows_forward_and_backward_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    backward = Support(kernel="a stub", devices=("cpu",), dtypes=("float32",), causal=True)
    monkeypatch.setattr(backends, "names", lambda: ("math",))
    with replaced(backends.load("math"), forward_claims=replace(backward, window=True), backward_claims=backward):
        lines = render().splitlines()
    assert {
        "| `window` | — | `math` |",
        "| `causal` | `math` | — |",
        "| boolean `mask` | — | — |",
    } <= set(lines)


def test_support_page_shows_the_oldest_gpu_that_a_backend_takes() -> None:
    lines = (ROOT / "docs/reference/support.md").read_text(encoding="utf-8").splitlines()
    shown = {row[0]: row[3] for row in (line.strip("| ").split(" | ") for line in lines) if len(row) == 8}
    for name, device in (("`sdpa_flash` (cuda)", "sm75"), ("`sdpa_cudnn`", "sm75"), ("`flex` (cuda)", "sm75")):
        assert shown[name] == "cuda from sm80"
        selection = explain(PLAIN_CALL, Target("torch", device))
        assert any(reason.startswith("device sm75:") for reason in selection.reasons(name.split("`")[1]))
    assert shown["`sdpa_efficient`"] == "cuda" and shown["`flash4`"] == "sm90, sm100"


@pytest.mark.parametrize("device", devices.DEVICES, ids=lambda device: device.name)
def test_the_page_of_gpus_agrees_with_the_claims(device: devices.Device) -> None:
    rows = [line.strip("| ").split(" | ") for line in devices.render().splitlines() if line.startswith("| ")]
    (row,) = (row for row in rows if row[0] == device.cards and len(row) == 1 + len(devices.MARKS))
    columns = dict(zip(devices.MARKS, row[1:], strict=True))
    shown = {name: mark for mark, names in columns.items() for name in re.findall(r"`(\w+)`", names)}
    for name in backends.names():
        backend = backends.load(name, backends.kind_of(device.name))
        if not backend.forward_claims.runs_on(device.name):
            assert name not in shown
        if backend.backward_claims is None:
            assert shown.get(name) != devices.BOTH
        if backend.forward_claims.approximate or backend.forward_claims.unproven:
            assert shown.get(name, devices.BY_NAME) == devices.BY_NAME


def test_the_page_of_gpus_installs_what_the_backends_need() -> None:
    for name, command in devices.PACKAGES.items():
        package = command.removeprefix("pip install ").strip("'").split(" ")[0].split(">")[0]
        assert package in backends.load(name).requires


def test_pages_are_written_and_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pages, "FOLDER", tmp_path)
    for folder in ("reference", "explanation", "lab", "images"):
        (tmp_path / folder).mkdir()
    with pytest.raises(
        SystemExit, match=r"stale: reference/support\.md, reference/devices\.md, .*images/plan-window\.svg"
    ):
        pages.main(["--check"])
    pages.main([])
    pages.main(["--check"])
    (tmp_path / "reference/support.md").write_text("stale", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"stale: reference/support\.md; run"):
        pages.main(["--check"])


DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.ipynb")]
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s\\]*)(?:#([^)\s\\]+))?\)")
"""A link within the repository: the file, empty for the same page, and the heading."""


def test_links_lead_to_files_and_headings_that_exist() -> None:
    """On the same page, on others, and from notebooks; ``mkdocs build --strict`` would refuse those of the pages."""
    headings = 0
    for page in DOCUMENTS:
        for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
            other, link = page.parent / target if target else page, f"{page.relative_to(ROOT)}: {target}#{anchor}"
            assert other.is_file() if page.suffix == ".ipynb" else other.exists(), link
            if anchor:
                headings += 1
                assert other.suffix == ".md" and anchor in anchors(other), link
    assert headings > 150


def anchors(page: Path) -> set[str]:
    """The anchors of a page, as the site makes them from its headings and from the names of the API page."""
    text = re.sub(r"^( *)(`{3,}).*?^\1\2", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#{1,6} +(.+?) *#*$", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text), re.MULTILINE)
    plain = (unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode() for title in titles)
    slugs = {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in plain}
    return slugs | set(re.findall(r"^::: (\S+)", text, re.MULTILINE))


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_a_page_names_commands_that_exist(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"(?:^|`)make ([a-z0-9-]+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


RESULTS = report.RESULTS
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(python|console)( title=\"([^\"\n]+)\")?\n(.*?)^```", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block of a page: Python code, an excerpt of a file (``title``), or commands with their output."""

    name: str
    language: str
    title: str | None
    text: str


def _blocks() -> list[Block]:
    results = []
    for page in PAGES:
        for number, block in enumerate(FENCE.finditer(page.read_text(encoding="utf-8")), start=1):
            results.append(Block(f"{page.relative_to(ROOT)}-{number}", block[1], block[3], block[4]))
    return results


def _of(language: str, *, titled: bool = False) -> pytest.MarkDecorator:
    blocks = [block for block in _blocks() if block.language == language and (block.title is not None) == titled]
    return pytest.mark.parametrize("block", blocks, ids=lambda block: block.name)


@pytest.mark.sampled
@_of("python")
def test_examples_run(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("torch"):  # an example may replace torch's function; afterwards torch's must be back
        functional = import_module("torch.nn.functional")
        monkeypatch.setattr(functional, "scaled_dot_product_attention", functional.scaled_dot_product_attention)
    for framework in ("torch", "jax"):
        if re.search(rf"^(import|from) {framework}\b|^(import|from) {framework}_frontend\b", block.text, re.MULTILINE):
            pytest.importorskip(framework)
    with _one_rank(monkeypatch) if "torch.distributed" in block.text else nullcontext():
        module = ModuleType("example")
        monkeypatch.setitem(sys.modules, "example", module)  # a compiler looks up a function's globals by module
        try:
            exec(compile(block.text, block.name, "exec"), vars(module))
        finally:  # an example registers for its process, in which other tests run
            if "huggingface.register()" in block.text:
                import_module("torch_frontend.huggingface").unregister()


@contextmanager
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sets the environment that torchrun gives the only process of a run."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    try:
        yield
    finally:
        distributed = import_module("torch.distributed")
        if distributed.is_initialized():
            distributed.destroy_process_group()


@_of("python", titled=True)
def test_excerpts_are_in_the_file_they_name(block: Block) -> None:
    assert block.text in (ROOT / str(block.title)).read_text(encoding="utf-8")


@_of("console")
def test_commands_print_what_the_page_shows(block: Block) -> None:
    for shown in block.text.removeprefix("$ attn ").split("\n$ attn "):
        command, _, output = shown.partition("\n")
        printed = CliRunner().invoke(app, shlex.split(command), env={"COLUMNS": "100"}).output
        printed = "\n".join(line.rstrip() for line in printed.splitlines())  # rich fills the rows of a table
        for part in output.rstrip().split("\n..."):  # a line of three dots stands for any lines
            assert part in printed, command


@pytest.mark.parametrize("page", list(report.pages()), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_shows_the_stored_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == report.filled(text), "stale: run python -m benchmarks.report --write"
    assert text.count("<!-- table: ") == len(report.BLOCK.findall(text)), "a table without its end"


def test_every_kind_of_table_is_on_a_page() -> None:
    names = {name for page in report.pages() for _, name, _, _ in report.BLOCK.findall(page.read_text("utf-8"))}
    found = {next((each for each in report.OF_FILE if name.startswith(each)), name) for name in names}
    assert found == {*report.OF_FILE, *report.WITHOUT_FILE}
    assert set(tables.CONSTRUCTORS) == set(GALLERY)
    with pytest.raises(ValueError, match="no table is called 'unknown'"):
        report.render("unknown")


def test_what_was_measured_once_names_its_revision() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        revision = re.search(r"benchmarks/\w+\.py` of\s+revision [0-9a-f]{8}", text)
        assert "<!-- measured once -->" not in text or revision, page


def test_the_tables_of_whole_models_show_failures_and_wrong_results() -> None:
    facts = {"family": "F", "mode": "prefill", "tokens": 8, "backends": ["flash2 (8x2:8)"]}
    group = {"seconds": {"attn_core": [1.0, 2.0], "sdpa": [2.0, 6.0]}, "errors": {"attn_core": 1.0, "sdpa": 9.0}}
    group |= facts | {"failures": {"eager": "MemoryError: none left"}}
    flex = facts | {"seconds": {"attn_core": [1.0], "flex_attention": [4.0]}, "errors": {}, "failures": {}}
    result = {"generate": [], "models": [group, flex], "not_run": ["flex, G: after 9 s"]}
    assert "| F, prefill | 1,500.0 ms | – | 4.00 | 2.50 | – | 1.00 | flash2 |" in tables.models(result)
    failures = tables.failures(result)
    assert "- F, prefill: eager: MemoryError: none left" in failures and "- not run: flex, G: after 9 s" in failures
    assert "- F, prefill: sdpa: error 9.0 times that of eager" in failures


def test_results_that_a_page_names_exist() -> None:
    for page in PAGES:
        for name in re.findall(r"benchmarks/results/([\w.-]+\.\w+)", page.read_text(encoding="utf-8")):
            assert (RESULTS / name).is_file(), f"{page}: {name}"


FIGURE = re.compile(r"\d ?(?:µs|ms|TFLOP/s)(?!\w)|\d (?:times as fast|times the speed)|% of linear")
"""A measured time or speed."""
LAB = ROOT / "docs/lab"
"""Dated evidence for maintainers, which the navigation does not show."""
WRITTEN_BY_SCRIPTS = ("training.md", "modules.md")
"""Pages of the lab that a script writes as a whole."""
MEASURED = re.compile(r"<!-- (?:table: [^>]+|measured once) -->.*?<!-- end -->|^```.*?^```", re.M | re.S)
"""What scripts write, or wrote once; and code."""


def test_only_scripts_write_measured_figures() -> None:
    for page in PAGES:
        by_hand = MEASURED.sub("", page.read_text(encoding="utf-8"))
        assert page.parent == LAB or not FIGURE.findall(by_hand), page


def test_every_note_of_the_lab_has_a_date() -> None:
    pages = [page for page in LAB.glob("*.md") if page.name not in WRITTEN_BY_SCRIPTS]
    texts = [MEASURED.sub("", page.read_text(encoding="utf-8")) for page in pages]
    lines = [line for text in texts for line in text.splitlines()]
    notes = [line for line in lines if line.startswith("- ")]
    assert notes and [note for note in notes if not re.match(r"- \d{4}-\d\d-\d\d: ", note)] == []


def test_the_search_for_measured_figures_finds_them() -> None:
    for text in ("12.5 µs above torch", "1.8 ms", "686 TFLOP/s", "2.75 times as fast", "98.4% of linear speedup"):
        assert FIGURE.search(text), text
    assert not FIGURE.search("2 machines, 3 msgs, `P` times as fast")


def test_every_fact_about_another_library_has_a_source() -> None:
    page = (ROOT / "docs/explanation/comparison.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if re.match(r"\| [\w*]", line)]
    assert len(rows) > 30
    for name, theirs, _ours in rows:
        assert "](https://" in theirs or name == "together", name


def test_every_page_but_those_of_the_lab_is_in_the_navigation() -> None:
    settings, _, navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    lab = {page for page in pages if page.startswith("lab/")}
    assert set(re.findall(r": ([\w/]+\.md)$", navigation, re.MULTILINE)) == pages - lab
    assert re.findall(r"^not_in_nav: (\S+)", settings, re.MULTILINE) == ["/lab/"]


def test_the_search_of_the_site_lists_the_lab_last() -> None:
    for source, meta in (("lab/notes.md", {"search": {"boost": search_order.BOOST}}), ("reference/cli.md", {})):
        page = SimpleNamespace(file=SimpleNamespace(src_uri=source), meta={})
        assert search_order.on_page_markdown("text", page, None, None) == "text" and page.meta == meta
    assert search_order.BOOST < 1 and "tools/search_order.py" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_folders_in_the_architecture_exist() -> None:
    page = (ROOT / "docs/explanation/architecture.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```text\n(.*?)^```", page, re.M | re.S)
    tree = next(block for block in blocks if block.startswith("attn_core/"))
    above: list[str] = []
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        for name in re.findall(r"(\w+)/ ", line):
            assert (ROOT / "/".join(above[:depth]) / name).is_dir(), line
        above[depth:] = [line.split("/")[0].strip()]


def test_the_book_is_short() -> None:
    """Evidence belongs into the lab. A new fact for users takes the place of words that nobody needs."""
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.parent != LAB]
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= 45_000


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 100 and len(text.split()) <= 600 and text.count("](") <= 20
