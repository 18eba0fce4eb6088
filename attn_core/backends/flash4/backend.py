"""FlashAttention-4: the CuTe DSL kernels of flash-attn-4. The first call of a kind compiles its kernel in about 2 s.

Tested on sm90 (Hopper). On sm100 (Blackwell) the claims follow upstream's sources and tests, up to head_dim 128; we
have not run it there. Limits: no mask, bias, ALiBi or dropout. ``shared.rewrites`` adds sinks and head widths; the
gradient of the log-sum-exp is the kernel's own. Softcap runs through ``softcap.py``, not ``softcap=``. Key ranges, mask
functions and score functions: ``masked.py``.

Conventions: causal and windows become distances from the bottom-right diagonal, None if a side hides nothing (-1 would
be the distance -1). For rows that see no key the kernel itself gives out 0, log-sum-exp -inf and gradients 0; its
``learnable_sink`` would make their log-sum-exp the sink, so we do not use it. On sm90 the backward writes dq in widths
of 16 and reads it in widths of 32 (or 64), so we pad to widths on which the two agree. Atomics sum dq, and dk and dv of
grouped heads, unless ``deterministic``. A NaN or Inf in a document can reach the document before it, because the last
tile of one holds the first tokens of the next, with weight 0.

No function here synchronises or records a graph: the kernels get detached tensors. The third and later calls of a spec
launch the compiled kernels directly, see ``direct``. Paged keys and values: ``paged``.
Upstream: flash-attn-4 >= 4.0.0b30; its sources were read at b30 and b36.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

from attn_core.backends.flash4 import arguments, direct, disk_cache, masked, own_kernels, paged, sinks, versions
from attn_core.backends.flash4.operands import backward_width, copy_if_expanded, writable
from attn_core.backends.shared import dry_run, first_call, kernel_limits, rewrites
from attn_core.backends.shared.programs.kernel_programs import KernelProgram
from attn_core.backends.support import Build, Support
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs

FRAMEWORK = "torch"
REQUIRES = "flash-attn-4>=4.0.0b30"

FORWARD = Support(
    kernel="FlashAttention-4",
    devices=("sm90", "sm100"),
    dtypes=("bfloat16", "float16"),
    max_head_dim=256,
    value_dim=True,
    grouped_heads=True,
    alignments=("bottom_right", "top_left"),
    causal=True,
    window=True,
    softcap=True,
    key_ranges=True,
    mask_mod=True,
    score_mod=True,
    sinks=True,
    packed=True,
    deterministic=True,
    lse=True,
    partial=True,
    lse_gradient=True,
    paged=True,
    invariant=("batch",),
)
BACKWARD = replace(FORWARD, paged=False)
WRITES_INTO = True
lower, program_refuses = arguments.lower, arguments.program_refuses


def refuses(spec: AttentionSpec, device: str, build: Build | None) -> tuple[str, ...]:
    """Refuses top-left bands of packed documents, calls beyond the grid, widths over 128 on sm100, some page sizes,
    and some calls with ranges or functions."""
    reasons = [*kernel_limits.grid(spec, FORWARD.kernel, spec.batch), *masked.refusals(spec, device, FORWARD.kernel)]
    if spec.paged is not None:
        reasons += paged.refusals(spec, device, FORWARD.kernel)
    reasons += arguments.invariant_refusals(spec, device, FORWARD.kernel)
    edge, widest = band(spec), max(spec.head_dim, spec.value_dim)
    if spec.packed and spec.alignment == "top_left" and (edge.left is not None or edge.right is not None):
        reasons.append(
            f"alignment=top_left with causal={spec.causal}, window={spec.window} and packed documents: "
            "FlashAttention-4 is bottom-right in each document"
        )
    if device == "sm100" and 128 < widest <= 256:
        reasons.append(f"head_dim={widest}: FlashAttention-4 on sm100 is not claimed above 128")
    return tuple(reasons)


def probe() -> str:
    """Imports the kernels and returns the version of flash-attn-4. Raises what ``versions.installed`` raises."""
    version = versions.installed()
    _kernels()
    return version


def build() -> Build | None:
    """See ``versions.build``."""
    return versions.build()


@cache
def _kernels() -> tuple[Any, Any]:
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    return _flash_attn_fwd, _flash_attn_bwd


def forward(spec: AttentionSpec, inputs: Inputs, into: Any = None) -> tuple[Any, Any]:
    """See ``Backend.forward``. Raises RuntimeError if a CUDA graph would capture the compilation."""
    launches = direct.launches_of(spec, "forward", inputs.q)
    if launches is not None:
        return direct.launch_forward(launches, spec, inputs, into)
    disk_cache.use()
    kernel = _kernel(spec, gradient=False)
    return first_call.run(
        direct.compiled_key(spec, "forward", inputs.q),
        lambda: rewrites.forward(kernel, spec, inputs, into),
        lambda: f"the flash4 forward of ({spec})",
        *(() if spec.paged is None else ("run the same call once before the capture",)),
    )


def backward(
    spec: AttentionSpec, inputs: Inputs, out: Any, lse: Any, dout: Any, dlse: Any, into: Any = None
) -> Gradients:
    """See ``Backend.backward``, and ``forward`` for the error."""
    launches = direct.launches_of(spec, "backward", inputs.q) if dlse is None else None
    if launches is not None:
        return direct.launch_backward(launches, spec, inputs, out, lse, dout, into, None)
    disk_cache.use()
    kernel = _kernel(spec, gradient=True)
    return first_call.run(
        direct.compiled_key(spec, "backward" if dlse is None else "backward of out and lse", inputs.q),
        lambda: rewrites.backward(kernel, spec, inputs, out, lse, dout, dlse, into),
        lambda: f"the flash4 backward of ({spec})",
    )


def warm_up(spec: AttentionSpec) -> None:
    """Compiles the kernels of a call by running it on zeros on the current CUDA device."""
    inputs = dry_run.zeros(spec)
    out, lse = forward(spec, inputs)
    if spec.needs_backward:
        # With dlse the backward is another kernel; see ``backward``'s key.
        for dlse in (None, lse) if spec.return_lse else (None,):
            backward(spec, inputs, out, lse, out, dlse)


@lru_cache(maxsize=1024)
def program(spec: AttentionSpec, direction: str, with_dlse: bool = False, as_one: bool = False) -> KernelProgram:
    """Returns the kernels of a call that ``program_refuses`` allows, and the buffers between them.

    Operands are the fields of ``Inputs``; in a backward also out, lse, dout, and ``with_dlse`` dlse, 0 in rows that see
    no key; ``as_one`` q, k and v are the operand qkv. Those of ``program_operands`` replace the call's. Buffers have
    the kernel's widths: operands are padded with zeros, and results are cut. Compiles nothing. Raises Unrecordable if
    flash-attn-4 works differently from the version that we tested.
    """
    from attn_core.backends.flash4 import program as flash4_program

    own = _kernel(spec, direction == "backward").runs(spec)

    def run(notes: Any, inputs: Inputs, others: dict[str, Any]) -> None:
        more = masked.operands(own, inputs, direction, notes)
        alone = inputs._replace(sinks=None)
        out, lse = others["out"], others["lse"]
        if direction == "forward":
            plain = sinks.scratch_like(lse) if spec.sinks else lse
            _run_forward(own, alone, (out, plain), notes.kernels, *more, lane=notes)
            if spec.sinks:
                sinks.add(out, plain, inputs.sinks, lse, notes)
        else:
            dout, dlse = others["dout"], others.get("dlse")
            buffers = Gradients(*(others[name] for name in ("dq", "dk", "dv")))
            _run_backward(own, alone, out, lse, dout, buffers, dlse, notes.kernels, *more, lane=notes)
            if spec.sinks:
                sinks.gradient(inputs.sinks, out, lse, dout, dlse, others["dsinks"], lane=notes)

    return flash4_program.program(replace(own, sinks=spec.sinks), direction, with_dlse, as_one, run)


def program_operands(spec: AttentionSpec, arrays: dict[str, Any]) -> dict[str, Any]:
    """Returns the operands of a program that are not the call's own arrays, by name."""
    return masked.program_operands(spec, arrays) | sinks.program_operands(arrays)


