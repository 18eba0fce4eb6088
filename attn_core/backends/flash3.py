"""FlashAttention 3: the Hopper kernels, dense and packed, with gradients where the build has them; and "flash3_fp8".

Limits: sm90, float16 and bfloat16, head_dim up to 256, bottom-right alignment only; no mask, bias, ALiBi or dropout.
We call the operators directly, never the package's Python functions: those cost more than a small kernel, and their
autograd loses packed offsets and ``deterministic``. Arguments are filled in by name from the operator's own schema,
which differs between builds. ``build`` finds out by tiny calls what the installed build lacks.
Upstream: FlashAttention 3.0 with torch operators, as flash-attn-3 (PyTorch's wheels, or a build of ``hopper/``),
tokenspeed-fa3 (forward only, no softcap) or fa3-fwd (forward only, no window, no float16). Gradients need flash-attn-3,
which we have not run so far.

Conventions: natural log-sum-exp, -inf for rows that see no key, as ours; -1 is an open side of a window. Head
dimensions between those of the kernels run as they are in multiples of 8; ``shared.rewrites`` does the rest.
Equal bits on every run: the forward always; the gradient if the build is new enough, and never at head_dim > 192.
A tile of keys may reach into the next packed document: those keys have weight 0, but 0 * NaN is NaN. If the kernel
splits the keys of few queries, a row with a NaN score has NaN in the log-sum-exp and 0 in the output.

flash3_fp8: the same forward on q, k and v rounded to e4m3. The largest magnitude of a group becomes 448, the largest
e4m3 number: a relative error of up to 2^-4 per element, and of up to 2^-10 of the largest for small elements. Nothing
is read back from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from importlib import import_module, metadata
from importlib.util import find_spec
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from attn_core.backends.contract import Backend, Buffers, Timing
from attn_core.backends.shared import pages, rewrites
from attn_core.backends.shared.autograd import without_gradient
from attn_core.backends.shared.caches import cached_once
from attn_core.backends.shared.first_calls import TOKENS, averages, differentiates, runs
from attn_core.backends.shared.kernel_limits import GRID_LIMIT
from attn_core.backends.shared.readable import readable, readable_rows, writable
from attn_core.backends.support import Build, Support
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec, PagedKV
from attn_core.call.tensors import Gradients, Inputs
from attn_core.errors import ShapeError

if TYPE_CHECKING:
    from torch import Tensor
    from torch._ops import OpOverload

NAME = "the FlashAttention 3 kernel"
WIDTHS = (64, 96, 128, 192, 256)
"""The head dimensions that have kernels. A kernel also serves the smaller dimensions down to the next kernel's."""
ORDERED = "deterministic backward"
"""The word in ``Build.without`` for a gradient that adds in any order."""


FORWARD = Support(
    kernel=NAME,
    devices=("sm90",),
    dtypes=("bfloat16", "float16"),
    max_head_dim=256,
    value_dim=True,
    grouped_heads=True,
    alignments=("bottom_right",),
    causal=True,
    window=True,
    softcap=True,
    sinks=True,
    packed=True,
    deterministic=True,
    lse=True,
    partial=True,
    lse_gradient=True,
    paged=True,
)
BACKWARD = replace(FORWARD, paged=False)

ONE_DIRECTION = {"forward": {"deterministic"}, "backward": {"num_splits", "pack_gqa"}}
"""Settings that a direction's operator does not take."""
OFFSETS = ("cu_seqlens_q", "cu_seqlens_k")


def refuses(spec: AttentionSpec, device: str, build: Build | None) -> tuple[str, ...]:
    """Refuses combinations that the kernel or the installed build cannot run though each claim alone holds."""
    return (*rewrites.refusals(spec), *_limits(spec, build))


