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


@cache
def good_values(framework: str) -> dict[str, Make]:
    """Good values by the name of a parameter."""
    array = _array_of(framework)

    def numbers(*shape: int, dtype: str = "float32") -> Make:
        return lambda: array(_numbers(*shape, dtype=dtype))

    def ints(*values: Any) -> Make:
        return lambda: array(np.array(values, np.int32))

    def plain(value: Any) -> Make:
        return lambda: value

    head_first = {name: numbers(2, 2, 7, 8) for name in ("K", "V")}
    good = {
        **{"q": numbers(2, 5, 4, 8), "k": numbers(2, 7, 2, 8), "v": numbers(2, 7, 2, 8), "qkv": numbers(2, 5, 3, 4, 8)},
        **{"query": numbers(2, 4, 5, 8), "key": numbers(2, 4, 7, 8), "value": numbers(2, 4, 7, 8)},
        **{"Q": numbers(2, 4, 5, 8), **head_first, "x": numbers(1, 8, 2, 8)},
        **{"mask": numbers(5, 7, dtype="bool"), "bias": numbers(5, 7), "alibi_slopes": numbers(4), "sinks": numbers(4)},
        **{"causal": plain(True), "alignment": plain("top_left"), "window": plain((3, 0)), "softcap": plain(20.0)},
        **{"scale": plain(0.5), "layout": plain("bshd"), "dropout": plain(0.0), "deterministic": plain(True)},
        **{"invariant": plain("batch")},
        **{"backend": plain(None), "return_lse": plain(True), "return_max_logit": plain(True)},
        **{"dropout_rng": plain(None), "seq_info": plain(None), "needs_backward": plain(False)},
        **{"on": plain(True), "names": plain("math")},
        **{"attn_mask": numbers(5, 7, dtype="bool"), "dropout_p": plain(0.0), "is_causal": plain(False)},
        **{"enable_gqa": plain(False), "attention_kwargs": plain(None), "attention_mask": plain(None)},
        **{"block_table": ints([0, 1], [2, -1], [3, 4]), "seq_lens": ints(6, 2, 8), "cu_seqlens_q": ints(0, 1, 2, 3)},
        **{"kv_lengths": ints(7, 6), "kv_starts": ints(0, 2), "cache_index": ints(1, 0)},
        **{"k_pages": numbers(6, 4, 2, 8), "v_pages": numbers(6, 4, 2, 8), "max_len_q": plain(1)},
        **{"k_scales": plain(None), "v_scales": plain(None), "kv_dtype": plain(None)},
        **{"num_layers": plain(1), "num_pages": plain(6), "page_size": plain(4), "kv_heads": plain(2)},
        **{"head_dim": plain(8), "value_dim": plain(8), "width": plain(2), "layer": plain(0), "device": plain(None)},
        **{"name": plain("a"), "parent": plain("a"), "tokens": plain(1), "lengths": plain([6, 2]), "new": plain(1)},
        **{
            "lengths_q": plain([3, 2]),
            "lengths_k": plain([4, 3]),
            "max_len": plain(None),
            "max_documents": plain(None),
        },
        **{"array": plain(None), "strategy": plain(None), "length": plain(8), "head_groups": plain(None)},
        **{"dim": plain(1), "mesh": one_rank_mesh if framework == "torch" else plain(None)},
        **{"provider": plain("native"), "convert_to_fp32": plain(True), "rotate_method": plain("allgather")},
        **{"training": plain(False), "uses_mask": plain(False), "use_varlen": plain(False)},
        **{"kwargs": dict, "past_key_value": plain(None), "max_seq_length": plain(64), "sliding_window": plain(4)},
        **{"total_tokens": plain(5), "labels": ints(*range(5)), "shift_labels": ints(*range(5))},
        **{
            "seq_lengths": plain([3, 2]),
            "ignore_index": plain(-100),
            "attn_bias": plain(None),
            "base_mask": plain(None),
        },
        **{
            "num_heads": plain(4),
            "in_features": plain(32),
            "position_ids": plain(None),
            "bsz": plain(2),
            "q_len": plain(5),
            "kv_len": plain(5),
        },
        **{"causal_mask": numbers(5, 7), "self": lambda: _layer(query_pre_attn_scalar=8, attn_logit_softcapping=30.0)},
        **{"framework": plain("torch"), "unavailable": plain(()), "builds": plain(())},
        "spec": lambda: attn_core.AttentionSpec(**_spec_sizes()),
        "target": lambda: attn_core.Target("torch", "cpu"),
    }
    if framework == "torch":
        import torch

        good |= {"dtype": plain(torch.float32), "device": plain("cpu")}
        good["seq_info"] = lambda: None
    elif framework == "jax":
        import jax.numpy as jnp

        good |= {"dtype": plain(jnp.float32)}
        good |= {"query_seq_lengths": ints(5, 3), "key_value_seq_lengths": ints(7, 6)}
        good |= {"local_window_size": plain((3, 0)), "implementation": plain("xla"), "return_residual": plain(False)}
        good |= {"axis_name": plain("rows"), "partition_spec": plain(None), "mesh": _jax_mesh}
    else:
        good |= {"dtype": plain("float32"), "device": plain("cpu"), "value": plain(None)}
    return good


