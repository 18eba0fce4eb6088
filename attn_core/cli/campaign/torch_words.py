"""What the entries of torch's drop-ins share: tables, documents, the generator and the requested backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from attn_core.call.spec import AttentionSpec
from attn_core.cli.campaign.documents import same_documents
from attn_core.cli.campaign.host_words import Ops
from attn_core.cli.trial import Trial


def ops_on(where: Any) -> Ops:
    """Returns the operations of ``host_words`` for tensors on a device."""
    import torch

    def hide(bias: Any, seen: Any) -> Any:
        return torch.where(seen, bias, -torch.inf)

    return Ops(lambda array: torch.from_numpy(array).to(where), hide)


@contextmanager
def seeded(trial: Trial) -> Iterator[None]:
    """Seeds torch's own generator, from which a host's dropout draws."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(trial.seed)
        yield


def requested(backend: str | None) -> Any:
    """Requests a backend for hosts whose calls cannot name one."""
    from torch_frontend import use_backend

    return use_backend(*() if backend is None else (backend,))


def offsets_on(trial: Trial, where: Any) -> Any:
    """Returns the documents with int32 offsets on the device, as loaders make them."""
    import torch

    from attn_core import SeqInfo

    info = trial.seq_info
    if info is None:
        return None
    queries, keys = (torch.from_numpy(each).to(where) for each in (info.cu_seqlens_q, info.cu_seqlens_k))
    return SeqInfo(queries, keys, info.max_len_q, info.max_len_k)


def has_same_documents(trial: Trial) -> bool:
    """Returns whether the call is packed, and queries and keys have the same documents."""
    return trial.seq_info is not None and same_documents(trial.spec, trial.seq_info)


def without_batch(out: Any, spec: AttentionSpec) -> Any:
    """Returns ``[batch, len, heads, dim]`` without the batch of a packed call."""
    return out[0] if spec.packed else out
