"""Job of ``context_torch_worker``: diffusers' context parallelism with our attention in torch's place.

Each of two processes has half of the tokens. With Ulysses, diffusers exchanges tokens for heads and calls torch's
function for half of the heads. Ring attention needs log-sum-exps, which diffusers' native backend has not; with
``diffusers_parallel`` it runs on our context parallelism.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import ContextParallelConfig
from diffusers_models import FAMILIES, flux, flux_inputs

from torch_frontend import diffusers as dropin
from torch_frontend import diffusers_parallel

PROCESSES = 2


def compared(degree: str) -> list[tuple[int, ...]]:
    """Compares a model over processes with the whole one; returns the queries' shapes in calls of torch's function."""
    given = flux_inputs(2, 5, 6)
    torch.manual_seed(0)
    whole, parts = flux(heads=4).eval(), flux(heads=4).eval()
    parts.load_state_dict(whole.state_dict())
    (expected,) = whole(**given, return_dict=False)  # as pipelines call it
    ran: list[tuple[int, ...]] = []
    ours = dropin.attention_dispatch

    def counted(*arguments: Any, **options: Any) -> torch.Tensor:
        ran.append(tuple(arguments[0].shape))
        return ours(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch, dropin.installed():
        patch.setattr(torch.accelerator, "device_count", lambda: 1)  # diffusers divides by it, and a CPU has 0
        patch.setattr(dropin, "attention_dispatch", counted)
        parts.enable_parallelism(config=ContextParallelConfig(**{degree: PROCESSES}))
        if degree == "ulysses_degree":
            (actual,) = parts(**given, return_dict=False)
        else:
            with pytest.raises(ValueError, match="Native attention does not support return_lse=True"):
                parts(**given, return_dict=False)
            with diffusers_parallel.installed():
                (actual,) = parts(**given, return_dict=False)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    return ran


CALLS = [(2, 2, 16, 16)] * FAMILIES["flux"].calls
"""With Ulysses: ``[batch, half of the heads, all tokens, head_dim]``."""
