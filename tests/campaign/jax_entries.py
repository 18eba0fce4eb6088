"""The entry points of JAX that a campaign calls. The twin of torch_entries."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

from attn_core import SeqInfo
from attn_core.call.spec import AttentionSpec
from attn_core.cli.devices import jax_device
from attn_core.cli.in_jax import arrays_of, cotangents_of, results_of
from attn_core.cli.trial import Trial, as_keywords, functions_of
from attn_core.context_parallel.ranges import MOST_TILES
from tests.campaign import pages, segments
from tests.campaign.entries import LACK_RANGES, Arrays, Entry, ranges_refuse, without
from tests.campaign.pages import pages_of

Call = Callable[..., Any]

_programs: dict[Any, Any] = {}
"""The jitted program of the last structure: the cases of a block share it. One at a time, so memory stays bounded."""


def words(seed: int) -> list[int]:
    """Returns the two words that ``attention`` draws from a key with this seed."""
    import jax
    import jax.numpy as jnp

    return jax.random.bits(jax.random.key(seed), (2,), jnp.uint32).tolist()  # type: ignore[no-any-return]


def run(
    call: Call,
    jitted: bool,
    trial: Trial,
    backend: str | None,
    device: str,
    more: Callable[[Trial], Arrays] = lambda trial: {},
) -> Arrays:
    """Runs a call of (arrays, options), which returns the results of ``attention``; see ``Entry.run``.

    more: returns numpy arrays that the call takes besides those of the trial.
    """
    import jax
    import jax.numpy as jnp

    spec = trial.spec
    with jax.enable_x64(spec.dtype == "float64"), jax.default_device(jax_device(device)):
        constants, learned = arrays_of(trial)
        constants |= {name: jnp.asarray(array) for name, array in more(trial).items()}
        offsets = None
        if trial.seq_info is not None:
            offsets = (jnp.asarray(trial.seq_info.cu_seqlens_q), jnp.asarray(trial.seq_info.cu_seqlens_k))
        key = jax.random.key(trial.seed) if spec.dropout else None
        program = _program(call, spec, backend) if jitted else _function(call, spec, backend)
        results = program(learned, constants, cotangents_of(trial), offsets, key)
        return {name: np.asarray(array).astype(np.float64) for name, array in results.items()}


def _program(call: Call, spec: AttentionSpec, backend: str | None) -> Any:
    import jax

    key = (call, spec, backend)
    if key not in _programs:
        _programs.clear()
        _programs[key] = jax.jit(_function(call, spec, backend))
    return _programs[key]


def _function(call: Call, spec: AttentionSpec, backend: str | None) -> Call:
    """Returns a function of (learned inputs, other inputs, cotangents, offsets, key) that returns the named results."""
    names = ("causal", "alignment", "window", "softcap", "scale", "deterministic", "return_lse", "dropout", "invariant")
    keywords = {name: getattr(spec, name) for name in names} | {"backend": backend} | functions_of(spec)

    def function(learned: Arrays, constants: Arrays, cotangents: Any, offsets: Any, key: Any) -> Arrays:
        longest = (spec.max_len_q or 0, spec.max_len_k or 0)
        info = None if offsets is None else SeqInfo(offsets[0], offsets[1], *longest)
        options = keywords | {"seq_info": info, "dropout_rng": key}

        def forward(learned: Arrays) -> tuple[Any, ...]:
            results = call(as_keywords(learned | constants), options)
            return results if spec.return_lse else (results,)

        return results_of(forward, learned, cotangents)

    return function


def _attention(arrays: Arrays, options: dict[str, Any]) -> Any:
    import jax_frontend

    return jax_frontend.attention(**arrays, **options)


def _ranges_on_host(arrays: Arrays, options: dict[str, Any]) -> Any:
    """Backends without key ranges compute them in parts, if they are a few bands."""
    import jax_frontend

    device = next(iter(arrays["key_ranges"].devices())).platform
    names = LACK_RANGES["cpu" if device == "cpu" else "cuda"]
    ranges = {"key_ranges": np.asarray(arrays["key_ranges"]), "backend": names}
    return jax_frontend.attention(**arrays | options | ranges)


def _mapped(arrays: Arrays, options: dict[str, Any]) -> Any:
    """Each row of the batch is a call of its own, under vmap."""
    import jax

    import jax_frontend

    batched = {name: 0 for name in ("q", "k", "v")}
    tables = {name: arrays.get(name) for name in ("mask", "bias", "key_ranges")}
    batched |= {name: 0 for name, table in tables.items() if table is not None and table.shape[0] > 1}
    batched |= {"alibi_slopes": 0} if arrays["alibi_slopes"] is not None and arrays["alibi_slopes"].ndim == 2 else {}

    def one(rows: Arrays, shared: Arrays) -> Any:
        whole = rows | shared
        alone = {name: array if array is None or name not in rows else array[None] for name, array in whole.items()}
        results = jax_frontend.attention(**alone, **options)
        return tuple(result[0] for result in results) if isinstance(results, tuple) else results[0]

    rows = {name: arrays[name] for name in batched}
    shared = {name: array for name, array in arrays.items() if name not in batched}
    return jax.vmap(one, in_axes=(0, None))(rows, shared)


def _mapped_refuses(spec: AttentionSpec) -> str | None:
    return "a batch" if spec.batch < 2 else without("packed", "dropout", key_ranges=True)(spec)


def _dot_product_attention(arrays: Arrays, options: dict[str, Any]) -> Any:
    import jax_frontend

    tensors = (arrays[name] for name in ("q", "k", "v", "bias", "mask"))
    return jax_frontend.dot_product_attention(*tensors, scale=options["scale"], is_causal=options["causal"])


def _dot_product_refuses(spec: AttentionSpec) -> str | None:
    if spec.causal and spec.q_len != spec.kv_len and spec.alignment != "top_left":
        return "is_causal is top-left"
    if spec.value_dim != spec.head_dim:
        return "values as wide as keys"
    return without("window", "softcap", "alibi", "packed", "sinks", "dropout", "lse", "deterministic")(spec)


def _paged(arrays: Arrays, options: dict[str, Any]) -> Any:
    import jax_frontend

    given = {name: arrays[name] for name in (*pages.TABLES, "sinks")}
    given |= {name: arrays[name].astype(arrays["q"].dtype) for name in ("k_pages", "v_pages")}
    given |= {name: options[name] for name in (*pages.OPTIONS, "backend")}
    return jax_frontend.paged_attention(arrays["q"], **given, max_len_q=options["seq_info"].max_len_q)


def _pages(trial: Trial) -> Arrays:
    """Returns the pools in the place of the keys and values, and the tables."""
    laid_out = pages_of(trial)
    return {"k": laid_out.k, "v": laid_out.v, **laid_out.tables}


def _in_segments(arrays: Arrays, options: dict[str, Any]) -> Any:
    """Documents are segment ids and positions."""
    import jax.numpy as jnp

    import jax_frontend

    return segments.attend(jax_frontend.attention, jnp.take_along_axis, arrays, options | {"seq_info": None})


def _exported(arrays: Arrays, options: dict[str, Any]) -> Any:
    """The call runs as the program that ``jax.export`` wrote, and read again where flatbuffers is installed."""
    import jax
    import jax.export

    import jax_frontend

    present = {name: array for name, array in arrays.items() if array is not None}
    absent: Arrays = dict.fromkeys(arrays.keys() - present.keys())

    def call(present: Arrays) -> Any:
        return _attention(present | absent, options)

    shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), present)
    program = jax.export.export(jax.jit(call), disabled_checks=jax_frontend.export_checks())(shapes)
    if find_spec("flatbuffers") is not None:
        program = jax.export.deserialize(program.serialize())
    return program.call(present)


_lacks = partial(without, key_ranges=True, functions=True)
"""What ``attention`` itself lacks."""

ENTRIES = (
    Entry("jax paged_attention", partial(run, _paged, True, more=_pages), pages.refuses, requests=False, share=0.1),
    Entry(
        "jax attention, exported",
        partial(run, _exported, False),
        _lacks("packed", "dropout", "gradients"),
        shared=True,
        share=0.1,
    ),
    Entry(
        "jax attention, jit",
        partial(run, _attention, True),
        _lacks(),
        shared=True,
        words=words,
    ),
    Entry(
        "jax attention, eager",
        partial(run, _attention, False),
        _lacks(),
        shared=True,
        share=0.1,
        words=words,
    ),
    Entry(
        "jax attention, ranges on the host",
        partial(run, _ranges_on_host, False),
        ranges_refuse,
        shared=True,
        share=0.1,
        requests=False,
        parts=MOST_TILES,
    ),
    Entry(
        "jax attention, segments",
        partial(run, _in_segments, True, more=segments.arrays_of),
        segments.refuses,
        shared=True,
        masks=True,
    ),
    Entry("jax attention, vmap", partial(run, _mapped, True), _mapped_refuses, shared=True),
    Entry(
        "jax dot_product_attention",
        partial(run, _dot_product_attention, True),
        _dot_product_refuses,
        shared=True,
        requests=False,
    ),
)
