"""Expresses rows that share a prefix (Unsloth's GRPO) as key ranges of the rows laid end to end.

A row consists of groups: one prefix, then the suffixes that continue it. A token of the prefix sees the prefix up to
itself. A token of a suffix sees the whole prefix of its group, and its own suffix up to itself.

Unsloth describes the layout by labels of every token: ``group_of_kv``, ``is_prefix`` and ``suffix_of_kv`` (padded at
the end), with a ``signature`` that two layouts share only if they are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np

from attn_core import masks
from attn_core.call.kinds import check_kind
from attn_core.dropins.unsloth.arguments import AttentionContext
from attn_core.dropins.unsloth.request import UnslothRequest
from attn_core.errors import ShapeError, SpecError

NAME = "context.prefix_seg_info"


def resolve_prefix_seg_info(kwargs: Mapping[str, Any], past_key_value: Any, attention_mask: Any) -> Any:
    """Returns ``kwargs["prefix_seg_info"]``, or None.

    Raises:
        SpecError: if a cache or a mask comes with it, because neither supports shared prefixes.
    """
    check_kind("kwargs", kwargs, Mapping, "a dict of keywords")
    info = kwargs.get("prefix_seg_info")
    beside = {"past_key_value": past_key_value, "attention_mask": attention_mask}
    for name, value in beside.items():
        if info is not None and value is not None:
            raise SpecError(f"{name}: expected None with prefix_seg_info, got {type(value).__name__}")
    return info


def shared_prefixes(request: UnslothRequest, context: AttentionContext) -> np.ndarray:
    """Returns the key ranges of ``context.prefix_seg_info``, cached by signature.

    Raises:
        SpecError, ShapeError: for options that shared prefixes do not support, and for invalid labels.
    """
    _refuse(request, context)
    info = context.prefix_seg_info
    layout = _Layout(getattr(info, "signature", None), context.bsz * context.q_len, info)
    # Without a signature two different layouts would share a key, so nothing is cached.
    key_ranges, longest = (_read_layout if layout.has_key else _read_layout.__wrapped__)(layout)
    left = request.options["window"][0]
    # A window would count the tokens of other suffixes, so it is allowed only if it hides nothing.
    if left is not None and left + 1 < longest:
        raise SpecError(
            f"window of {left + 1} keys: expected {longest} or more with {NAME}, because its longest prefix "
            "and suffix have that many tokens together; or pass no window"
        )
    return key_ranges


def _refuse(request: UnslothRequest, context: AttentionContext) -> None:
    """Raises SpecError or ShapeError for options that shared prefixes do not support."""
    stated = (
        ("context.seq_info", context.seq_info),
        (request.mask_name, request.mask),
        ("blocks of an xformers mask", request.documents),
        ("alibi_slopes", request.options["alibi_slopes"]),
    )
    for name, value in stated:
        if value is not None:
            raise SpecError(f"{name}: expected None with {NAME}, got {type(value).__name__}")
    if dropout := request.options["dropout"]:
        raise SpecError(f"dropout_p={dropout}: expected 0 with {NAME}, because kernels compute each row in parts")
    if not request.options["causal"]:
        raise SpecError(f"causal=False: expected True with {NAME}, because its prefixes and suffixes are causal")
    if context.kv_seq_len != context.q_len:
        raise ShapeError(
            f"context.kv_seq_len={context.kv_seq_len}: expected q_len={context.q_len} with {NAME}, which has no cache"
        )


@dataclass(frozen=True)
class _Layout:
    """The key of the cache (a signature and the number of tokens), with the labels, which are not compared."""

    signature: Any
    tokens: int
    info: Any = field(compare=False)

    @property
    def has_key(self) -> bool:
        try:
            hash(self.signature)
        except TypeError:
            return False
        return self.signature is not None


@lru_cache(maxsize=16)
def _read_layout(layout: _Layout) -> tuple[np.ndarray, int]:
    """Reads the labels of a layout: its key ranges, and the most positions of a prefix with its longest suffix.

    Raises:
        ShapeError, SpecError: for invalid labels.
    """
    info, tokens = layout.info, layout.tokens
    labels = []
    for name in ("group_of_kv", "is_prefix", "suffix_of_kv"):
        # The labels may be padded at the end: only the labels of the call's tokens count.
        values = getattr(info, name)
        values = np.asarray(values.cpu() if hasattr(values, "cpu") else values)  # a tensor on a GPU is waited for
        if values.ndim != 1 or len(values) < tokens:
            raise ShapeError(f"{NAME}.{name}: expected a label for each of {tokens} tokens, got {list(values.shape)}")
        labels.append(values[:tokens].tolist())
    if getattr(info, "T", tokens) != tokens:
        raise ShapeError(f"{NAME}.T={info.T}: expected the {tokens} tokens of Q")
    runs: dict[Any, list[tuple[Any, int]]] = {}  # by group: (None or the suffix, number of tokens), in order
    places = ((group, None if prefix else suffix) for group, prefix, suffix in zip(*labels, strict=True))
    last = object()
    for (group, suffix), members in groupby(places):
        seen = runs.setdefault(group, [])
        again = suffix in (name for name, _ in seen)
        if (seen and group != last) or again or (seen and suffix is None):
            raise SpecError(
                f"{NAME}: expected the tokens of each group next to each other, its prefix first and each suffix in "
                f"one piece, but group {group} differs"
            )
        seen.append((suffix, sum(1 for _ in members)))
        last = group
    prefixes, suffixes = [], []
    for group_runs in runs.values():
        prefixes.append(group_runs[0][1] if group_runs[0][0] is None else 0)
        suffixes.append([length for name, length in group_runs if name is not None])
    longest = max((prefix + max(rest, default=0) for prefix, rest in zip(prefixes, suffixes)), default=0)
    return masks.shared_prefix(prefixes, suffixes), longest
