"""Old import paths: each works for one more release, with a DeprecationWarning that names the new one."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {
    "attn_core.accuracy": "attn_core.correctness.accuracy",
    "attn_core.context_parallel.choose": "attn_core.context_parallel.cost.choose",
    "attn_core.context_parallel.machine": "attn_core.context_parallel.cost.machine",
    "attn_core.dropout": "attn_core.call.dropout",
    "attn_core.finetrainers": "attn_core.dropins.finetrainers",
    "attn_core.override": "attn_core.selection.override",
    "attn_core.paged.book": "attn_core.paged.step",
    "attn_core.paged.kv": "attn_core.paged.tables",
    "attn_core.reference": "attn_core.correctness.reference",
    "attn_core.seq_info": "attn_core.call.seq_info",
    "attn_core.spec": "attn_core.call.spec",
    "attn_core.support": "attn_core.backends.support",
    "attn_core.unsloth": "attn_core.dropins.unsloth.arguments",
    "attn_core.unsloth_prefix": "attn_core.dropins.unsloth.prefix",
    "jax_frontend.compiled_lane": "jax_frontend.bridge.compiled_lane",
    "jax_frontend.context_shards": "jax_frontend.context_parallel.shards",
    "jax_frontend.flax_hook": "jax_frontend.flax.hook",
    "jax_frontend.paged_cache": "jax_frontend.paged.cache",
    "torch_frontend.context_active": "torch_frontend.context_parallel.layers",
    "torch_frontend.context_parallel.use": "torch_frontend.context_parallel.layers",
    "torch_frontend.context_shards": "torch_frontend.context_parallel.shards",
    "torch_frontend.paged_cache": "torch_frontend.paged.cache",
    "torch_frontend.unsloth_packing": "torch_frontend.unsloth.packing",
    "torch_frontend.unsloth_softcapping": "torch_frontend.unsloth.softcapping",
}
"""The paths that the documentation named before, and the new path of each module."""


class _OldPaths(MetaPathFinder, Loader):
    """Finds a module at its old path: an empty one that takes every name from the module at the new path."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        new = import_module(MOVED[module.__name__])
        warnings.warn(f"{module.__name__} is now {new.__name__}", DeprecationWarning, stacklevel=2)

        def at_new_path(name: str) -> Any:
            return getattr(new, name)

        # Names are looked up in the new module on access, so that both paths always have the same objects.
        module.__doc__ = new.__doc__
        module.__dict__["__getattr__"] = at_new_path
        module.__dict__["__dir__"] = lambda: dir(new)


def install() -> None:
    """Makes the old paths importable. The finder is the last one, so it is asked only for paths that no other finds."""
    if not any(isinstance(finder, _OldPaths) for finder in sys.meta_path):
        sys.meta_path.append(_OldPaths())
