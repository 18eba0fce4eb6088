"""Finetrainers' ``attention_dispatch`` for torch tensors: the same result on every provider.

On the native provider without ``attention_kwargs``, a call has the result of
``torch.nn.functional.scaled_dot_product_attention`` with the same arguments, and can replace it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad
from torch.jit._builtins import _register_builtin
from torch.overrides import handle_torch_function, has_torch_function_variadic

from attn_core.call.kinds import check_kind
from attn_core.call.options import check_flag, check_number
from attn_core.errors import SpecError
from attn_core.selection import NoBackendError, Target, override
from torch_frontend.attention import attention
from torch_frontend.dispatch import sdpa_flags
from torch_frontend.dispatch.after_import import after_import
from torch_frontend.dispatch.functions import function_of, is_block_mask
from torch_frontend.dispatch.plan import Results, check_tensor
from torch_frontend.dispatch.tensor_kinds import (
    PLAIN,
    are_jit_traces_active,
    as_causal,
    is_cut,
    is_foreign,
    is_plain,
    torch_attention,
)
from torch_frontend.explain import here
from torch_frontend.finetrainers import calls, providers
from torch_frontend.finetrainers.calls import DispatchCall, HostOptions, attention_with
from torch_frontend.finetrainers.providers import NATIVE, VARLEN, AttentionProvider, SharedRows

if TYPE_CHECKING:  # torch may be built without torch.distributed
    from torch.distributed.device_mesh import DeviceMesh


__all__ = ["AttentionProvider", "attention_dispatch", "attention_provider", "list_providers"]

Tensor = torch.Tensor

_is_compiling, _modes = torch.compiler.is_compiling, torch._C._len_torch_function_stack


def attention_provider(
    provider: AttentionProvider | str = NATIVE,
    *,
    mesh: DeviceMesh | None = None,
    convert_to_fp32: bool = True,
    rotate_method: str = "allgather",
) -> AbstractContextManager[AttentionProvider]:
    """Runs a block's attention on a provider's kernel: ``attention_dispatch``, and ``attention`` like ``use_backend``.

    Blocks nest; they are safe with threads and asyncio tasks. An inner ``use_backend`` chooses another kernel for the
    same result.

    Args:
        provider: a name or a member of ``AttentionProvider``. native is automatic choice; any other runs or raises.
        mesh: a ``DeviceMesh`` of the ranks that share every row: each call of ``attention_dispatch`` gets this rank's
            consecutive part of the positions, of queries and of keys alike, and runs ``context_parallel_attention``. It
            does not apply to ``attention`` and the layers. None shares nothing, also inside a block with a mesh.
        convert_to_fp32: with a mesh it must be True: results of ranks are merged in float32.
        rotate_method: with a mesh "allgather" (our strategy "all_gather") or "alltoall" ("ring").

    Raises:
        SpecError: for an unknown provider, and options of a mesh that are not supported.
        TypeError, ShapeError: for a mesh that is no ``DeviceMesh`` of one axis, or of two: (outer, inner).
    """
    shared = providers.shared_rows(mesh, convert_to_fp32, rotate_method)
    if shared is not None:
        check_mesh(mesh)
    return providers.provided(provider, shared)


def list_providers(*, training: bool = False, uses_mask: bool = False) -> list[AttentionProvider]:
    """Returns the providers that have a kernel on this machine, according to what its backends support.

    Args:
        training: whether the kernel must have a backward.
        uses_mask: whether the kernel must support a mask: of scores, or of keys on the varlen providers.
    """
    return list(providers.providers_on(Target.here("torch", here()), training=training, uses_mask=uses_mask))


def attention_dispatch(  # noqa: C901
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    attention_kwargs: Mapping[str, object] | None = None,
) -> Any:
    """Computes attention on the active provider.

    Args:
        query: ``[batch, heads, q_len, head_dim]``.
        key, value: ``[batch, kv_heads, kv_len, ...]``; fewer kv heads than heads need ``enable_gqa=True``.
        attn_mask: bool, True = visible, or float, added; broadcastable to ``[batch, heads, q_len, kv_len]``. Two axes
            are ``[q_len, kv_len]``; on the varlen providers, flex and xformers a mask of keys ``[batch, kv_len]``,
            bool on the former. flex also accepts a ``BlockMask``.
        is_causal: query i sees keys 0 to i, whatever the lengths. On a mesh it is refused, and so are masks.
        attention_kwargs: ``window_size``, ``softcap``, ``alibi_slopes``, ``deterministic`` and ``return_lse``, as in
            flash-attn, on any provider.

    Returns:
        ``[batch, heads, q_len, value_dim]``; with ``return_lse`` also the log-sum-exp ``[batch, heads, q_len]``.

    Raises:
        SpecError and its subclasses: for arguments that are invalid, or invalid on this provider.
        NoBackendError: if the provider's kernel cannot run the call, with every reason. On native without
            ``attention_kwargs``, torch's own function runs a call that no backend can run.
    """
    if enable_gqa is not True and enable_gqa is not False:
        check_flag("enable_gqa", enable_gqa)
    if attn_mask is not None:
        attn_mask, is_causal = as_causal(attn_mask, is_causal, query)
    if _is_compiling():
        call = DispatchCall(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return _in_compiled_code(call, attention_kwargs)
    if _modes() and (offered := _offer_to_modes(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)):
        return offered[0]
    if type(attn_mask) is Tensor and attn_mask.layout is torch.strided and is_cut(attn_mask):
        check_tensor("attn_mask", attn_mask)  # raises: a kernel would read beyond the mask's memory
    # The usual types need no check, and asking for them takes less time than a call of a check.
    if type(dropout_p) is not float:
        check_number("dropout_p", dropout_p)
    if type(is_causal) is not bool or type(enable_gqa) is not bool:
        check_flag("is_causal", is_causal), check_flag("enable_gqa", enable_gqa)
    if attention_kwargs is not None:
        check_kind("attention_kwargs", attention_kwargs, Mapping, "a dict or None")
    provider = providers.stated_provider() or providers.default_provider()
    shared = providers.active_rows()
    if shared is not None:
        call = DispatchCall(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return run_over_ranks(shared, provider, call, attention_kwargs)
    # A plain call needs no translation but the names of its arguments.
    native = provider is NATIVE and not attention_kwargs
    plain = not attention_kwargs and not dropout_p and (attn_mask is None or (native and is_table(attn_mask, query)))
    if plain and is_simple(query, key, value, is_causal, enable_gqa) and (not native or _is_unrestricted()):
        added = attn_mask is not None and attn_mask.dtype != torch.bool
        try:
            return attention(
                query,
                key,
                value,
                causal=is_causal,
                alignment="top_left",
                scale=scale,
                mask=None if added else attn_mask,
                bias=attn_mask if added else None,
                layout="bhsd",
                dropout=dropout_p,  # 0 of some type, which the plan checks
                backend=override.requested() or provider.kernels or None,
            )
        except SpecError:  # the code below names the error, or torch's own function runs the call (a scale of 0, say)
            pass
        except NoBackendError as error:
            if not native or error.selection.requested:
                raise
    call = DispatchCall(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return _run_as_torch(call) if native else run_on_provider(provider, call, attention_kwargs)


def _in_compiled_code(call: DispatchCall, attention_kwargs: Mapping[str, object] | None) -> Any:
    """Runs a call that a compiler traces: as torch's own function, unless the provider decides what it means.

    The compiler cannot see which provider is active, so such a call leaves the graph.
    """
    unclear = attention_kwargs or providers.DEFAULT != "native" or any(map(is_foreign, call[:4]))
    unclear = unclear or providers.may_share
    if unclear or (call.attn_mask is not None and call.attn_mask.dim() == 2):  # a table of scores, or a mask of keys
        return _outside_the_graph(*call, attention_kwargs)
    return _run_as_torch(call)  # on the provider's kernels: the op looks them up when it runs


def _offer_to_modes(*arguments: Any) -> tuple[Any] | None:
    """Returns the result of an active ``TorchFunctionMode`` in a tuple, or None if no mode is active.

    A mode compares the function that it receives with ``F.scaled_dot_product_attention``. It receives
    ``attention_dispatch``, so the comparison succeeds if ``attention_dispatch`` has replaced torch's function. Calls
    with tensor subclasses go to torch's own function, which offers them to the modes itself.
    """
    operands = arguments[:3]
    if not has_torch_function_variadic(*operands) or not all(type(tensor) in PLAIN for tensor in operands):
        return None
    options = {"scale": arguments[6], "enable_gqa": arguments[7]}
    return (handle_torch_function(attention_dispatch, operands, *arguments[:6], **options),)


def _outside_the_graph(*arguments: Any) -> Any:
    return attention_dispatch(*arguments)


def _leave_to_python() -> None:
    """Makes Dynamo call ``_outside_the_graph`` instead of tracing it."""
    why = "the active provider decides what these arguments of attention_dispatch mean"
    globals()["_outside_the_graph"] = torch.compiler.disable(_outside_the_graph, reason=why)


after_import("torch._dynamo", _leave_to_python)  # torch.compiler.disable itself would import Dynamo


def _run_as_torch(call: DispatchCall) -> Tensor:
    """Runs a call as torch's own function would, on automatic choice or the backends of ``use_backend``.

    If no backend can run the call, torch's own function does.
    """
    refusal = None
    if _is_ours(call):
        try:
            calls.check_heads(call)
            positive = calls.with_positive_scale(call)
            attend = attention_with(attention, positive, _DEFAULTS, None)
            return calls.run_dense(attend, positive, _DEFAULTS)[0]
        except SpecError as error:  # torch's own function supports the call or raises its own error
            refusal = error
        except NoBackendError as error:
            if error.selection.requested:
                raise
    if refusal is None or _is_compiling():
        return _torchs_own(call)
    try:
        return _torchs_own(call)
    except RuntimeError as error:
        error.add_note(f"in the words of attention(): {refusal}")
        raise


def _torchs_own(call: DispatchCall) -> Tensor:
    return torch_attention(*call[:6], scale=call.scale, enable_gqa=call.enable_gqa)  # type: ignore[no-any-return]


_DEFAULTS = HostOptions()


def _is_ours(call: DispatchCall) -> bool:
    """Returns whether these are plain tensors in a call whose result has query's axes and rows."""
    query, key, value, mask = call[:4]
    for tensor in (query, key, value) if mask is None else (query, key, value, mask):
        if not is_plain(tensor):
            return False
    rank, rows = query.dim(), query.shape[:-3]
    if rank not in (2, 3, 4) or key.dim() != rank or value.dim() != rank:
        return False
    if key.shape[:-3] != rows or value.shape[:-3] != rows or query.device.type not in ("cpu", "cuda"):
        return False
    if 0 in query.shape or 0 in key.shape or 0 in value.shape:
        return False
    if mask is not None and (mask.dim() > rank or mask.dtype not in (torch.bool, torch.float32, query.dtype)):
        return False
    return sdpa_flags.now() is None if torch.compiler.is_compiling() else _is_unrestricted()


