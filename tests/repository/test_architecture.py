"""Tests the imports between the packages, read from the sources, and the modules that an import loads in a fresh
process."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("attn_core", "torch_frontend", "jax_frontend")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
FRAMEWORKS = {"torch", "jax", "jaxlib", "flax", "jax_tvm_ffi", "tvm_ffi", "triton", "transformers"}
MOST_MODULES_ALONE = 21
"""Modules that one module of the same folder alone imports. Lower the number when there are fewer."""


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def imports(path: Path, *, module_level: bool = False) -> tuple[str, ...]:
    """The dotted names that a file imports; with module_level only the imports that run when the file is imported."""
    return tuple(_imports(_tree(path), module_level))


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _imports(node: ast.AST, module_level: bool) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "absolute imports only, or the arrows cannot be read"
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif not (module_level and _runs_later(child)):
            yield from _imports(child, module_level)


def _runs_later(node: ast.AST) -> bool:
    """Whether importing a module does not run the code inside the node: a function, or names for types alone."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test).endswith("TYPE_CHECKING")
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))


def top(name: str) -> str:
    return name.partition(".")[0]


def test_the_reader_of_imports_finds_them() -> None:
    source = (
        "import torch.nn as nn\nfrom jax import numpy\n"
        "class A:\n    import flax\n"
        "def f():\n    import triton\n    from attn_core import spec\n"
        "if TYPE_CHECKING:\n    import transformers\n"
    )
    tree = ast.parse(source)
    assert list(_imports(tree, True)) == ["torch.nn", "jax.numpy", "flax"]
    assert set(_imports(tree, False)) >= {"triton", "attn_core.spec", "transformers"}


KERNEL_FILES = [
    ROOT / "attn_core" / kernel
    for kernel in (
        "backends/flash4/sinks_kernel.py",
        "backends/flash4/table_kernel.py",
        "backends/shared/in_order/rows.py",
        "backends/triton_jvp/kernels.py",
        "backends/triton_ordered/kernels.py",
        "backends/triton_splitkv/kernels.py",
        "backends/triton_splitkv/stored_tiles.py",
        "context_parallel/on_torch/merge_triton.py",
        "paged/kernels.py",
    )
]
"""Written in Triton or the CuTe DSL from the first line on, so they are imported only when they run."""


OF_CORE = [path for path in SOURCES if path.is_relative_to(ROOT / "attn_core")]
CLI = ROOT / "attn_core/cli"


def test_attn_core_imports_no_framework_at_module_level() -> None:
    kernels = tuple(".".join(kernel.relative_to(ROOT).with_suffix("").parts) for kernel in KERNEL_FILES)
    wrong = {}
    for path in OF_CORE:
        allowed = {"numpy", "attn_core"} | set(sys.stdlib_module_names)
        if path.is_relative_to(CLI):
            allowed |= {"typer", "rich"}
        if path in KERNEL_FILES:
            allowed |= {"triton", "cutlass", "flash_attn", "quack"}
        names = imports(path, module_level=True)
        wrong[name_of(path)] = [name for name in names if top(name) not in allowed]
        wrong[name_of(path)] += [name for name in names if path not in KERNEL_FILES and name.startswith(kernels)]
    assert not any(wrong.values()), wrong


def test_attn_core_does_not_import_the_frontends() -> None:
    for path in OF_CORE:
        known = {top(name) for name in imports(path)}
        only_cli = set() if path.is_relative_to(CLI) else {"torch_frontend", "jax_frontend", "typer", "rich"}
        assert not known & (only_cli | {"tests"}), name_of(path)


def test_the_frontends_do_not_import_each_other() -> None:
    for path in SOURCES:
        other = {"torch_frontend": "jax_frontend", "jax_frontend": "torch_frontend"}.get(
            path.relative_to(ROOT).parts[0]
        )
        assert other not in {top(name) for name in imports(path)}, name_of(path)


def test_torch_frontend_does_not_import_jax() -> None:
    for path in (ROOT / "torch_frontend").rglob("*.py"):
        assert not {top(name) for name in imports(path)} & {"jax", "jaxlib", "flax"}, name_of(path)


