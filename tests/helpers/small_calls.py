"""Small calls on a GPU, for tests of how calls run and not of their results. Imports no JAX."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

import torch_frontend
from attn_core import SeqInfo, backends
from attn_core.selection import Selection

KINDS = ("dense", "window", "packed")
"""Causal calls: plain, with a sliding window of 33 keys, and four documents in a row."""


class SmallCall(NamedTuple):
    """One self-attention call in bfloat16 and a gradient of its output.

    q and dout ``[batch, seq, heads, head_dim]``, k and v ``[batch, seq, kv_heads, head_dim]``; packed: no batch axis.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    options: dict[str, Any]

    def selection(self, backend: str, trained: bool, **more: Any) -> Selection:
        """Whether a backend can run it, forward alone or with gradients, and the reasons if it cannot."""
        qkv = (self.q, self.k, self.v)
        return torch_frontend.explain(*qkv, **self.options, **more, backend=backend, needs_backward=trained)

    def run(self, backend: str, trained: bool, **more: Any) -> tuple[torch.Tensor, ...]:
        """(out,), or (out, dq, dk, dv)."""
        if not trained:
            return (torch_frontend.attention(self.q, self.k, self.v, **self.options, **more, backend=backend),)
        learned = [tensor.detach().requires_grad_() for tensor in (self.q, self.k, self.v)]
        out = torch_frontend.attention(*learned, **self.options, **more, backend=backend)
        return (out.detach(), *torch.autograd.grad(out, learned, self.dout))

    def laid_out(self, place: Any) -> SmallCall:
        """The same call with each tensor placed by ``place``."""
        return self._replace(**{name: place(getattr(self, name)) for name in ("q", "k", "v", "dout")})


def small_call(
    kind: str,
    *,
    batch: int = 2,
    seq: int = 128,
    heads: int = 4,
    head_dim: int = 64,
    seed: int = 0,
    device: str = "cuda",
) -> SmallCall:
    """A call of one of KINDS with standard normal values; packed, its tokens are ``batch * seq`` (more than 130)."""
    generator = torch.Generator(device).manual_seed(seed)
    lead = (batch * seq,) if kind == "packed" else (batch, seq)
    size = (*lead, heads, head_dim)
    tensors = [torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(4)]
    options: dict[str, Any] = {"causal": True}
    if kind == "window":
        options["window"] = 33
    if kind == "packed":
        lengths = [57, 1, 70, batch * seq - 128]
        offsets = SeqInfo.from_lengths(lengths, array=lambda offsets: torch.from_numpy(offsets).to(device))
        options["seq_info"] = offsets
    return SmallCall(*tensors, options)


def torch_backends() -> tuple[str, ...]:
    """The names of backends with GPU kernels for torch tensors, installed or not; without those for pages alone."""
    actual = {name: backends.load(name, "cuda") for name in backends.names()}
    return tuple(name for name, each in actual.items() if each.framework == "torch" and not each.takes_pages_alone)


def most_it_can(call: SmallCall, backend: str) -> tuple[bool, dict[str, Any]] | None:
    """(with gradients, options): gradients if the backend has them, equal bits every time if it promises them; or
    None."""
    for trained in (True, False):
        for more in ({"deterministic": True}, {}):
            if call.selection(backend, trained, **more).backend is not None:
                return trained, more
    return None


def why_not(call: SmallCall, backend: str) -> str:
    """Every reason why a backend cannot run the call's forward, in one line."""
    return f"{backend}: {'; '.join(call.selection(backend, False).reasons(backend))}"
