"""Attention for torch: one call, every kernel, and the reasons for the choice."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from attn_core import NoBackendError, Pages, Selection, SeqInfo
from attn_core import __version__ as __version__
from attn_core.errors import needs_extra
from attn_core.selection.override import use_backend

with needs_extra(__name__, "torch", "torch"):
    import torch

import torch.distributed

from torch_frontend import context_parallel, flops  # noqa: F401  flops tells torch's counter
from torch_frontend.attention import attention
from torch_frontend.context_parallel.layers import use_context_parallel
from torch_frontend.explain import available_backends, explain, warm_up
from torch_frontend.padding import repad, unpad
from torch_frontend.paged.append import append_kv
from torch_frontend.paged.attention import explain_paged, paged_attention
from torch_frontend.paged.cache import PagedKVCache, pages_of, pages_that_fit
from torch_frontend.paged.merge_states import merge_states
from torch_frontend.paged.rotary import apply_rotary
from torch_frontend.qkvpacked import attention_qkvpacked

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
    "explain",
    "explain_paged",
    "merge_states",
    "paged_attention",
    "pages_that_fit",
    "pages_of",
    "repad",
    "run_attention",
    "scaled_dot_product_attention",
    "unpad",
    "use_backend",
    "use_context_parallel",
    "warm_up",
]

if TYPE_CHECKING:
    from torch_frontend.context_parallel.attention import context_parallel_attention, explain_context_parallel
    from torch_frontend.context_parallel.shards import shard_lengths, shard_sequence, unshard_sequence
    from torch_frontend.finetrainers import attention_dispatch as scaled_dot_product_attention
    from torch_frontend.unsloth import run_attention
if torch.distributed.is_available():  # torch can be built without it
    __all__ += ["context_parallel_attention", "explain_context_parallel"]
    __all__ += ["shard_lengths", "shard_sequence", "unshard_sequence"]


def __getattr__(name: str) -> Any:
    if name in ("run_attention", "unsloth"):  # load at first use, because few programs need the drop-in
        globals()["run_attention"] = import_module(f"{__name__}.unsloth").run_attention
        return globals()[name]  # the import names the module here
    if name == "scaled_dot_product_attention":  # the same
        from torch_frontend.finetrainers import attention_dispatch

        # One function under two names, because torch's modes and TorchScript compare functions by identity.
        globals()[name] = attention_dispatch
        return attention_dispatch
    if name in context_parallel.PUBLIC:  # loads at first use, because DTensor takes longer to import than the rest
        if not torch.distributed.is_available():
            raise ImportError(f"torch_frontend.{name} needs torch.distributed, which this build of torch does not have")
        globals()[name] = getattr(context_parallel, name)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