def _is_unrestricted() -> bool:
    """Returns whether no transform or trace is active and no torch kernel is disabled; only torch honours these."""
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return False
    return are_jit_traces_active() is None and sdpa_flags.now() is None


_register_builtin(
    attention_dispatch, "aten::scaled_dot_product_attention"
)  # so that torch.jit.script compiles it as torch's own


def is_simple(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, enable_gqa: bool) -> bool:
    """Returns whether these are plain, fitting tensors ``[batch, heads, len, head_dim]`` without unusual options."""
    if type(query) is not Tensor or type(key) is not Tensor or type(value) is not Tensor:
        return False
    if query.is_nested or key.is_nested or value.is_nested:  # a strided one has no shape
        return False
    q, k, v = query.shape, key.shape, value.shape
    if len(q) != 4 or len(k) != 4 or k[0] != q[0] or k[3] != q[3] or v[:3] != k[:3] or len(v) != 4:
        return False
    if (k[1] != q[1] and not (enable_gqa and k[1] and not q[1] % k[1])) or (is_causal and q[2] != k[2]):
        return False
    if query.layout is not torch.strided or key.layout is not torch.strided or value.layout is not torch.strided:
        return False
    return 0 not in q and 0 not in k and v[3] != 0 and query.device.type in ("cpu", "cuda")


