"""Finds every cache of the three packages in their sources, with its bound, and reads the sizes of those in use.

A cache is a function under ``lru_cache``, ``from_records``, ``cache`` or ``cached_once``, or a dict, set or list of a
module that starts empty. A ``maxsize`` is its bound. Each other cache states it in ``BOUNDS``, or a test fails.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from functools import _lru_cache_wrapper
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("attn_core", "torch_frontend", "jax_frontend")
UNBOUNDED = ("cache", "cached_once")
"""Decorators without a limit of their own."""
ONE = "one result"

BOUNDS: dict[str, int | str] = {
    # Modules' own dicts, sets and lists
    "attn_core.backends.flash4.replay:_recorded": 2 * 4096,
    "attn_core.backends.flash4.replay:_seen": 4096,
    "attn_core.backends.flex.operands:_in_graphs": "the tables in captured CUDA graphs, each once",
    "attn_core.backends.shared.caches:_results": "ranges on a GPU that in_parts keeps, 8 results each",
    "attn_core.backends.shared.caches:_of_no_tensor": 8,
    "attn_core.backends.shared.first_calls:_compiled": 2**15,
    "attn_core.backends.shared.triton:_compiled": "the kernels that Triton keeps compiled",
    "attn_core.backends.shared.triton:_launches": 4096,
    "attn_core.paged.step:_TICKETS": "the block tables that are alive",
    "jax_frontend.bridge.compiled_lane:_compile_seconds": 1000,
    "jax_frontend.bridge.targets:_callbacks": 1024,
    "jax_frontend.bridge.targets:_calls": "calls that JAX has traced, half a kilobyte each, as a program may run later",
    "torch_frontend.context_parallel.agreement:_meetings": "the stores that are alive",
    "torch_frontend.context_parallel.layers:_blocks": "the blocks that are running",
    "torch_frontend.context_parallel.layers:_ran_under": "the modules that are alive",
    "torch_frontend.dispatch.plan:_planned_shapes": "the backends with kept_plans, as many shapes each as these say",
    "torch_frontend.dispatch.sdpa_flags:_behind": "torch's flags for kernels",
    "torch_frontend.dispatch.triton_offsets:_launchers": "the GPUs",
    # Functions of few arguments
    "attn_core.dropins.flash_attn.arguments:slopes_of_tokens": ONE,
    "attn_core.backends.shared.caches:_caches": "marked caches",
    "attn_core.backends:_entry_points": ONE,
    "attn_core.backends:_plug_ins": "registered backends",
    "attn_core.backends:_made_in": "backends and kinds of device",
    "attn_core.backends:_places": ONE,
    "attn_core.backends:availability": "backends and kinds of device",
    "attn_core.backends:foreign_names": ONE,
    "attn_core.backends:forward_mode_order": "frameworks and kinds of device",
    "attn_core.backends:in_order_on": "kinds of device",
    "attn_core.backends:installed_build": "backends and devices",
    "attn_core.backends:load": "backends and kinds of device",
    "attn_core.backends:kinds_in_order": ONE,
    "attn_core.backends:names": ONE,
    "attn_core.backends:plain_backend": "frameworks",
    "attn_core.backends:row_maximum_order": "frameworks and kinds of device",
    "attn_core.backends:usual_order": "frameworks and kinds of device",
    "attn_core.backends.ffpa:entry_points": ONE,
    "attn_core.backends.flash2:_extension": ONE,
    "attn_core.backends.flash2:build": ONE,
    "attn_core.backends.flash3:build": ONE,
    "attn_core.backends.flash3_xla:register": ONE,
    "attn_core.backends.flash4.disk_cache:use": ONE,
    "attn_core.backends.flash4.own_kernels:_compiled": "mask functions and kinds of block tables",
    "attn_core.backends.flash4.own_kernels:compiled_code": ONE,
    "attn_core.backends.flash4.own_kernels:entry_points": ONE,
    "attn_core.backends.flash4.recorded_program:_entry": ONE,
    "attn_core.backends.flash4.recorded_program:_suppress_address_warning": ONE,
    "attn_core.backends.flash4.recorded_program:_versions": ONE,
    **{f"attn_core.backends.flash4.recording:{name}": ONE for name in ("_private_copy", "is_possible", "_watch")},
    "attn_core.backends.flash4.functions:correct_indices": ONE,
    "attn_core.backends.sage:_function": "SageAttention's functions",
    "attn_core.backends.sdpa_cudnn:_kernels": ONE,
    "attn_core.backends.sdpa_cudnn:_trials": ONE,
    "attn_core.backends.sdpa_cudnn:forward_binding": ONE,
    "attn_core.backends.sdpa_efficient:_kernels": ONE,
    "attn_core.backends.sdpa_flash.containment:valueless": ONE,
    "attn_core.backends.sdpa_flash.cpu_kernel:has_tiles": ONE,
    "attn_core.backends.sdpa_flash.cpu_kernel:kernels": ONE,
    "attn_core.backends.sdpa_flash.cuda:_heads_first_binding": ONE,
    "attn_core.backends.sdpa_flash.cuda:_in_place": ONE,
    "attn_core.backends.sdpa_flash.cuda:_kernels": ONE,
    "attn_core.backends.shared.caches:first": "the arguments of its function",
    "attn_core.backends.shared.caches:once": "the arguments of its function",
    "attn_core.backends.flash3:operators": ONE,
    "attn_core.backends.shared.known_bad:rows": ONE,
    "attn_core.backends.shared.torch_ranges:_profiler": ONE,
    "attn_core.backends.shared.triton:_launches_directly": ONE,
    "attn_core.backends.shared.triton:has_triton": ONE,
    "attn_core.backends.shared.triton:multiprocessors": "the GPUs",
    "attn_core.backends.shared.in_order.order:merge_kernel": ONE,
    "attn_core.backends.triton_jvp:_kernels": ONE,
    "attn_core.backends.triton_jvp:_shared_memory": "the GPUs",
    "attn_core.backends.triton_jvp.launches:_maximum_kernel": ONE,
    "attn_core.backends.triton_ordered:_kernels": ONE,
    "attn_core.backends.triton_splitkv:_kernels": ONE,
    "attn_core.backends.xformers:_kernel": "xFormers' kernels",
    "attn_core.backends.xformers.operators:load_operator": "xFormers' kernels",
    "attn_core.backends.xformers.operators:flash_widths": "xFormers' kernels",
    "attn_core.cli.advice:backends_of": "backends and devices",
    "attn_core.selection.tables:published": ONE,
    "attn_core.selection.tables:shipped_table": "frameworks and devices",
    "attn_core.selection.tables:table_in_force": "frameworks and devices",
    "attn_core.selection.target:bridge_reason": ONE,
    "jax_frontend.bridge.targets:_register_targets": ONE,
}
"""Cache -> the most entries, or what there is an entry for."""


class Cache(NamedTuple):
    """A cache as the sources define it.

    Attributes:
        module, name: the module, and the function or variable; ``Class.method`` in a class.
        bound: the most entries, or what there is an entry for; None if neither ``lru_cache`` nor BOUNDS says.
    """

    module: str
    name: str
    bound: int | str | None

    @property
    def key(self) -> str:
        return f"{self.module}:{self.name}"


@functools.cache
def all_caches() -> tuple[Cache, ...]:
    """Returns every cache of the three packages, by module. The sources are read once."""
    return tuple(
        cache
        for package in PACKAGES
        for file in sorted((ROOT / package).rglob("*.py"))
        for cache in caches_of(file.read_text(encoding="utf-8"), _module_name(file))
    )


def _module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def caches_of(source: str, module: str) -> Iterator[Cache]:
    """Finds the caches that a source defines, at any depth."""
    tree = ast.parse(source)
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for name, maker in _cached_functions(tree, ""):
        yield Cache(module, name, _limit(maker, constants) or BOUNDS.get(f"{module}:{name}"))
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and _starts_empty(node.value):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            assert isinstance(target, ast.Name)
            yield Cache(module, target.id, BOUNDS.get(f"{module}:{target.id}"))


def _cached_functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.expr]]:
    """Yields the name of each cached function, and the expression that makes the cache."""
    for child in ast.iter_child_nodes(node):
        inner = prefix
        if isinstance(child, ast.ClassDef):
            inner = f"{prefix}{child.name}."
        elif isinstance(child, ast.FunctionDef):
            yield from ((prefix + child.name, each) for each in child.decorator_list if _makes_a_cache(each))
        elif isinstance(child, ast.Assign) and isinstance(child.value, ast.Call):
            # name = lru_cache(...)(function), or cache(function)
            maker = child.value.func
            if _makes_a_cache(maker) and isinstance(child.targets[0], ast.Name):
                yield prefix + child.targets[0].id, maker
        yield from _cached_functions(child, inner)


def _makes_a_cache(maker: ast.expr) -> bool:
    function = maker.func if isinstance(maker, ast.Call) else maker
    return isinstance(function, ast.Name) and function.id in ("lru_cache", "from_records", *UNBOUNDED)


def _limit(maker: ast.expr, constants: dict[str, Any]) -> int | None:
    """Returns the ``maxsize`` of ``lru_cache``, None for another maker."""
    if not isinstance(maker, ast.Call):
        return None
    for keyword in maker.keywords:
        if keyword.arg == "maxsize":
            value = keyword.value
            size = constants.get(value.id) if isinstance(value, ast.Name) else ast.literal_eval(value)
            return size if isinstance(size, int) else None
    return None


def _starts_empty(value: ast.expr | None) -> bool:
    if isinstance(value, (ast.Dict, ast.List)):
        return not (value.keys if isinstance(value, ast.Dict) else value.elts)
    if not isinstance(value, ast.Call) or value.args or value.keywords:
        return False
    made = value.func.value if isinstance(value.func, ast.Subscript) else value.func
    return isinstance(made, ast.Name) and made.id in (
        "set",
        "dict",
        "list",
        "WeakKeyDictionary",
        "OrderedDict",
        "deque",
    )


def sizes() -> dict[str, int]:
    """Returns the number of entries of each cache of an imported module, without those inside a function."""
    found = {}
    for cache in all_caches():
        value: Any = sys.modules.get(cache.module)
        for name in cache.name.split("."):
            value = getattr(value, name, None)
        value = getattr(value, "__func__", value)  # a class method
        if isinstance(value, _lru_cache_wrapper):
            found[cache.key] = value.cache_info().currsize
        elif value is not None and hasattr(value, "__len__"):
            found[cache.key] = len(value)
    return found


def over_bound(found: dict[str, int]) -> list[str]:
    """Returns a sentence for each cache with more entries than its bound."""
    limits = {cache.key: cache.bound for cache in all_caches()}
    return [
        f"{key} has {size} entries, and its bound is {limits[key]}"
        for key, size in found.items()
        if isinstance(limits.get(key), int) and size > limits[key]  # type: ignore[operator]
    ]
