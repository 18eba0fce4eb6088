"""Checks the arguments of a call for both frontends and builds the spec.

The frontends describe each tensor as ``ArrayFacts`` (shape, dtype and device, no values) and pass checked options. The
checks need only metadata, so they run while a compiler traces, and before any kernel runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from attn_core.call.functions import AUX, aux_of
from attn_core.call.kinds import check_int32, is_number
from attn_core.call.masks import with_band_of_function, without_idle_sides
from attn_core.call.observe import warn
from attn_core.call.options import EXCHANGED_HINT, HEADS_FIRST_HINT, PLAIN, Options
from attn_core.call.spec import DTYPES, AttentionSpec, Shape4
from attn_core.errors import DeviceError, DTypeError, LayoutWarning, ShapeError, SpecError
from attn_core.expressions.tracing import Aux


class ArrayFacts(NamedTuple):
    """The metadata of a tensor, known without reading its values."""

    shape: tuple[int, ...]
    dtype: str
    device: str


class Arrays(NamedTuple):
    """The metadata of every tensor of a call; None for a tensor that the call lacks."""

    q: ArrayFacts
    k: ArrayFacts
    v: ArrayFacts
    mask: ArrayFacts | None = None
    bias: ArrayFacts | None = None
    alibi_slopes: ArrayFacts | None = None
    sinks: ArrayFacts | None = None
    cu_seqlens_q: ArrayFacts | None = None
    cu_seqlens_k: ArrayFacts | None = None
    key_ranges: ArrayFacts | None = None
    aux0: ArrayFacts | None = None
    aux1: ArrayFacts | None = None
    aux2: ArrayFacts | None = None
    aux3: ArrayFacts | None = None


def check_one_place(named: Mapping[str, Any], first: str) -> None:
    """Raises DeviceError unless all arrays, or their facts, are on the device of the first; None passes."""
    where = named[first].device
    for name, array in named.items():
        if array is not None and array.device != where:
            raise DeviceError(f"{name}: expected the device of {first} ({where}), got {array.device}; move it there")


def check_qkv_as_one(facts: ArrayFacts, packed: bool) -> None:
    """Checks the ``qkv`` of ``attention_qkvpacked``, which has q, k and v on its third last axis.

    Args:
        packed: whether the call has packed documents: then ``[tokens, 3, heads, head_dim]``, or one row of it.

    Raises:
        ShapeError, DTypeError: naming ``qkv``.
    """
    shape, expected = facts.shape, "[batch, seq, 3, heads, head_dim]"
    if packed:
        expected = "packed [tokens, 3, heads, head_dim], or [1, tokens, 3, heads, head_dim]"
    fits = len(shape) in (4, 5) if packed else len(shape) == 5
    if not fits or shape[-3] != 3 or (packed and len(shape) == 5 and shape[0] != 1):
        raise ShapeError(f"qkv: expected shape {expected}, got {list(shape)}")
    # Checked here, because build_spec would name q, which is no argument of this call.
    if facts.dtype not in DTYPES:
        raise DTypeError(f"qkv: expected one of {', '.join(DTYPES)}, got {facts.dtype}; cast it")


def build_spec(
    arrays: Arrays, options: Options, *, needs_backward: bool = False, bias_gradient: bool = False
) -> AttentionSpec:
    """Builds the spec of a call. A window that hides no key of a dense call is left out of it.

    Args:
        options: with the window as a pair (``options.check_options``); the spec checks every option again.

    Raises:
        ShapeError, DTypeError, DeviceError, SpecError: naming argument, value, what was expected and the remedy.
    """
    packed = arrays.cu_seqlens_q is not None
    _check_devices(arrays)
    _check_dtypes(arrays)
    q, k, v = _rows(arrays, packed)
    _check_shapes(q, k, v)
    batch, q_len, num_heads, head_dim = q
    for name, facts in (("mask", arrays.mask), ("bias", arrays.bias)):
        if facts is not None:
            _check_axes(name, facts.shape, (batch, num_heads, q_len, k[1]), (batch, q_len, num_heads, k[2]))
    lengths: dict[str, Any] = {"max_len_q": options.max_len_q, "max_len_k": options.max_len_k} if packed else {}
    if not packed:
        warn_of_heads_first(q, k)
        anchored, has_aux = arrays.alibi_slopes is not None, arrays.aux0 is not None
        options = with_band_of_function(options, q_len, k[1], anchored=anchored, has_aux=has_aux)
        options = without_idle_sides(options, q_len, k[1])
    plain: dict[str, Any] = {name: getattr(options, name) for name in PLAIN}
    return AttentionSpec(
        batch=batch,
        q_len=q_len,
        kv_len=k[1],
        num_heads=num_heads,
        num_kv_heads=k[2],
        head_dim=head_dim,
        value_dim=v[3],
        dtype=arrays.q.dtype,
        mask_shape=_four("mask", arrays.mask),
        key_ranges_shape=None if arrays.key_ranges is None else tuple(arrays.key_ranges.shape),
        mask_mod=options.mask_mod,
        score_mod=options.score_mod,
        aux=tuple(Aux(tuple(facts.shape), facts.dtype) for facts in aux_of(arrays)),
        bias_shape=_four("bias", arrays.bias),
        # None if it is the dtype of q, so that equal calls have equal specs.
        bias_dtype=arrays.bias.dtype if arrays.bias is not None and arrays.bias.dtype != arrays.q.dtype else None,
        alibi_shape=None if arrays.alibi_slopes is None else arrays.alibi_slopes.shape,
        sinks=_sinks(arrays.sinks, num_heads),
        documents=_documents(arrays, options),
        needs_backward=needs_backward,
        bias_gradient=bias_gradient,
        aux_gradients=options.aux_gradients if needs_backward else (),
        **plain,
        **lengths,
    )


def _check_devices(arrays: Arrays) -> None:
    names = {name: f"seq_info.{name}" for name in ("cu_seqlens_q", "cu_seqlens_k")}
    names |= {name: f"aux[{number}]" for number, name in enumerate(AUX)}
    check_one_place({names.get(name, name): facts for name, facts in arrays._asdict().items()}, "q")


def _check_dtypes(arrays: Arrays) -> None:
    """Raises DTypeError for arrays whose dtypes do not fit each other, or their meaning."""
    named = {name: facts.dtype for name, facts in zip(Arrays._fields, arrays, strict=True) if facts is not None}
    _check_one_dtype(named["q"], named["k"], named["v"])
    # Casting would be a guess: an additive mask has 0 where a key is visible, a 0/1 mask where it is hidden.
    if named.get("mask", "bool") != "bool":
        raise DTypeError(
            f"mask: expected dtype bool (True = visible), got {named['mask']}; "
            "pass an additive mask as bias=, and a 0/1 mask as mask != 0"
        )
    for name in ("bias", "alibi_slopes", "sinks"):
        if named.get(name, "float32") not in DTYPES:
            hint = "; pass a boolean mask as mask=" if name == "bias" else "; cast it"
            raise DTypeError(f"{name}: expected one of {', '.join(DTYPES)}, got {named[name]}{hint}")
    for name in ("cu_seqlens_q", "cu_seqlens_k", "key_ranges"):
        check_int32(name if name == "key_ranges" else f"seq_info.{name}", named.get(name, "int32"))


def _rows(arrays: Arrays, packed: bool) -> list[tuple[int, ...]]:
    """Returns the shapes of q, k, v as ``[batch, seq, heads, dim]``."""
    rank = len(arrays.q.shape)
    for name in ("q", "k", "v"):
        shape = getattr(arrays, name).shape
        if not packed and len(shape) != 4:
            raise ShapeError(
                f"{name}: expected [batch, seq, heads, head_dim], got {list(shape)}; "
                "[tokens, heads, head_dim] is for packed documents and needs seq_info="
            )
        if packed and (len(shape) != rank or rank not in (3, 4)):
            raise ShapeError(
                f"{name}: expected [tokens, heads, head_dim] or [1, tokens, heads, head_dim] with seq_info, the same "
                f"rank for q, k and v; got {list(shape)} and q {list(arrays.q.shape)}"
            )
        if packed and rank == 4 and shape[0] != 1:
            raise ShapeError(
                f"{name}: expected one row of packed documents [1, tokens, heads, head_dim], got {list(shape)}; "
                f"reshape to {ONE_ROW} if no row has padding, else unpad(attention_mask, q, k, v)"
            )
    return [shape if len(shape) == 4 else (1, *shape) for shape in (arrays.q.shape, arrays.k.shape, arrays.v.shape)]


ONE_ROW = "[1, batch * seq, heads, head_dim]"
QKV = ("q", "k", "v")


def check_qkv(q: ArrayFacts, k: ArrayFacts, v: ArrayFacts, names: tuple[str, str, str] = QKV) -> None:
    """Checks q, k and v of a dense call against each other, for a host that must use their sizes before ``attention``.

    Args:
        q, k, v: with shapes ``[batch, seq, heads, dim]``.
        names: what the host calls them.

    Raises:
        DTypeError, ShapeError: naming the one that does not fit.
    """
    _check_one_dtype(q.dtype, k.dtype, v.dtype, names)
    if all(map(is_number, (*q.shape[2:], *k.shape[2:], *v.shape[2:]))):  # ``attention`` knows what symbols it takes
        _check_shapes(q.shape, k.shape, v.shape, names)


def _check_one_dtype(q: str, k: str, v: str, names: tuple[str, str, str] = QKV) -> None:
    if q not in DTYPES:
        every = f"{names[0]}, {names[1]} and {names[2]}"
        raise DTypeError(f"{names[0]}: expected one of {', '.join(DTYPES)}, got {q}; cast {every} to one of them")
    for name, dtype in zip(names, (q, k, v), strict=True):
        if dtype != q:
            found = ", ".join(f"{each} {got}" for each, got in zip(names, (q, k, v), strict=True))
            raise DTypeError(f"{name}: expected the dtype of {names[0]}, got {found}; cast them to one")


def _check_shapes(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], names: tuple[str, str, str] = QKV
) -> None:
    for name, shape in zip(names, (q, k, v), strict=True):
        # The checks below compare these numbers and the spec divides by them, which a symbol does not allow.
        if not (is_number(shape[2]) and is_number(shape[3])):
            # As text, because the repr of a symbol is not its name.
            raise ShapeError(
                f"{name}: expected numbers of heads and channels, got shape [{', '.join(map(str, shape))}]; only the "
                "batch, lengths and the number of documents may be symbolic"
            )
        if shape[2] < 1 or shape[3] < 1:
            raise ShapeError(f"{name}: expected at least one head and one channel, got shape {list(shape)}")
    of_q, of_k, of_v = names
    for name, shape in ((of_k, k), (of_v, v)):
        if shape[0] != q[0]:
            raise ShapeError(
                f"{name}: expected the batch of {of_q} ({q[0]}), got {shape[0]}; expand {name}, as it does not "
                "broadcast"
            )
    if k[3] != q[3]:
        raise ShapeError(
            f"{of_k}: expected the head_dim of {of_q} ({q[3]}), got {k[3]}, because a score is their dot product"
        )
    for axis, what in ((1, "length"), (2, "heads")):
        if v[axis] != k[axis]:
            raise ShapeError(
                f"{of_v}: expected the {what} of {of_k} ({k[axis]}), got {v[axis]}; each key has one value"
            )
    hint = f"; {HEADS_FIRST_HINT}" if names is QKV else ""
    if q[2] % k[2] and (not hint or fits_heads_first(q, k)):
        raise ShapeError(f"{of_k}: expected kv heads that divide the {q[2]} query heads, got {k[2]}{hint}")


def _documents(arrays: Arrays, options: Options) -> int | None:
    """Returns the number of packed documents, or None. Checks the shapes of the offsets and the longest documents."""
    if arrays.cu_seqlens_q is None or arrays.cu_seqlens_k is None:
        return None
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        shape = getattr(arrays, name).shape
        # A symbolic number of documents cannot be compared with 2.
        if len(shape) != 1 or (is_number(shape[0]) and shape[0] < 2):
            raise ShapeError(
                f"seq_info.{name}: expected shape [documents + 1] with at least one document, got {list(shape)}"
            )
    count_q, count_k = arrays.cu_seqlens_q.shape[0] - 1, arrays.cu_seqlens_k.shape[0] - 1
    if count_q != count_k:
        raise ShapeError(
            f"seq_info.cu_seqlens_k: expected as many documents as cu_seqlens_q ({count_q}), got {count_k}; "
            "a document without queries or keys has length 0"
        )
    for side, facts in (("q", arrays.q), ("k", arrays.k)):
        tokens, longest = facts.shape[-3], getattr(options, f"max_len_{side}")
        sizes_known = is_number(tokens) and is_number(count_q)
        if longest is not None and sizes_known and tokens > count_q * longest:  # known without reading the offsets
            raise SpecError(
                f"seq_info.max_len_{side}={longest}: expected at least the longest document; {count_q} documents of at "
                f"most {longest} tokens cannot have the {tokens} tokens of {side}"
            )
    return count_q


def _four(name: str, facts: ArrayFacts | None) -> Shape4 | None:
    """Returns a mask's or bias's shape, padded in front with axes of 1 as broadcasting does."""
    if facts is None:
        return None
    shape = facts.shape
    if len(shape) > 4:
        raise ShapeError(
            f"{name}: expected a shape broadcastable to [batch, heads, q, kv], at most 4 axes, got {list(shape)}"
        )
    return (1,) * (4 - len(shape)) + tuple(shape)  # type: ignore[return-value]


def _sinks(facts: ArrayFacts | None, num_heads: int) -> bool:
    if facts is not None and facts.shape != (num_heads,):
        raise ShapeError(f"sinks: expected one logit per query head, shape [{num_heads}], got {list(facts.shape)}")
    return facts is not None


_READINGS = {2: ("[batch, kv]", "[:, None, None, :]", "[q, kv]"), 3: ("[batch, q, kv]", "[:, None]", "[heads, q, kv]")}
"""By the number of axes: what the caller may mean, how to write it, and what broadcasting reads."""


def _check_axes(name: str, shape: tuple[int, ...], full: Shape4, heads_first: Shape4) -> None:
    """Checks a mask or bias whose axes the caller may mean otherwise than broadcasting reads them.

    A mask that fits both readings is refused. A bias is not, because a bias of all rows, ``[heads, q, kv]``, is usual,
    and one of each row is not.

    Args:
        full: ``(batch, heads, q_len, kv_len)``. Nothing is checked if one of the sizes is a symbol.
        heads_first: the same if q, k and v were ``[batch, heads, seq, head_dim]``.

    Raises:
        ShapeError: naming the spelling that the caller may mean.
    """
    axes, batch = len(shape), full[0]
    if not 1 <= axes <= 4 or not all(map(is_number, (*shape, *full, *heads_first))):
        return
    meant, spelling, read = _READINGS.get(axes, _READINGS[2])  # the second also of [batch, kv, 1, 1]
    of_rows = axes in _READINGS and shape[0] == batch > 1 and _broadcasts(shape[1:], full[5 - axes :])
    if not _broadcasts(shape, full[-axes:]):
        hint = ""
        if of_rows or shape == (batch, full[3], 1, 1):
            hint = f"; a {name} of {meant} is {name}{spelling}"
        elif _broadcasts(shape, heads_first[-axes:]):
            hint = f"; {EXCHANGED_HINT}"
        raise ShapeError(
            f"{name}: expected a shape broadcastable to [batch, heads, q, kv] = {list(full)}, got {list(shape)}{hint}"
        )
    if of_rows and name == "mask":
        raise ShapeError(
            f"mask: expected four axes, got {list(shape)}, which fits both {meant} and {read}; write "
            f"mask{spelling} for {meant}, mask[{', '.join(['None'] * (4 - axes))}] for {read}"
        )


def _broadcasts(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    return all(n in (1, m) for n, m in zip(shape, full, strict=True))


MOST_HEADS = 128
"""Models have no more query heads, so a longer axis likely counts tokens."""


def fits_heads_first(q: tuple[int, ...], k: tuple[int, ...]) -> bool:
    """Returns whether two shapes of four axes also describe a call if heads come before the sequence."""
    return all(map(is_number, (*q, *k))) and min(*q, *k) > 0 and q[1] % k[1] == 0


def warn_of_heads_first(q: tuple[int, ...], k: tuple[int, ...]) -> None:
    """Warns if the shapes of q and k, ``[batch, seq, heads, head_dim]``, are likelier those of heads first.

    They are if there are as many key/value heads as query heads and more heads than queries, and either more heads than
    models have, or fewer keys than queries, which is grouped heads if the first axes are heads.
    """
    if not fits_heads_first(q, k) or q[2] != k[2] or q[2] <= q[1]:
        return
    if q[2] > MOST_HEADS or q[1] > k[1]:
        warn(
            f"q, k: the shapes {list(q)} and {list(k)} are read as [batch, seq, heads, head_dim], which is {q[1]} "
            f"queries and {k[1]} keys of {q[2]} heads; {HEADS_FIRST_HINT}",
            LayoutWarning,
        )


def may_be_heads_first(q: tuple[int, ...], k: tuple[int, ...]) -> bool:
    """Returns whether the shapes of q and k, of four axes, fit both layouts, so that only the caller knows which it is.

    Then the second axis may count heads, and the third one tokens: it has as many of q as of k.
    """
    return fits_heads_first(q, k) and q[2] == k[2] > 1 and 1 < q[1] <= MOST_HEADS