def _limits(spec: AttentionSpec, build: Build | None) -> Iterator[str]:
    """Yields refusals of what the launch grid or the build cannot run. An unknown build is taken for an older one."""
    without, name = (build.without, f"{NAME} ({build.name})") if build else ((ORDERED,), NAME)
    if spec.dtype in without:
        yield f"dtype {spec.dtype}: {name} has none"
    widths = build.head_dims if build else ()  # empty: every width runs
    if spec.paged is not None:
        own = {rewrites.width_of(dim, WIDTHS, widths) for dim in (spec.head_dim, spec.value_dim)}
        yield from pages.flash3_refusals(spec, name, own)
    if (rows := spec.documents or spec.batch) > GRID_LIMIT:
        yield f"batch={rows}: {NAME} launches at most {GRID_LIMIT} rows"
    if spec.deterministic and spec.needs_backward:
        width = max(spec.head_dim, spec.value_dim)
        if width > 192:
            yield f"backward: deterministic=True with head_dim={width}: {NAME} has none above 192"
        if ORDERED in without:
            why = "before late 2025 it ignored the flag, or lost count of windows, documents and grouped heads"
            yield f"backward: deterministic=True: {name} is not known to keep it; {why}"


# The two operators, from whichever package provides them. Those of different builds take different arguments, so these
# are laid out by the schema of the installed operator, and one that we do not set keeps the schema's default.

PACKAGES = ("flash_attn_3", "fa3_fwd")
"""Packages whose extension ``_C`` registers ``torch.ops.<package>.fwd`` and ``bwd``. The first one found is used."""


class Operators(NamedTuple):
    """The operators of the installed build. build: its distribution and version, e.g. ``"tokenspeed-fa3 3.0.0"``."""

    forward: OpOverload
    backward: OpOverload
    build: str


@cached_once
def operators() -> Operators:
    """Returns the installed operators. Errors from importing their extension propagate."""
    import torch

    # If neither is installed, importing the first one raises an error that names it.
    package = next((name for name in PACKAGES if find_spec(name)), PACKAGES[0])
    import_module(f"{package}._C")
    library = getattr(torch.ops, package)
    distribution = metadata.packages_distributions().get(package, [package])[0]
    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:  # a build copied into site-packages by hand has no metadata
        version = "of unknown version"
    return Operators(library.fwd.default, library.bwd.default, f"{distribution} {version}")


def prepare(
    operator: OpOverload, settings: dict[str, object], tensors: tuple[str, ...]
) -> Callable[..., Sequence[Tensor]]:
    """Returns a function of some tensors that runs an operator with settings, both by the names in its schema.

    Arguments without a setting have the schema's default; tensors that are not named are None. The function calls the
    operator's CUDA kernel directly. The usual way goes through autograd, which costs time, and warns if the operator
    has no derivative.

    Raises:
        TypeError: if the operator has no argument with a setting's name.
        KeyError: if it has no argument with a tensor's name.
    """
    import torch

    arguments = operator._schema.arguments
    if unknown := settings.keys() - {argument.name for argument in arguments}:
        raise TypeError(f"{operator._schema.name}: this build takes no {', '.join(sorted(unknown))}")
    if missing := set(tensors) - {argument.name for argument in arguments}:
        raise KeyError(f"{operator._schema.name}: this build takes no {', '.join(sorted(missing))}")
    values = tuple(settings.get(argument.name, argument.default_value) for argument in arguments)
    # Where each argument is in (*tensors, *values).
    places = {name: place for place, name in enumerate(tensors)}
    in_order = itemgetter(*[places.get(each.name, len(tensors) + place) for place, each in enumerate(arguments)])
    keys, run = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), operator.redispatch
    if tensors == tuple(argument.name for argument in arguments[: len(tensors)]):  # no need to sort three dozen values
        others = values[len(tensors) :]
        return lambda *operands: run(keys, *operands, *others)
    return lambda *operands: run(keys, *in_order((*operands, *values)))


LONGEST_SPLIT = 2**15
"""Rows (queries times heads) up to which the keys may be split: 256 tiles of queries, two for each of 132 SMs."""
LONG_DOCUMENTS = 2**10
"""Mean number of queries per packed document from which tiles of one head are faster than tiles of a whole group of
heads (the kernel's own choice for every packed call). Measured on an H200, head_dim 128, heads 32/8; the bits are
equal. Shorter documents would leave tiles of one head partly empty."""


