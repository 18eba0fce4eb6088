"""Tests the files that releases and contributors rely on: metadata, links on a package index, forms and workflows."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import attn_core

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted(path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")


def load(path: Path) -> Any:
    return yaml.load(path.read_text(encoding="utf-8"), yaml.BaseLoader)  # "on" stays a word


def test_the_description_on_an_index_has_no_link_into_the_repository() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (rule,) = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]
    shown = re.sub(rule["pattern"], rule["replacement"], readme)
    inside = re.compile(r"\]\((?!https?:|#)")
    assert inside.search(readme) and not inside.search(shown)
    words = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", readme)
    assert re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", shown) == words  # only links go, no text


def test_every_extra_is_named_in_the_documentation() -> None:
    install = (ROOT / "docs/get_started/install.md").read_text(encoding="utf-8")
    for_users = set(PROJECT["project"]["optional-dependencies"]) - {"dev", "docs", "docs-check", "demo", "release"}
    first_cells = re.findall(r"^\| (`[^|]*) \|", install, re.MULTILINE)
    assert for_users <= set(re.findall(r"`([a-z0-9-]+)`", " ".join(first_cells)))


def test_the_citation_has_the_version_and_the_authors_of_the_package() -> None:
    citation = load(ROOT / "CITATION.cff")
    assert citation["version"] == attn_core.__version__
    assert citation["authors"] == PROJECT["project"]["authors"]
    assert citation["license"] == PROJECT["project"]["license"]
    assert {"cff-version", "message", "title"} <= citation.keys()


def test_the_changelog_has_a_released_version_below_what_is_unreleased() -> None:
    headings = re.findall(r"^## \[(.+?)\]", CHANGELOG, re.MULTILINE)
    assert headings[0] == "Unreleased" and headings[1:2] in ([], [attn_core.__version__])
    assert len(headings) == len(set(headings))


def test_the_changelog_is_short() -> None:
    assert long_entries(CHANGELOG) == []
    assert len(CHANGELOG.split()) <= 3000


def test_a_long_entry_of_the_changelog_is_found() -> None:
    fits = "word " * 19 + "end"
    for entry in (f"- {fits}", f"- {fits[:50]}\n  {fits[50:]}", f"{fits[:50]} | {fits[50:]}"):
        assert long_entries(f"## [Unreleased]\n\n### Pages\n\n- short\n{entry}\n- short\n") == []
        longer = entry.replace("end", "the end")
        assert len(long_entries(f"## [Unreleased]\n\n### Pages\n\n- short\n{longer}\n- short\n")) == 1
    with pytest.raises(AssertionError, match="no entry: word"):
        long_entries(f"## [Unreleased]\n\n{fits}\n")


def long_entries(changelog: str) -> list[str]:
    """The entries of more than 20 words. Lines below the introduction are headings, entries and names."""
    entries: list[str] = []
    for line in changelog[changelog.index("## [") :].splitlines():
        if line.startswith("  "):
            entries[-1] += line
        elif line and not line.startswith("#"):
            assert line.startswith("- ") or " | " in line, f"no entry: {line}"
            entries.append(line)
    return [entry for entry in entries if len(re.findall(r"\S*\w\S*", entry)) > 20]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_pins_actions_and_runs_targets_that_exist(path: Path) -> None:
    workflow = load(path)
    assert workflow["permissions"] == {"contents": "read"} and workflow["on"]
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert steps and all(("uses" in step) != ("run" in step) for step in steps)
    for step in steps:
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@([0-9a-f]{40}|release/v1)", step["uses"]), step
        for target in re.findall(r"\bmake ([a-z0-9-]+)", step.get("run", "")):
            assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), target
    needed = {job["needs"] for job in workflow["jobs"].values() if "needs" in job}
    assert needed <= workflow["jobs"].keys()


def test_the_workflows_cover_every_python_that_the_package_names() -> None:
    named = [line.rpartition(" ")[2] for line in PROJECT["project"]["classifiers"] if "Python :: 3." in line]
    matrix = load(ROOT / ".github/workflows/ci.yml")["jobs"]["matrix"]["strategy"]["matrix"]["python"]
    assert named == matrix and PROJECT["project"]["requires-python"] == f">={named[0]}"


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_an_issue_form_asks_for_the_doctor(path: Path) -> None:
    form = load(path)
    assert {"name", "description", "body"} <= form.keys()
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields)
    assert any("attn doctor --json" in field["attributes"]["label"] for field in fields)
