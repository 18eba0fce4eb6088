"""torch's own flash attention, as scaled_dot_product_attention uses it: the aten CPU flash kernel.

Limits: no softcap or dropout; value_dim == head_dim; no gradient of a bias or of the log-sum-exp. Causal is top-left in
the kernel. Windows, bottom-right causal with unequal lengths, masks, biases and ALiBi become additive masks of blocks
of queries (``cpu_kernel.py``), for which ``containment.py`` contains NaN in hidden keys. Sinks scale the results.
Packed documents run one after another, those of equal lengths as one batch, so that nothing crosses between them.
The raw op of torch 2.11 to 2.15, ``aten::_scaled_dot_product_flash_attention_for_cpu``, reads wrong memory if the last
stride is not 1, and reports a log-sum-exp of 0 for rows that see no key. This file corrects both.
It promises no ``invariant``: the library below adds in another order for another alignment or number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from attn_core.backends.contract import Backend, Pages
from attn_core.backends.sdpa_flash import containment, cpu_kernel
from attn_core.backends.sdpa_flash.cpu_kernel import forward_op, has_tiles, kernels, run_twice
from attn_core.backends.shared.pages import packed_documents
from attn_core.backends.shared.readable import readable
from attn_core.backends.shared.rewrites import sink_gradient, with_sinks
from attn_core.backends.shared.row_blocks import DocumentSlices, dense_inputs, dense_spec, documents
from attn_core.backends.support import Build, Support
from attn_core.call.arithmetic import LARGE_LSE, may_be_large
from attn_core.call.masks import band
from attn_core.call.spec import BITS, DTYPES, AttentionSpec
from attn_core.call.tensors import Gradients, Inputs, PagedInputs

if TYPE_CHECKING:
    from torch import Tensor

FORWARD = Support(
    kernel="the aten CPU flash kernel",
    devices=("cpu",),
    dtypes=DTYPES,
    grouped_heads=True,
    alignments=("bottom_right", "top_left"),
    causal=True,
    window=True,
    mask=True,
    bias=True,
    alibi=True,
    sinks=True,
    packed=True,
    deterministic=True,
    lse=True,
    partial=True,
    paged=True,
    paged_alibi=True,
    paged_starts=True,
    page_dtypes=tuple(BITS),
)
BACKWARD = replace(FORWARD, paged=False, paged_alibi=False, paged_starts=False, page_dtypes=())


def refuses(spec: AttentionSpec, device: str, build: Build | None) -> tuple[str, ...]:
    """Refuses slopes of each sequence in pages."""
    if spec.paged is not None and len(spec.alibi_shape or ()) == 2:
        return (f"alibi_slopes of shape {list(spec.alibi_shape or ())}: {FORWARD.kernel} takes [heads] with pages",)
    return ()


def probe() -> str:
    """Checks that the ops exist and returns torch's version."""
    import torch

    kernels()
    return torch.__version__


@lru_cache(maxsize=4096)
def lower(spec: AttentionSpec) -> dict[str, Any]:
    """Returns the op's arguments: ``is_causal`` if the kernel's top-left causal fits, else ``additive_mask``.

    ``contained`` is whether NaN in hidden keys is contained, and ``by_results`` whether the results show it.
    """
    edge = band(spec)
    explicit = spec.mask_shape is not None or spec.bias_shape is not None or spec.alibi_shape is not None
    plain = edge.left is None and edge.right is None
    native = edge.left is None and edge.right == 0 and edge.offset == 0  # the kernel's causal is top-left
    hidden = not plain and not edge.hides_nothing(spec.q_len, spec.kv_len)
    is_causal = hidden and native and not explicit
    additive_mask = explicit or (hidden and not is_causal)
    return {
        "is_causal": is_causal,
        "additive_mask": additive_mask,
        "contained": additive_mask or (is_causal and spec.sinks),
        "by_results": containment.shows_in_results(spec),
        "scale": spec.scale,
        "by_document": spec.packed,
    }


