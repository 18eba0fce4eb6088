"""Looks for known vulnerabilities of every package of the lock files: ``make audit``. Needs the network.

pip-audit asks an index of packages, or with ``-s osv`` a database of advisories, about each version. It runs strictly:
a package that cannot be looked up is an error, because an index without advisories would pass for one that knows none.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.environments import build
from tools.lock import LOCK, RELEASE_LOCK, Pin, parse, text_of


def as_published(pins: dict[str, Pin]) -> dict[str, Pin]:
    """Drops the local part of versions: advisories are of torch 2.13.0, not of its build 2.13.0+cpu."""
    return {name: pin._replace(version=pin.version.partition("+")[0]) for name, pin in pins.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pip-args", default="", type=shlex.split, help="options of pip install")
    parser.add_argument("options", nargs="*", help="options of pip-audit, after --")
    arguments = parser.parse_args()
    hashed = ["--require-hashes", "--no-deps", "-r", str(RELEASE_LOCK)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        files = []
        for lock in (LOCK, RELEASE_LOCK):
            path = folder / lock.name
            path.write_text(text_of(as_published(parse(lock.read_text(encoding="utf-8"))), lock.name), encoding="utf-8")
            files += ["-r", str(path)]
        try:
            python = build(folder / "tools", sys.executable, *hashed, pip_args=arguments.pip_args or [])
        except subprocess.CalledProcessError as error:
            sys.exit(f"failed\n{error}\n{error.stdout}")
        flags = ["--strict", "--disable-pip", "--progress-spinner", "off"]
        audit = [python, "-m", "pip_audit", *flags, *files, *arguments.options]
        sys.exit(subprocess.run(audit, check=False).returncode)


if __name__ == "__main__":
    main()
