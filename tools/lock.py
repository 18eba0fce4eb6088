"""Writes requirements.lock, versions with the hashes of their files: ``make lock``. Needs an index of packages.

pip resolves the requirements under constraints.txt and names the file that it would take for each. uv reads from the
index the hashes of all files of these versions, so that a lock does not depend on which of them this machine took. An
index of packages has no files of a version with a local part, such as the build of torch for the CPU (2.13.0+cpu): its
hash is that of the file that pip took.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import NamedTuple

from tools.environments import ROOT, build, run

CONSTRAINTS = ROOT / "constraints.txt"
LOCK = ROOT / "requirements.lock"
PYTHON = (3, 11)
EDITABLE = "editables>=0.5"  # hatchling asks for it when it builds an editable installation

HEADER = """\
# Linux x86_64, Python 3.11. `make lock` writes this file from pyproject.toml and constraints.txt; do not edit it.
# It is complete, so pip need not look for dependencies: pip install --require-hashes --no-deps -r {name}
"""
LOCAL_BUILD = """\
# The usual index does not have this build; an index that has it is named by PIP_ARGS or pip's configuration. The only
# hash is that of its file for Linux x86_64 and Python 3.11.
"""


class Pin(NamedTuple):
    """One version of a package, and the SHA-256 of each file that may be installed for it, as hexadecimal digits."""

    version: str
    hashes: frozenset[str]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def parse(text: str) -> dict[str, Pin]:
    """Reads a lock: ``name==version`` and its hashes, joined by backslashes. Returns the pins by canonical name.

    Raises:
        ValueError: names a line that is anything else, such as an option, an address, or a version without a hash.
    """
    pins: dict[str, Pin] = {}
    for line in text.replace("\\\n", " ").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        first, *options = line.split()
        pinned = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.!+]+)", first)
        hashes = [re.fullmatch(r"--hash=sha256:([0-9a-f]{64})", option) for option in options]
        if not pinned or not hashes or not all(hashes):
            raise ValueError(f"not a version with hashes: {line[:100]}")
        name = canonical(pinned[1])
        if name in pins:
            raise ValueError(f"twice in the lock: {name}")
        pins[name] = Pin(pinned[2], frozenset(found[1] for found in hashes if found))
    return pins


def text_of(pins: dict[str, Pin], name: str) -> str:
    """Writes pins as a lock file of the given name; ``parse`` reads it."""
    lines = [HEADER.format(name=name)]
    for package, pin in sorted(pins.items()):
        if "+" in pin.version:
            lines.append(LOCAL_BUILD)
        hashes = "".join(f" \\\n    --hash=sha256:{value}" for value in sorted(pin.hashes))
        lines.append(f"{package}=={pin.version}{hashes}\n")
    return "".join(lines)


def resolve(python: str, *requirements: str, pip_args: list[str]) -> dict[str, Pin]:
    """Asks pip what it would install under constraints.txt. Each pin has one hash, that of the file it would take."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        flags = ["--quiet", "--dry-run", "--ignore-installed", "--report", str(report), "-c", str(CONSTRAINTS)]
        run(python, "-m", "pip", "install", *flags, *pip_args, *requirements)
        installed = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {
        canonical(item["metadata"]["name"]): Pin(
            item["metadata"]["version"], frozenset([item["download_info"]["archive_info"]["hashes"]["sha256"]])
        )
        for item in installed
        if "archive_info" in item["download_info"]  # the project itself is a folder
    }


def with_all_files(python: str, taken: dict[str, Pin]) -> dict[str, Pin]:
    """Adds the hashes of all files that the index has of each version.

    Raises:
        AssertionError: names a package whose file from pip is not one of them.
    """
    listed = "".join(f"{name}=={pin.version}\n" for name, pin in taken.items() if "+" not in pin.version)
    flags = ["--quiet", "--no-config", "--no-deps", "--no-header", "--no-annotate", "--generate-hashes"]
    uv = [python, "-m", "uv", "pip", "compile", *flags, "--python", python, "-"]
    known = parse(subprocess.run(uv, input=listed, check=True, text=True, stdout=subprocess.PIPE, cwd=ROOT).stdout)
    strange = [name for name, pin in known.items() if not taken[name].hashes <= pin.hashes]
    assert not strange, f"pip took files that are not in the index: {strange}"
    return taken | known


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extras", required=True, help="names with commas, as in the Makefile")
    parser.add_argument("--alone", required=True, type=shlex.split, help="what is installed without dependencies")
    parser.add_argument("--pip-args", default="", type=shlex.split, help="options of pip install")
    arguments = parser.parse_args()
    machine = (platform.system(), platform.machine(), sys.version_info[:2])
    if machine != ("Linux", "x86_64", PYTHON):
        sys.exit(f"the lock is for Linux x86_64 and Python 3.11, and this is {machine}")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    tools = [*project["build-system"]["requires"], EDITABLE]
    pip_args = arguments.pip_args or []
    try:
        with tempfile.TemporaryDirectory() as folder:
            python = build(Path(folder), sys.executable, "uv", pip_args=[*pip_args, "-c", str(CONSTRAINTS)])
            pins = resolve(python, f"{ROOT}[{arguments.extras}]", *tools, pip_args=pip_args)
            pins |= resolve(python, "--no-deps", *arguments.alone, pip_args=pip_args)
            write(LOCK, with_all_files(python, pins))
    except (AssertionError, subprocess.CalledProcessError) as error:
        sys.exit(f"failed\n{error}\n{getattr(error, 'stdout', None) or ''}")


def write(path: Path, pins: dict[str, Pin]) -> None:
    path.write_text(text_of(pins, path.name), encoding="utf-8")
    print(f"{path.name}: {len(pins)} packages, {sum(len(pin.hashes) for pin in pins.values())} hashes")


if __name__ == "__main__":
    main()
