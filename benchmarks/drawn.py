"""Measures drawn calls of torch_frontend.attention beside F.scaled_dot_product_attention, and prints where it loses.

python -m benchmarks.drawn --seed 81 --json drawn.json               # 40 calls, the GPU's, of any size
python -m benchmarks.drawn --seed 81 --gigaflop 20 --by-name         # small calls, also on each backend by name

The calls are those of a sweep (benchmarks/fit/calls.py) that F.sdpa can express. A seed that no table was fitted to
judges the automatic choice. F.sdpa gets heads-first tensors without gaps, ours have the tokens first; both are also
timed in the other layout, F.sdpa on views of our tensors, as a model's layer has them. A window is a mask that was made
before.
"In a graph" is the time of a call inside a CUDA graph of many: the device's alone, without the host's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as functional

from attn_core import explain
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec
from attn_core.cli.tune import device_of
from attn_core.selection import Target, refusals
from benchmarks import tables
from benchmarks.fit.calls import SweepCase, as_called, flops, random_calls
from benchmarks.fit.sweep import candidates
from benchmarks.measure import Calls, Row, device_name, environment, graphed, measure, parser, ran, reason
from torch_frontend import attention

Tensor = torch.Tensor
OURS, SDPA = "attention", "F.sdpa"
SDPA_TOKENS_FIRST, OURS_HEADS_FIRST = "F.sdpa, tokens first", "attention, heads first"
IN_GRAPH = ", in a graph"
GRAPHED = 10
"""Calls in a graph."""
TURN = 0.004
KERNELS = ("math", "flash", "efficient", "cuDNN")
"""torch's kernels in the order of its numbers."""
SLOW = ("ffpa", "flex", "math", "xformers", "triton_ordered")
"""Backends that compile for seconds, or never win."""


class Call:
    """One call on tensors of its own, in our function or in F.sdpa."""

    def __init__(self, spec: AttentionSpec) -> None:
        def normal(*shape: int, grad: bool = spec.needs_backward) -> Tensor:
            return torch.randn(shape, device="cuda", dtype=getattr(torch, spec.dtype)).requires_grad_(grad)

        rows, keys = (spec.batch, spec.q_len, spec.num_heads), (spec.batch, spec.kv_len, spec.num_kv_heads)
        self.ours = [normal(*rows, spec.head_dim), normal(*keys, spec.head_dim), normal(*keys, spec.value_dim)]
        self.theirs = [each.detach().transpose(1, 2).contiguous() for each in self.ours]
        for each in self.theirs:
            each.requires_grad_(spec.needs_backward)
        self.dout = normal(*rows, spec.value_dim, grad=False)
        self.options: dict[str, Any] = {
            "causal": spec.causal,
            "window": None if spec.window == (None, None) else spec.window,
        }
        mask = bias = None
        if spec.mask_shape is not None:
            mask = torch.rand(spec.mask_shape, device="cuda") > 0.2
        if spec.bias_shape is not None:
            bias = normal(*spec.bias_shape, grad=False)
        self.options |= {"mask": mask, "bias": bias}
        self.of_sdpa: dict[str, Any] = {"enable_gqa": spec.num_heads != spec.num_kv_heads}
        square = spec.q_len == spec.kv_len and spec.window == (None, None)
        if spec.causal and square and mask is bias is None:
            self.of_sdpa["is_causal"] = True
        else:
            self.of_sdpa["attn_mask"] = _dense(spec, mask, bias)

    def attention(self, backend: str | None = None) -> Any:
        out = attention(*self.ours, backend=backend, **self.options)
        return torch.autograd.grad(out, self.ours, self.dout) if out.requires_grad else out

    def attention_heads_first(self) -> Any:
        out = attention(*self.theirs, layout="bhsd", **self.options)
        return torch.autograd.grad(out, self.theirs, self.dout.transpose(1, 2)) if out.requires_grad else out

    def sdpa(self) -> Any:
        out = functional.scaled_dot_product_attention(*self.theirs, **self.of_sdpa)
        return torch.autograd.grad(out, self.theirs, self.dout.transpose(1, 2)) if out.requires_grad else out

    def sdpa_tokens_first(self) -> Any:
        q, k, v = (each.transpose(1, 2) for each in self.ours)
        out = functional.scaled_dot_product_attention(q, k, v, **self.of_sdpa).transpose(1, 2)
        return torch.autograd.grad(out, self.ours, self.dout) if out.requires_grad else out

    def kernel_of_sdpa(self) -> str:
        """Returns which of torch's kernels F.sdpa takes."""
        options = {"attn_mask": None, "is_causal": False, **self.of_sdpa}
        return KERNELS[torch._fused_sdp_choice(*self.theirs, **options)]