def _spec_sizes() -> dict[str, Any]:
    sizes = {"batch": 2, "q_len": 5, "kv_len": 7, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "value_dim": 8}
    return {**sizes, "dtype": "float32"}


def _pool_sizes() -> dict[str, Make]:
    sizes = {"page_size": 16, "num_layers": 2, "kv_heads": 2, "head_dim": 8, "value_dim": 8, "dtype": "bfloat16"}
    sizes["fraction"] = 0.5
    return {name: lambda value=value: value for name, value in sizes.items()}


def _own(framework: str) -> dict[str, dict[str, Make]]:
    """Good values of single functions, by the end of the function's name, where a parameter's name is not enough."""
    array = _array_of(framework)

    def numbers(*shape: int, dtype: str = "float32") -> Make:
        return lambda: array(_numbers(*shape, dtype=dtype))

    def ints(*values: Any) -> Make:
        return lambda: array(np.array(values, np.int32))

    def plain(value: Any) -> Make:
        return lambda: value

    paged = {"q": numbers(3, 4, 8), "kv_starts": lambda: array(np.array([1, 0, 3], np.int32))}
    new = {"k": numbers(3, 2, 8), "v": numbers(3, 2, 8)}
    rotary = {"cos": numbers(9, 4), "sin": numbers(9, 4), "positions": lambda: array(np.array([5, 1, 7], np.int32))}
    packed = {"seq_info": lambda: (array(np.array([3, 2], np.int32)), array(np.array([0, 3, 5], np.int32)), 3)}
    ring = {name: numbers(1, 8, 2, 8) for name in "qkv"}
    ring |= {"mask": plain(None), "bias": plain(None), "alibi_slopes": plain(None), "alignment": plain("bottom_right")}
    ring |= {"sinks": numbers(2), "causal": plain(True), "layout": plain("zigzag")}
    packed_rows = {"q": numbers(5, 4, 8), "k": numbers(5, 2, 8), "v": numbers(5, 2, 8), "kv": numbers(5, 2, 2, 8)}
    packed_rows |= {name: ints(0, 3, 5) for name in ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k")}
    packed_rows |= {name: plain(3) for name in ("max_seqlen", "max_seqlen_q", "max_seqlen_k")}
    packed_rows |= {"qkv": numbers(5, 3, 4, 8), "block_table": plain(None)}
    cached = {"k_cache": numbers(2, 7, 2, 8), "v_cache": numbers(2, 7, 2, 8), "cache_seqlens": ints(3, 5)}
    cached |= {name: plain(None) for name in ("k", "v", "rotary_cos", "rotary_sin", "block_table")}
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
            **{**new, "slot_mapping": lambda: array(np.array([5, -1, 7], np.int32)), "positions": rotary["positions"]},
            "rotary": lambda: (rotary["cos"](), rotary["sin"]()),
        },
        "apply_rotary": {"x": numbers(3, 2, 8), **rotary},
        "PagedKVCache.update": {**new, "step": plain(None)},
        "PagedKVCache.attend": {**paged, "step": plain(None)},
        "PagedKVCache.step": {"names": plain(["a", "b", "c"])},
        "PagedKVCache.fork": {"name": plain("d")},
        "PagedKVCache.add": {"name": plain("e")},
        "PagedKVCache.check": {"step": plain(None)},
        "PagedKVCache.pages": {"step": plain(None)},
        "PageAllocator.allocate": {"name": plain("new")},
        "PageAllocator.fork": {"name": plain("new")},
        "PageAllocator.block_table": {"names": plain(["a"])},
        "PageAllocator.seq_lens": {"names": plain(["a"])},
        "PageAllocator.needed": {"tokens": lambda: {"a": 2}},
        "PageAllocator.match": {"tokens": plain([5, 3, 2])},
        "PageAllocator.allocate_matching": {"name": plain("new"), "tokens": plain([5, 3, 2])},
        "PageAllocator.record": {"tokens": plain([5, 3, 2])},
        "PageAllocator.swap_in": {"name": plain("out")},
        "PageAllocator.check_swapped": {"name": plain("out")},
        "PagedKVCache.record": {"tokens": plain([])},
        "PagedKVCache.swap_in": {"name": plain("out")},
        "pages_that_fit": {**_pool_sizes(), "memory": plain(2**30)},
        "bytes_per_token": _pool_sizes(),
        "pages_of": {"cache": numbers(6, 2, 4, 2, 8), "layout": plain("NHD")},
        "merge_states": {
            **{"outs": lambda: [array(_numbers(2, 5, 4, 8))] * 2, "lses": lambda: [array(_numbers(2, 4, 5))] * 2},
        },
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
        "AttentionSpec": {name: plain(value) for name, value in _spec_sizes().items()},
        "AttentionSpec.with_lengths": {"batch": plain(2), "q_len": plain(3), "kv_len": plain(3)},
        "SeqInfo": {
            **{name: plain(np.array([0, 3, 5], np.int32)) for name in ("cu_seqlens_q", "cu_seqlens_k")},
            **{"max_len_q": plain(3), "max_len_k": plain(3)},
        },
        "module.Attention": {
            **{name: plain(True) for name in ("sinks", "use_bias", "bitwise_deterministic")},
            **{name: plain(32) for name in ("in_kv_features", "out_features")},
            **{"num_kv_heads": plain(2), "dropout_rate": plain(0.0), "rotary": plain(None)},
        },
        "Target.build": {"name": plain("math")},
        "Target.claims": {"name": plain("math")},
        "Target.out_of_reach": {"name": plain("math")},
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
            **{"bias": numbers(5, 7), "mask": numbers(5, 7, dtype="bool"), "key": plain(None)},
        }
    return own


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

        def call(**keywords: Any) -> Any:
            return inner(*[keywords.pop(spread)] if spread in keywords else [], **keywords)

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

    def plain(value: Any) -> Make:
        return lambda: value

    config = {"backend": plain("sdpa"), "n_kv_heads": plain(2), "n_groups": plain(2), "sdpa_kwargs": plain(None)}
    config |= {"flash_dense_kwargs": plain(None), "flash_varlen_kwargs": plain(None), "xformers_kwargs": plain(None)}
    context = {"bsz": plain(2), "q_len": plain(5), "kv_seq_len": plain(7), "n_heads": plain(4), "head_dim": plain(8)}
    context |= {"requires_grad": plain(False), "seq_info": plain(None), "attention_mask": plain(None)}
    context |= {"causal_mask": plain(None), "sliding_window": plain(None), "prefix_seg_info": plain(None)}
    context |= {"is_causal": plain(True), "training": plain(False)}
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
    packed: dict[str, Make] = {**offsets, "max_len_q": plain(3), "max_len_k": plain(3)}
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

    yield from _function(
        "torch_frontend.module.Attention",
        Attention,
        Attention,
        "torch",
    )
    layer = Attention(4, 32, num_kv_heads=2)
    good = {
        "x": lambda: torch.from_numpy(_numbers(2, 5, 32)),
        "context": lambda: torch.from_numpy(_numbers(2, 7, 32)),
        **{name: good_values("torch")[name] for name in ("mask", "bias", "alibi_slopes", "seq_info")},
        **{"positions": lambda: None, "pages": lambda: None},
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
        **{"positions": lambda: None, "pages": lambda: None, "deterministic": lambda: True},
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
        **{"mask": lambda: jnp.ones((1, 1, 5, 7), bool), "dropout_rate": lambda: 0.0, "deterministic": lambda: True},
        **{"dtype": lambda: None, "precision": lambda: None, "dropout_rng": lambda: None},
    }

    def hook(**keywords: Any) -> Any:
        made = linen.attention_fn(**{name: keywords.pop(name) for name in fields if name in keywords})
        return made(**keywords)

    yield Function("jax_frontend.linen.attention_fn()", "jax", hook, {**fields, **given}, tuple(_FLAX_SHAPES))


_FLAX_SHAPES = {"query": (2, 5, 4, 8), "key": (2, 7, 2, 8), "value": (2, 7, 2, 8)}
