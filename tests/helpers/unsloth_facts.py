"""Derives what Unsloth's files need of its attention modules, from an unpacked release, without importing it.

``python tests/helpers/unsloth_facts.py FOLDER`` prints the table that tests/dropins/unsloth_facts.json stores. FOLDER
contains the package ``unsloth``: an unpacked wheel, a checkout, or site-packages.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parents[1] / "dropins/unsloth_facts.json"
MODULES = {
    "attention_dispatch": "utils/attention_dispatch.py",
    "packing": "utils/packing.py",
    "flex_attention": "kernels/flex_attention.py",
}
"""The modules that we replace, by name."""
_OBJECTS = ("AttentionConfig", "AttentionContext")


def derive(folder: Path) -> dict[str, Any]:
    """Returns the release's version, signatures, fields, and what each of its files imports and sets."""
    root = folder / "unsloth"
    trees = {name: ast.parse((root / path).read_text()) for name, path in MODULES.items()}
    softcapping = {name for name in _functions(trees["flex_attention"]) if "softcapping" in name or "flex" in name}
    files = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        text = path.read_text()
        if name in MODULES.values() or not any(word in text for word in (*MODULES, *softcapping)):
            continue
        needs = _needs(ast.parse(text), softcapping)
        if needs:
            files[name] = needs
    imported = {name for needs in files.values() for name in needs.get("imports", ())}
    signatures = {
        f"{module}.{name}": _parameters(function)
        for module, tree in trees.items()
        for name, function in sorted(_functions(tree).items())
        if not name.startswith("_") and name in _exported(tree) | imported | softcapping
    }
    return {
        "version": _version(root),
        "signatures": signatures,
        "fields": {name: _fields(trees["attention_dispatch"], name) for name in _OBJECTS},
        "files": files,
    }


def render(table: dict[str, Any]) -> str:
    """Returns the table as JSON with one line for each function, class or file."""
    parts = []
    for key, value in table.items():
        text = json.dumps(value)
        if isinstance(value, dict):
            text = "{\n" + ",\n".join(f"  {json.dumps(name)}: {json.dumps(x)}" for name, x in value.items()) + "\n }"
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def stored() -> dict[str, Any]:
    """Returns the stored table."""
    table: dict[str, Any] = json.loads(TABLE.read_text())
    return table


def _version(root: Path) -> str:
    for node in ast.parse((root / "_version.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return str(ast.literal_eval(node.value))
    raise SystemExit(f"{root}: _version.py has no __version__")


def _functions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    """Returns the functions at module level, also those in an ``if``; the first definition of a name counts."""
    found: dict[str, ast.FunctionDef] = {}
    for node in tree.body:
        body = node.body if isinstance(node, ast.If | ast.Try) else [node]
        for each in body:
            if isinstance(each, ast.FunctionDef):
                found.setdefault(each.name, each)
    return found


def _exported(tree: ast.Module) -> set[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def _parameters(function: ast.FunctionDef) -> str:
    """Returns the parameters without annotations."""
    for node in ast.walk(function.args):
        if isinstance(node, ast.arg):
            node.annotation = None
    return ast.unparse(function.args)


def _fields(tree: ast.Module, name: str) -> list[str]:
    """Returns a dataclass's fields in order, with their defaults."""
    (cls,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return [
        ast.unparse(node.target) + ("" if node.value is None else f"={ast.unparse(node.value)}")
        for node in cls.body
        if isinstance(node, ast.AnnAssign)
    ]


def _needs(tree: ast.Module, softcapping: set[str]) -> dict[str, Any]:
    """Returns what a file imports from the three modules, and which fields and bag keys its objects have."""
    imports: set[str] = set()
    needs: dict[str, Any] = {}
    aliases: set[str] = set()  # of the module attention_dispatch itself
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("unsloth.")):
            if (node.module or "").rsplit(".", 1)[-1] in MODULES:
                imports |= {alias.name for alias in node.names}
            aliases |= {alias.asname or alias.name for alias in node.names if alias.name in MODULES}
        elif isinstance(node, ast.Name) and node.id in softcapping:
            imports.add(node.id)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _OBJECTS:
            given = needs.setdefault(node.func.id, set())
            for keyword in node.keywords:
                given |= {str(keyword.arg), *(f"{keyword.arg}[{key}]" for key in _keys(keyword.value))}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            imports.add(node.attr)
    if imports:
        needs["imports"] = imports
    return {name: sorted(values) for name, values in sorted(needs.items())}


def _keys(value: ast.expr) -> set[str]:
    """Returns the constant keys of every dict in an expression."""
    dicts = (node for node in ast.walk(value) if isinstance(node, ast.Dict))
    return {str(key.value) for node in dicts for key in node.keys if isinstance(key, ast.Constant)}


if __name__ == "__main__":
    sys.stdout.write(render(derive(Path(sys.argv[1]))))