def is_table(mask: Tensor, query: Tensor) -> bool:
    """Returns whether a mask is a plain tensor ``[batch, heads, q_len, kv_len]`` that torch's own function accepts."""
    if type(mask) is not Tensor or mask.layout is not torch.strided or mask.dim() != 4:
        return False
    return mask.dtype in (torch.bool, torch.float32, query.dtype)


def run_on_provider(provider: AttentionProvider, call: DispatchCall, kwargs: Mapping[str, object] | None) -> Results:
    """Runs a call on a provider's kernel, or raises with every reason against it."""
    calls.check_operands(call)
    options = calls.interpret(kwargs)
    mask_mod, mask = None, call.attn_mask
    if is_block_mask(mask) and provider is AttentionProvider.FLEX:
        (batch, heads, q_len, _), kv_len = call.query.shape, call.key.shape[2]
        mask_mod, mask = function_of(mask, batch, heads, q_len, kv_len, "attn_mask"), None
    elif mask is not None:
        check_tensor("attn_mask", mask)
        mask = calls.with_mask_axes(provider, call.query, mask)
    call = calls.with_positive_scale(call._replace(attn_mask=mask))
    attend = attention_with(attention, call, options, provider)
    if call.attn_mask is not None and provider in VARLEN:
        results = calls.run_key_mask(provider, call, options, attend)
    else:
        results = calls.run_dense(attend, call, options, mask_mod=mask_mod)
    return results if options.return_lse else results[0]


