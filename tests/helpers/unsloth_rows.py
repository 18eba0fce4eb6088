"""Unsloth's ``run_attention`` as a function of rows, in both frameworks."""

from __future__ import annotations

from typing import Any


def attend_as_unsloth(
    frontend: Any, q: Any, k: Any, v: Any, config: dict[str, Any] | None = None, **context: Any
) -> Any:
    """Attention of q, k and v ``[batch, len, heads, dim]``, with the output ``[batch, len, heads, dim]``.

    Args:
        config: fields of ``AttentionConfig`` beside the heads; without it, those of torch's own attention.
        context: fields of ``AttentionContext`` beside the sizes.
    """
    (batch, q_len, heads, dim), kv_heads = q.shape, k.shape[2]
    made = frontend.unsloth.AttentionConfig(
        **(config or {"backend": "sdpa"}), n_kv_heads=kv_heads, n_groups=heads // kv_heads
    )
    about = frontend.unsloth.AttentionContext(
        bsz=batch, q_len=q_len, kv_seq_len=k.shape[1], n_heads=heads, head_dim=dim, **context
    )
    heads_first = {name: array.swapaxes(1, 2) for name, array in (("Q", q), ("K", k), ("V", v))}
    return frontend.unsloth.run_attention(config=made, context=about, **heads_first)
