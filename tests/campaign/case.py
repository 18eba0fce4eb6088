"""Case: one call of a campaign as plain data, and as one line of JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attn_core.call.seq_info import SeqInfo
from attn_core.call.spec import AttentionSpec
from attn_core.errors import SpecError
from benchmarks.fit.records import plain_fields, spec_of

Lengths = tuple[tuple[int, ...], tuple[int, ...]]
"""The tokens of each query document, and of each key document."""


@dataclass(frozen=True)
class Case:
    """One call, complete: the same Case gives the same numbers on every machine.

    Attributes:
        entry: the entry point that runs it, a name of ``entries.ENTRIES``.
        spec: the call.
        backend: the backend by name, or None for automatic choice.
        seed: of the numbers.
        lengths: of the packed documents; None if the call is not packed. Tokens behind the last one belong to none.
        relation: a name of ``relations.RELATIONS``: the call is rewritten that way before it runs, and its result must
            still be that of ``spec``. None runs the call as it is.
    """

    entry: str
    spec: AttentionSpec
    backend: str | None = None
    seed: int = 0
    lengths: Lengths | None = None
    relation: str | None = None

    @property
    def seq_info(self) -> SeqInfo | None:
        """The documents with numpy offsets, or None."""
        if self.lengths is None:
            return None
        spec = self.spec
        return SeqInfo.from_lengths(*self.lengths, max_len=(spec.max_len_q or 0, spec.max_len_k or 0))

    def __str__(self) -> str:
        return text_of(self)


def text_of(case: Case) -> str:
    """Returns a case as one line of JSON, without the fields that have their defaults."""
    plain: dict[str, Any] = {"entry": case.entry, "spec": plain_fields(case.spec), "seed": case.seed}
    plain |= {
        name: getattr(case, name) for name in ("backend", "lengths", "relation") if getattr(case, name) is not None
    }
    return json.dumps(plain)


def case_of(text: str) -> Case:
    """Inverts ``text_of``.

    Raises:
        SpecError: if the text is not the JSON of a case.
    """
    try:
        plain = json.loads(text)
        if "lengths" in plain:
            queries, keys = plain["lengths"]
            plain["lengths"] = tuple(queries), tuple(keys)
        return Case(**plain | {"spec": spec_of(plain["spec"])})
    except (ValueError, TypeError, KeyError) as error:
        raise SpecError(f"case: expected one JSON object as a campaign prints it: {error}") from None


def is_banded(spec: AttentionSpec) -> bool:
    """Returns whether causal or a window hides keys."""
    return spec.causal or spec.window != (None, None)


def same_documents(spec: AttentionSpec, info: SeqInfo) -> bool:
    """Returns whether queries and keys have the same documents, and no token is behind the last one."""
    ends = np.asarray(info.cu_seqlens_q), np.asarray(info.cu_seqlens_k)
    return np.array_equal(*ends) and int(ends[0][-1]) == spec.q_len == spec.kv_len


def with_same_documents(spec: AttentionSpec, lengths: Lengths) -> tuple[AttentionSpec, Lengths]:
    """Returns a call whose keys have the documents of the queries, without the tokens behind the last one."""
    queries = lengths[0]
    tokens = sum(queries)
    return replace(spec, q_len=tokens, kv_len=tokens, max_len_k=spec.max_len_q), (queries, queries)
