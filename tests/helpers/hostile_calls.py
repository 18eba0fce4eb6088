"""Every public function and method, and a good call of each, for tests that pass bad values to them.

Functions come from the ``__all__`` of public modules. A new function whose required parameters have familiar names
has a good call at once; else ``functions`` says which row of ``GOOD`` or ``OWN`` it lacks.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterator
from enum import Enum
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
from hostile_values import one_rank_mesh

import attn_core
from attn_core import backends

Make = Callable[[], Any]

NO_FUZZING = {
    "Pages": "a tuple of other objects",
    "Padding": "a tuple of other objects",
    "Step": "a tuple of other objects",
    "Selection": "a result, which callers do not make",
    "Counters": "a result, as a dict",
    "Backend": "a record, which register_backend checks",
    "Support": "claims of a backend, as data",
    "AttentionFn": "made by attention_fn",
    "digest": "for names of compiled code",
    "converted": "for the frontends, which pass their own functions",
    "known_conversion": "for the frontends",
    "with_lengths": "for the frontends, without checks by its description",
    "changed_since": "for steps of a cache",
    "commit": "for steps of a cache",
    "evict": "for steps of a cache",
    "grow": "for steps of a cache, which have checked its argument",
    "table_of": "for steps of a cache",
    "unchecked": "for the frontends, without checks by its name",
}
"""Public names that take no argument from a caller, or no checked one, and why."""


class Function(NamedTuple):
    """One public function.

    Attributes:
        name: with its module, as in a program.
        framework: ``"core"``, ``"torch"`` or ``"jax"``.
        call: takes keywords.
        good: a function for each parameter, which returns a good value or None.
        required: names of parameters that every call has.
        writes: names of parameters that the function writes to by contract.
    """

    name: str
    framework: str
    call: Callable[..., Any]
    good: dict[str, Make]
    required: tuple[str, ...]
    writes: tuple[str, ...] = ()


def _numbers(*shape: int, dtype: str = "float32") -> np.ndarray:
    values = np.random.default_rng(7).standard_normal(shape)
    return (values > -0.5) if dtype == "bool" else values.astype(dtype)


def _array_of(framework: str) -> Callable[[Any], Any]:
    if framework == "torch":
        import torch

        return torch.from_numpy
    if framework == "jax":
        import jax.numpy as jnp

        return jnp.asarray
    return lambda array: array


def _layer(**config: float) -> Any:
    return type("Layer", (), {"config": type("Config", (), config)(), "training": False})()


def plain(**values: Any) -> dict[str, Make]:
    """Good values that are the same object in every call."""
    return {name: lambda value=value: value for name, value in values.items()}


class _Arrays:
    """Makers of a framework's arrays."""

    def __init__(self, framework: str) -> None:
        self.of = _array_of(framework)

    def numbers(self, *shape: int, dtype: str = "float32") -> Make:
        return lambda: self.of(_numbers(*shape, dtype=dtype))

    def ints(self, *values: Any) -> Make:
        return lambda: self.of(np.array(values, np.int32))


