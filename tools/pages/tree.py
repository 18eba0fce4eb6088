"""The tree of the packages, from the first lines of docstrings: folders for newcomers, and a page of all modules."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("attn_core", "torch_frontend", "jax_frontend")
BACKENDS = ROOT / "attn_core/backends"
ARCHITECTURE = ROOT / "docs/explanation/architecture.md"
FOLDERS = re.compile(r"(?<=\n## The tree\n\n```text\n).*?(?=^(?:tests|```))", re.M | re.S)


def render_architecture() -> str:
    """Returns the page on the architecture with a current tree of folders."""
    lines = [f"{'  ' * depth + folder.name + '/':<22} {first_line(folder)}" for folder, depth in folders()]
    return FOLDERS.sub("".join(f"{line}\n" for line in lines), ARCHITECTURE.read_text(encoding="utf-8"))


def render_modules() -> str:
    """Returns the page that lists every module of the packages."""
    parts = ["# Modules\n\nThe first line of each module's docstring. `make support` writes this page.\n"]
    for folder, _ in folders(every=True):
        parts.append(f"\n## {folder.relative_to(ROOT)}\n\n{first_line(folder)}\n\n")
        inside = [path for path in sorted(folder.glob("*.py")) if not path.name.startswith("__")]
        parts += [f"- `{path.stem}`: {first_line(path)}\n" for path in inside]
    return "".join(parts).replace("\n\n\n", "\n\n").rstrip() + "\n"


def folders(*, every: bool = False) -> Iterator[tuple[Path, int]]:
    """Yields each package and its depth; a backend's own package only if ``every``."""
    for package in PACKAGES:
        for init in sorted((ROOT / package).rglob("__init__.py")):
            folder = init.parent
            if every or not (folder.parent == BACKENDS and folder.name != "shared"):
                yield folder, len(folder.relative_to(ROOT).parts) - 1


def first_line(path: Path) -> str:
    """Returns the first paragraph of a module's docstring, in one line."""
    file = path / "__init__.py" if path.is_dir() else path
    doc = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(doc.split("\n\n")[0].split()).replace("``", "`")
