"""A call of Unsloth's ``run_attention`` as a call of ``attention``, for torch tensors and JAX arrays alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from attn_core.dropins.unsloth.arguments import (
    AttentionConfig,
    AttentionContext,
    check_fields,
    check_sizes,
    documents,
    preference,
)
from attn_core.dropins.unsloth.prefix import shared_prefixes
from attn_core.dropins.unsloth.request import interpret, split_mask


class HostCall(NamedTuple):
    """The call in our terms.

    Attributes:
        options: the keywords of ``attention`` besides ``backend``.
        preferred: the backends to try, or None for automatic choice.
        joined: the axes in place of ``[bsz, len]`` if the rows are laid end to end, else None.
        axes: of the result, ``[bsz, q_len, n_heads, value_dim]``.
    """

    options: dict[str, Any]
    preferred: tuple[str, ...] | None
    joined: tuple[int, ...] | None
    axes: tuple[int, ...]

    def rows(self, *arrays: Any) -> list[Any]:
        """Returns arrays ``[bsz, heads, len, dim]`` as ``attention`` takes them."""
        rows = [array.swapaxes(1, 2) for array in arrays]  # [bsz, len, heads, dim]
        return rows if self.joined is None else [array.reshape(*self.joined, *array.shape[2:]) for array in rows]

    def split(self, out: Any) -> Any:
        """Returns the output of ``attention`` in the axes of the result."""
        return out if self.joined is None else out.reshape(self.axes)


def prepare(
    framework: str,
    device: str,
    check: Callable[[str, Any], None],
    config: AttentionConfig,
    context: AttentionContext,
    operands: tuple[Any, Any, Any],
) -> HostCall:
    """Returns the call of Q, K and V, ``[bsz, heads, len, dim]``.

    Args:
        check: raises an error that names an argument unless its value is an array of the framework.
    """
    check_fields(config, context)
    check_sizes(config, context, *(array.shape for array in operands))
    request = interpret(config, context)
    preferred = preference(config, framework, device, request.options["invariant"])
    axes = (context.bsz, context.q_len, context.n_heads, operands[2].shape[3])
    if context.prefix_seg_info is not None:
        # The ranges say what is visible, and every other option but these is refused.
        options = {name: request.options[name] for name in ("softcap", "scale", "deterministic", "invariant")}
        return HostCall({**options, "key_ranges": shared_prefixes(request, context)}, preferred, (1, -1), axes)
    if request.mask is not None:
        check(request.mask_name, request.mask)
    mask, bias = split_mask(request, context)
    info = request.documents or documents(context)
    options = {**request.options, "mask": mask, "bias": bias, "seq_info": info}
    return HostCall(options, preferred, None if info is None else (-1,), axes)