def test_only_the_bridge_imports_jax_and_torch() -> None:
    meeting = {
        name_of(path) for path in (ROOT / "jax_frontend").rglob("*.py") if "torch" in {top(n) for n in imports(path)}
    }
    assert meeting <= {"jax_frontend/bridge/targets.py"}


BACKENDS = ROOT / "attn_core/backends"
COMMON = {"contract", "shared", "support"}
"""The folders of attn_core/backends that every backend may use. Each other folder or file is a backend."""


def test_a_backend_imports_neither_selection_nor_another_backend() -> None:
    for path in BACKENDS.rglob("*.py"):
        if path == BACKENDS / "__init__.py":
            continue
        own = path.relative_to(BACKENDS).parts[0].removesuffix(".py")
        for name in imports(path):
            assert not name.startswith("attn_core.selection"), f"{name_of(path)}: {name}"
            if name.startswith("attn_core.backends."):
                assert name.split(".")[2] in COMMON | {own}, f"{name_of(path)}: {name}"


def rooms_of(package: str) -> dict[str, set[str]]:
    """The files and folders at the root of a package, and which of them each imports, also inside functions."""
    rooms: dict[str, set[str]] = {}
    for path in (ROOT / package).rglob("*.py"):
        room = path.relative_to(ROOT / package).parts[0].removesuffix(".py")
        reached = {
            "__init__" if name == package else name.split(".")[1] for name in modules(path) if top(name) == package
        }
        rooms.setdefault(room, set()).update(reached - {room})
    return rooms


@cache
def modules(path: Path) -> tuple[str, ...]:
    """The modules of this project that a file imports; for ``from package import name`` the package if name is no
    module."""

    def module_of(name: str) -> str:
        target = ROOT / name.replace(".", "/")
        return name if target.is_dir() or target.with_suffix(".py").is_file() else name.rpartition(".")[0]

    return tuple(map(module_of, imports(path)))


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_between_rooms_run_one_way(package: str) -> None:
    graphlib.TopologicalSorter(rooms_of(package)).prepare()  # raises CycleError, which names the folders


def test_imports_between_files_run_one_way() -> None:
    """Imports for types alone count, too."""
    files = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in SOURCES}
    reached = {file: set(modules(path)) & set(files.values()) - {file} for path, file in files.items()}
    graphlib.TopologicalSorter(reached).prepare()  # raises CycleError, which names the files


@pytest.mark.parametrize("init", [p for p in SOURCES if p.name == "__init__.py"], ids=name_of)
def test_a_package_defines_no_name_of_its_modules(init: Path) -> None:
    """``from package import name`` would give the function of that name instead of the module."""
    modules_inside = {path.stem for path in init.parent.glob("*.py")} | {
        path.parent.name for path in init.parent.glob("*/__init__.py")
    }
    defined = {
        node.name
        for node in ast.parse(init.read_text(encoding="utf-8")).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }
    assert not defined & modules_inside


@pytest.mark.parametrize(("package", "most"), [("attn_core", 14), ("torch_frontend", 20), ("jax_frontend", 24)])
def test_the_root_of_a_package_stays_small(package: str, most: int) -> None:
    entries = [
        entry.name for entry in (ROOT / package).iterdir() if entry.is_file() or (entry / "__init__.py").exists()
    ]
    assert len(entries) <= most, sorted(entries)


