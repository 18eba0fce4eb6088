"""Forms of an eager torch call, what may observe one, and what may be wrong with it: the cases of ``test_observers``.

A case is a form, an observer and a change. ``outcome`` runs it once and records all that a caller could notice.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from attn_core import checks, ranges
from torch_frontend import (
    SeqInfo,
    append_kv,
    attention,
    attention_qkvpacked,
    context_parallel_attention,
    paged_attention,
    use_backend,
)
from torch_frontend.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from torch_frontend.recomputed import attention_of_heads, attention_of_layer

Tensor = torch.Tensor
Operands = dict[str, Any]
Results = Any
BATCH, TOKENS, HEADS, DIM, NEW = 2, 8, 2, 8, 3
"""NEW: the queries of each sequence in a call with a cache that has several."""
PAGES, PAGE = 6, 4
DOCUMENTS = SeqInfo.from_lengths([6, 4, 6])
"""An object that remembers its offsets on each device."""


class Form(NamedTuple):
    """One way to call.

    Attributes:
        function: takes the operands and the options by name.
        operands: the tensors of a legal call.
        options: the plain options of a legal call.
    """

    function: Callable[..., Any]
    operands: dict[str, Tensor]
    options: dict[str, Any]

    def copies(self) -> Operands:
        """New tensors with the numbers of a legal call."""
        return {name: tensor.clone() for name, tensor in self.operands.items()}


class Change(NamedTuple):
    """What makes a call another one than the legal one.

    Attributes:
        name: the operand or the option, and what happens to it.
        apply: changes operands; None if none changes.
        option: the name of an option that has a value of its own; None if none has.
        value: its value.
        legal_value: its value in a legal call that runs first: equal to ``value``, or near to it.
    """

    name: str
    apply: Callable[[Operands], None] | None = None
    option: str | None = None
    value: Any = None
    legal_value: Any = None

    def options(self, form: Form) -> dict[str, Any]:
        """The options of the call."""
        return form.options if self.option is None else form.options | {self.option: self.value}

    def before(self) -> Change:
        """The legal call that runs first."""
        return Change("before", option=self.option, value=self.legal_value)


def _numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + shape[-1]))


def _ints(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _rows(q_len: int = TOKENS, kv_len: int = TOKENS, width: int = DIM) -> dict[str, Tensor]:
    shapes = {"q": (BATCH, q_len), "k": (BATCH, kv_len), "v": (BATCH, kv_len)}
    return {name: _numbers(*shape, HEADS, width).roll(at) for at, (name, shape) in enumerate(shapes.items())}


def _packed() -> dict[str, Tensor]:
    return {name: tensor.flatten(0, 1) for name, tensor in _rows().items()}


def _heads_first(q_len: int = TOKENS) -> dict[str, Tensor]:
    return {name: tensor.transpose(1, 2).contiguous() for name, tensor in _rows(q_len).items()}


def _mask() -> Tensor:
    return _numbers(BATCH, 1, TOKENS, TOKENS) > -0.5


def _pool() -> dict[str, Tensor]:
    pages = _numbers(PAGES, PAGE, HEADS, DIM)
    return {"k_pages": pages, "v_pages": pages.roll(1)}


def _tables() -> dict[str, Tensor]:
    return {"block_table": _ints([2, 0], [5, 1]), "seq_lens": _ints(6, 4)}


def _cache() -> dict[str, Tensor]:
    cache = _rows(1)
    return {"k_cache": cache["k"], "v_cache": cache["v"], "cache_seqlens": _ints(5, 3)}


def _with_documents(cu_seqlens: Any, **call: Any) -> Any:
    return attention(**call, seq_info=SeqInfo(cu_seqlens, cu_seqlens, 6, 6))


def _with_known_documents(**call: Any) -> Any:
    return attention(**call, seq_info=DOCUMENTS)


def _nested(q: Any, k: Any, v: Any, offsets: Any, **options: Any) -> Any:
    rows = [torch.nested.nested_tensor_from_jagged(each, offsets, min_seqlen=4, max_seqlen=6) for each in (q, k, v)]
    return attention(*rows, **options).values()


def _of_layer(**call: Any) -> Any:
    """The first pass of re-entrant checkpointing."""
    with torch.no_grad():
        return attention_of_layer(**call, trains=True)


def _trained_qkv(qkv: Any, **options: Any) -> Any:
    """A call whose tensor autograd records."""
    return attention_qkvpacked(qkv.requires_grad_() if type(qkv) is Tensor else qkv, **options)


def _of_heads(**call: Any) -> Any:
    return attention_of_heads(**call, trains=False)


def _on_one_rank(**call: Any) -> Any:
    return context_parallel_attention(**call, mesh=one_rank(), layout="contiguous")


@cache
def one_rank() -> Any:
    """The mesh of this process alone."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.init_device_mesh("cpu", (1,), mesh_dim_names=("context",))