def forward_tiles(spec: AttentionSpec) -> dict[str, int | None]:
    """Returns the forward's tiling arguments. They depend on shapes alone, so that equal calls give equal bits.

    num_splits = 0 lets the kernel split the keys if the queries alone do not fill the GPU, as in decoding; builds
    without splits take it as 1. With many queries we set 1, because each split takes memory for packed calls and for
    heads whose keys do not fit into the L2 cache. pack_gqa = None lets the kernel choose, which splitting requires.
    """
    # ``documents`` counts for the mean length; the lengths themselves are on the device and unknown here.
    whole = spec.q_len * (1 if spec.packed else spec.batch) * spec.num_heads > LONGEST_SPLIT
    long = spec.documents is not None and spec.paged is None and spec.q_len >= LONG_DOCUMENTS * spec.documents
    return {"num_splits": 1 if whole else 0, "pack_gqa": False if whole and long else None}


def probe() -> str:
    """Loads the operators and returns the installed package and its version."""
    return operators().build


@cached_once
def build() -> Build:
    """Finds out what the installed build lacks, with about a dozen tiny kernels on the current device."""
    name, plain, reduced = operators().build, partial(averages, _forward), partial(averages, _fp8_forward)
    head_dims = tuple(width for width in WIDTHS if runs(plain, width))
    if not head_dims:
        raise RuntimeError(f"{name}: none of its kernels runs on this GPU")
    trials: dict[str, tuple[Any, dict[str, Any]]] = {
        "float16": (plain, {"dtype": "float16"}),
        "window": (plain, {"window": (3, 1)}),
        "softcap": (plain, {"softcap": 30.0}),
        "packed": (plain, {"documents": 1}),
        "paged": (plain, {"documents": 1, "paged": PagedKV(num_pages=1, page_size=TOKENS, width=1)}),
        "fp8": (reduced, {}),
        "backward": (partial(differentiates, _forward, _backward), {}),
    }
    lacking = [word for word, (trial, fields) in trials.items() if not runs(trial, head_dims[0], **fields)]
    # The schema tells the build's age. Builds whose backward also returns the gradients may ignore ``deterministic``.
    if len(operators().backward._schema.returns) != 5:
        lacking.append(ORDERED)
    return Build(name, tuple(lacking), head_dims=() if head_dims == WIDTHS else head_dims)


@lru_cache(maxsize=4096)
def lower(spec: AttentionSpec) -> dict[str, Any]:
    """Returns the operators' arguments other than tensors, for both directions."""
    edge = band(spec)
    lengths = {"max_seqlen_q": spec.max_len_q, "max_seqlen_k": spec.max_len_k} if spec.packed else {}
    return {
        **lengths,
        "softmax_scale": spec.scale,
        "is_causal": edge.left is None and edge.right == 0,
        "window_size_left": -1 if edge.left is None else edge.left,
        "window_size_right": -1 if edge.right is None else edge.right,
        "softcap": spec.softcap or 0.0,
        **forward_tiles(spec),
        "deterministic": spec.deterministic,
    }


@lru_cache(maxsize=4096)
def _operator(spec: AttentionSpec, direction: str, *tensors: str) -> Callable[..., Sequence[Tensor]]:
    """Returns a function of the named tensors that runs the operator for a spec."""
    settings = tuple((name, value) for name, value in lower(spec).items() if name not in ONE_DIRECTION[direction])
    return _prepared(direction, tensors, settings)


@lru_cache(maxsize=4096)  # few settings depend on lengths, so the steps of a decoding loop share one function
def _prepared(
    direction: str, tensors: tuple[str, ...], settings: tuple[tuple[str, object], ...]
) -> Callable[..., Sequence[Tensor]]:
    return prepare(getattr(operators(), direction), dict(settings), tensors)


def shortcut(spec: AttentionSpec) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """See ``Backend.shortcut_of``: the operator alone, for calls without a gradient."""
    if spec.needs_backward or not rewrites.is_native(KERNEL, spec):
        return None
    operator = _operator(spec, "forward", "q", "k", "v")

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, *_ = operator(*readable_rows(q, k, v))
        return out, lse

    return run


