"""Tests requirements.lock: it agrees with constraints.txt and pyproject.toml, and lacks nothing; CI installs it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from tools import lock

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
OPTIONAL = PROJECT["project"]["optional-dependencies"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
CONSTRAINTS = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
HASH = f"--hash=sha256:{'a' * 64}"


def variable(name: str) -> str:
    (value,) = re.findall(rf"^{name} := (.+)$", MAKEFILE, re.MULTILINE)
    return value


def of_extras(names: list[str]) -> list[str]:
    """The requirements of extras of this project, with those of the extras that they name."""
    texts = [text for name in names for text in OPTIONAL[name]]
    own = [Requirement(text).extras for text in texts if Requirement(text).name == "attn-core"]
    inner = of_extras(sorted(set().union(*own))) if own else []
    return [text for text in texts if Requirement(text).name != "attn-core"] + inner


BUILD = [*PROJECT["build-system"]["requires"], lock.EDITABLE]
ALONE = variable("ALONE").split()
NEEDED = [*PROJECT["project"]["dependencies"], *of_extras(variable("EXTRAS").split(",")), *BUILD, *ALONE]
"""What the lock must have."""


def pins() -> dict[str, lock.Pin]:
    return lock.parse(lock.LOCK.read_text(encoding="utf-8"))


def disagreements(pins: dict[str, lock.Pin], requirements: list[str]) -> list[str]:
    """The packages of which a lock has another version than constraints.txt, and the requirements that it lacks."""
    known = {canonicalize_name(name): version for name, version in CONSTRAINTS.items()}
    known |= {canonicalize_name(name): version for name, _, version in (text.partition("==") for text in ALONE)}
    found = [name for name, pin in pins.items() if known.get(name) not in (pin.version, Version(pin.version).public)]
    for text in requirements:
        needed = Requirement(text)
        pin = pins.get(canonicalize_name(needed.name))
        if pin is None or not needed.specifier.contains(pin.version, prereleases=True):
            found.append(text)
    return found


def test_the_lock_agrees_with_the_constraints_and_has_every_requirement() -> None:
    assert len(pins()) > len(NEEDED) and disagreements(pins(), NEEDED) == []


def test_a_wrong_version_and_a_missing_requirement_are_found() -> None:
    locked = pins()
    name = canonicalize_name(Requirement(BUILD[0]).name)
    assert disagreements(locked | {name: locked[name]._replace(version="1.28.1")}, NEEDED) == [name]
    assert disagreements(locked | {name: locked[name]._replace(version="1.0")}, NEEDED) == [name, BUILD[0]]
    without = {other: pin for other, pin in locked.items() if other != name}
    assert disagreements(without, NEEDED) == [BUILD[0]]
    assert disagreements(locked | {"leftpad": lock.Pin("1.0", frozenset("a" * 64))}, NEEDED) == ["leftpad"]


def test_the_lock_is_as_the_tool_writes_it_and_names_no_machine() -> None:
    text = lock.LOCK.read_text(encoding="utf-8")
    assert lock.text_of(lock.parse(text), lock.LOCK.name) == text
    assert "://" not in text and not re.search(r"(^|\s)/", text)


@pytest.mark.parametrize(
    "line",
    [
        "numpy==2.4.6",
        f"numpy>=2.4.6 {HASH}",
        f"numpy {HASH}",
        f"numpy==2.* {HASH}",
        f"numpy==2.4.6 {HASH[:-1]}",
        f"numpy==2.4.6 {HASH.replace('sha256', 'md5')}",
        f"numpy==2.4.6 {HASH} --config-settings=x",
        "--extra-index-url https://example.org/simple",
        f"numpy @ https://example.org/numpy.whl {HASH}",
        f"numpy==2.4.6 {HASH}\nNumPy==2.4.5 {HASH}",
    ],
)
def test_a_lock_with_anything_but_versions_and_hashes_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"not a version with hashes|twice in the lock: numpy"):
        lock.parse(f"# a lock\n{line}\n")


MACHINE = {
    "python_version": "3.11",
    "python_full_version": "3.11.7",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "sys_platform": "linux",
    "os_name": "posix",
}
"""What the lock is for, whatever runs the tests."""

INSTALLED = {canonicalize_name(found.name) for found in importlib.metadata.distributions()}


def wheel_of(name: str, folder: Path) -> str:
    """Writes an empty wheel, version 1.0, and returns the SHA-256 of the file."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def install(pins: dict[str, lock.Pin], folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs pip with the Makefile's flags on a lock of these pins, with the wheels of a folder. It installs nothing."""
    (flags,) = re.findall(r"pip install \$\(PIP_ARGS\) (.+) -r requirements.lock", MAKEFILE)
    path = folder / "a.lock"
    path.write_text(lock.text_of(pins, path.name), encoding="utf-8")
    options = ["--dry-run", "--ignore-installed", "--no-index", "--find-links", str(folder), *flags.split()]
    command = [sys.executable, "-m", "pip", "--isolated", "install", *options, "-r", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_pip_refuses_a_file_with_another_hash(tmp_path: Path) -> None:
    right = {name: lock.Pin("1.0", frozenset([wheel_of(name, tmp_path)])) for name in ("first", "second")}
    done = install(right, tmp_path)
    assert done.returncode == 0 and "Would install first-1.0 second-1.0" in done.stdout, done.stderr
    done = install(right | {"second": lock.Pin("1.0", frozenset(["0" * 64]))}, tmp_path)
    assert done.returncode and "THESE PACKAGES DO NOT MATCH THE HASHES" in done.stderr
    assert f"Got        {min(right['second'].hashes)}" in done.stderr


def needs(name: str, extras: frozenset[str]) -> list[Requirement]:
    """What an installed package, with some of its extras, needs on the machine of the lock."""
    found = [Requirement(text) for text in importlib.metadata.requires(name) or []]
    worlds = [MACHINE | {"extra": extra} for extra in extras | {""}]
    return [one for one in found if not one.marker or any(one.marker.evaluate(world) for world in worlds)]


def missing(pins: dict[str, lock.Pin]) -> set[str]:
    """What the installed packages of a lock need, and the lock does not have: pip does not look for dependencies."""
    alone = {canonicalize_name(Requirement(text).name) for text in ALONE}
    found: set[str] = set()
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [(name, frozenset[str]()) for name in pins.keys() - alone]
    waiting += [(canonicalize_name(one.name), frozenset(one.extras)) for one in map(Requirement, NEEDED)]
    while waiting:
        name, extras = waiting.pop()
        if (name, extras) in seen or name in alone:
            continue
        seen.add((name, extras))
        if name not in pins:
            found.add(name)
        elif name in INSTALLED:
            waiting += [(canonicalize_name(one.name), frozenset(one.extras)) for one in needs(name, extras)]
    return found


def test_a_lock_has_everything_that_its_packages_need() -> None:
    locked = pins()
    read = locked.keys() & INSTALLED
    few = f"the environment has few packages of the lock: {sorted(locked.keys() - read)}"
    assert len(read) > 0.9 * len(locked), few
    assert missing(locked) == set()
    for name in ("sympy", "certifi", "execnet"):  # of torch, of an extra of a dependency, of pytest-xdist
        assert missing({other: pin for other, pin in locked.items() if other != name}) == {name}


def test_a_build_for_the_cpu_has_its_own_hash() -> None:
    (local,) = [(name, pin) for name, pin in pins().items() if "+" in pin.version]
    assert local[0] == "torch" and local[1].version == f"{CONSTRAINTS['torch']}+cpu" and len(local[1].hashes) == 1
    assert SpecifierSet(f"=={CONSTRAINTS['torch']}").contains(local[1].version)  # pip takes the build, too


def test_ci_installs_from_the_lock() -> None:
    assert "step make venv LOCKED=1\n" in (ROOT / ".ci/run").read_text(encoding="utf-8")
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    for job in workflow["jobs"].values():
        commands = [step["run"] for step in job["steps"] if "run" in step]
        if any(re.search(r"make (lint|test|docs)", command) for command in commands):
            assert commands[0] == "make venv LOCKED=1"
    locked = MAKEFILE.partition("define INSTALL_LOCKED")[2].partition("endef")[0]
    installs = re.findall(r"pip install \$\(PIP_ARGS\) (.+)", locked)
    assert installs == [
        "--require-hashes --no-deps --only-binary :all: -r requirements.lock",
        "--no-deps --no-build-isolation -e .",
    ]
