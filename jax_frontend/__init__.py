"""Attention for JAX: one call for every kernel, under every transformation, with the reasons for the choice."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from attn_core import NoBackendError, Pages, Selection, SeqInfo
from attn_core import __version__ as __version__
from attn_core.errors import needs_extra

with needs_extra(__name__, "jax", "jax"):
    import jax  # noqa: F401

from jax_frontend import context_parallel
from jax_frontend.attention import attention
from jax_frontend.dispatch.export import export_checks
from jax_frontend.dot_product_attention import dot_product_attention
from jax_frontend.explain import available_backends, explain, use_backend, warm_up
from jax_frontend.padding import repad, unpad
from jax_frontend.paged.append import append_kv
from jax_frontend.paged.attention import explain_paged, paged_attention
from jax_frontend.paged.cache import PagedKVCache, pages_of, pages_that_fit
from jax_frontend.paged.merge_states import merge_states
from jax_frontend.paged.rotary import apply_rotary
from jax_frontend.qkvpacked import attention_qkvpacked

if TYPE_CHECKING:
    from jax_frontend.context_parallel.attention import context_parallel_attention, explain_context_parallel
    from jax_frontend.context_parallel.shards import shard_lengths, shard_sequence, unshard_sequence
    from jax_frontend.unsloth import run_attention

__all__ = [
    "NoBackendError",
    "PagedKVCache",
    "Pages",
    "Selection",
    "SeqInfo",
    "append_kv",
    "apply_rotary",
    "attention",
    "attention_qkvpacked",
    "available_backends",
    "context_parallel_attention",
    "dot_product_attention",
    "explain",
    "explain_context_parallel",
    "explain_paged",
    "export_checks",
    "merge_states",
    "paged_attention",
    "pages_that_fit",
    "pages_of",
    "repad",
    "run_attention",
    "shard_lengths",
    "shard_sequence",
    "unshard_sequence",
    "unpad",
    "use_backend",
    "warm_up",
]


def __getattr__(name: str) -> Any:
    if name in ("run_attention", "unsloth"):  # load at first use, because few programs need the drop-in
        globals()["run_attention"] = import_module(f"{__name__}.unsloth").run_attention
        return globals()[name]  # the import names the module here
    if name in context_parallel.PUBLIC:  # loads at first use, because few programs need it
        globals()[name] = getattr(context_parallel, name)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