def _forward(spec: AttentionSpec, inputs: Any, into: Buffers | None) -> tuple[Tensor, Tensor]:
    if spec.paged is not None:
        return pages.flash3(spec, inputs, into, partial(_operator, spec, "forward"))
    q, k, v = readable(inputs.q), readable(inputs.k), readable(inputs.v)
    out = None if into is None else writable(into[0])
    run = _operator(spec, "forward", "q", "k", "v", "out", *OFFSETS)
    result, lse, *_ = run(q, k, v, out, *_offsets(inputs))
    return result if out is None else out, lse


def _backward(
    spec: AttentionSpec, inputs: Inputs, out: Tensor, lse: Tensor, dout: Tensor, into: Gradients | None
) -> Gradients:
    import torch

    buffers = (None, None, None) if into is None else map(writable, into[:3])
    gradients = [  # allocated here, because builds differ in what the operator returns
        torch.empty(like.shape, dtype=like.dtype, device=like.device) if buffer is None else buffer
        for buffer, like in zip(buffers, inputs[:3])
    ]
    names = ("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv")
    saved = map(readable, (dout, inputs.q, inputs.k, inputs.v, out))
    _operator(spec, "backward", *names, *OFFSETS)(*saved, lse.contiguous(), *gradients, *_offsets(inputs))
    return Gradients(*gradients)


def _offsets(inputs: Inputs) -> tuple[Tensor | None, Tensor | None]:
    if inputs.cu_seqlens_q is None:
        return None, None
    return inputs.cu_seqlens_q.contiguous(), inputs.cu_seqlens_k.contiguous()


# The variant "flash3_fp8": q, k and v have one factor per (batch row or document, kv head).

LARGEST_E4M3 = 448.0
"""The largest finite e4m3 (float8_e4m3fn)."""
SMALLEST_FACTOR = 2.0**-100
"""The smallest factor, so that a group of zeros is not divided by 0."""


def _fp8_forward(spec: AttentionSpec, inputs: Inputs, into: Buffers | None) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) of the kernel on e4m3 inputs; it always writes bfloat16, converted for float16 calls."""
    sides = zip(inputs[:3], (inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.cu_seqlens_k))
    rounded, factors = zip(*(quantise(tensor, spec.num_kv_heads, lengths) for tensor, lengths in sides))
    native = spec.dtype == "bfloat16"
    out = writable(into[0]) if native and into is not None else None
    result, lse = _attend_e4m3(spec, inputs._replace(q=rounded[0], k=rounded[1], v=rounded[2]), factors, out)
    return result if native else result.to(inputs.q.dtype), lse


def _attend_e4m3(
    spec: AttentionSpec, rounded: Inputs, factors: Sequence[Tensor | None], out: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns (out in bfloat16, lse) of q, k and v in float8_e4m3fn.

    Args:
        factors: float32 ``[batch or documents, kv_heads]`` for each; None for 1.
        out: a buffer for out, or None.
    """
    names = ("q", "k", "v", "q_descale", "k_descale", "v_descale", "out", *OFFSETS)
    run = _operator(spec, "forward", *names)
    result, lse, *_ = run(*map(readable, rounded[:3]), *factors, out, *_offsets(rounded))
    return (result if out is None else out), lse


