"""Finetrainers' ``attention_dispatch`` and ``attention_provider`` on our kernels.

``with installed():``, or ``install()`` once for the process, registers our attention as a provider of Finetrainers. Its
Trainer sets the active provider of Finetrainers' own registry, by a name that its enumeration must know. While
installed, both know the provider ``attn_core``. It is the active one unless the Trainer chooses another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from inspect import signature
from typing import Any

import torch

from attn_core.dropins.finetrainers import (
    NATIVE,
    OPTIONS,
    AttentionProvider,
    DispatchCall,
    shared_rows,
    stated_provider,
)
from attn_core.dropins.replacement import Replacement
from torch_frontend.finetrainers.call import check_mesh, run_over_ranks
from torch_frontend.finetrainers.dispatch import attention_dispatch, attention_provider, list_providers

__all__ = [
    "AttentionProvider",
    "attention_dispatch",
    "attention_provider",
    "install",
    "installed",
    "is_installed",
    "list_providers",
    "uninstall",
]

Tensor = torch.Tensor

NAME = "attn_core"
_DISPATCH = "finetrainers.models.attention_dispatch"


def _apply() -> Callable[[], None]:
    host = import_module(_DISPATCH)
    registry, enumeration = host._AttentionProviderRegistry, host.AttentionProvider
    if NAME in registry._providers:
        raise RuntimeError(f"{_DISPATCH}: expected no provider named {NAME!r}, found {registry._providers[NAME]}")
    member = _member(enumeration)
    # Its later commits know which providers share rows over a mesh.
    shares = {"supports_cp": True} if "supports_cp" in signature(registry.register).parameters else {}
    registry.register(member, **shares)(_provider(registry))
    registry._supported_arg_names[member] = _EveryName(registry._supported_arg_names[member])
    before, registry._active_provider = registry._active_provider, member

    def restore() -> None:
        del enumeration._missing_
        for table in list(vars(registry).values()):
            if isinstance(table, dict):
                table.pop(NAME, None)
        if registry._active_provider == NAME:
            registry._active_provider = before

    return restore


_replacement = Replacement(_apply)
installed = _replacement.installed
"""Registers and activates the provider ``attn_core`` in a block, in every thread.

The end of the last block removes the provider, and activates the one before unless another is active by then.

Raises:
    ImportError: if Finetrainers cannot be imported.
    RuntimeError: if its registry already has another provider of this name.
"""
install = _replacement.install
"""Puts our attention in Finetrainers' place until ``uninstall``. Idempotent. Raises as ``installed``."""
uninstall = _replacement.uninstall
"""Undoes all calls of ``install``. Running blocks of ``installed`` keep our attention until their end."""
is_installed = _replacement.is_installed
"""Returns whether our attention is in Finetrainers' place now."""


def _member(enumeration: Any) -> Any:
    """Makes the host's enumeration know our provider, by its method for values without a member. Returns the value."""
    member = str.__new__(enumeration, NAME)
    member._name_, member._value_ = NAME.upper(), NAME
    enumeration._missing_ = classmethod(lambda _, value: member if value == NAME else None)
    return member


def _provider(registry: Any) -> Callable[..., Any]:
    """Returns the function that the host's dispatch calls."""

    def attn_core(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        **attention_kwargs: Any,
    ) -> Any:
        """Runs ``attention_dispatch``, on the mesh of the host's block if it has one."""
        options, kwargs = (attn_mask, dropout_p, is_causal, scale, enable_gqa), attention_kwargs or None
        mesh = getattr(registry, "_mesh", None)
        if mesh is None:
            return attention_dispatch(query, key, value, *options, kwargs)
        shared = shared_rows(mesh, registry._convert_to_fp32, registry._rotate_method)
        assert shared is not None
        check_mesh(mesh)
        return run_over_ranks(shared, stated_provider() or NATIVE, DispatchCall(query, key, value, *options), kwargs)

    return attn_core


class _EveryName(frozenset[str]):
    """The names of our provider's arguments. It contains every name, because the host drops keywords it lacks.

    Its iterator gives those that we know: the host's checks warn of the others.
    """

    def __new__(cls, parameters: Iterable[str]) -> _EveryName:
        return super().__new__(cls, {*parameters, *OPTIONS} - {"attention_kwargs"})

    def __contains__(self, name: object) -> bool:
        return True