def leave_one_rank() -> None:
    """Ends the process group of ``one_rank``."""
    if one_rank.cache_info().currsize:
        one_rank.cache_clear()
        dist.destroy_process_group()


_CAUSAL = {"causal": True}
_DROPPED = {"causal": True, "dropout": 0.5}
_OFFSETS = _ints(0, 6, 10, 16)
_NEW_OFFSETS = _ints(0, 2, 3)
_KEY_RANGES = torch.stack((torch.arange(TOKENS), torch.full((TOKENS,), TOKENS)), -1).int()[None, None, :, None]
_CHUNK = {"q": _numbers(3, HEADS, DIM), **_pool(), **_tables(), "cu_seqlens_q": _NEW_OFFSETS}
_DECODE = {"q": _numbers(BATCH, HEADS, DIM), **_pool(), **_tables()}
_APPENDED = {**_pool(), "k": _numbers(BATCH, HEADS, DIM), "v": _numbers(BATCH, HEADS, DIM).roll(1), **_tables()}
_NEW_ROWS = {"k": _numbers(BATCH, 1, HEADS, DIM), "v": _numbers(BATCH, 1, HEADS, DIM).roll(1)}
_ROTARY = {"rotary_cos": _numbers(TOKENS, DIM // 2).cos(), "rotary_sin": _numbers(TOKENS, DIM // 2).sin()}
_LENGTHS = {"kv_lengths": _ints(7, 4)}
_VARLEN = {**_packed(), "cu_seqlens_q": _OFFSETS, "cu_seqlens_k": _OFFSETS}
_LONGEST = {"max_seqlen_q": 6, "max_seqlen_k": 6}
_BIAS = {"bias": _numbers(BATCH, HEADS, TOKENS, TOKENS)}
_SINKS = {"sinks": _numbers(HEADS)}
_SLOPES = {"alibi_slopes": _numbers(HEADS).abs()}

FORMS: dict[str, Form] = {
    "dense": Form(attention, _rows(), _CAUSAL),
    "lse": Form(attention, _rows(), _CAUSAL | {"return_lse": True}),
    "max logit": Form(attention, _rows(), _CAUSAL | {"return_max_logit": True}),
    "window": Form(attention, _rows(), _CAUSAL | {"window": 3}),
    "softcap": Form(attention, _rows(), {"softcap": 2.0}),
    "dropout": Form(attention, _rows(), _DROPPED),
    "mask": Form(attention, _rows() | {"mask": _mask()}, {}),
    "bias": Form(attention, _rows() | _BIAS, {}),
    "mask and bias": Form(attention, _rows() | {"mask": _mask()[:, :, :1], **_BIAS}, _CAUSAL | {"return_lse": True}),
    "sinks": Form(attention, _rows() | _SINKS, _CAUSAL),
    "alibi": Form(attention, _rows() | _SLOPES, _CAUSAL),
    "sinks, mask and lse": Form(attention, _rows() | _SINKS | {"mask": _mask()}, {"return_lse": True}),
    "documents": Form(_with_documents, _packed() | {"cu_seqlens": _OFFSETS}, _CAUSAL),
    "known documents": Form(_with_known_documents, _packed(), _CAUSAL),
    "documents, lse": Form(_with_documents, _packed() | {"cu_seqlens": _OFFSETS} | _SINKS, {"return_lse": True}),
    "key ranges": Form(attention, _rows() | {"key_ranges": _KEY_RANGES}, {}),
    "segments": Form(
        attention, _rows() | {"q_segment_ids": torch.arange(BATCH * TOKENS).view(BATCH, -1).int() // 3}, {}
    ),
    "bhsd": Form(attention, _heads_first(), _CAUSAL | {"layout": "bhsd"}),
    "bhsd, mask": Form(attention, _heads_first() | {"mask": _mask()}, {"layout": "bhsd"}),
    "bhsd, bias": Form(attention, _heads_first() | _BIAS, _CAUSAL | {"layout": "bhsd"}),
    "rows of a cache": Form(attention, _rows(1) | _LENGTHS, _CAUSAL),
    "rows of a cache, chunk": Form(attention, _rows(NEW) | _LENGTHS | _SINKS, _CAUSAL | {"return_lse": True}),
    "rows of a cache, index": Form(attention, _rows(1) | _LENGTHS | {"cache_index": _ints(1, 0)}, _CAUSAL),
    "rows of a cache, starts": Form(attention, _rows(1) | _LENGTHS | {"kv_starts": _ints(2, 0)}, _CAUSAL),
    "rows of a cache, bhsd": Form(attention, _heads_first(NEW) | _LENGTHS, _CAUSAL | {"layout": "bhsd"}),
    "paged": Form(paged_attention, _DECODE, {}),
    "paged, lse": Form(paged_attention, _DECODE | _SINKS, {"return_lse": True, "window": 3}),
    "paged chunk": Form(paged_attention, _CHUNK, {"max_len_q": 2}),
    "append_kv": Form(append_kv, _APPENDED, {}),
    "append_kv, chunk": Form(append_kv, _APPENDED | {"cu_seqlens_q": _ints(0, 1, 2)}, {}),
    "kvcache": Form(flash_attn_with_kvcache, {"q": _numbers(BATCH, 1, HEADS, DIM)} | _cache() | _NEW_ROWS, _CAUSAL),
    "kvcache, rotary": Form(
        flash_attn_with_kvcache, {"q": _numbers(BATCH, 1, HEADS, DIM)} | _cache() | _NEW_ROWS | _ROTARY, _CAUSAL
    ),
    "kvcache, chunk": Form(
        flash_attn_with_kvcache,
        {"q": _numbers(BATCH, NEW, HEADS, DIM)} | _cache(),
        _CAUSAL | {"return_softmax_lse": True},
    ),
    "kvcache, pages": Form(
        flash_attn_with_kvcache,
        {
            "q": _numbers(BATCH, 1, HEADS, DIM),
            "k_cache": _pool()["k_pages"],
            "v_cache": _pool()["v_pages"],
            "cache_seqlens": _ints(6, 4),
            "block_table": _ints([2, 0], [5, 1]),
        },
        _CAUSAL,
    ),
    "flash_attn": Form(flash_attn_func, _rows(), _CAUSAL),
    "varlen": Form(flash_attn_varlen_func, _VARLEN, _CAUSAL | _LONGEST),
    "layer": Form(_of_layer, _rows(), _CAUSAL),
    "layer, dropout": Form(_of_layer, _rows(), _DROPPED),
    "heads of a layer": Form(_of_heads, _heads_first(), _CAUSAL),
    "qkvpacked": Form(attention_qkvpacked, {"qkv": _numbers(BATCH, TOKENS, 3, HEADS, DIM)}, _CAUSAL),
    "qkvpacked, trained": Form(_trained_qkv, {"qkv": _numbers(BATCH, TOKENS, 3, HEADS, DIM)}, _CAUSAL),
    "nested": Form(_nested, _packed() | {"offsets": _OFFSETS.long()}, _CAUSAL),
    "one rank": Form(_on_one_rank, _rows(), _CAUSAL),
    "one rank, lse": Form(_on_one_rank, _rows() | _SINKS, _CAUSAL | {"window": 3, "return_lse": True}),
}


class Subclass(torch.Tensor):
    """A subclass without a meaning of its own."""


def _cut(tensor: Tensor) -> Tensor:
    """Numbers whose storage ends at half of them, as that of a parameter of FSDP may.

    The other half is behind the storage, so a path that reads it does no harm and finds the same every time.
    """
    numbers = tensor.numpy().reshape(-1)
    half = torch.from_numpy(numbers[: numbers.size // 2])
    cut: Tensor = torch.ops.inductor._reinterpret_tensor(half, tensor.shape, tensor.stride())
    return cut


def _with_mixed_strides(tensor: Tensor) -> Tensor:
    """Equal numbers, each two places from the next."""
    return torch.stack((tensor, tensor), -1)[..., 0]


def _in_inference_mode(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


def _with_nan(tensor: Tensor) -> Tensor:
    tensor.view(-1)[tensor.numel() // 2] = torch.nan
    return tensor


FLOATS: dict[str, Callable[[Tensor], Any]] = {
    "requires a gradient": lambda t: t.requires_grad_(),
    "a Parameter that trains": torch.nn.Parameter,
    "float64": torch.Tensor.double,
    "bfloat16": torch.Tensor.bfloat16,
    "conjugated": lambda t: t.to(torch.complex64).conj(),
    "a negative view": torch._neg_view,
    "NaN": _with_nan,
}
INTS: dict[str, Callable[[Tensor], Any]] = {
    "int64": torch.Tensor.long,
    "float32": torch.Tensor.float,
    "too large": lambda t: t + 1000,
    "negative": lambda t: t - 1000,
}
KINDS: dict[str, Callable[[Tensor], Any]] = {
    "an axis less": lambda t: t[0],
    "an axis more": lambda t: t[None],
    "a shorter last axis": lambda t: t[..., :-1],
    "a longer first axis": lambda t: torch.cat((t, t)),
    "on meta": lambda t: t.to("meta"),
    "numpy": lambda t: t.numpy(),
    "a list": lambda t: t.tolist(),
    "None": lambda t: None,
    "cut": _cut,
    "sparse": lambda t: t.to_sparse(),
    "a subclass": lambda t: t.as_subclass(Subclass),
    "a Parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "mixed strides": _with_mixed_strides,
    "expanded": lambda t: t[:1].expand(t.shape),
    "of inference mode": _in_inference_mode,
}
"""What may happen to one operand, or to all of them: it stays legal, or becomes wrong in one respect."""

WRONG_OPTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "causal": (True, (1, 1.0, "yes", None)),
    "deterministic": (True, (1,)),
    "return_lse": (True, (1,)),
    "return_max_logit": (True, (1,)),
    "return_softmax_lse": (True, (1,)),
    "return_attn_probs": (False, (0,)),
    "window": (1, (True, 1.0, (True, 0), (1.0, 0), [1, 0], torch.tensor(1))),
    "window_size": ((1, 0), ((True, 0), (1.0, 0), [1, 0], 1)),
    "scale": (1.0, (True, 1, "1", torch.tensor(1.0))),
    "softmax_scale": (1.0, (True, 1, "1")),
    "softcap": (1.0, (True, 1, -1.0)),
    "dropout": (0.0, (0, False, 1.0, None)),
    "dropout_p": (0.0, (0, False)),
    "alignment": ("top_left", ("TOP_LEFT", None, ("top_left",))),
    "invariant": ("batch", (True, ("batch",))),
    "backend": ("math", (["math"], ("math",), "mth", 1)),
    "max_len_q": (2, (2.0, True)),
    "max_seqlen_q": (6, (6.0, True)),
    "rotary_interleaved": (True, (1,)),
    "layout": ("bhsd", (1, "BHSD", None)),
}
"""For each option a legal value, and others: most are equal to it or nearly so, and of another type."""

_SHARED = ("causal", "deterministic", "window", "scale", "softcap", "backend")
_OF_ATTENTION = (*_SHARED, "return_lse", "return_max_logit", "dropout", "alignment", "invariant")
_OF_FLASH_ATTENTION = ("causal", "window_size", "softmax_scale", "softcap")
OPTIONS: dict[Callable[..., Any], tuple[str, ...]] = {
    attention: (*_OF_ATTENTION, "layout"),
    _with_documents: _OF_ATTENTION,
    _with_known_documents: _OF_ATTENTION,
    _nested: _SHARED,
    _of_layer: (*_SHARED, "return_lse", "dropout"),
    _of_heads: ("causal", "scale", "window"),
    _on_one_rank: (*_SHARED, "return_lse", "alignment"),
    attention_qkvpacked: (*_SHARED, "return_lse", "dropout", "alignment", "invariant"),
    _trained_qkv: (*_SHARED, "return_lse", "dropout", "alignment", "invariant"),
    paged_attention: (*_SHARED, "return_lse", "max_len_q", "invariant"),
    append_kv: ("rotary_interleaved",),
    flash_attn_func: (*_OF_FLASH_ATTENTION, "dropout_p", "return_attn_probs", "deterministic"),
    flash_attn_varlen_func: (*_OF_FLASH_ATTENTION, "dropout_p", "return_attn_probs", "max_seqlen_q"),
    flash_attn_with_kvcache: (*_OF_FLASH_ATTENTION, "return_softmax_lse", "rotary_interleaved"),
}
"""The options of each function that are changed."""


def legal() -> Change:
    return Change("legal")


def kinds_of(tensor: Tensor) -> dict[str, Callable[[Tensor], Any]]:
    """The changes for an operand of this dtype."""
    if tensor.is_floating_point():
        return KINDS | FLOATS
    return KINDS if tensor.dtype is torch.bool else KINDS | INTS


def changes(form: Form) -> Iterator[Change]:
    """Every change of a form: of each operand, of all of them, and of each option."""
    yield legal()
    for name, tensor in form.operands.items():
        for kind, apply in kinds_of(tensor).items():
            yield Change(f"{name}: {kind}", _to((name,), apply))
        yield Change(f"{name}: fake", _to_fake((name,)))
    floats = tuple([name for name, tensor in form.operands.items() if tensor.is_floating_point()])
    yield Change("all: fake", _to_fake(tuple(form.operands)))
    for kind in ("on meta", "a subclass", "a Parameter", "mixed strides", "of inference mode"):
        yield Change(f"all: {kind}", _to(tuple(form.operands), KINDS[kind]))
    for kind in ("requires a gradient", "bfloat16", "a negative view"):
        yield Change(f"floats: {kind}", _to(floats, FLOATS[kind]))
    for name in OPTIONS[form.function]:
        right, others = WRONG_OPTIONS[name]
        for other in others:
            yield Change(f"{name}={other!r}", option=name, value=other, legal_value=right)


def changes_of(form: Form, observer: Observer) -> list[Change]:
    """The changes of a form that an observer sees."""
    return [change for change in changes(form) if change.name.endswith(observer.sees)]


ALL = ("",)
SOME = ("legal", "requires a gradient", "bfloat16", "float64", "NaN", "cut", "a subclass", "on meta")
FEW = ("legal", "floats: requires a gradient")
"""How the names of changes end that an observer sees: what may be wrong, what meets its observer, or what is cheap."""
COMPILED = ("dense", "mask", "paged")
"""The forms that are compiled, which takes seconds for each."""


def is_meant(form: str, observer: str) -> bool:
    """Whether the tests have this pair of a form and an observer."""
    return observer != "compile" or form in COMPILED


def _to(names: tuple[str, ...], apply: Callable[[Tensor], Any]) -> Callable[[Operands], None]:
    def change(operands: Operands) -> None:
        for name in names:
            operands[name] = apply(operands[name])

    return change


def _to_fake(names: tuple[str, ...]) -> Callable[[Operands], None]:
    def change(operands: Operands) -> None:
        mode = FakeTensorMode()  # one for all, because fake tensors of two modes cannot meet
        for name in names:
            operands[name] = mode.from_tensor(operands[name])

    return change


class Observer(NamedTuple):
    """What is around a call, or what the call is inside of.

    Attributes:
        run: takes the function of the operands, the operands, and a list for notes about what the observer saw.
        sees: the changes that run under it.
    """

    run: Callable[[Callable[[Operands], Results], Operands, list[Any]], Results]
    sees: tuple[str, ...]


class _RecordingMode(TorchDispatchMode):
    """Notes the names of our ops, and whether there were others: which ones depends on what kernels remember."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        name = str(function)
        self.names.add(name if name.startswith("attn.") else "an op of torch")
        return function(*arguments, **(keywords or {}))


@contextmanager
def _recorded(notes: list[Any]) -> Iterator[None]:
    with _RecordingMode() as mode:
        yield
    notes.extend(sorted(mode.names))


class _FunctionMode(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        return function(*arguments, **(keywords or {}))


@contextmanager
def _profiled(notes: list[Any]) -> Iterator[None]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield
    notes.extend(event.name for event in profile.events() if event.name.startswith("attn."))


@contextmanager
def _in_ranges(notes: list[Any]) -> Iterator[None]:
    """Ranges for NVTX, which a build of torch for CPUs does not have."""
    with (
        patch.object(torch.cuda.nvtx, "range_push", notes.append),
        patch.object(torch.cuda.nvtx, "range_pop", lambda: notes.append("the end of a range")),
        ranges(True),
    ):
        yield


def _compiled(function: Callable[..., Results], floats: tuple[Tensor, ...]) -> Results:
    torch._dynamo.reset()
    return torch.compile(function, backend="eager")(*floats)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _inside(context: Callable[[list[Any]], AbstractContextManager[Any]], sees: tuple[str, ...] = SOME) -> Observer:
    def run(function: Callable[[Operands], Results], operands: Operands, notes: list[Any]) -> Results:
        with context(notes):
            return function(operands)

    return Observer(run, sees)


def _transformed(transform: Callable[[Callable[..., Results], tuple[Tensor, ...]], Results]) -> Observer:
    """An observer that takes a function of floating tensors, and these."""

    def run(function: Callable[[Operands], Results], operands: Operands, notes: list[Any]) -> Results:
        names = [name for name, value in operands.items() if isinstance(value, Tensor) and value.is_floating_point()]

        def of_floats(*floats: Tensor) -> Results:
            return function(operands | dict(zip(names, floats, strict=True)))

        return transform(of_floats, tuple([operands[name] for name in names]))

    return Observer(run, FEW)


def _sum(results: Results) -> Tensor:
    return sum(each.square().sum() for each in _tensors(results) if each.is_floating_point())  # type: ignore[return-value]


def _dual(function: Callable[..., Results], floats: tuple[Tensor, ...]) -> Results:
    with forward_ad.dual_level():
        results = _tensors(function(*[forward_ad.make_dual(each.detach(), each.detach().cos()) for each in floats]))
        return [part for each in results for part in forward_ad.unpack_dual(each) if part is not None]


OBSERVERS: dict[str, Observer] = {
    "nothing": _inside(lambda notes: nullcontext(), ALL),
    "autocast": _inside(lambda notes: torch.autocast("cpu", torch.bfloat16)),
    "no_grad": _inside(lambda notes: torch.no_grad()),
    "inference_mode": _inside(lambda notes: torch.inference_mode()),
    "a dispatch mode": _inside(_recorded),
    "a function mode": _inside(lambda notes: _FunctionMode()),
    "a default device": _inside(lambda notes: torch.device("meta")),
    "a default dtype": _inside(lambda notes: default_dtype(torch.float64)),
    "sdpa_kernel(MATH)": _inside(lambda notes: sdpa_kernel(SDPBackend.MATH)),
    "sdpa_kernel(FLASH)": _inside(lambda notes: sdpa_kernel(SDPBackend.FLASH_ATTENTION)),
    "checks": _inside(lambda notes: checks(True)),
    "ranges": _inside(_in_ranges),
    "a profiler": _inside(_profiled, FEW),
    "hooks of saved tensors": _inside(
        lambda notes: torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t)
    ),
    "use_backend": _inside(lambda notes: use_backend("math")),
    "FakeTensorMode": _inside(lambda notes: FakeTensorMode(allow_non_fake_inputs=True), FEW),
    "a dual level": _inside(lambda notes: forward_ad.dual_level()),
    "dual tensors": _transformed(_dual),
    "functionalize": _transformed(lambda function, floats: torch.func.functionalize(function)(*floats)),
    "vmap": _transformed(lambda function, floats: torch.func.vmap(function)(*[torch.stack((t, t)) for t in floats])),
    "grad": _transformed(
        lambda function, floats: torch.func.grad(lambda *t: _sum(function(*t)), tuple(range(len(floats))))(*floats)
    ),
    "jvp": _transformed(lambda function, floats: torch.func.jvp(function, floats, tuple(map(torch.cos, floats)))),
    "make_fx": _transformed(lambda function, floats: make_fx(function)(*floats)(*floats)),
    "jit.trace": _transformed(lambda function, floats: torch.jit.trace(function, floats, check_trace=False)(*floats)),
    "checkpoint": _transformed(lambda function, floats: checkpoint(function, *floats, use_reentrant=False)),
    "re-entrant checkpoint": _transformed(lambda function, floats: checkpoint(function, *floats, use_reentrant=True)),
    "compile": _transformed(_compiled),
}


class Seen(NamedTuple):
    """What a caller may see of a tensor. bits: of its numbers; None for a tensor without data."""

    kind: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    requires_grad: bool
    bits: bytes | None


class Outcome(NamedTuple):
    """All that a caller could notice of a call.

    Attributes:
        results: the tensors that it returned.
        gradients: of the operands that require one, by name; None for an operand without one.
        operands: the operands after the call, which may write to them.
        warned: the categories and the texts of warnings.
        noted: what the observer saw.
        error: the type, the text and the notes of an error of the call or of its backward.
        state: a hash of the state of torch's random numbers afterwards.
    """

    results: tuple[Seen, ...] = ()
    gradients: tuple[tuple[str, Seen | None], ...] = ()
    operands: tuple[tuple[str, Any], ...] = ()
    warned: tuple[tuple[str, str], ...] = ()
    noted: tuple[Any, ...] = ()
    error: str = ""
    state: int = 0

    def differences(self, other: Outcome) -> str:
        """Both values of each field that differs; empty if the outcomes are equal."""
        pairs = zip(self._fields, self, other, strict=True)
        return "; ".join(f"{name}: {_short(mine)} | {_short(theirs)}" for name, mine, theirs in pairs if mine != theirs)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 600 else f"{text[:600]}..."


def outcome(form: Form, observer: Observer, change: Change) -> Outcome:
    """Runs a case once."""
    operands = form.copies()
    notes: list[Any] = []
    if change.apply is not None:
        change.apply(operands)
    torch.default_generator.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own modules have some when they are imported
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # there is one for each value that a path looks at
        warnings.filterwarnings("ignore", "`torch.jit.script`", FutureWarning)  # torch 2.14's at its first tangent
        found = _observed(form, observer, operands, change.options(form), notes)
    warned = tuple([(each.category.__name__, _without_places(str(each.message))) for each in caught])
    after = tuple([(name, _seen(value)) for name, value in operands.items() if isinstance(value, Tensor)])
    state = hash(bytes(torch.get_rng_state().numpy()))
    noted = () if found.error else tuple(notes)  # a call that is refused may have come to any place
    return found._replace(operands=after, warned=warned, noted=noted, state=state)


def _observed(form: Form, observer: Observer, operands: Operands, options: dict[str, Any], notes: list[Any]) -> Outcome:
    found = Outcome()

    def function(given: Operands) -> Results:
        results = form.function(**given, **options)
        nonlocal found
        if given is operands:  # no transform is around the call, so its gradients belong to what is observed
            found = _with_gradients(found, results, operands)
        return results

    try:
        results = observer.run(function, operands, notes)
        if not found.gradients:
            found = _with_gradients(found, results, operands)
        return found._replace(results=tuple(map(_seen, _tensors(results))))
    except Exception as error:
        lines = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
        return found._replace(error=_without_places("\n".join(lines)))


def _with_gradients(found: Outcome, results: Results, operands: Operands) -> Outcome:
    """Adds the gradients of a loss for the operands that require one."""
    outputs = [each for each in _tensors(results) if each.requires_grad]
    learned = {name: each for name, each in operands.items() if isinstance(each, Tensor) and each.requires_grad}
    if not outputs or not learned:
        return found
    weights = [torch.linspace(-1.0, 2.0, each.numel(), dtype=each.dtype, device=each.device) for each in outputs]
    weights = [weight.view(each.shape) for weight, each in zip(weights, outputs, strict=True)]
    gradients = torch.autograd.grad(outputs, list(learned.values()), weights, allow_unused=True)
    seen = [None if each is None else _seen(each) for each in gradients]
    return found._replace(gradients=tuple(zip(learned, seen, strict=True)))


def _tensors(results: Results) -> list[Tensor]:
    if isinstance(results, Tensor):
        return [results]
    return [tensor for each in results for tensor in _tensors(each)] if isinstance(results, (tuple, list)) else []


def _seen(tensor: Tensor) -> Seen:
    facts = tuple(tensor.shape), str(tensor.dtype), tensor.device.type, tensor.requires_grad
    return Seen(type(tensor).__name__, *facts, _bits(tensor))


def _bits(tensor: Tensor) -> bytes | None:
    if isinstance(tensor, FakeTensor) or tensor.is_meta or tensor.layout is not torch.strided:
        return None
    if tensor.untyped_storage().nbytes() < tensor.nbytes and tensor.is_contiguous():  # cut
        return None
    plain = tensor.detach().as_subclass(Tensor).resolve_conj().resolve_neg().contiguous()
    return bytes(plain.view(-1).view(torch.uint8).numpy())


def _without_places(text: str) -> str:
    """A text without addresses of objects and without lines of code, which TorchScript puts into its errors."""
    if "TorchScript" in text:
        text = "\n".join(line for line in text.splitlines() if "Error" in line)
    return re.sub(r"0x[0-9a-f]+", "0x", text)