def test_modules_that_one_sibling_alone_imports_become_fewer() -> None:
    """A module with one user, in its own folder, is most often a part of this user that stands in another file."""
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in SOURCES}
    users: dict[str, set[str]] = {file: set() for file in files}
    for file, path in files.items():
        for module in set(modules(path)) & set(files) - {file}:
            users[module].add(file)
    alone = sorted(
        file
        for file, path in files.items()
        if path.name != "__init__.py" and [user.rpartition(".")[0] for user in users[file]] == [file.rpartition(".")[0]]
    )
    assert len(alone) <= MOST_MODULES_ALONE, "\n".join(alone)


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh interpreter at the root of the project."""
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )


LOADED = f"import sys; loaded = sorted({FRAMEWORKS!r} & set(sys.modules)); print(*loaded); sys.exit(bool(loaded))"


def test_imports_load_no_framework() -> None:
    modules = (
        "attn_core.cli.app, attn_core.correctness.reference, attn_core.correctness.accuracy, attn_core.expressions"
    )
    done = python(f"import attn_core, {modules}\n{LOADED}")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_frontend_loads_neither_ranks_nor_drop_ins(framework: str) -> None:
    """They would be a fifth of an import, and few programs need them. Their public names load them."""
    pytest.importorskip(framework)
    late = f"'{framework}_frontend.unsloth', 'attn_core.dropins', 'attn_core.context_parallel'"
    lines = (
        f"import sys, {framework}_frontend as frontend",
        f"assert not [name for name in sys.modules if name.startswith(({late}))]",
        "assert frontend.unsloth.run_attention is frontend.run_attention",
        "frontend.context_parallel_attention",
        f"assert all(name in sys.modules for name in ({late}))",
    )
    done = python("\n".join(lines))
    assert done.returncode == 0, done.stderr


def test_the_drop_in_of_flash_attn_loads_no_compiler() -> None:
    pytest.importorskip("torch")
    code = "import sys, torch_frontend.flash_attn; assert 'torch._dynamo' not in sys.modules"
    done = python(f"{code}; import attn_core; assert attn_core.masks.from_flashmask")
    assert done.returncode == 0, done.stderr


def test_import_loads_nothing_slow() -> None:
    """Each takes as long as several modules of ours, and few calls need it."""
    slow = {"importlib.metadata", "importlib.resources", "unittest", "asyncio", "subprocess", "tempfile", "difflib"}
    loaded = f"print(*{slow!r} & set(sys.modules))"
    done = python(f"import sys, numpy; {loaded}; import attn_core; {loaded}")
    by_numpy, by_us = (set(line.split()) for line in done.stdout.splitlines())
    assert by_numpy == by_us, done.stdout + done.stderr


def test_the_import_check_can_fail() -> None:
    pytest.importorskip("jax")
    done = python(f"import attn_core, jax\n{LOADED}")
    assert done.returncode == 1
    assert "jax" in done.stdout.split()


WITHOUT_DISTRIBUTED = """
import sys

PARTS = ("_c10d", "_distributed", "_rpc", "_dist_autograd", "_faulty")

class Without:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("torch._C._distributed"):
            raise ModuleNotFoundError(name)
        if name == "torch.distributed":  # its first import by torch, which goes by what the library has
            library = sys.modules["torch._C"]
            for part in [part for part in dir(library) if part.startswith(PARTS)]:
                delattr(library, part)

sys.meta_path.insert(0, Without())
import torch
assert not torch.distributed.is_available()
from torch_frontend import *
attention(*torch.ones(3, 1, 2, 4, 8))
try:
    from torch_frontend import shard_sequence
except ImportError as error:
    print(error)
"""


def test_torch_frontend_works_where_torch_was_built_without_distributed() -> None:
    pytest.importorskip("torch")
    done = python(WITHOUT_DISTRIBUTED)
    assert done.returncode == 0, done.stderr
    expected = "torch_frontend.shard_sequence needs torch.distributed, which this build of torch does not have"
    assert done.stdout.strip() == expected


def test_every_backend_is_described_without_a_framework() -> None:
    code = f"""
from attn_core import backends
for name in backends.names():
    backend = backends.load(name)
    assert backend.forward_claims.kernel and backend.requires and backend.framework in ("torch", "jax"), name
{LOADED}"""
    done = python(code)
    assert done.returncode == 0, done.stdout + done.stderr


BLOCKED = """
import sys
for name in ("torch", "jax", "jaxlib", "flax", "jax_tvm_ffi", "tvm_ffi"):
    sys.modules[name] = None  # an import of it raises ModuleNotFoundError
"""


def test_explain_works_without_any_framework() -> None:
    places = [(framework, device) for framework in ("torch", "jax") for device in ("cpu", "sm90")]
    code = f"""{BLOCKED}
from attn_core.cli import main
for framework, device in {places}:
    sys.argv = ["attn", "explain", "--causal", "--softcap", "50", "--device", device, "--framework", framework]
    try:
        main()
    except SystemExit as end:
        assert end.code in (0, 1)
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    for framework, device in places:
        assert done.stdout.count(f"attention in {framework} on {device}: ") == 1
    for framework in ("torch", "jax"):
        says = f"{framework} is not installed here: every backend is assumed to be installed"
        assert done.stdout.count(says) == 2