@cache
def good_values(framework: str) -> dict[str, Make]:
    """Good values by the name of a parameter."""
    numbers, ints = _Arrays(framework).numbers, _Arrays(framework).ints
    keys, values, packed_pages = numbers(2, 7, 2, 8), numbers(2, 4, 7, 8), numbers(6, 4, 2, 8)
    good = {
        **{"q": numbers(2, 5, 4, 8), "k": keys, "v": keys, "qkv": numbers(2, 5, 3, 4, 8)},
        **{"query": numbers(2, 4, 5, 8), "key": values, "value": values, "x": numbers(1, 8, 2, 8)},
        **{"Q": numbers(2, 4, 5, 8), "K": numbers(2, 2, 7, 8), "V": numbers(2, 2, 7, 8)},
        **{"mask": numbers(5, 7, dtype="bool"), "bias": numbers(5, 7), "alibi_slopes": numbers(4), "sinks": numbers(4)},
        **plain(causal=True, alignment="top_left", window=(3, 0), softcap=20.0, scale=0.5, layout="bshd"),
        **plain(dropout=0.0, deterministic=True, invariant="batch", backend=None, return_lse=True),
        **plain(return_max_logit=True, dropout_rng=None, seq_info=None, needs_backward=False, on=True, names="math"),
        **plain(dropout_p=0.0, is_causal=False, enable_gqa=False, attention_kwargs=None, attention_mask=None),
        **{"attn_mask": numbers(5, 7, dtype="bool"), "causal_mask": numbers(5, 7)},
        **{"block_table": ints([0, 1], [2, -1], [3, 4]), "seq_lens": ints(6, 2, 8), "cu_seqlens_q": ints(0, 1, 2, 3)},
        **{"kv_lengths": ints(7, 6), "kv_starts": ints(0, 2), "cache_index": ints(1, 0)},
        **{"k_pages": packed_pages, "v_pages": packed_pages},
        **plain(max_len_q=1, k_scales=None, v_scales=None, kv_dtype=None, num_layers=1, num_pages=6, page_size=4),
        **plain(kv_heads=2, head_dim=8, value_dim=8, width=2, layer=0, device=None, name="a", parent="a", tokens=1),
        **plain(lengths=[6, 2], new=1, lengths_q=[3, 2], lengths_k=[4, 3], max_len=None, max_documents=None),
        **plain(array=None, strategy=None, length=8, head_groups=None, dim=1, provider="native", convert_to_fp32=True),
        **plain(rotate_method="allgather", training=False, uses_mask=False, use_varlen=False, past_key_value=None),
        **plain(max_seq_length=64, sliding_window=4, total_tokens=5, seq_lengths=[3, 2], ignore_index=-100),
        **plain(attn_bias=None, base_mask=None, num_heads=4, in_features=32, position_ids=None),
        **plain(bsz=2, q_len=5, kv_len=5, framework="torch", unavailable=(), builds=()),
        **{"labels": ints(*range(5)), "shift_labels": ints(*range(5)), "kwargs": dict},
        **{"mesh": one_rank_mesh if framework == "torch" else lambda: None},
        "self": lambda: _layer(query_pre_attn_scalar=8, attn_logit_softcapping=30.0),
        "spec": lambda: attn_core.AttentionSpec(**_spec_sizes()),
        "target": lambda: attn_core.Target("torch", "cpu"),
    }
    if framework == "torch":
        import torch

        return good | plain(dtype=torch.float32, device="cpu")
    if framework == "jax":
        import jax.numpy as jnp

        good |= {"query_seq_lengths": ints(5, 3), "key_value_seq_lengths": ints(7, 6), "mesh": _jax_mesh}
        good |= plain(local_window_size=(3, 0), implementation="xla", return_residual=False)
        return good | plain(dtype=jnp.float32, axis_name="rows", partition_spec=None)
    return good | plain(dtype="float32", device="cpu", value=None)


def _spec_sizes() -> dict[str, Any]:
    sizes = {"batch": 2, "q_len": 5, "kv_len": 7, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "value_dim": 8}
    return {**sizes, "dtype": "float32"}


def _pool_sizes() -> dict[str, Make]:
    return plain(page_size=16, num_layers=2, kv_heads=2, head_dim=8, value_dim=8, dtype="bfloat16", fraction=0.5)


