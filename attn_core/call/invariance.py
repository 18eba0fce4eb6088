"""What cannot have the same bits in every batch, on any backend: the combinations that ``invariant`` excludes."""

from __future__ import annotations

from typing import Any

from attn_core.errors import SpecError


def check_invariant_call(spec: Any) -> None:
    """Raises SpecError for the first property of an spec with ``invariant`` that makes it impossible."""
    excluded = (
        (spec.dropout, f"dropout={spec.dropout}", "which weights drop depends on a row's place in the batch"),
        (spec.bias_gradient, "a gradient of the bias", "it is a sum over all rows that share the bias"),
        (spec.aux_gradients, "a gradient of aux", "it is a sum over all rows that read the array"),
        (spec.partial, "a part of each row's keys", "the parts of context parallelism depend on the number of ranks"),
        (_sees_later_keys(spec), "keys behind a query", "a query's result would depend on tokens after it"),
    )
    for present, what, why in excluded:
        if present:
            raise SpecError(f"invariant={spec.invariant!r}: expected no {what.removeprefix('a ')}, because {why}")


def _sees_later_keys(spec: Any) -> bool:
    """Returns whether a query sees keys behind its own position although the call promises "prefix"."""
    if spec.invariant != "prefix" or spec.key_ranges_shape is not None:  # ranges say themselves what a query sees
        return False
    return not spec.causal and spec.window[1] != 0


def refuse_over_ranks(invariant: str | None) -> None:
    """Raises SpecError for a layer with ``invariant`` whose rows are spread over ranks."""
    if invariant is not None:
        raise SpecError(
            f"invariant={invariant!r}: expected None with context parallelism, because the parts of a row, and so the "
            "order of sums, depend on the number of ranks"
        )
