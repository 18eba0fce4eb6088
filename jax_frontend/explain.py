"""explain: what ``attention`` would run on JAX arrays, and why; warm_up does in advance what its first run would do.

And use_backend, whose names are also part of ``jax.jit``'s cache key, and the backends that JAX can use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Unpack

import jax
import numpy as np

from attn_core.call import cache_rows
from attn_core.call.cache_rows import CacheRows
from attn_core.call.hints import SharedOptions
from attn_core.call.keywords import ExplainKeywords
from attn_core.call.options import Door, Options, check_flag, check_layout, names_at, requested_names
from attn_core.call.segments import Scores, Segments, as_plain
from attn_core.call.seq_info import SeqInfo
from attn_core.call.tensors import Inputs
from attn_core.expressions.tracing import TracedFunction
from attn_core.selection import NoBackendError, Selection, override, with_function
from attn_core.selection.row_maximum import with_max_logit
from attn_core.selection.target import Availability, availability
from jax_frontend.attention import attention, exchanged, gather_arguments
from jax_frontend.bridge import targets
from jax_frontend.dispatch import plan, value_checks
from jax_frontend.dispatch.plan import ArrayOrShape
from jax_frontend.paged import dense_caches

_shared = SharedOptions(attention, names_at(Door.ATTENTION))
_traced_under = jax.make_user_context(default_value=None)  # part of jit's cache key; its value is never read


@_shared
def explain(
    q: ArrayOrShape,
    k: ArrayOrShape,
    v: ArrayOrShape,
    *,
    needs_backward: bool | None = None,
    **options: Unpack[ExplainKeywords[ArrayOrShape, ArrayOrShape]],
) -> Selection:
    """Returns the backend that ``attention`` chooses for these arguments and why the others cannot run. Runs nothing.

    Takes arrays or ``jax.ShapeDtypeStruct``. JAX's arguments do not show whether a gradient will be computed; pass
    ``needs_backward=True`` for training: of every tensor, the bias included, but of no array in ``aux``. The other
    arguments are those of ``attention``.
    """
    said = _shared.complete(explain, {**options})
    if check_layout(said.pop("layout")) == "bhsd":
        q, k, v = map(exchanged, (q, k, v))
    rows = CacheRows(*(said.pop(name) for name in CacheRows._fields))
    segments = Segments(*(said.pop(name) for name in Segments._fields))
    seq_info, bias = said["seq_info"], said["bias"]
    if any(array is not None for array in rows):
        cache_rows.refuse(seq_info, *segments)
        return dense_caches.explain(explain, (q, k, v), rows, said, needs_backward)
    scores = Scores(*(said[name] for name in Scores._fields))
    said |= as_plain(scores, segments, (q, k), seq_info, said["alibi_slopes"])._asdict()
    inputs = Inputs(q, k, v, *(said[name] for name in ("mask", "bias", "alibi_slopes", "sinks")))
    key_ranges, mask_mod, aux = said["key_ranges"], said["mask_mod"], said["aux"]
    inputs, functions = inputs._replace(key_ranges=key_ranges), (mask_mod, said["score_mod"], aux)
    info, plain = SeqInfo.coerce(seq_info), Options.of(said)
    inputs, plain = gather_arguments(inputs, info, plain, said["dropout_rng"], functions, shapes_only=True)
    if needs_backward is not None:
        check_flag("needs_backward", needs_backward)
    trains, requested = bool(needs_backward), requested_names(said["backend"]) or override.requested()
    device = plan.device_name(q)
    # Shapes do not show which arrays get gradients, so training counts with a gradient of every bias.
    bias_gradient = trains and bias is not None
    spec = plan.spec(plan.metadata(inputs), device, plain, needs_backward=trains, bias_gradient=bias_gradient)
    selection = with_function(plan.explanation(spec, device, requested), plain.mask_mod)
    selection = with_max_logit(selection) if check_flag("return_max_logit", said["return_max_logit"]) else selection
    value_checks.check_tables(selection.spec, info, inputs.key_ranges)
    # Few programs need the two modules, and a fifth of the package loads with them.
    from attn_core.context_parallel.one_device import described
    from jax_frontend.context_parallel.one_device import rows_are_here

    # As ``context_parallel.one_device`` decides, but for the question whether the program is traced.
    whole = key_ranges is not None and requested is None and not rows_are_here(selection.spec.batch)
    tables = (*aux, *(mask_mod.captured if isinstance(mask_mod, TracedFunction) else ()))
    if value_checks.ranges_here(key_ranges, named=requested is not None):
        key_ranges = np.asarray(key_ranges)
    here = all(isinstance(table, np.ndarray) for table in (key_ranges, *tables) if table is not None)
    # Arrays that an untraced function captured are not among the tables.
    if whole or not here or len(tables) != len(selection.spec.aux):
        return selection
    return described(selection, key_ranges, tables)


def warm_up(
    q: ArrayOrShape, k: ArrayOrShape, v: ArrayOrShape, *, needs_backward: bool | None = None, **options: Any
) -> Selection:
    """Chooses the backend of a call, and on a GPU does what the call's first run would do with torch's kernels.

    ``jax.jit`` still compiles the program on its first call. The function has the arguments of ``explain``, as arrays
    or ``jax.ShapeDtypeStruct``, and returns the same Selection.

    Raises:
        NoBackendError: if no backend, or not the requested one, can run the call.
    """
    for name, array in zip("qkv", (q, k, v)):
        if isinstance(array, jax.Array):
            plan.check_array(name, array)  # not deleted, because its device counts
    selection = explain(q, k, v, needs_backward=needs_backward, **options)
    if selection.backend is None:
        raise NoBackendError(selection)
    targets.warm_up(selection.backend, selection.spec, selection.target.device, plan.device_index(q))
    return selection


@contextmanager
def use_backend(*names: str | tuple[str, ...]) -> Iterator[None]:
    """Runs ``attn_core``'s ``use_backend``; in the block, ``jax.jit`` traces functions again even if it compiled them.

    JAX keeps such a context per thread, so the asyncio tasks of one thread would see each other's names. Inside a task
    the names therefore apply only to eager calls and to functions that are traced there. A function that was compiled
    before keeps its backend; pass ``backend=`` in its call instead.

    Raises:
        SpecError: for an unknown name, with the close matches.
    """
    with override.use_backend(*names), nullcontext() if _inside_a_task() else _traced_under(override.requested()):
        yield


def _inside_a_task() -> bool:
    """Returns whether an asyncio task runs in this thread; other tasks of the thread would see JAX's contexts, too."""
    try:
        return asyncio.current_task() is not None
    except RuntimeError:  # no event loop runs in this thread
        return False


def available_backends() -> dict[str, Availability]:
    """Returns every backend by name: its version, or the reason why it is not available here."""
    return availability("jax", plan.device_name(None))


def available_here() -> tuple[str, ...]:
    """Returns the names of the backends that can run on this machine's device."""
    return tuple(name for name, entry in available_backends().items() if entry.reason is None)