def _own(framework: str) -> dict[str, dict[str, Make]]:
    """Good values of single functions, by the end of the function's name, where a parameter's name is not enough."""
    arrays = _Arrays(framework)
    array, numbers, ints = arrays.of, arrays.numbers, arrays.ints

    paged = {"q": numbers(3, 4, 8), "kv_starts": ints(1, 0, 3)}
    new = {"k": numbers(3, 2, 8), "v": numbers(3, 2, 8)}
    rotary = {"cos": numbers(9, 4), "sin": numbers(9, 4), "positions": ints(5, 1, 7)}
    packed = {"seq_info": lambda: (ints(3, 2)(), ints(0, 3, 5)(), 3)}
    ring = {name: numbers(1, 8, 2, 8) for name in "qkv"} | {"sinks": numbers(2)}
    ring |= plain(mask=None, bias=None, alibi_slopes=None, alignment="bottom_right", causal=True, layout="zigzag")
    packed_rows = {"q": numbers(5, 4, 8), "k": numbers(5, 2, 8), "v": numbers(5, 2, 8), "kv": numbers(5, 2, 2, 8)}
    packed_rows |= {name: ints(0, 3, 5) for name in ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k")}
    packed_rows |= plain(max_seqlen=3, max_seqlen_q=3, max_seqlen_k=3, block_table=None)
    packed_rows |= {"qkv": numbers(5, 3, 4, 8)}
    cached = {"k_cache": numbers(2, 7, 2, 8), "v_cache": numbers(2, 7, 2, 8), "cache_seqlens": ints(3, 5)}
    cached |= plain(k=None, v=None, rotary_cos=None, rotary_sin=None, block_table=None)
    prompt = [5, 3, 2]
    own = {
        "register_backend": {"backend": lambda: backends.load("math")},
        "flash_attn_kvpacked_func": {"kv": numbers(2, 7, 2, 2, 8)},
        "flash_attn_varlen_func": packed_rows,
        "flash_attn_varlen_kvpacked_func": packed_rows,
        "flash_attn_varlen_qkvpacked_func": packed_rows,
        "flash_attn_with_kvcache": {**cached, "cache_batch_idx": ints(1, 0), "cache_leftpad": ints(0, 2)},
        "paged_attention": paged,
        "explain_paged": paged,
        "append_kv": {
            **{**new, "slot_mapping": ints(5, -1, 7), "positions": rotary["positions"]},
            "rotary": lambda: (rotary["cos"](), rotary["sin"]()),
        },
        "apply_rotary": {"x": numbers(3, 2, 8), **rotary},
        "PagedKVCache.update": {**new, **plain(step=None)},
        "PagedKVCache.attend": {**paged, **plain(step=None)},
        "PagedKVCache.step": plain(names=["a", "b", "c"]),
        "PagedKVCache.fork": plain(name="d"),
        "PagedKVCache.add": plain(name="e"),
        "PagedKVCache.check": plain(step=None),
        "PagedKVCache.pages": plain(step=None),
        "PageAllocator.allocate": plain(name="new"),
        "PageAllocator.fork": plain(name="new"),
        "PageAllocator.block_table": plain(names=["a"]),
        "PageAllocator.seq_lens": plain(names=["a"]),
        "PageAllocator.needed": {"tokens": lambda: {"a": 2}},
        "PageAllocator.match": plain(tokens=prompt),
        "PageAllocator.allocate_matching": plain(name="new", tokens=prompt),
        "PageAllocator.record": plain(tokens=prompt),
        "PageAllocator.swap_in": plain(name="out"),
        "PageAllocator.check_swapped": plain(name="out"),
        "PagedKVCache.record": plain(tokens=[]),
        "PagedKVCache.swap_in": plain(name="out"),
        "pages_that_fit": {**_pool_sizes(), **plain(memory=2**30)},
        "bytes_per_token": _pool_sizes(),
        "pages_of": {"cache": numbers(6, 2, 4, 2, 8), **plain(layout="NHD")},
        "merge_states": {
            **{"outs": lambda: [array(_numbers(2, 5, 4, 8))] * 2, "lses": lambda: [array(_numbers(2, 4, 5))] * 2},
        },
        "unpad": {"attention_mask": ints([1, 1, 0], [0, 1, 1]), "tensors": numbers(2, 3, 4, 8), **plain(total=5)},
        "repad": {"packed": numbers(1, 4, 4, 8), "padding": lambda: _padding(framework)},
        "attention_qkvpacked": {"mask": numbers(5, 5, dtype="bool"), "bias": numbers(5, 5)},
        "context_parallel_attention": ring,
        "explain_context_parallel": ring,
        "jax_frontend.dot_product_attention": {
            **{"query": numbers(2, 5, 4, 8), "key": numbers(2, 7, 2, 8), "value": numbers(2, 7, 2, 8)},
            **{"bias": numbers(1, 1, 5, 7), "mask": numbers(1, 1, 5, 7, dtype="bool")},
        },
        "build_sdpa_packed_attention_mask": packed,
        "build_xformers_block_causal_mask": packed,
        "cover_padded_cu_seqlens": packed,
        "mask_packed_boundary_labels": {"labels": lambda: array(np.arange(5).reshape(1, 5))},
        "mask_packed_sequence_boundaries": {"shift_labels": lambda: array(np.arange(5).reshape(1, 5))},
        "AttentionSpec": plain(**_spec_sizes()),
        "AttentionSpec.with_lengths": plain(batch=2, q_len=3, kv_len=3),
        "SeqInfo": {
            **{name: lambda: np.array([0, 3, 5], np.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")},
            **plain(max_len_q=3, max_len_k=3),
        },
        "module.Attention": {
            **plain(sinks=True, use_bias=True, bitwise_deterministic=True, in_kv_features=32, out_features=32),
            **plain(num_kv_heads=2, dropout_rate=0.0, rotary=None),
        },
        "Target.build": plain(name="math"),
        "Target.claims": plain(name="math"),
        "Target.out_of_reach": plain(name="math"),
        "run_attention": {
            "config": lambda: _unsloth("Config", framework),
            "context": lambda: _unsloth("Context", framework),
        },
        "nnx.Attention": {"rngs": _streams},
        "set_layer_backends": {"model": _model, "choice": lambda: {0: None}},
    }
    if framework == "jax":
        own["equinox.attend"] = {
            **{"query": numbers(5, 32), "key_": numbers(7, 32), "value": numbers(7, 32), "layer": _equinox_layer},
            **{"bias": numbers(5, 7), "mask": numbers(5, 7, dtype="bool"), **plain(key=None)},
        }
    return own


def _padding(framework: str) -> Any:
    return import_module(f"{framework}_frontend").unpad(np.array([[1, 1, 0], [0, 1, 1]]))[-1]


@cache
def _jax_mesh() -> Any:
    import jax

    return jax.make_mesh((1,), ("rows",), devices=jax.devices()[:1])


@cache
def _streams() -> Any:
    from flax import nnx

    return nnx.Rngs(0)


def _unsloth(kind: str, framework: str) -> Any:
    unsloth = import_module(f"{framework}_frontend").unsloth
    if kind == "Config":
        return unsloth.AttentionConfig("sdpa", 2, 2)
    return unsloth.AttentionContext(2, 5, 7, 4, 8)


@cache
def _model() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from torch_frontend import huggingface

    huggingface.register()
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=16, attn_implementation=huggingface.NAME))


@cache
def _equinox_layer() -> Any:
    import equinox as eqx
    import jax

    return eqx.nn.MultiheadAttention(4, 32, key=jax.random.key(0))


OF_HOSTS = {
    "nnx.Attention": ("rngs", "dtype", "param_dtype"),
    "linen.Attention": ("dtype", "param_dtype"),
    "module.Attention": ("dtype", "device"),
}
"""Parameters that a layer hands to its framework as they are, beside initialisers: their errors are the framework's."""

_OFFSETS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
ALWAYS = {
    "torch_frontend.flash_attn.cute.flash_attn_varlen_func": _OFFSETS,
    "jax_frontend.flash_attn.cute.flash_attn_varlen_func": _OFFSETS,
    "torch_frontend.append_kv": ("block_table", "seq_lens"),
    "jax_frontend.append_kv": ("block_table", "seq_lens"),
    "torch_frontend.pages_that_fit": ("memory",),
    "jax_frontend.pages_that_fit": ("memory",),
    "jax_frontend.context_parallel_attention": ("mesh", "axis_name", "layout"),
    "jax_frontend.explain_context_parallel": ("mesh", "axis_name"),
    "jax_frontend.shard_lengths": ("mesh", "axis_name"),
    "jax_frontend.shard_sequence": ("mesh", "axis_name"),
    "jax_frontend.unshard_sequence": ("mesh", "axis_name", "length"),
}
"""Parameters with defaults that a good call still has, because the defaults are for calls of another form: inside
jax.shard_map, by slots, or on a GPU."""

WRITES = {
    "append_kv": ("k_pages", "v_pages"),
    "torch_frontend.paged_attention": ("out",),
    "torch_frontend.PagedKVCache.attend": ("out",),
    "flash_attn_with_kvcache": ("k_cache", "v_cache"),
    "mask_packed_sequence_boundaries": ("shift_labels",),
}
"""Parameters that a function writes to by contract."""


def _cache(frontend: str) -> Any:
    made = import_module(frontend).PagedKVCache(num_layers=1, num_pages=6, page_size=4, kv_heads=2, head_dim=8)
    for name in [*"abc", "out"]:
        made.add(name)
    made.swap_out("out")
    return made


def _allocator() -> Any:
    made = attn_core.PageAllocator(6, 4)
    made.allocate("a", 6)
    made.allocate("b", 2)
    made.allocate("out", 2)
    made.swap_out("out")
    return made


def _object(kind: type, framework: str) -> Make | None:
    """How to make an object of a class whose methods are called."""
    return {
        "PageAllocator": _allocator,
        "PagedKVCache": lambda: _cache(f"{framework}_frontend"),
        "AttentionSpec": lambda: attn_core.AttentionSpec(**_spec_sizes()),
        "SeqInfo": lambda: attn_core.SeqInfo.from_lengths([3, 2]),
        "Target": lambda: attn_core.Target("torch", "cpu"),
        "Selection": lambda: attn_core.select(
            attn_core.AttentionSpec(**_spec_sizes()), attn_core.Target("torch", "cpu")
        ),
    }.get(kind.__name__)


def public_modules(framework: str) -> list[str]:
    """Names of modules with ``__all__``: the package, its direct children, and those of FlashAttention 3 and 4."""
    root = {"core": "attn_core", "torch": "torch_frontend", "jax": "jax_frontend"}[framework]
    if framework == "core":  # its subpackages are for the frontends
        return [root]
    modules = pkgutil.iter_modules(import_module(root).__path__)
    children = [f"{root}.{each.name}" for each in modules]
    children += [f"{root}.flash_attn.{name}" for name in ("hopper", "cute")]
    return [name for name in (root, *children) if hasattr(import_module(name), "__all__")]


@cache
def functions(framework: str) -> dict[str, Function]:
    """Every public function of a framework by its name.

    Raises:
        LookupError: for a required parameter without a good value.
    """
    found: dict[str, Function] = {}
    seen: set[int] = set()
    for module_name in public_modules(framework):
        module = import_module(module_name)
        for name in module.__all__:
            thing = getattr(module, name)
            if id(thing) in seen or not callable(thing) or name in NO_FUZZING:
                continue
            seen.add(id(thing))
            for made in _functions_of(f"{module_name}.{name}", thing, framework):
                found[made.name] = made
    if framework != "core":
        for made in _composed(framework):
            found[made.name] = made
    return found


def _functions_of(name: str, thing: Any, framework: str) -> Iterator[Function]:
    if not isinstance(thing, type):
        yield from _function(name, thing, thing, framework)
        return
    own = thing.__module__.startswith(("attn_core", f"{framework}_front"))
    if not own or issubclass(thing, Exception | Warning | Enum):  # Python looks up the members of an Enum
        return
    if framework == "core" or not thing.__module__.startswith("attn_core"):
        signed, skip = (thing, 0) if type(thing) is type else (thing.__init__, 1)
        yield from _function(name, thing, signed, framework, skip)
    make = _object(thing, framework)
    methods = {
        key for each in thing.__mro__ if each.__module__.startswith(("attn_core", framework)) for key in vars(each)
    }
    if make is None or (framework != "core" and not thing.__module__.startswith(framework)):
        return
    for key in sorted(methods):
        function = getattr(thing, key)
        if key.startswith("_") or key in NO_FUZZING or not callable(function):
            continue
        if inspect.ismethod(function) or isinstance(inspect.getattr_static(thing, key), staticmethod):
            yield from _function(f"{name}.{key}", function, function, framework)
        else:
            yield from _function(f"{name}.{key}", _method(make, key), function, framework, skip=1)


def _method(make: Make, key: str) -> Callable[..., Any]:
    def call(*positional: Any, **keywords: Any) -> Any:
        owner = make()
        if keywords.get("step", 0) is None:
            keywords["step"] = owner.step(["a", "b", "c"])
        return getattr(owner, key)(*positional, **keywords)

    return call


def _function(name: str, call: Callable[..., Any], signed: Any, framework: str, skip: int = 0) -> Iterator[Function]:
    parameters = list(inspect.signature(signed).parameters.values())[skip:]
    own = {key: make for end, row in _own(framework).items() if _ends(name, end) for key, make in row.items()}
    known = {**good_values(framework), **own}
    good: dict[str, Make] = {}
    required = []
    spread = None
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:  # the options of attention
            good |= {key: known[key] for key in ("causal", "window", "softcap", "mask", "layout", "backend")}
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            spread = parameter.name
        elif parameter.default is parameter.empty:
            if parameter.name not in known:
                raise LookupError(f"{name}: no good value for {parameter.name}; add it to GOOD or OWN of {__name__}")
            required.append(parameter.name)
        default = parameter.default
        good[parameter.name] = known.get(parameter.name, lambda default=default: default)
    if not good:
        return
    if spread is not None:
        inner = call
        before = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]

        def call(**keywords: Any) -> Any:
            return inner(*[keywords.pop(name) for name in (*before, spread) if name in keywords], **keywords)

        required.append(spread)
    required += ALWAYS.get(name, ())
    handed = next((names for end, names in OF_HOSTS.items() if _ends(name, end)), ())
    fixed = {key: make for key, make in good.items() if key in handed or key.endswith("_init")}
    if fixed:
        whole = call

        def call(**keywords: Any) -> Any:
            return whole(**keywords, **{key: make() for key, make in fixed.items() if key in required_all})

        required_all = set(required)
        good = {key: make for key, make in good.items() if key not in fixed}
        required = [key for key in required if key not in fixed]
    writes = next((names for end, names in WRITES.items() if _ends(name, end)), ())
    yield Function(name, framework, call, good, tuple(required), writes)


