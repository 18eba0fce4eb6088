"""Tests the list of what a wheel needs (SBOM): its contents, and the check that compares it with a wheel's metadata."""

from __future__ import annotations

import copy
import json
import tomllib
import zipfile
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement

import attn_core
from tools import sbom, sbom_check

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
ABOUT = {"description": "Attention", "license": "Apache-2.0", "supplier": "The attn-core contributors"}
OPTIONAL = {
    name: [text for text in texts if not text.startswith("attn-core[")]
    for name, texts in PROJECT["project"]["optional-dependencies"].items()
}


def document() -> dict[str, Any]:
    return sbom.document("attn-core", attn_core.__version__, ABOUT, PROJECT["project"]["dependencies"], OPTIONAL)


def metadata() -> Message:
    """The metadata of a wheel of this project, written from pyproject.toml by other code than the SBOM."""
    message = Message()
    message["Name"], message["Version"] = "attn-core", attn_core.__version__
    for text in PROJECT["project"]["dependencies"]:
        message["Requires-Dist"] = text
    for extra, texts in OPTIONAL.items():
        for text in texts:
            words, _, marker = text.partition(";")
            others = f"({marker.strip()}) and " if marker else ""
            message["Requires-Dist"] = f"{words}; {others}extra == '{extra}'"
    return message


def component(contents: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [part for part in contents["components"] if part["name"] == name]
    return found


def test_the_sbom_names_the_package_and_every_declared_dependency() -> None:
    contents = document()
    assert contents["metadata"]["component"]["version"] == attn_core.__version__
    names = {Requirement(text).name.replace("_", "-").lower() for texts in OPTIONAL.values() for text in texts}
    assert {part["name"] for part in contents["components"]} == names | {"numpy"}
    assert component(contents, "numpy")["scope"] == "required"
    assert {part["scope"] for part in contents["components"] if part["name"] != "numpy"} == {"optional"}
    values = [one["value"] for one in component(contents, "triton")["properties"]]
    assert values == ['triton>=3.6; sys_platform == "linux" and extra == "dev"']
    assert sbom_check.differences(contents, metadata()) == []


def test_the_same_sources_make_the_same_sbom_and_others_make_another() -> None:
    assert document() == document()
    other = sbom.document("attn-core", attn_core.__version__, ABOUT, ["numpy>=2"], OPTIONAL)
    assert other["serialNumber"] != document()["serialNumber"]


def test_a_package_that_every_installation_has_is_required_also_if_an_extra_names_it() -> None:
    contents = sbom.document("attn-core", "1", ABOUT, ["numpy>=1.26"], {"cli": ["numpy>=2"]})
    assert component(contents, "numpy")["scope"] == "required"
    marked = Requirement("numpy>=2")
    marked.marker = Marker('extra == "cli"')
    assert [one["value"] for one in component(contents, "numpy")["properties"]] == ["numpy>=1.26", str(marked)]


def drop(contents: dict[str, Any]) -> None:
    contents["components"] = [part for part in contents["components"] if part["name"] != "numpy"]


FAULTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "of name another": lambda one: one["metadata"]["component"].update(name="another"),
    "of version 9.9": lambda one: one["metadata"]["component"].update(version="9.9"),
    "lacks numpy>=1.26": drop,
    "differ in pkg:pypi/numpy": lambda one: one["dependencies"][0]["dependsOn"].remove("pkg:pypi/numpy"),
    "numpy has the scope optional": lambda one: component(one, "numpy").update(scope="optional"),
    "typer has the scope required": lambda one: component(one, "typer").update(scope="required"),
    "has numpy>=1.27, the metadata does not": lambda one: component(one, "numpy")["properties"][0].update(
        value="numpy>=1.27"
    ),
    "leftpad has the requirements": lambda one: component(one, "numpy").update(name="leftpad"),
    "typer has the requirements []": lambda one: component(one, "typer").update(properties=[]),
}


@pytest.mark.parametrize("sentence", FAULTS)
def test_a_fault_in_the_sbom_is_found(sentence: str) -> None:
    contents = copy.deepcopy(document())
    FAULTS[sentence](contents)
    assert any(sentence in found for found in sbom_check.differences(contents, metadata()))


@pytest.mark.parametrize("names", [[], ["one", "two"]])
def test_a_wheel_without_one_sbom_is_refused(names: list[str], tmp_path: Path) -> None:
    wheel = tmp_path / "attn_core-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("attn_core-1.dist-info/METADATA", str(metadata()))
        for name in names:
            archive.writestr(f"attn_core-1.dist-info/sboms/{name}.cdx.json", json.dumps(document()))
    with pytest.raises(AssertionError, match=f"the wheel has {len(names)} SBOMs"):
        sbom_check.read(wheel)


def test_the_build_writes_the_sbom_into_every_wheel() -> None:
    hooks = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]
    assert (ROOT / hooks["custom"]["path"]).is_file()
    in_sdist = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert "/tools" in in_sdist  # so that a wheel of the sdist has the SBOM, too
    assert "hatchling>=1.28" in PROJECT["build-system"]["requires"]  # the first one that puts SBOMs into wheels
