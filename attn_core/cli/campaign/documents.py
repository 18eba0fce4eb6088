"""Packed documents for entries whose queries and keys must have the same ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from attn_core.call.seq_info import SeqInfo
from attn_core.call.spec import AttentionSpec
from attn_core.cli.campaign.case import Lengths


def same_documents(spec: AttentionSpec, info: SeqInfo) -> bool:
    """Returns whether queries and keys have the same documents, and no token is behind the last one."""
    ends = np.asarray(info.cu_seqlens_q), np.asarray(info.cu_seqlens_k)
    return np.array_equal(*ends) and int(ends[0][-1]) == spec.q_len == spec.kv_len


def with_same_documents(spec: AttentionSpec, lengths: Lengths) -> tuple[AttentionSpec, Lengths]:
    """Returns a call whose keys have the documents of the queries, without the tokens behind the last one."""
    queries = lengths[0]
    tokens = sum(queries)
    return replace(spec, q_len=tokens, kv_len=tokens, max_len_k=spec.max_len_q), (queries, queries)
