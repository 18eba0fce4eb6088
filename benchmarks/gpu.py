"""Measures whole calls on one GPU beside other libraries, and writes their TFLOP/s: the headlines of the project.

python -m benchmarks.gpu --json benchmarks/results/gpu-h200.json      # minutes; missing packages are named and skipped
python -m benchmarks.gpu --only causal --json gpu.json                # measures one call anew, and keeps other rows

The large call is causal: 4 rows of 4096 tokens, 32 query heads on 8 kv heads of 128 channels, bfloat16. A half of its
scores counts, and forward + backward has 3.5 times the operations of a forward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import cycle, islice
from typing import Any

import jax
import torch

import jax_frontend
import torch_frontend
from attn_core import SeqInfo
from benchmarks import jax_peers, torch_peers
from benchmarks.measure import Calls, Jobs, Row, measure, run
from benchmarks.pages import Pool, Shape
from benchmarks.tables import speeds
from examples.training import data, weights
from examples.training.config import GemmaConfig
from examples.training.jax_nn import JAX_NN, OURS, with_attention

FORWARD, TRAINING = "forward", "forward + backward"
LARGE, TINY = (4, 4096, 32, 8, 128), (1, 64, 4, 4, 64)
"""(batch, tokens, heads, kv_heads, head_dim)."""
FLOPS = 4 * 4 * 32 * 4096 * 4096 * 128 / 2
SOFTCAP, DOCUMENTS, CHAIN, STEPS = 50.0, 16, 24, 8
TURN, REST = 0.05, 0.3
"""Seconds of a turn, and before each turn: a GPU is slower after a kernel that drew much power."""
Attend = Callable[..., Any]
WITH_GRADIENTS: dict[str, Callable[[], Attend]] = {
    "flash2": torch_peers.flash2,
    "flash4": torch_peers.flash4,
    "sdpa_cudnn": torch_peers.aten_cudnn,
    "sdpa_flash": torch_peers.aten_flash,
}
PEERS = {FORWARD: {"flash3": torch_peers.flash3_op, **WITH_GRADIENTS}, TRAINING: WITH_GRADIENTS}
WIDE = GemmaConfig(
    hidden_size=1024,
    mlp_size=4096,
    num_layers=4,
    num_heads=16,
    num_kv_heads=4,
    head_dim=64,
    window=512,
    max_positions=4096,
)


def tensors(shape: tuple[int, ...], training: bool) -> list[torch.Tensor]:
    """Returns q, k, v and dout, standard normal."""
    batch, tokens, heads, kv_heads, dim = shape
    generator = torch.Generator("cuda").manual_seed(0)
    made = [
        torch.randn(batch, tokens, each, dim, generator=generator, device="cuda", dtype=torch.bfloat16)
        for each in (heads, kv_heads, kv_heads, heads)
    ]
    return [*(tensor.requires_grad_(training) for tensor in made[:3]), made[3]]


def in_torch(make: Callable[[], Attend], what: str, shape: tuple[int, ...] = LARGE) -> Callable[[], Any]:
    """Returns a call in torch, with gradients in training. A package that is missing fails in the first call."""
    q, k, v, dout = tensors(shape, what == TRAINING)
    made: list[Attend] = []

    def call() -> Any:
        if not made:
            made.append(make())
        if what == FORWARD:
            with torch.no_grad():
                return made[0](q, k, v)
        return torch.autograd.grad(made[0](q, k, v), (q, k, v), dout)

    return call


def in_jax(make: Callable[[], Attend], what: str, shape: tuple[int, ...] = LARGE, chain: int = 1) -> Callable[[], Any]:
    """Returns a jitted call, with gradients in training; of a chain, each call runs on the output of the last."""
    q, k, v, dout = (jax.dlpack.from_dlpack(tensor.detach()) for tensor in tensors(shape, False))

    @jax.jit
    def program(q: Any, k: Any, v: Any, dout: Any) -> Any:
        attend = make()

        def forward(last: Any, k: Any, v: Any) -> Any:
            for _ in range(chain):
                last = attend(last, k, v)
            return last

        if what == FORWARD:
            return forward(q, k, v)
        out, pull = jax.vjp(forward, q, k, v)
        return out, pull(dout)

    return lambda: program(q, k, v, dout)


def ours(backend: str | None = None, frontend: Any = torch_frontend, **options: Any) -> Callable[[], Attend]:
    """Makes ``attention``, on the automatic choice without a backend."""
    return lambda: partial(frontend.attention, causal=True, backend=backend, **options)


def causal(what: str) -> Row:
    """Returns attention() beside the bare kernels that it calls, and with the promise of equal bits."""
    calls: Calls = {f"bare {name}": in_torch(make, what) for name, make in PEERS[what].items()}
    calls |= {f"attention {name}": in_torch(ours(name), what) for name in PEERS[what]}
    calls["attention"] = in_torch(ours(), what)
    calls["attention, invariant"] = in_torch(ours(invariant="batch"), what)
    return _large(what, calls)


def softcapped(what: str) -> Row:
    """Returns a softcap on FlashAttention-4 (ours, as shipped), FlashAttention-2 and FlexAttention."""
    capped = torch_peers.softcapped(SOFTCAP)
    calls = {
        "bare flash2": in_torch(partial(torch_peers.flash2, SOFTCAP), what),
        "flash4 as shipped": in_torch(partial(torch_peers.flash4, SOFTCAP), what),
        "FlexAttention": in_torch(partial(torch_peers.flex, LARGE[1], torch_peers.causal, capped), what),
        "attention flash2": in_torch(ours("flash2", softcap=SOFTCAP), what),
        "attention flash4": in_torch(ours("flash4", softcap=SOFTCAP), what),
        "attention": in_torch(ours(softcap=SOFTCAP), what),
    }
    return _large(what, calls)


def packed(what: str) -> Row:
    """Returns documents of equal lengths packed in one row, beside a batch of them."""
    rows, tokens, *heads = LARGE
    shape, batch = (1, rows * tokens, *heads), (DOCUMENTS, rows * tokens // DOCUMENTS, *heads)
    info = SeqInfo.from_lengths([batch[1]] * DOCUMENTS, array=lambda offsets: torch.from_numpy(offsets).cuda())
    calls = {
        "attention": in_torch(ours(seq_info=info), what, shape),
        "attention, invariant": in_torch(ours(seq_info=info, invariant="batch"), what, shape),
        "attention, a batch": in_torch(ours(), what, batch),
    }
    calls |= {f"bare {name}, a batch": in_torch(make, what, batch) for name, make in PEERS[what].items()}
    return {"flops": _flops(what) * batch[1] / tokens, **measure(calls, turn=TURN, rest=REST)}


def jitted(what: str) -> Row:
    """Returns jitted attention beside torch on the same kernels, jax.nn with cuDNN and tokamax."""
    calls: Calls = {}
    for name in ("flash3", "flash4") if what == FORWARD else ("flash4",):
        calls[f"attention in torch {name}"] = in_torch(ours(name), what)
        calls[f"attention in JAX {name}"] = in_jax(ours(name, jax_frontend), what)
    calls["attention in JAX"] = in_jax(ours(None, jax_frontend), what)
    for name, peer in (("jax.nn cudnn", "jax.nn, cuDNN"), ("tokamax mosaic", "tokamax, Mosaic GPU")):
        calls[name] = in_jax(partial(jax_peers.PEERS[peer], {"causal": True}), what)
    return _large(what, calls)


def tiny_chain() -> Row:
    """Returns the time of a tiny call in a jitted chain of them, in which the bridge weighs most."""
    makers: dict[str, Callable[[], Attend]] = {
        f"attention in JAX {name}": ours(name, jax_frontend) for name in ("flash3", "flash4")
    }
    makers["jax.nn cudnn"] = partial(jax_peers.PEERS["jax.nn, cuDNN"], {"causal": True})
    found = measure({name: in_jax(make, FORWARD, TINY, CHAIN) for name, make in makers.items()}, turn=TURN)
    found["seconds"] = {name: [each / CHAIN for each in times] for name, times in found["seconds"].items()}
    return found


def decoding() -> Row:
    """Returns decoding of 64 sequences of 8192 tokens from pages of 16, beside the same keys without pages."""
    shape = Shape(64, 8192, 32, 8)
    rows = torch.randn(64, 1, 32, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(64, 8192, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    contiguous = partial(torch_frontend.attention, rows, k, v, causal=True)
    return measure({"attention": Pool(shape).call(), "attention, contiguous": contiguous}, turn=TURN)


def training_step() -> Row:
    """Returns steps of the training example's Flax model, made wider, with our attention and with jax.nn's.

    jax.nn has neither softcap nor packed documents, so each row is one document and scores are not capped.
    """
    text, first = data.python_documentation(), weights.initial(WIDE, 0)
    batches = list(islice(data.dense_batches(text, 4, 4096, seed=0), STEPS))

    def steps(name: str, **options: Any) -> Callable[[], Any]:
        trainer = with_attention(name, WIDE, first, steps=1000, device="cuda", dtype="bfloat16", **options)
        endless = cycle(batches)
        return lambda: trainer.step(next(endless))

    calls = {
        "attention": steps(OURS),
        "attention flash4": steps(OURS, backend="flash4"),
        "jax.nn cudnn": steps(JAX_NN, implementation="cudnn"),
    }
    return measure(calls, turn=0.2, rounds=15)


def _flops(what: str) -> float:
    return FLOPS * (1.0 if what == FORWARD else 3.5)


def _large(what: str, calls: Calls) -> Row:
    return {"flops": _flops(what), **measure(calls, turn=TURN, rest=REST)}


JOBS: Jobs = {
    (name, what): partial(job, what)
    for name, job in {"causal": causal, "softcap 50": softcapped, "16 documents": packed, "jax.jit": jitted}.items()
    for what in (FORWARD, TRAINING)
}
JOBS |= {
    ("chain of 24 tiny calls", "jax.jit"): tiny_chain,
    ("decode 64 x 8192 tokens from pages of 16", FORWARD): decoding,
    ("training step of a Flax model", "jax.jit"): training_step,
}

if __name__ == "__main__":
    sys.exit(run(__doc__, JOBS, speeds))
