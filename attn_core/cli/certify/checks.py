"""The list of checks, in the order in which they run."""

from __future__ import annotations

from attn_core.cli.certify import accuracy, bits, containment, invariance, masks
from attn_core.cli.certify.check import Check, everything, no_dense, stable

CHECKS = {
    check.name: check
    for check in (
        Check(
            "bounds",
            "results and gradients stay within the bounds of the float64 reference",
            48,
            everything,
            accuracy.within_bounds,
        ),
        Check(
            "pages",
            "the same with keys and values in pages, and NaN in every unused place",
            16,
            lambda subject: no_dense(subject) or accuracy.without_pages(subject),
            accuracy.within_bounds,
            paged=True,
        ),
        Check(
            "mask",
            "a key that must not be seen has no effect, bit for bit; one that must be seen has one",
            24,
            everything,
            masks.sees_its_mask,
            adapt=masks.forward_alone,
            fits=masks.can_be_probed,
        ),
        Check(
            "nan",
            "a NaN or Inf in one document or batch row changes no bit of the others",
            16,
            containment.excludes,
            containment.contains_nan,
            adapt=stable,
            fits=containment.has_neighbours,
        ),
        Check(
            "repeats",
            "a deterministic call gives the same bits on every run",
            12,
            bits.promises_nothing,
            bits.repeats,
            adapt=bits.deterministic,
            fits=lambda spec: spec.deterministic and not spec.empty,
        ),
        Check(
            "frameworks",
            "torch and JAX give the same bits on one backend",
            24,
            bits.one_framework,
            bits.agrees,
            adapt=stable,
        ),
        Check(
            invariance.BATCH,
            "the bits of a row do not depend on the other rows, its place, padding or packing",
            24,
            invariance.unclaimed(invariance.BATCH),
            invariance.ignores_the_batch,
            adapt=invariance.plain_rows,
            fits=containment.has_neighbours,
        ),
        Check(
            invariance.PREFIX,
            "the bits of a query do not depend on how its prompt was cut, nor on the pages",
            12,
            invariance.unclaimed(invariance.PREFIX),
            invariance.ignores_the_cuts,
            adapt=invariance.prompts,
            fits=invariance.is_prompt,
        ),
    )
}
"""By name."""
