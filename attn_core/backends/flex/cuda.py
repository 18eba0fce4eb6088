"""Compiled FlexAttention on NVIDIA GPUs: the spec as a score function and a mask function in torch's Triton kernels.

Limits: sm80 and later, head_dim up to 256, no dropout, no gradient of the bias. Causal, windowed and packed calls
compute only the blocks they need; document and position of a packed token are read on the device, so that memory grows
with the tokens and the block tables (blocks.py). Each signature compiles on its first run, in seconds. It covers the
scale of calls without softcap, but not softcap, lengths, batch, window distances and offsets (program.py).
Gradients exist only through autograd: ``backward`` runs the forward again, ``shortcut`` lets torch save it.
Corrections: head dims between powers of two are zero-padded (the kernel's work is the same, and its block sizes are
tuned for powers of two); TF32 is off for float32; a NaN in one packed document would reach documents in the same block
through ``0 * NaN``, so non-finite values are set to 0 before the kernel and their rows to NaN after it.
Sinks are an epilogue, because the kernels have none.
Upstream: ``torch.nn.attention.flex_attention``, torch 2.11 to 2.15, with the Triton that belongs to it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from attn_core.backends.contract import Backend, Timing
from attn_core.backends.flex import functions, learned
from attn_core.backends.flex.blocks import BLOCK
from attn_core.backends.flex.functions import PackedTokens
from attn_core.backends.flex.operands import FlexOperands, arrange, hides, length_classes, offsets
from attn_core.backends.flex.operands import operands as operands_of
from attn_core.backends.flex.program import Signature, flex, program
from attn_core.backends.shared import first_calls
from attn_core.backends.shared.autograd import recording, without_gradient
from attn_core.backends.shared.kernel_limits import tables
from attn_core.backends.shared.plain.attention import without_autocast
from attn_core.backends.shared.rewrites import power_of_two
from attn_core.backends.support import Build, Support
from attn_core.call.functions import has_functions
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs
from attn_core.expressions.on_torch import torch_function

if TYPE_CHECKING:
    from torch import Tensor

FORWARD = Support(
    kernel="FlexAttention on CUDA",
    devices=("cuda",),
    dtypes=("float32", "bfloat16", "float16"),
    max_head_dim=256,
    value_dim=True,
    grouped_heads=True,
    alignments=("bottom_right", "top_left"),
    causal=True,
    window=True,
    softcap=True,
    mask=True,
    key_ranges=True,
    mask_mod=True,
    score_mod=True,
    aux_gradients=True,
    bias=True,
    alibi=True,
    sinks=True,
    packed=True,
    deterministic=True,
    lse=True,
    lse_gradient=True,
)
BACKWARD = FORWARD


def refuses(spec: AttentionSpec, device: str, build: Build | None) -> tuple[str, ...]:
    """Refuses GPUs before sm80, where nobody has run the Triton kernels, and tables beyond 32-bit indices."""
    old = device.startswith("sm") and int(device[2:]) < 80
    reasons = (f"device {device}: FlexAttention on CUDA needs sm80",) if old else ()
    return (*reasons, *learned.refusals(spec, FORWARD.kernel), *tables(spec, FORWARD.kernel))


def probe() -> str:
    """Imports FlexAttention's symbols and Triton, and returns torch's version."""
    import torch
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

    _ = (AuxRequest, BlockMask, flex_attention, import_module("triton"))
    return torch.__version__


@lru_cache(maxsize=4096)
def lower(spec: AttentionSpec) -> dict[str, Any]:
    """Returns flex_attention's scale, enable_gqa and kernel_options, its head dims (widths), and the parts of its score
    and mask functions, in order."""
    score = {"softcap": spec.softcap, "score_mod": spec.score_mod, "bias": spec.bias_shape, "alibi": spec.alibi_shape}
    mask: dict[str, Any] = {
        "documents": spec.packed,
        "band": hides(spec),
        "mask": spec.mask_shape,
        "ranges": spec.key_ranges_shape,
        "mask_mod": spec.mask_mod,
    }
    whole = spec.q_len % BLOCK == 0 and spec.kv_len % BLOCK == 0
    # The kernel for few queries splits the keys. Let torch choose it only within that kernel's limits.
    few = spec.q_len == 1 and spec.group_size <= 64
    return {
        "scale": spec.scale,
        "enable_gqa": spec.group_size > 1,
        "widths": (power_of_two(max(spec.head_dim, spec.value_dim)), power_of_two(spec.value_dim)),
        "score": tuple(name for name, used in score.items() if used),
        "mask": tuple(name for name, used in mask.items() if used),
        "kernel_options": {
            "BACKEND": "AUTO" if few else "TRITON",
            "IS_DIVISIBLE": whole,
            **functions.kernel_options(spec),
        },
    }


@without_gradient
def forward(spec: AttentionSpec, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """See ``Backend.forward``."""
    with without_autocast(inputs.q):  # flex_attention would cast q, k and v to its dtype
        q, k, v = _with_batch(spec, *(tensor.detach() for tensor in inputs[:3]))
        operands = operands_of(spec, inputs)
        if operands.places is None:
            out, lse = _attend(spec, q, k, v, operands)
        else:
            clean = _contain(spec, operands.places, inputs, (), (v,))
            out, lse = _attend(spec, q, k, clean.tensors[0], operands)
            _mark(out, clean.rows, lse)
        if spec.sinks:
            out, lse = functions.with_sinks(out.transpose(1, 2), lse, inputs.sinks)
            out = out.transpose(1, 2)
    return (out[0], lse[0]) if spec.packed else (out, lse)


def shortcut(spec: AttentionSpec) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """See ``Backend.shortcut_of``: autograd keeps what the compiled forward saved, and runs its backward kernel."""
    import torch

    more = (spec.mask_shape, spec.key_ranges_shape, spec.bias_shape, spec.alibi_shape, spec.documents)
    if not spec.needs_backward or spec.sinks or has_functions(spec) or any(extra is not None for extra in more):
        return None

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if not torch.is_grad_enabled():
            return forward(spec, Inputs(q, k, v))
        # The kernel always computes all three gradients, so one program serves every combination of them.
        q, k, v = (tensor if tensor.requires_grad else tensor.detach().requires_grad_() for tensor in (q, k, v))
        with without_autocast(q):
            return _attend(spec, q, k, v, operands_of(spec, Inputs(q, k, v)))

    return run


@without_gradient
def backward(
    spec: AttentionSpec, inputs: Inputs, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Gradients:
    """See ``Backend.backward``. Runs the forward again, because its saved tensors are not accessible."""
    import torch

    if torch.is_inference_mode_enabled():  # autograd takes no inference tensors
        with torch.inference_mode(False):
            out, lse, dout, dlse = (t if t is None else t.clone() for t in (out, lse, dout, dlse))  # type: ignore[assignment]
            copies = Inputs(*(t if t is None else t.clone() for t in inputs))
            return backward(spec, copies, out, lse, dout, dlse)
    clean = None
    with without_autocast(inputs.q):
        q, k, v, out, dout = _with_batch(spec, *(tensor.detach() for tensor in (*inputs[:3], out, dout)))
        lse, dlse = (t if t is None or not spec.packed else t[None] for t in (lse, dlse))  # type: ignore[assignment]
        share = _SinkShare(inputs.sinks, out, lse, dout, dlse) if spec.sinks else None
        operands = operands_of(spec, inputs)
        if operands.places is not None:
            clean = _contain(spec, operands.places, inputs, (q, dout), (k, v))
            q, dout, k, v = clean.tensors
        with recording():
            q, k, v = (tensor.detach().requires_grad_() for tensor in (q, k, v))
            operands = operands._replace(learned=learned.leaves(spec, operands.aux))
            results = _attend(spec, q, k, v, operands)
            if share is not None:
                dout, dlse = share.inner(results[1].detach(), dout)
            cotangents = (dout,) if dlse is None else (dout, dlse)
            dq, dk, dv, *parts = torch.autograd.grad(
                results[: len(cotangents)], (q, k, v, *operands.learned), cotangents
            )
        if clean is not None:
            _mark(dq, clean.rows, results[1].detach())
            dk, dv = _mark(dk, clean.keys), _mark(dv, clean.keys)
        daux = learned.summed(spec, operands.aux, parts, None if clean is None else clean.rows.any() | clean.keys.any())
    dq, dk, dv = (dq[0], dk[0], dv[0]) if spec.packed else (dq, dk, dv)
    return Gradients(dq, dk, dv, None, share and share.dsinks, **daux)


def warm_up(spec: AttentionSpec) -> None:
    """Compiles and runs the call once on the current device, on contiguous zeros, with slopes in float32."""
    import torch

    inputs = first_calls.zeros(spec)
    out, lse = forward(spec, inputs)
    if spec.needs_backward:
        backward(spec, inputs, out, lse, torch.zeros_like(out), None)


class _Contained(NamedTuple):
    """Packed tensors without NaN and Inf, and which rows and keys must become NaN, bool ``[tokens]`` each."""

    tensors: tuple[Tensor, ...]
    rows: Tensor
    keys: Tensor


def _contain(
    spec: AttentionSpec, where: PackedTokens, inputs: Inputs, by_query: tuple[Tensor, ...], by_key: tuple[Tensor, ...]
) -> _Contained:
    """Replaces non-finite elements of tensors ``[1, tokens, heads, dim]`` by 0, and finds the affected rows and keys.

    A non-finite query marks its own row; a non-finite key marks every row of its document. Either marks every key of
    that document.
    """
    tensors, layouts = zip(*map(arrange, (*by_query, *by_key)))
    shapes = tuple((str(tensor.dtype), tuple(tensor.shape[2:])) for tensor in tensors)
    clean = program(_clear, ("q",) * len(by_query), shapes, layouts, length_classes(spec))
    return clean(where, *offsets(inputs), *tensors)


def _clear(how: tuple[Any, ...], where: PackedTokens, cu_q: Tensor, cu_k: Tensor, *tensors: Tensor) -> _Contained:
    """Returns operands with 0 in place of NaN and Inf, and which rows and keys get NaN afterwards.

    flex multiplies hidden values by the weight 0, and 0 * NaN is NaN. So a NaN would reach other documents whose pairs
    are in the same block.

    Args:
        tensors: those of queries, as many as ``how`` says, then those of keys: ``[1, tokens, heads, dim]``.
    """
    import torch

    count = len(how[0])  # the signature holds a tuple of this length because a number would become a symbol
    finite = [torch.isfinite(tensor) for tensor in tensors]
    clean = tuple(torch.where(fine, tensor, 0.0) for fine, tensor in zip(finite, tensors))
    bad = [~fine.all(3).all(2)[0] for fine in finite]  # [tokens]
    bad_rows, bad_keys = torch.zeros_like(where.of_query, dtype=torch.bool), bad[count]
    for one in bad[:count]:
        bad_rows = bad_rows | one
    for one in bad[count + 1 :]:
        bad_keys = bad_keys | one
    by_keys, by_rows = _in_documents(bad_keys, cu_k), _in_documents(bad_rows, cu_q)
    documents = cu_q.shape[0] - 1
    of_query, of_key = where.of_query.clamp(0, documents - 1), where.of_key.clamp(0, documents - 1)
    rows = bad_rows | (by_keys[of_query] & (where.of_query >= 0))
    keys = (by_keys | by_rows)[of_key] & (where.of_key < documents)
    return _Contained(clean, rows, keys)


def _in_documents(bad: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Returns which documents contain a bad token: bool ``[documents]``."""
    import torch

    total = torch.nn.functional.pad(bad.cumsum(0), (1, 0))
    return total[cu_seqlens.clamp(0, bad.shape[0])].diff() > 0


