"""Packed documents for torch's CPU flash kernel: neighbours of equal lengths are the rows of one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from attn_core.backends.shared.parts.split_documents import DocumentSlices, dense_inputs, dense_spec, documents
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs


class Run(NamedTuple):
    """Neighbouring documents of equal lengths: their tokens, and how many documents they are."""

    rows: slice
    keys: slice
    number: int


def forward(spec: AttentionSpec, inputs: Inputs, dense: Callable[..., tuple[Any, Any]]) -> tuple[Any, Any]:
    """Returns (out, lse) of a packed call. ``dense`` is the forward of a dense call."""
    import torch

    every = list(runs(spec, inputs))
    outs, lses = [], []
    for run in every:
        out, lse = dense(_run_spec(spec, run), _run_inputs(inputs, run))
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


def backward(
    spec: AttentionSpec, inputs: Inputs, out: Any, lse: Any, dout: Any, dense: Callable[..., Gradients]
) -> Gradients:
    """Returns the gradients of a packed call. ``dense`` is the backward of a dense call."""
    import torch

    dq, dk, dv = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in inputs[:3])
    dsinks = torch.zeros_like(inputs.sinks, dtype=getattr(torch, spec.lse_dtype)) if spec.sinks else None
    for run in runs(spec, inputs):
        shape = (run.number, -1)
        part_lse = lse[:, run.rows].unflatten(1, shape).transpose(0, 1)
        saved = (out[run.rows].unflatten(0, shape), part_lse, dout[run.rows].unflatten(0, shape))
        part = dense(_run_spec(spec, run), _run_inputs(inputs, run), *saved, None)
        for gradient, of_run, tokens in zip((dq, dk, dv), part[:3], (run.rows, run.keys, run.keys), strict=True):
            gradient[tokens].view(of_run.shape).copy_(of_run)
        if dsinks is not None:
            dsinks += part.dsinks
    return Gradients(dq, dk, dv, dsinks=None if dsinks is None else dsinks.to(inputs.sinks.dtype))


def runs(spec: AttentionSpec, inputs: Inputs) -> Iterator[Run]:
    """Yields the documents in order. Documents with tables of their own, such as a mask, are runs of one."""
    alone = any(shape is not None for shape in (spec.mask_shape, spec.bias_shape, spec.alibi_shape))
    run: Run | None = None
    for document in documents(spec, inputs.cu_seqlens_q.numpy(), inputs.cu_seqlens_k.numpy()):
        if run is not None and not alone and _continues(run, document):
            run = Run(
                slice(run.rows.start, document.rows.stop), slice(run.keys.start, document.keys.stop), run.number + 1
            )
            continue
        if run is not None:
            yield run
        run = Run(*document, 1)
    if run is not None:
        yield run


def _continues(run: Run, document: DocumentSlices) -> bool:
    """Returns whether a document begins where a run ends, with the same lengths as each of the run's documents."""
    adjacent = (run.rows.stop, run.keys.stop) == (document.rows.start, document.keys.start)
    queries, keys = document.lengths
    return adjacent and _length(run.rows) == queries * run.number and _length(run.keys) == keys * run.number


def _length(tokens: slice) -> int:
    return int(tokens.stop - tokens.start)


def _run_spec(spec: AttentionSpec, run: Run) -> AttentionSpec:
    return _spec_of(spec, _length(run.rows) // run.number, _length(run.keys) // run.number, run.number)


@lru_cache(maxsize=4096)
def _spec_of(spec: AttentionSpec, q_len: int, kv_len: int, count: int) -> AttentionSpec:
    document = dense_spec(spec, q_len, kv_len)
    return document if count == 1 else replace(document, batch=count)


def _run_inputs(inputs: Inputs, run: Run) -> Inputs:
    """Returns a run's tensors as a dense call: views of its tokens."""
    if run.number == 1:
        return dense_inputs(inputs, DocumentSlices(run.rows, run.keys))
    shape = (run.number, -1)
    q, k, v = inputs.q[run.rows], inputs.k[run.keys], inputs.v[run.keys]
    return Inputs(q.unflatten(0, shape), k.unflatten(0, shape), v.unflatten(0, shape), sinks=inputs.sinks)