def check_mesh(mesh: Any) -> None:
    """Raises TypeError or ShapeError unless the ranks of a mesh can share a row."""
    from torch_frontend.context_parallel.mesh import group_names  # few programs have a mesh

    group_names(mesh)


def run_over_ranks(
    shared: SharedRows, provider: AttentionProvider, call: DispatchCall, kwargs: Mapping[str, object] | None
) -> Results:
    """Returns the result of a call on this rank's consecutive part of the positions.

    Raises:
        SpecError and its subclasses: for arguments that are invalid, or that ranks cannot share.
        NoBackendError: if no backend, or not the provider's, can run a part of the call.
    """
    from torch_frontend.context_parallel.attention import context_parallel_attention

    calls.check_operands(call)
    options = calls.interpret(kwargs)
    if call.attn_mask is not None:
        raise SpecError("attn_mask: expected None with a mesh, because every rank would need another part of it")
    if call.is_causal:
        raise SpecError(
            "is_causal=True: expected False with a mesh; the host cuts rows into consecutive parts, but its causal "
            "ring reads them in torch's head-and-tail order. torch_frontend.context_parallel_attention has layout="
        )
    call = calls.with_positive_scale(call)
    over_ranks = {"mesh": shared.mesh, "strategy": shared.strategy, "layout": "contiguous"}
    rows = [tensor.transpose(1, 2) for tensor in call[:3]]  # [batch, heads, shard, dim] -> [batch, shard, heads, dim]
    out, lse = attention_with(context_parallel_attention, call, options, provider, **over_ranks)(*rows)
    out = out.transpose(1, 2)
    return (out, lse) if options.return_lse else out