def _dense(spec: AttentionSpec, mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Returns mask, bias and band as F.sdpa's mask; None if nothing is hidden or added."""
    edge = band(spec)
    if not edge.hides_nothing(spec.q_len, spec.kv_len):
        rows, columns = torch.arange(spec.q_len, device="cuda")[:, None], torch.arange(spec.kv_len, device="cuda")
        seen = edge.contains(rows, columns)
        mask = seen if mask is None else mask & seen
    if mask is None or bias is None:
        return bias if mask is None else mask
    return bias.masked_fill(~mask, -torch.inf)


def timed(spec: AttentionSpec, by_name: bool) -> Row:
    """Times a call beside F.sdpa, eager and in a graph; ``by_name``: and each backend that can run it."""
    call, target = Call(spec), Target.here("torch", device_of(None, "torch"))
    calls: Calls = {
        OURS: call.attention,
        SDPA: call.sdpa,
        SDPA_TOKENS_FIRST: call.sdpa_tokens_first,
        OURS_HEADS_FIRST: call.attention_heads_first,
    }
    graphs: Calls = {}
    both = tuple(calls.items())
    if by_name:
        names = [name for name in candidates(target) if name not in SLOW and not refusals(name, spec, target)]
        calls |= {name: partial(call.attention, name) for name in names}
    row = measure(calls, turn=TURN)
    for name, each in both:
        try:
            graphs[name + IN_GRAPH] = graphed(each, GRAPHED)
        except Exception as error:  # a call that cannot be captured
            row["not_run"][name + IN_GRAPH] = reason(error)
    for name, seconds in measure(graphs, turn=TURN)["seconds"].items():
        row["seconds"][name] = [each / GRAPHED for each in seconds]
    return {"backend": explain(spec, target).backend, "kernel of F.sdpa": call.kernel_of_sdpa(), **row}


def expressible(seed: int, gigaflop: float) -> Iterator[SweepCase]:
    """Yields the drawn calls that F.sdpa can express, up to a number of operations of the forward."""
    for case in random_calls(seed, "cuda"):
        spec = case.spec
        others = spec.softcap, spec.alibi_shape, spec.sinks or None, spec.documents
        if others == (None, None, None, None) and flops(spec) <= 1e9 * gigaflop:
            yield case


def main(arguments: list[str] | None = None) -> int:
    """Measures the calls of a seed; returns an exit code: 2 without a GPU."""
    options = parser(__doc__)
    options.add_argument("--seed", type=int, required=True, help="of the calls")
    options.add_argument("--calls", type=int, default=40)
    options.add_argument("--gigaflop", type=float, default=float("inf"), help="of the largest call's forward")
    options.add_argument("--by-name", action="store_true", help="times every backend that can run the call as well")
    parsed = options.parse_args(arguments)
    if device_name() == "cpu":
        print("needs an NVIDIA GPU, and torch sees none", file=sys.stderr)
        return 2
    now = environment()
    result: Row = {"environment": now, "device": device_name(), "seed": parsed.seed, "calls": []}
    for case in islice(expressible(parsed.seed, parsed.gigaflop), parsed.calls):
        for what in ("forward", "training") if case.training else ("forward",):
            spec = replace(as_called(case.spec), needs_backward=what == "training")
            ran(case.name, what, partial(timed, spec, parsed.by_name), result, now["date"], parsed.json)
    print(tables.drawn(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
