"""Rows whose logits are all large: callers hide keys by large negative biases, slopes or scores."""

from __future__ import annotations

from attn_core.call.spec import AttentionSpec

LARGE_LSE = 1024.0
"""The size of a log-sum-exp from which a backward does not compute weights as exp(logit - lse). In float32 they would
be wrong by 2^-14 there, and at 1e9 by a factor of the number of keys."""


def may_be_large(spec: AttentionSpec) -> bool:
    """Returns whether a bias, ALiBi or a score function may make all logits of a row large.

    ALiBi does it if a mask hides the keys near a query.
    """
    return spec.bias_shape is not None or spec.alibi_shape is not None or spec.score_mod is not None