def _ends(name: str, end: str) -> bool:
    return f".{name}".endswith(f".{end}")


def _composed(framework: str) -> Iterator[Function]:
    """Calls whose arguments travel in objects: Unsloth's two, packed documents, layers."""
    frontend = import_module(f"{framework}_frontend")
    unsloth = frontend.unsloth
    array = _array_of(framework)
    good = good_values(framework)

    config = plain(backend="sdpa", n_kv_heads=2, n_groups=2, sdpa_kwargs=None, flash_dense_kwargs=None)
    config |= plain(flash_varlen_kwargs=None, xformers_kwargs=None)
    context = plain(bsz=2, q_len=5, kv_seq_len=7, n_heads=4, head_dim=8, requires_grad=False, seq_info=None)
    context |= plain(attention_mask=None, causal_mask=None, sliding_window=None, prefix_seg_info=None)
    context |= plain(is_causal=True, training=False)
    tensors = {name: good[name] for name in "QKV"}

    def run(**keywords: Any) -> Any:
        return frontend.run_attention(
            config=unsloth.AttentionConfig(**{key: keywords.pop(key) for key in config}),
            context=unsloth.AttentionContext(**{key: keywords.pop(key) for key in context}),
            **keywords,
        )

    fields = {**config, **context, **tensors}
    yield Function(f"{framework}_frontend.run_attention(fields)", framework, run, fields, tuple(fields))

    offsets = {name: lambda: array(np.array([0, 3, 5], np.int32)) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    packed: dict[str, Make] = {**offsets, **plain(max_len_q=3, max_len_k=3)}
    rows = {name: (lambda heads=heads: array(_numbers(5, heads, 8))) for name, heads in (("q", 4), ("k", 2), ("v", 2))}

    def documents(**keywords: Any) -> Any:
        info = attn_core.SeqInfo(*(keywords.pop(key) for key in packed))
        return frontend.attention(**keywords, seq_info=info)

    required = (*rows, *packed)
    options = {key: good[key] for key in ("causal", "window", "backend", "return_lse", "sinks")}
    yield Function(
        f"{framework}_frontend.attention(documents)", framework, documents, {**rows, **packed, **options}, required
    )
    if framework == "torch":
        yield from _torch_layer()
    else:
        yield from _flax_layers()


def _torch_layer() -> Iterator[Function]:
    import torch

    from torch_frontend.module import Attention

    yield from _function("torch_frontend.module.Attention", Attention, Attention, "torch")
    layer = Attention(4, 32, num_kv_heads=2)
    good = {
        "x": lambda: torch.from_numpy(_numbers(2, 5, 32)),
        "context": lambda: torch.from_numpy(_numbers(2, 7, 32)),
        **{name: good_values("torch")[name] for name in ("mask", "bias", "alibi_slopes", "seq_info")},
        **plain(positions=None, pages=None),
    }
    yield Function("torch_frontend.module.Attention()", "torch", layer, good, ("x", "context"))


def _flax_layers() -> Iterator[Function]:
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from jax_frontend import linen
    from jax_frontend import nnx as layers

    good = good_values("jax")
    arrays: dict[str, Make] = {
        "x": lambda: jnp.asarray(_numbers(2, 5, 32)),
        "context": lambda: jnp.asarray(_numbers(2, 7, 32)),
        **{name: good[name] for name in ("mask", "bias", "alibi_slopes", "seq_info")},
        **plain(positions=None, pages=None, deterministic=True),
    }
    layer = linen.Attention(4, num_kv_heads=2)
    weights = layer.init(jax.random.key(0), jnp.ones((1, 1, 32)))

    def apply(**keywords: Any) -> Any:
        return layer.apply(weights, **keywords)

    yield Function("jax_frontend.linen.Attention()", "jax", apply, arrays, ("x", "context"))
    decoding = layer.clone(decode=True)
    cache = decoding.init(jax.random.key(0), jnp.ones((2, 7, 32)))["cache"]

    def decode(**keywords: Any) -> Any:
        return decoding.apply({**weights, "cache": cache}, mutable=["cache"], **keywords)[0]

    tables = {"x": arrays["x"], **{name: arrays[name] for name in ("mask", "bias", "alibi_slopes")}}
    yield Function("jax_frontend.linen.Attention(decode=True)()", "jax", decode, tables, ("x",))
    yield Function(
        "jax_frontend.nnx.Attention()",
        "jax",
        layers.Attention(4, 32, num_kv_heads=2, rngs=nnx.Rngs(0)),
        arrays,
        ("x", "context"),
    )
    names = ("causal", "alignment", "window", "softcap", "scale", "alibi_slopes", "sinks", "backend")
    fields = {name: good[name] for name in names}
    given: dict[str, Make] = {
        **{name: (lambda shape=shape: jnp.asarray(_numbers(*shape))) for name, shape in _FLAX_SHAPES.items()},
        **{"mask": lambda: jnp.ones((1, 1, 5, 7), bool)},
        **plain(dropout_rate=0.0, deterministic=True, dtype=None, precision=None, dropout_rng=None),
    }

    def hook(**keywords: Any) -> Any:
        made = linen.attention_fn(**{name: keywords.pop(name) for name in fields if name in keywords})
        return made(**keywords)

    yield Function("jax_frontend.linen.attention_fn()", "jax", hook, {**fields, **given}, tuple(_FLAX_SHAPES))


_FLAX_SHAPES = {"query": (2, 5, 4, 8), "key": (2, 7, 2, 8), "value": (2, 7, 2, 8)}
