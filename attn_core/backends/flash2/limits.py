"""Limits of FlashAttention 2's kernel: combinations that it computes wrongly or cannot launch, and its widths."""

from __future__ import annotations

from collections.abc import Iterator

from attn_core.backends.shared.pages import flash_paged
from attn_core.backends.support import Build
from attn_core.call.spec import AttentionSpec

NAME = "the FlashAttention 2 kernel"

ROCM_CK = Build("ROCm CK", without=("softcap",))
ROCM_TRITON = Build("ROCm Triton", without=("softcap", "window"))

WIDTHS = (32, 64, 96, 128, 160, 192, 224, 256)
"""The widths of the kernels. Each kernel also serves smaller dimensions (160 and 224 exist in old versions only)."""
SMALL_MEMORY = ("sm86", "sm89", "sm120")
"""Devices with 99 KiB of shared memory per block: dropout's gradient kernel does not fit above head_dim 192."""


def refusals(spec: AttentionSpec, device: str, width: int) -> Iterator[str]:
    """Refuses combinations of features that the kernel of a width computes wrongly or cannot launch."""
    if spec.paged is not None:
        yield from flash_paged.flash2_refusals(spec, NAME, width)
    if spec.invariant is not None:
        yield from _invariant_refusals(spec)
    if spec.alibi_shape and spec.alignment == "top_left" and (spec.packed or spec.q_len != spec.kv_len):
        yield f"alignment=top_left with alibi_slopes: {NAME} measures from the bottom_right diagonal"
    if spec.dropout and spec.softcap is not None:
        yield f"dropout={spec.dropout} with softcap={spec.softcap}: {NAME} has one or the other"
    if spec.dropout and not 1 / 256 <= spec.dropout <= 255 / 256:
        yield f"dropout={spec.dropout}: {NAME} drops in steps of 1/256"
    if spec.dropout and spec.needs_backward and width > 192 and device in SMALL_MEMORY:
        yield f"backward: dropout={spec.dropout} with head_dim={width}: {NAME} has none on {device}"


def _invariant_refusals(spec: AttentionSpec) -> Iterator[str]:
    """Refuses what has other bits in another batch. The rows of a dense call run as documents, forwards."""
    why = {
        "pages": spec.paged is not None and "splits the keys by the number of sequences",
        "packed documents and gradients": spec.packed
        and spec.needs_backward
        and "sums dq in parts whose number depends on the documents",
        "alibi_slopes of each row": len(spec.alibi_shape or ()) == 2 and "takes one slope per head there",
    }
    for what, reason in why.items():
        if reason:
            yield f"invariant={spec.invariant!r} with {what}: {NAME} {reason}"


def rocm_refusals(spec: AttentionSpec, build: Build | None) -> Iterator[str]:
    """Refuses what ROCm builds ignore silently, or may ignore."""
    nameless = build is None and "ROCm builds ignore it silently, and it is not known which build this is"
    ignored = spec.deterministic and spec.needs_backward and build != ROCM_CK
    why = {
        f"softcap={spec.softcap}": spec.softcap is not None and nameless,
        f"window={spec.window}": spec.window != (None, None) and nameless,
        "alibi_slopes": spec.alibi_shape and "it is not known how ROCm builds define the log-sum-exp",
        f"dropout={spec.dropout}": spec.dropout and "ROCm builds do not all draw it from the call's own seed",
        "backward: deterministic=True": ignored and "the ROCm Triton build ignores it",
    }
    return (f"{feature}: {reason}" for feature, reason in why.items() if reason)


def width_of(dim: int, head_dims: tuple[int, ...]) -> int:
    """Returns the head dimension to run ``dim`` at: the next multiple of 8, or the next width that the build has."""
    eights = -(-dim // 8) * 8
    native = next((width for width in WIDTHS if width >= eights), eights)
    if not head_dims or native in head_dims:
        return eights
    return next((width for width in head_dims if width > eights), eights)
