"""A backend's results as the frontends return them to callers, in numpy, for tests that call a backend directly."""

from __future__ import annotations

from typing import Any

import numpy as np

from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients
from attn_core.correctness import reference


def callers_results(
    spec: AttentionSpec, inputs: Any, lse: Any, gradients: Gradients | None = None, dlse: Any = None
) -> tuple[np.ndarray, Gradients | None]:
    """(lse, gradients) with sinks in rows that see no key: the sink is their log-sum-exp and receives its gradient.

    numpy must be able to cast all arrays to float64.
    """
    lse = np.asarray(lse, np.float64)
    if not spec.sinks:
        return lse, gradients
    if spec.paged is not None:
        from attn_core.correctness.reference import gather_pages

        return callers_results(*gather_pages(spec, inputs), lse, gradients, dlse)
    rows, sink = reference.per_row(spec, lse), reference.softmax(spec, inputs).sink
    alone = (rows == -np.inf) & (sink != -np.inf)
    if gradients is not None:
        more = np.where(alone, reference.per_row(spec, dlse), 0.0).sum((0, 2))
        gradients = gradients._replace(dsinks=np.asarray(gradients.dsinks, np.float64) + more)
    return np.where(alone, sink, rows).reshape(lse.shape), gradients