def forward(spec: AttentionSpec, inputs: Any) -> tuple[Tensor, Tensor]:
    """See ``Backend.forward``."""
    if spec.paged is not None:
        return _paged_forward(spec, inputs)
    how = lower(spec)
    if how["by_document"]:
        return _packed_forward(spec, inputs)
    inputs = _all_readable(inputs)
    if how["additive_mask"]:
        out, lse = cpu_kernel.forward(spec, inputs)
    else:
        # [batch, seq, heads, dim] -> [batch, heads, seq, dim] and back, as views
        q, k, v = (tensor.transpose(1, 2) for tensor in inputs[:3])
        if spec.q_len == 1:  # else not: the lookup of an op hashes the spec on every call
            out, lse = forward_op(spec, how["is_causal"])(q, k, v)
        else:
            out, lse = kernels()[0](q, k, v, 0.0, how["is_causal"], scale=how["scale"])
        out = out.transpose(1, 2)
    if spec.sinks:
        out, lse = with_sinks(out, lse, inputs.sinks)
    if how["contained"]:
        containment.contain(spec, inputs, out, lse, how["by_results"])
    return out, lse


def shortcut(spec: AttentionSpec) -> Callable[..., tuple[Tensor, Tensor] | None] | None:
    """See ``Backend.shortcut_of``: torch itself attaches the backward op below to this forward op."""
    how = lower(spec)
    if how["by_document"]:
        return None
    if how["additive_mask"]:
        return _masked_shortcut(spec)
    op = forward_op(spec, how["is_causal"])

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if not (q.is_contiguous() and k.is_contiguous() and v.is_contiguous()):  # nearly never: a cheap test first
            q, k, v = readable(q, _has_rows), readable(k, _has_rows), readable(v, _has_rows)
        out, lse = op(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return out.transpose(1, 2), lse

    def heads_first(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return op(readable(q, _has_rows), readable(k, _has_rows), readable(v, _has_rows))

    run.heads_first = heads_first  # type: ignore[attr-defined]
    return run


def paged_shortcut(spec: AttentionSpec) -> Callable[..., tuple[Tensor, Tensor] | None]:
    """See ``Backend.paged_shortcut_of``."""
    return _decoder(spec, spec.return_lse)


def _masked_shortcut(spec: AttentionSpec) -> Callable[..., tuple[Tensor, Tensor] | None] | None:
    """Returns the shortcut of a call with an additive mask; None if it needs more than one call of the kernel."""
    import torch

    blocks = cpu_kernel.blocks(spec)
    if len(blocks) != 1 or not blocks[0].whole:
        return None
    rows, keys, edge, _ = blocks[0]
    op, dtype, wants_lse = forward_op(spec), spec.lse_dtype, spec.return_lse
    by_results, learns = containment.shows_in_results(spec), spec.needs_backward and may_be_large(spec)
    size = torch.linalg.vector_norm  # here and not in a function, for small calls

    def run(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor] | None:
        if not (q.is_contiguous() and k.is_contiguous() and v.is_contiguous()):
            q, k, v = readable(q, _has_rows), readable(k, _has_rows), readable(v, _has_rows)
        if not (by_results or containment.are_finite(k, v)):
            return None
        added = cpu_kernel.additive(dtype, q.device, mask, bias, edge, rows, keys)
        out, lse = op(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=added)
        if by_results and not containment.are_results_finite(out, lse):
            return None
        if learns and not size(lse, inf).item() < LARGE_LSE:
            return None
        if wants_lse:
            lse = lse.masked_fill(cpu_kernel.empty_rows(added), -float("inf"))  # type: ignore[arg-type]
        return out.transpose(1, 2), lse

    def heads_first(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor] | None:
        if wants_lse or not (by_results or containment.are_finite(k, v)):
            return None
        added = cpu_kernel.additive(dtype, q.device, mask, bias, edge, rows, keys)
        out, lse = op(readable(q, _has_rows), readable(k, _has_rows), readable(v, _has_rows), attn_mask=added)
        if by_results and not containment.are_results_finite(out, lse):
            return None
        if learns and not size(lse, inf).item() < LARGE_LSE:
            return None
        return out, lse

    run.heads_first = heads_first  # type: ignore[attr-defined]
    return run


def backward(
    spec: AttentionSpec, inputs: Inputs, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Gradients:
    """See ``Backend.backward``."""
    how = lower(spec)
    if how["by_document"]:
        return _packed_backward(spec, inputs, out, lse, dout)
    inputs, dout = _all_readable(inputs), readable(dout, _has_rows)
    large = containment.large_queries(spec, lse) if how["additive_mask"] else None
    if how["additive_mask"]:
        shown = lse if large is None else lse.masked_fill(large[:, None], inf)  # the weights exp(score - inf) are 0
        dq, dk, dv = cpu_kernel.backward(spec, inputs, out, shown, dout)
    else:
        tensors = (tensor.transpose(1, 2) for tensor in (dout, *inputs[:3], out))
        gradients = kernels()[1](*tensors, lse, 0.0, how["is_causal"], scale=how["scale"])
        dq, dk, dv = (gradient.transpose(1, 2) for gradient in gradients)
    if how["contained"]:
        containment.contain_gradients(spec, inputs, out, lse, dout, (dq, dk, dv), large)
    dsinks = sink_gradient(inputs.sinks, out, lse, dout, None) if spec.sinks else None
    return Gradients(dq, dk, dv, dsinks=dsinks)


def _all_readable(inputs: Inputs) -> Inputs:
    """Returns inputs that the kernel can read."""
    q, k, v = inputs[:3]
    if q.is_contiguous() and k.is_contiguous() and v.is_contiguous():
        return inputs
    return inputs._replace(q=readable(q, _has_rows), k=readable(k, _has_rows), v=readable(v, _has_rows))


def _has_rows(tensor: Tensor) -> bool:
    """Returns whether the kernel can read a ``[batch, seq, heads, dim]`` or ``[batch, heads, seq, dim]`` tensor."""
    batch_stride, row_stride, other_stride, last_stride = tensor.stride()
    width = tensor.shape[3]
    if last_stride == 1 and row_stride >= width and other_stride >= width and batch_stride >= 1:
        return True
    return tensor.is_contiguous()  # axes of length 1 may have any strides


# Packed documents: neighbours of equal lengths are the rows of one batch.


class _Run(NamedTuple):
    """Neighbouring documents of equal lengths: their tokens, and how many documents they are."""

    rows: slice
    keys: slice
    number: int


def _packed_forward(spec: AttentionSpec, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) of a packed call."""
    import torch

    every = list(_runs(spec, inputs))
    outs, lses = [], []
    for run in every:
        out, lse = forward(_run_spec(spec, run), _run_inputs(inputs, run))
        # [documents, rows, heads, dim] -> [tokens, heads, dim]; [documents, heads, rows] -> [heads, tokens]
        outs.append(out.flatten(0, 1))
        lses.append(lse.transpose(0, 1).flatten(1) if run.number > 1 else lse[0])
    if sum(_length(run.rows) for run in every) == spec.q_len:
        return (outs[0], lses[0]) if len(every) == 1 else (torch.cat(outs), torch.cat(lses, dim=1))
    # Tokens outside all documents see no key: they have 0 and -inf.
    out = inputs.q.new_zeros(spec.out_shape)
    lse = inputs.q.new_full(spec.lse_shape, -torch.inf, dtype=getattr(torch, spec.lse_dtype))
    for run, part, part_lse in zip(every, outs, lses, strict=True):
        out[run.rows], lse[:, run.rows] = part, part_lse
    return out, lse


def _packed_backward(spec: AttentionSpec, inputs: Inputs, out: Tensor, lse: Tensor, dout: Tensor) -> Gradients:
    """Returns the gradients of a packed call."""
    import torch

    dq, dk, dv = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in inputs[:3])
    dsinks = torch.zeros_like(inputs.sinks, dtype=getattr(torch, spec.lse_dtype)) if spec.sinks else None
    for run in _runs(spec, inputs):
        shape = (run.number, -1)
        part_lse = lse[:, run.rows].unflatten(1, shape).transpose(0, 1)
        saved = (out[run.rows].unflatten(0, shape), part_lse, dout[run.rows].unflatten(0, shape))
        part = backward(_run_spec(spec, run), _run_inputs(inputs, run), *saved, None)
        for gradient, of_run, tokens in zip((dq, dk, dv), part[:3], (run.rows, run.keys, run.keys), strict=True):
            gradient[tokens].view(of_run.shape).copy_(of_run)
        if dsinks is not None:
            dsinks += part.dsinks
    return Gradients(dq, dk, dv, dsinks=None if dsinks is None else dsinks.to(inputs.sinks.dtype))


def _runs(spec: AttentionSpec, inputs: Inputs) -> Iterator[_Run]:
    """Yields the documents in order. Documents with tables of their own, such as a mask, are runs of one."""
    alone = any(shape is not None for shape in (spec.mask_shape, spec.bias_shape, spec.alibi_shape))
    run: _Run | None = None
    for document in documents(spec, inputs.cu_seqlens_q.numpy(), inputs.cu_seqlens_k.numpy()):
        if run is not None and not alone and _continues(run, document):
            run = _Run(
                slice(run.rows.start, document.rows.stop), slice(run.keys.start, document.keys.stop), run.number + 1
            )
            continue
        if run is not None:
            yield run
        run = _Run(*document, 1)
    if run is not None:
        yield run


def _continues(run: _Run, document: DocumentSlices) -> bool:
    """Returns whether a document begins where a run ends, with the same lengths as each of the run's documents."""
    adjacent = (run.rows.stop, run.keys.stop) == (document.rows.start, document.keys.start)
    queries, keys = document.lengths
    return adjacent and _length(run.rows) == queries * run.number and _length(run.keys) == keys * run.number


def _length(tokens: slice) -> int:
    return int(tokens.stop - tokens.start)


def _run_spec(spec: AttentionSpec, run: _Run) -> AttentionSpec:
    return _spec_of(spec, _length(run.rows) // run.number, _length(run.keys) // run.number, run.number)


@lru_cache(maxsize=4096)
def _spec_of(spec: AttentionSpec, q_len: int, kv_len: int, count: int) -> AttentionSpec:
    document = dense_spec(spec, q_len, kv_len)
    return document if count == 1 else replace(document, batch=count)


def _run_inputs(inputs: Inputs, run: _Run) -> Inputs:
    """Returns a run's tensors as a dense call: views of its tokens."""
    if run.number == 1:
        return dense_inputs(inputs, DocumentSlices(run.rows, run.keys))
    shape = (run.number, -1)
    q, k, v = inputs.q[run.rows], inputs.k[run.keys], inputs.v[run.keys]
    return Inputs(q.unflatten(0, shape), k.unflatten(0, shape), v.unflatten(0, shape), sinks=inputs.sinks)


# Keys and values in pages: decoding in one call, everything else as packed documents. If each sequence has one query,
# its pages are gathered into one row of a batch, and a mask hides the rest of the row. The heads of a group become
# queries of the kernel, which then reads each key once for all of them.

MOST_PADDING = 2
"""Rows are padded to the longest sequence if that makes at most this many times the tokens."""
FEW_TOKENS = 1024
"""So few padded tokens always are one call, because a call of each sequence costs more."""

WORTH_TWO_ROWS = 2048
"""Elements of a head's keys from which one query is computed twice in bfloat16 without tiles; see ``cpu_kernel``."""


def _paged_forward(spec: AttentionSpec, inputs: PagedInputs) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) of a paged call whose tables are checked."""
    q, k, v, table, lengths, offsets, sinks = inputs[:7]
    results = None
    quantised = spec.paged is not None and spec.paged.dtype is not None
    if offsets is None and inputs.alibi_slopes is None and inputs.kv_starts is None and not quantised:
        results = _decoder(spec, True)(q.detach(), k.detach(), v.detach(), table, lengths, sinks)
    if results is not None:
        return results
    out, lse = forward(*packed_documents(spec, inputs))
    return out.to(q.dtype), lse


@lru_cache(maxsize=4096)
def _decoder(spec: AttentionSpec, needs_lse: bool) -> Callable[..., tuple[Tensor, Tensor] | None]:
    """Returns a function that computes one query of each sequence in one call of the kernel.

    Its arguments are those of ``Backend.paged_shortcut_of``. It returns (out, lse), or None if the lengths differ so
    much that a padded batch costs more than a call of each sequence. Without ``needs_lse`` lse may be anything.
    """
    paged, batch, page_size = spec.paged, spec.documents or 0, spec.paged.page_size if spec.paged else 1
    assert paged is not None
    kv_heads, dim, left = spec.num_kv_heads, spec.head_dim, band(spec).left
    token, grouped, flat = kv_heads * dim, (batch, kv_heads, spec.group_size, dim), (batch, spec.num_heads, dim)
    kernel, scale, dtype, needs_lse = kernels()[0], spec.scale, spec.lse_dtype, needs_lse or spec.sinks
    one_row = spec.group_size == 1 and spec.dtype == "bfloat16" and not has_tiles()

    def decode(
        q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        ends = lengths.tolist()
        longest, shortest = max(ends), min(ends)
        pads_much = longest != shortest and batch * longest > max(FEW_TOKENS, MOST_PADDING * sum(ends))
        if pads_much or not longest:
            return None
        columns = -(-longest // page_size)
        used = table if columns == paged.width else table[:, :columns]
        if shortest <= (columns - 1) * page_size:  # entries behind a last page may hold any value
            used = used.clamp(0, paged.num_pages - 1)
        pages, keys = used.reshape(-1), longest if shortest == longest else columns * page_size
        # [pages, page_size, kv_heads, dim] -> [batch, kv_heads, keys, dim]
        layout = (batch, kv_heads, keys, dim), (columns * page_size * token, dim, token, 1)
        k, v = k.index_select(0, pages).as_strided(*layout), v.index_select(0, pages).as_strided(*layout)
        q = q.contiguous().reshape(grouped)  # the kernel reads channels and rows side by side, whatever the strides say
        op = run_twice if one_row and longest * dim >= WORTH_TWO_ROWS else kernel
        if longest == shortest and (left is None or left >= longest - 1):
            out, lse = op(q, k, v, 0.0, False, scale=scale)
        else:
            out, lse = _masked(op, q, k, v, scale, _additive(dtype, ends, keys, left))
        out = out.reshape(flat)
        if needs_lse:
            lse = lse.flatten(1).t()
            if shortest == 0:
                lse = lse.masked_fill(lengths == 0, -inf)
        return with_sinks(out, lse, sinks) if sinks is not None else (out, lse)

    return decode


def _masked(
    op: Callable[..., tuple[Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor, scale: float | None, added: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the kernel's (out, lse) under an additive mask ``[batch, 1, 1, keys]``."""
    out, lse = op(q, k, v, 0.0, False, attn_mask=added, scale=scale)
    if containment.are_results_finite(out, lse):
        return out, lse
    # [batch, 1, 1, keys] -> [batch, 1, keys, 1]; each row has one query, so what it does not see may become 0
    hidden = (added == -inf).transpose(2, 3)
    k, v = k.masked_fill_(hidden, 0.0), v.masked_fill_(hidden, 0.0)
    return op(q, k, v, 0.0, False, attn_mask=added, scale=scale)


def _additive(dtype: str, lengths: list[int], keys: int, left: int | None) -> Tensor:
    """Returns the additive mask ``[batch, 1, 1, keys]`` of the last token of each sequence, in a window if left."""
    import torch

    # The mask of each row is a part of one line, in which the zeros end where the row ends.
    line = np.full(2 * keys, -np.inf, dtype)
    line[0 if left is None else max(0, keys - left - 1) : keys] = 0
    rows = np.array([line[keys - length : 2 * keys - length] for length in lengths])
    return torch.from_numpy(rows).view(len(lengths), 1, 1, keys)


BACKEND = Backend(
    name="sdpa_flash",
    framework="torch",
    requires="torch>=2.11",
    forward_claims=FORWARD,
    backward_claims=BACKWARD,
    refuses=refuses,
    probe=probe,
    lower=lower,
    forward=forward,
    backward=backward,
    shortcut=shortcut,
    pages=Pages(shortcut=paged_shortcut),
    # It is torch's kernel for CPUs; the others are plain operations.
    preference={"cpu": 10},
    also_called={"sdpa": 10, "flash": 40, "fa": 40, "flash_attention": 10, "native": 10, "torch": 10},
    torch_flag="flash",
)