def _mark(results: Tensor, tokens: Tensor, lse: Tensor | None = None) -> Tensor:
    """Writes NaN into ``[1, tokens, heads, dim]`` at ``tokens``, except in rows that see no key according to lse."""
    import torch

    places = tokens[None, :, None, None]
    if lse is not None:  # [1, heads, tokens] -> [1, tokens, heads, 1]
        places = places & (lse != -torch.inf).transpose(1, 2)[..., None]
    return results.masked_fill_(places, torch.nan)


# Sinks. With w the sink's share of a row's weight, out' = (1 - w) * out and lse' = log(exp(lse) + exp(sink)). The
# kernel's backward gets (1 - w) * dout and (1 - w) * dlse + w * delta, with delta = sum(dout * out').


class _SinkShare:
    """The gradients through sinks.

    Attributes:
        dsinks: the gradient of the sinks, ``[heads]``.
    """

    def __init__(self, sinks: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> None:
        import torch

        empty = lse == -torch.inf
        self._sinks = sinks.detach().to(lse.dtype)[:, None]
        share = torch.exp(self._sinks - lse).masked_fill(empty, 0.0)
        delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(1, 2)  # [batch, heads, q_len]
        self._outer = torch.zeros_like(delta) if dlse is None else dlse.masked_fill(empty, 0.0)
        self._share_delta = share * delta
        self.dsinks = -(share * (delta - self._outer)).sum((0, 2)).to(sinks.dtype)

    def inner(self, lse: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
        """Returns dout and dlse for the kernel, from its own log-sum-exp without sinks.

        1 - w comes from that log-sum-exp, because ``1 - exp(sink - lse)`` has no correct digit if the sink has nearly
        all of a row's weight.
        """
        import torch

        rest = torch.sigmoid(lse - self._sinks).masked_fill(lse == -torch.inf, 0.0)
        return (dout * rest.transpose(1, 2)[..., None]).to(dout.dtype), rest * self._outer + self._share_delta


@lru_cache(maxsize=4096)
def _signature(spec: AttentionSpec, learns: bool) -> Signature:
    """Returns what a compiled program depends on: calls of one signature share it."""
    how = lower(spec)
    score_mod = learned.read_alone(spec).tree if learns else spec.score_mod
    return Signature(
        dtype=spec.dtype,
        heads=(spec.num_heads, spec.num_kv_heads),
        widths=how["widths"],
        enable_gqa=how["enable_gqa"],
        scale=repr(how["scale"] if spec.softcap is None else 1.0),  # the softcap includes the scale
        group=str(spec.group_size),
        score=how["score"],
        mask=how["mask"],
        options=tuple(how["kernel_options"].items()),
        mask_mod=None if spec.mask_mod is None else torch_function(spec.mask_mod),
        score_mod=None if score_mod is None else torch_function(score_mod, base_2=True),
        length_classes=length_classes(spec),
    )


def _with_batch(spec: AttentionSpec, *tensors: Tensor) -> tuple[Tensor, ...]:
    """``[tokens, heads, dim]`` -> ``[1, tokens, heads, dim]`` if packed."""
    return tuple(tensor[None] for tensor in tensors) if spec.packed else tensors


def _attend(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, operands: FlexOperands) -> tuple[Tensor, Tensor]:
    """Returns out ``[batch, q_len, heads, value_dim]`` and lse ``[batch, heads, q_len]``, differentiable."""
    signature = _signature(spec, bool(operands.learned))
    wide, value_wide = signature.widths
    padded = (_padded(q, wide), _padded(k, wide), _padded(v, value_wide))
    (q, k, v), layouts = zip(*map(arrange, padded))
    tensors = (operands.mask, operands.bias, operands.slopes)
    given = (*tensors, *(operands.ranges or ()), *operands.aux, *operands.learned)
    tables = [None if t is None else (str(t.dtype), tuple(n == 1 for n in t.shape)) for t in given]
    run = program(flex, signature, layouts, tuple(tables))
    # [batch, tokens, heads, dim] -> [batch, heads, tokens, dim] and back, as views
    out, lse = run(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), *operands)
    out = out.transpose(1, 2)
    return (out if out.shape[3] == spec.value_dim else out[..., : spec.value_dim].contiguous()), lse


def _padded(tensor: Tensor, width: int) -> Tensor:
    import torch

    missing = width - tensor.shape[-1]
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


BACKEND = Backend(
    name="flex",
    framework="torch",
    requires="torch>=2.11 with its triton",
    forward_claims=FORWARD,
    backward_claims=BACKWARD,
    refuses=refuses,
    probe=probe,
    lower=lower,
    forward=forward,
    backward=backward,
    warm_up=warm_up,
    shortcut=shortcut,
    # It compiles a kernel for each kind of call, so it comes after kernels that are there.
    preference={"cuda": 80},
    # It compiles a kernel for every kind of call, so that few calls say how fast it is. In float32 it takes 2 to 200
    # times as long as sdpa_efficient, depending on the kernel that it compiles to.
    timing=Timing(caution=1.3, compiles_for_seconds=True, behind="sdpa_efficient"),
)