def _forward(spec: AttentionSpec, inputs: Any, into: Any) -> tuple[Any, Any]:
    if spec.paged is not None:
        return paged.forward(spec, inputs, into, _kernels()[0], arguments.keywords(spec, "forward"))
    return direct.forward(spec, inputs, into, _run_forward)


def _run_forward(
    spec: AttentionSpec, inputs: Inputs, into: Any, kernels: Any, *more: Any, lane: Any = own_kernels
) -> tuple[Any, Any]:
    """Makes a call through flash-attn-4's entry points. kernels: a recording replaces them; more: see ``masked``."""
    out, lse = (None, None) if into is None else map(writable, into)
    results = (kernels or _kernels())[0](
        *map(copy_if_expanded, inputs[:3]),
        cu_seqlens_q=inputs.cu_seqlens_q,
        cu_seqlens_k=inputs.cu_seqlens_k,
        return_lse=True,
        out=out,
        lse=lse,
        **arguments.keywords(spec, "forward"),
        **masked.tensor_keywords(spec, more, lane),
    )
    return results[0], results[1]


def _backward(
    spec: AttentionSpec, inputs: Inputs, out: Any, lse: Any, dout: Any, into: Any, dlse: Any = None
) -> Gradients:
    if dlse is not None:  # a row that sees no key has weight 0, so its dlse must not reach the kernel, e.g. as NaN
        dlse = dlse.masked_fill(lse == -float("inf"), 0.0)
    return direct.backward(spec, inputs, out, lse, dout, into, dlse, _run_backward)


def _run_backward(
    spec: AttentionSpec,
    inputs: Inputs,
    out: Any,
    lse: Any,
    dout: Any,
    into: Any,
    dlse: Any,
    kernels: Any,
    *more: Any,
    lane: Any = own_kernels,
) -> Gradients:
    dq, dk, dv = (None, None, None) if into is None else map(writable, into[:3])
    results = (kernels or _kernels())[1](
        *map(copy_if_expanded, (*inputs[:3], out, dout)),
        lse,
        cu_seqlens_q=inputs.cu_seqlens_q,
        cu_seqlens_k=inputs.cu_seqlens_k,
        dq=dq,
        dk=dk,
        dv=dv,
        dlse=dlse,
        **arguments.keywords(spec, "backward"),
        **masked.tensor_keywords(spec, more, lane),
    )
    return Gradients(*results[:3])


@lru_cache(maxsize=4096)
def _kernel(spec: AttentionSpec, gradient: bool) -> rewrites.Kernel:
    """Returns the kernel with the widths of its forward or of its backward (``gradient``).

    Values keep their own width if the kernel is tuned for that: head_dim in (128, 192] with value_dim up to 128, except
    in the backward of grouped heads.
    """
    apart = 128 < spec.head_dim <= 192 and spec.value_dim <= 128 and not (gradient and spec.group_size > 1)
    width = backward_width if gradient else rewrites.whole_eights
    return rewrites.Kernel(_forward, _backward, width, same_width=not apart, lse_gradient=True, **_SINKS)


_SINKS: dict[str, Any] = {"add_sinks": sinks.add, "sink_gradient": sinks.gradient}