@without_gradient
def quantise(tensor: Tensor, kv_heads: int, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns the tensor as float8_e4m3fn, and the float32 factors that restore its values, ``[batch, kv_heads]``.

    Factors ignore NaN and Inf, so that these do not affect other rows. NaN and Inf themselves become NaN.

    Args:
        tensor: ``[batch, length, heads, dim]``, or ``[tokens, heads, dim]`` with ``cu_seqlens`` (int32, ``[documents +
            1]``), for which the factors are ``[documents, kv_heads]``. Heads of one kv head share its factor.
    """
    import torch

    # Query heads share the factor of their kv head, because the kernel takes q's factors as [batch, kv_heads] too.
    grouped = tensor.unflatten(-2, (kv_heads, -1))  # [..., heads, dim] -> [..., kv_heads, group, dim]
    finite = grouped.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs()
    if cu_seqlens is None:
        factors = _factors(finite.amax((1, 3, 4)))
        of_rows = factors[:, None]  # [batch, kv_heads] -> [batch, length, kv_heads]
    else:
        factors, of_rows = _by_document(finite.amax((2, 3)), cu_seqlens)
    scaled = grouped * of_rows.reciprocal()[..., None, None]  # float32, as the factors are
    scaled.fmod_(2 * LARGEST_E4M3)  # changes no finite value and turns Inf into NaN; some casts turn Inf into 448
    return scaled.to(torch.float8_e4m3fn).flatten(-3, -2), factors


def _by_document(largest: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the factors of documents and of tokens. largest: each token's largest value, ``[tokens, kv_heads]``."""
    import torch

    tokens, kv_heads = largest.shape
    documents = cu_seqlens.shape[0] - 1
    places = torch.arange(tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens[1:], places, right=True)
    # One extra row for tokens past the last offset, so that wrong offsets mix no such token into a document.
    maxima = largest.new_zeros(documents + 1, kv_heads, dtype=torch.float32)
    maxima.scatter_reduce_(0, document[:, None].expand(tokens, kv_heads), largest.float(), "amax")
    factors = _factors(maxima)
    return factors[:documents], factors[document]


def _factors(largest: Tensor) -> Tensor:
    return (largest.float() / LARGEST_E4M3).clamp_min(SMALLEST_FACTOR)


def _fp8_build() -> Build:
    installed = build()
    if "fp8" in installed.without:
        raise RuntimeError(f"{installed.name} was built without fp8")
    return installed


def _fp8_refuses(spec: AttentionSpec, device: str, build: Build | None) -> tuple[str, ...]:
    return refuses(replace(spec, dtype="bfloat16"), device, build)  # it needs no float16 kernel for float16 inputs


def forward_of_e4m3(
    spec: AttentionSpec, inputs: Inputs, factors: tuple[Tensor | None, Tensor | None, Tensor | None]
) -> tuple[Tensor, Tensor]:
    own = FP8.runs(spec)
    for name in ("head_dim", "value_dim"):
        actual, width = getattr(spec, name), getattr(own, name)
        if actual != width:
            raise ShapeError(f"{name}={actual}: {NAME} has {width} channels; pad float8 tensors to them")
    return _attend_e4m3(spec, inputs, factors, None)


KERNEL = rewrites.Kernel(_forward, _backward, lambda dim: rewrites.width_of(dim, WIDTHS, build().head_dims))
# The kernel copies 16 bytes at a time: 8 elements of 16 bits, or 16 of e4m3.
FP8 = KERNEL._replace(forward=_fp8_forward, width=lambda dim: rewrites.width_of(dim, WIDTHS, build().head_dims, 16))
forward, backward = partial(rewrites.forward, KERNEL), partial(rewrites.backward, KERNEL)


_FP8_BACKEND = Backend(
    name="flash3_fp8",
    framework="torch",
    requires="flash-attn-3, tokenspeed-fa3 or fa3-fwd",
    forward_claims=replace(FORWARD, kernel=f"{NAME} for e4m3", lse_gradient=False, paged=False, approximate=True),
    backward_claims=None,
    refuses=_fp8_refuses,
    probe=probe,
    lower=lower,
    forward=partial(rewrites.forward, FP8),
    backward=None,
    build=_fp8_build,
    writes_into=("forward",),
)
BACKEND = Backend(
    name="flash3",
    framework="torch",
    requires="flash-attn-3, tokenspeed-fa3 or fa3-fwd",
    forward_claims=FORWARD,
    backward_claims=BACKWARD,
    refuses=refuses,
    probe=probe,
    lower=lower,
    forward=forward,
    backward=backward,
    build=build,
    shortcut=shortcut,
    writes_into=("forward", "backward"),
    variants=(_FP8_BACKEND,),
    # Its kernels are made for the one device that it claims.
    preference={"cuda": 10},
    paged_preference={"cuda": 10},
    also_called={
        "flash": 20,
        "fa": 20,
        "flash_attention": 30,
        "fa3": 10,
        "flash_3": 10,
        "flash_attention_3": 10,
        "flash_attn_3": 10,
    },
    timing=Timing(in_callback=(90.0, 600.0)),
    reaches_next_document=True,
    splits_keys=True,
)
