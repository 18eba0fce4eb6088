"""attention for torch tensors: the public functions."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from attn_core.call.options import Options, checked, flag, is_plain_window, normalise_window, requested_names
from attn_core.call.seq_info import SeqInfo, check_cu_seqlens
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs
from attn_core.errors import SpecError
from attn_core.selection import NoBackendError, Selection, override
from torch_frontend.dispatch import autocast, autograd, lone_sinks, offsets, ops, plan, transforms
from torch_frontend.dispatch.plain import are_jit_traces_active, are_modes_active, beside

Tensor = torch.Tensor
_is_compiling, _is_grad_enabled, _requested = torch.compiler.is_compiling, torch.is_grad_enabled, override.requested
_is_autocast_on, _is_transformed, _modes = autocast.is_on, transforms.are_active, are_modes_active
Window = int | tuple[int | None, int | None] | None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    alignment: str = "bottom_right",
    window: Window = None,
    softcap: float | None = None,
    scale: float | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    seq_info: Any = None,
    dropout: float = 0.0,
    deterministic: bool = False,
    backend: str | tuple[str, ...] | None = None,
    return_lse: bool = False,
    dropout_rng: torch.Generator | None = None,
) -> Any:
    """Scaled dot-product attention on the best kernel that honours every argument.

    Args:
        q: ``[batch, q_len, heads, head_dim]``; packed ``[tokens, heads, head_dim]``, alone or as one row ``[1, ...]``.
        k: ``[batch, kv_len, kv_heads, head_dim]``; query head h reads kv head ``h // (heads // kv_heads)``.
        v: ``[batch, kv_len, kv_heads, value_dim]``. float64, float32, bfloat16 or float16, as q and k. Any strides.
        causal: query i sees key ``j <= i + offset``; ``alignment`` "bottom_right" means offset = kv_len - q_len,
            "top_left" 0. It also anchors ``window`` and ALiBi.
        window: ``W`` (needs causal): W keys, self included; or inclusive distances ``(left, right)``, None unbounded.
        softcap: ``s = softcap * tanh(s / softcap)``, after scale, before bias and mask.
        scale: factor on ``q . k``; ``1 / sqrt(head_dim)`` when None.
        mask: bool, True = visible; bias: float, added. Broadcastable to ``[batch, heads, q_len, kv_len]``.
        alibi_slopes: ``[heads]`` or ``[batch, heads]``: adds ``-slope * |i + offset - j|``. No gradient.
        sinks: ``[heads]``: one logit per head that joins every row's softmax without a value.
        seq_info: a ``SeqInfo`` or ``(seq_lens, cu_seqlens, max_seqlen)``: packed documents, which never see each other.
        dropout: probability of dropping a softmax weight; drawn from ``dropout_rng`` (best on the CPU, whatever q's
            device is) or torch's default generator.
        deterministic: only kernels that give the same bits on every run.
        backend: a name, which runs or raises; names in order of preference; or None for automatic choice.
        return_lse: also return the log-sum-exp, ``[batch, heads, q_len]`` (packed ``[heads, tokens]``), natural log,
            float32 (float64 for float64 inputs); of a row that sees nothing its sink, else -inf, and its output is 0.

    Returns:
        The output, of q's rank with value_dim channels and q's dtype; or ``(output, lse)``. Where ``torch.autocast`` is
        on, q, k, v and bias are taken in its dtype, float64 ones apart, and the output is in that.

    Raises:
        ShapeError, DTypeError, DeviceError, SpecError: for arguments that describe no call.
        NoBackendError: when no backend, or not the one asked for, can run it; the message has every reason.
    """
    no_extras = mask is None and bias is None and alibi_slopes is None and sinks is None and seq_info is None
    seen = _is_compiling() or _is_autocast_on() or _is_transformed() or _modes() or forward_ad._current_level >= 0
    plain = type(q) is type(k) is type(v) is Tensor  # the careful path knows the others
    odd_window = window is not None and type(window) is not int and not is_plain_window(window)
    if seen or not plain or not no_extras or dropout or odd_window or dropout_rng is not None:
        tensors = (q, k, v, mask, bias, alibi_slopes, sinks)
        options = Options(causal, alignment, window, softcap, scale, None, None, dropout, deterministic, return_lse)
        given = gathered(tensors, seq_info, options, dropout_rng)
        return lone_sinks.for_caller(attend(*given, backend), given[0], seq_info)
    try:
        needs_backward = _is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        made = plan.dense_plan(
            q.shape,
            k.shape,
            v.shape,
            q.dtype,
            k.dtype,
            v.dtype,
            q.device,
            k.device,
            v.device,
            needs_backward,
            _requested() if backend is None else backend,
            causal,
            alignment,
            window,
            softcap,
            scale,
            dropout,
            deterministic,
            return_lse,
        )
    except (AttributeError, TypeError, RuntimeError) as error:
        if isinstance(error, (SpecError, NoBackendError)):
            raise
        # An argument that is no tensor or no plain value. The careful path names it, or takes it: a list of names, say.
        options = Options(causal, alignment, window, softcap, scale, None, None, dropout, deterministic, return_lse)
        return attend(*gathered((q, k, v, None, None, None, None), None, options, None), backend)
    try:
        if made.shortcut is None and needs_backward:
            return autograd.Attention.apply(made, q, k, v)
        out, lse = made.shortcut(q, k, v) if made.shortcut else made.forward(made.spec, Inputs(q, k, v))
    except RuntimeError:  # a kernel raises it for a layout that it cannot read
        for name, tensor in zip("qkv", (q, k, v), strict=True):
            plan.check_tensor(name, tensor)
        raise
    return (out, lse) if return_lse else out


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    alignment: str = "bottom_right",
    window: Window = None,
    softcap: float | None = None,
    scale: float | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    seq_info: Any = None,
    dropout: float = 0.0,
    deterministic: bool = False,
    backend: str | tuple[str, ...] | None = None,
    return_lse: bool = False,
    dropout_rng: torch.Generator | None = None,
    needs_backward: bool | None = None,
) -> Selection:
    """Which backend ``attention`` runs with the same arguments, and every reason why the others do not. Runs nothing.

    ``needs_backward`` asks about training (or not) whatever the tensors' ``requires_grad`` says.
    """
    tensors = (q, k, v, mask, bias, alibi_slopes, sinks)
    options = Options(causal, alignment, window, softcap, scale, None, None, dropout, deterministic, return_lse)
    inputs, options = gathered(tensors, seq_info, options, dropout_rng, draw=False)
    wanted, bias_gradient = _gradients_wanted(inputs)
    needs = wanted if needs_backward is None else needs_backward
    requested = requested_names(backend) or override.requested()
    selection = plan.explanation(plan.metadata(inputs), options, needs, bias_gradient and needs, requested)
    check_offsets(selection.spec, inputs)
    return selection


def gathered(
    tensors: tuple[Any, ...],
    seq_info: Any,
    options: Options,
    generator: torch.Generator | None,
    *,
    draw: bool = True,
) -> tuple[Inputs, Options]:
    """The arguments of a call as Inputs and Options, with what can be checked of each by itself checked."""
    for name, tensor in zip(Inputs._fields, tensors, strict=False):
        if tensor is not None or name in ("q", "k", "v"):
            plan.check_tensor(name, tensor)
    q, k, v, mask, bias, alibi_slopes, sinks = tensors
    q, k, v, bias = autocast.in_autocast(q, k, v, bias)
    plan.check_gradient_free("alibi_slopes", alibi_slopes)
    if torch.compiler.is_compiling():  # numbers may be symbols here; the op checks their values when it runs
        for name in ("causal", "deterministic", "return_lse"):
            flag(name, getattr(options, name))
        window = normalise_window(options.window, options.causal)
        options = options._replace(window=window, dropout=options.dropout or 0.0)  # 0.0 itself may be a symbol
    else:
        options = checked(options)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise SpecError(f"dropout_rng: expected a torch.Generator, or None for torch's own, got {type(generator)}")
    info = SeqInfo.coerce(seq_info)
    inputs = Inputs(q, k, v, mask, bias, alibi_slopes, sinks)
    if info is not None:
        place = offsets.given if transforms.is_one_op(q) else offsets.of  # an op completes offsets itself
        inputs, longest = place(info, inputs)
        options = options._replace(max_len_q=longest[0], max_len_k=longest[1])
    if options.dropout and draw:
        where = _dropout_device(q, generator)
        rng = torch.randint(-(2**63), 2**63 - 1, (2,), generator=generator, device=where)
        inputs = inputs._replace(rng=beside(q, rng))
    return inputs, options


def _dropout_device(q: Tensor, generator: torch.Generator | None) -> Any:
    """Where a call's two random words are drawn: the host, where kernels with a generator of their own read them.

    While a CUDA graph is captured they are drawn on the device, so that every replay has its own.
    """
    if generator is not None:
        return generator.device
    compiling = torch.compiler.is_compiling()
    return q.device if q.is_cuda and not compiling and torch.cuda.is_current_stream_capturing() else "cpu"


def _gradients_wanted(inputs: Inputs) -> tuple[bool, bool]:
    """(any gradient, the bias's gradient) that autograd may ask of this call."""
    if are_jit_traces_active() is not None:  # what is traced once runs with other tensors, whose gradients are wanted
        return True, inputs.bias is not None
    if not torch.is_grad_enabled():
        return False, False
    bias = inputs.bias is not None and inputs.bias.requires_grad
    sinks = inputs.sinks is not None and inputs.sinks.requires_grad
    return bias or sinks or any(tensor.requires_grad for tensor in inputs[:3]), bias


def attend(inputs: Inputs, options: Options, backend: Any) -> Any:
    """The call with every feature: eager through a plan, or through the ops while a compiler or transform looks on."""
    needs_backward, bias_gradient = _gradients_wanted(inputs)
    if transforms.is_one_op(inputs.q):
        plan.check(inputs, options)
        left, right = options.window  # type: ignore[misc]
        plain = ops.PlainOptions(
            options.causal,
            options.alignment,
            left,
            right,
            options.softcap,
            options.scale,
            options.max_len_q,
            options.max_len_k,
            options.dropout,
            options.deterministic,
            options.return_lse,
            needs_backward,
            bias_gradient,
            ops.joined(requested_names(backend)),
        )
        out, lse = (transforms if transforms.at_work() else ops).traced(inputs, plain)
        return (out, lse) if options.return_lse else out
    requested = requested_names(backend) or override.requested()
    made = plan.plan(plan.metadata(inputs), options, needs_backward, bias_gradient, requested)
    check_offsets(made.spec, inputs)
    with autocast.switched_off(inputs.q.device):
        if needs_backward:
            return autograd.Attention.apply(made, *inputs)
        out, lse = plan.run_forward(made, inputs)
    return (out, lse) if options.return_lse else out


def check_offsets(spec: AttentionSpec, inputs: Inputs) -> None:
    """Checks the values of a packed call's offsets wherever they are on the host."""
    if spec.packed and inputs.q.device.type == "cpu":
        check_cu_seqlens(inputs.cu_seqlens_q.numpy(), spec.max_len_q or 0, side="q", tokens=spec.q_len)
        check_cu_seqlens(inputs.cu_seqlens_k.numpy(), spec.max_len_k or 0, side="k", tokens=spec.kv_len)
