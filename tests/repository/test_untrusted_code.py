"""Tests that no code runs because of a file's contents, or because of files in the folder that a user works in."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.sampled

pytest.importorskip("typer")

ROOT = Path(__file__).parents[2]
PACKAGES = ("attn_core", "torch_frontend", "jax_frontend")
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "yaml", "joblib", "runpy", "code"}
"""Modules that can turn data into code."""
CALLS = {"eval", "exec", "__import__", "load", "loads", "exec_module", "load_module"}
"""Functions that can turn data into code, by the last part of their names."""
HARMLESS = {"json.loads", "json.load", "backends.load", "tl.load"}
"""Calls of such names that do not: parsers of data, and loaders of our own modules by names of a fixed list."""
EXCEPTIONS = {
    ("jax_frontend/bridge/targets.py", "pickle"): "keeps calls as bytes in a dict of this process, never in a file",
    ("jax_frontend/bridge/targets.py", "pickle.loads"): "reads these bytes, found by their own hash in that dict",
    ("attn_core/backends/__init__.py", "load"): "our own record of a backend, by a name of a fixed list",
    ("attn_core/backends/__init__.py", "point.load"): "a plug-in, by the entry point of an installed package",
    ("attn_core/backends/flash4/functions.py", "?.load"): "a load in a GPU kernel",
    ("attn_core/backends/flash4/functions.py", "cell.load"): "a load in a GPU kernel",
    ("attn_core/backends/flash4/sinks_kernel.py", "?.load"): "a load in a GPU kernel",
    ("attn_core/backends/flash4/sinks_kernel.py", "few.load"): "a load in a GPU kernel",
    ("attn_core/backends/flash4/table_kernel.py", "?.load"): "a load in a GPU kernel",
    ("attn_core/backends/flash4/table_kernel.py", "cut.load"): "a load in a GPU kernel",
    (
        "attn_core/backends/flash4/recording.py",
        "spec.loader.exec_module",
    ): "a second copy of the installed flash-attn-4",
    ("torch_frontend/dispatch/after_import.py", "run_module"): "the usual loader of an installed module",
}
"""(file, name) and why it is safe."""
HOSTILE = (
    "numpy",
    "torch",
    "jax",
    "json",
    "typer",
    "rich",
    "attn_core",
    "torch_frontend",
    "dataclasses",
    "sitecustomize",
)


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def suspicious(tree: ast.AST) -> Iterator[str]:
    """Names in a file that can turn data into code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            yield node.module or ""
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            allows_pickle = any(keyword.arg == "allow_pickle" for keyword in node.keywords)
            if allows_pickle or (name.rpartition(".")[2] in CALLS and name not in HARMLESS):
                yield name


def test_nothing_turns_data_into_code() -> None:
    found = {
        (str(path.relative_to(ROOT)), name)
        for path in sources(*PACKAGES)
        for name in suspicious(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found <= set(EXCEPTIONS), found - set(EXCEPTIONS)


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from yaml import safe_load",
        "torch.load(file)",
        "eval(text)",
        "np.load(file, allow_pickle=True)",
        "marshal.loads(data)",
    ],
)
def test_planted_code_is_found(line: str) -> None:
    assert list(suspicious(ast.parse(line)))


def commands(tree: ast.AST) -> Iterator[tuple[int, list[str]]]:
    """Lists that begin with ``sys.executable``: their line, and the constants behind it."""
    for node in ast.walk(tree):
        # Behind a list of several interpreters comes no option.
        if isinstance(node, ast.List) and len(node.elts) > 1 and not isinstance(node.elts[1], ast.Starred):
            if dotted(node.elts[0]) != "sys.executable":
                continue
            yield node.lineno, [str(item.value) for item in node.elts[1:] if isinstance(item, ast.Constant)]


def test_processes_that_we_start_do_not_import_from_the_working_folder() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sources(*PACKAGES, "tools", "benchmarks")
        for line, options in commands(ast.parse(path.read_text(encoding="utf-8")))
        if not {"-P", "-I"} & set(options[:1])
    ]
    assert not wrong


@pytest.fixture
def hostile_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    for name in HOSTILE:
        (folder / f"{name}.py").write_text(
            f"open({str(tmp_path / 'ran')!r}, 'a').write('{name}')\nraise SystemExit(7)\n"
        )
    return folder


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "", "HOME": str(folder), "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


ARGUMENTS = {
    "explain": ["explain", "--heads", "2", "--kv-heads", "2", "--head-dim", "8", "--device", "cpu"],
    "doctor": ["doctor", "--json"],
    "version": ["--version"],
}


@pytest.mark.parametrize("name", ["explain", "version", pytest.param("doctor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["script", "-P -m"])
def test_the_command_runs_no_code_of_the_working_folder(hostile_folder: Path, name: str, how: str) -> None:
    script = hostile_folder.parent / "attn"  # what an installer writes into bin/
    script.write_text("from attn_core.cli import main\nmain()\n")
    start = [str(script)] if how == "script" else ["-P", "-m", "attn_core"]
    done = run(hostile_folder, *start, *ARGUMENTS[name])
    assert not (hostile_folder.parent / "ran").exists(), (hostile_folder.parent / "ran").read_text()
    assert done.returncode in (0, 1), done.stderr  # doctor: 1 with findings


def test_python_m_imports_from_the_working_folder_as_security_md_says(hostile_folder: Path) -> None:
    """Python itself puts the working folder first for ``-m``. If that changes, SECURITY.md should say so."""
    assert run(hostile_folder, "-m", "attn_core", "--version").returncode == 7
    assert "python -P -m attn_core" in (ROOT / "SECURITY.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_nothing_from_the_working_folder(hostile_folder: Path, package: str) -> None:
    pytest.importorskip({"torch_frontend": "torch", "jax_frontend": "jax"}.get(package, "numpy"))
    done = run(hostile_folder, "-P", "-c", f"import {package}")
    assert done.returncode == 0, done.stderr
    assert not (hostile_folder.parent / "ran").exists()
