"""Stand-ins for the kernels of flash4's sinks, in torch's operations, for machines without a GPU."""

from __future__ import annotations

from typing import Any

import torch

from attn_core.backends.shared.rewrites import sink_gradient, with_sinks


def launch(kernel: Any, arguments: tuple[Any, ...]) -> None:
    """Does what ``own_kernels.launch`` does with a kernel of ``sinks_kernel``."""
    name = kernel.name.removeprefix("attn_core.").partition("(")[0]
    if name == "AddSinks":
        out, lse, sinks, new_lse = arguments
        scaled, whole = with_sinks(out, lse, sinks)
        out.copy_(scaled)
        new_lse.copy_(whole)
    elif name == "SinkGradient":
        out, lse, dout, dlse, sinks, sums = arguments
        sums.zero_()
        sums[:, 0, 0] = sink_gradient(sinks, out, lse, dout, dlse)
    elif name == "SumOfSinks":
        sums, dsinks = arguments
        dsinks.copy_(torch.sum(sums, (1, 2)))
    else:
        raise AssertionError(f"a kernel without a stand-in: {kernel.name}")
