"""What the FlashAttention 3 kernel and its builds cannot run though each claim alone holds."""

from __future__ import annotations

from collections.abc import Iterator

from attn_core.backends.shared.kernel_limits import GRID_LIMIT
from attn_core.backends.shared.pages import flash_paged
from attn_core.backends.support import Build
from attn_core.call.spec import AttentionSpec

NAME = "the FlashAttention 3 kernel"
WIDTHS = (64, 96, 128, 192, 256)
"""The head dimensions that have kernels. A kernel also serves the smaller dimensions down to the next kernel's."""
ORDERED = "deterministic backward"
"""The word in ``Build.without`` for a gradient that adds in any order."""


def refusals(spec: AttentionSpec, build: Build | None) -> Iterator[str]:
    without, name = (build.without, f"{NAME} ({build.name})") if build else ((ORDERED,), NAME)
    if spec.dtype in without:
        yield f"dtype {spec.dtype}: {name} has none"
    widths = build.head_dims if build else ()  # empty: every width runs
    if spec.paged is not None:
        yield from flash_paged.flash3_refusals(
            spec, name, {width_of(d, widths) for d in (spec.head_dim, spec.value_dim)}
        )
    if (rows := spec.documents or spec.batch) > GRID_LIMIT:
        yield f"batch={rows}: {NAME} launches at most {GRID_LIMIT} rows"
    if spec.deterministic and spec.needs_backward:
        width = max(spec.head_dim, spec.value_dim)
        if width > 192:
            yield f"backward: deterministic=True with head_dim={width}: {NAME} has none above 192"
        if ORDERED in without:
            why = "before late 2025 it ignored the flag, or lost count of windows, documents and grouped heads"
            yield f"backward: deterministic=True: {name} is not known to keep it; {why}"


def width_of(dim: int, head_dims: tuple[int, ...], multiple: int = 8) -> int:
    """Returns the head dimension to run ``dim`` at: the next multiple, or the next width that the build has."""
    width = -(-dim // multiple) * multiple
    native = next((kernel for kernel in WIDTHS if kernel >= width), width)
    if not head_dims or native in head_dims:
        return width
    return next((kernel for kernel in head_dims if kernel > width), width)
