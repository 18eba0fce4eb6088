"""What a kernel of fixed tiles lacks, which keeps ``invariant`` on a CPU: the reasons of ``math`` and ``jax_xla``."""

from __future__ import annotations

from attn_core.call.spec import AttentionSpec


def refusals(spec: AttentionSpec, device: str, kernel: str) -> tuple[str, ...]:
    """Returns why tiles cannot compute a call with ``invariant``; nothing for a call without it.

    Args:
        kernel: the kernel's name in reasons.
    """
    if spec.invariant is None:
        return ()
    lacks = {
        f"device {device}": device != "cpu",
        "key_ranges": spec.key_ranges_shape is not None,
        "mask_mod": spec.mask_mod is not None,
        "score_mod": spec.score_mod is not None,
        "alibi_slopes of each sequence in pages": spec.paged is not None and len(spec.alibi_shape or ()) == 2,
        "sizes that are symbols": spec.symbolic,
    }
    return tuple(f"{what} with invariant={spec.invariant!r}: {kernel} has none" for what in lacks if lacks[what])
