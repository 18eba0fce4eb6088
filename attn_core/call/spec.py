"""AttentionSpec: one attention call as plain data; PagedKV: the sizes of its pages and how their numbers are stored."""

from __future__ import annotations

import hashlib
import math
from dataclasses import Field, dataclass, fields
from functools import partial
from operator import attrgetter

from attn_core.call.after_fork import lazy_property
from attn_core.call.functions import check_functions
from attn_core.call.key_ranges import check_shape
from attn_core.call.kinds import check_hashable, check_kind, is_host_int, is_number, is_size
from attn_core.call.options import PLAIN, Alignment, Invariant, Options, check_flag, check_options
from attn_core.errors import DTypeError, ShapeError, SpecError, shown
from attn_core.expressions.tracing import Aux
from attn_core.expressions.tree import Expression

BITS = {"float8_e4m3fn": 8, "int8": 8, "int4": 4}
"""The dtypes of quantised pages, and the bits of a stored number. Two int4 numbers are one byte of a uint8 pool."""
SCALES = ("page", "token")
"""What has one scale for each kv head."""
SCALE_BYTES = 4
FLOAT_BITS = {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16}


@dataclass(frozen=True, kw_only=True)
class PagedKV:
    """The static sizes of a pool and its block table, and how the pool stores its numbers.

    Attributes:
        num_pages: pages in the pool; 0 is allowed.
        page_size: tokens in a page.
        width: columns of the block table: a sequence has at most ``width * page_size`` tokens.
        starts: whether each sequence has a first visible key, ``kv_starts``.
        dtype: "float8_e4m3fn", "int8" or "int4" for quantised pages, where a number is ``stored * scale``; None if the
            pool has the dtype of q.
        scales: whether each "page" or each "token" has a scale for each kv head; None if and only if dtype is None.
    """

    num_pages: int
    page_size: int
    width: int
    starts: bool = False
    dtype: str | None = None
    scales: str | None = None

    def __post_init__(self) -> None:
        # An empty pool and an empty table are calls without keys. page_size divides positions, so it cannot be 0.
        for name, least in (("num_pages", 0), ("page_size", 1), ("width", 0)):
            value = getattr(self, name)
            if not is_size(value) or (is_host_int(value) and value < least):
                raise ShapeError(f"{name}={shown(value)}: expected {least} or more")
        check_flag("starts", self.starts)
        # The types come first, because a comparison with an array is an array.
        if self.dtype is not None and not (isinstance(self.dtype, str) and self.dtype in BITS):
            raise DTypeError(
                f"dtype={shown(self.dtype)}: expected one of {', '.join(BITS)}, or None for the dtype of q"
            )
        is_kind = isinstance(self.scales, str) and self.scales in SCALES
        if not (self.scales is None if self.dtype is None else is_kind):
            expected = "None without a dtype" if self.dtype is None else f"one of {', '.join(SCALES)}"
            raise SpecError(f"scales={shown(self.scales)}: expected {expected}")

    def __repr__(self) -> str:
        names = ("num_pages", "page_size", "width", *(("starts",) if self.starts else ()))
        names += () if self.dtype is None else ("dtype", "scales")
        return f"PagedKV({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    @property
    def capacity(self) -> int:
        """The most tokens of a sequence; 0 if the pool has no page."""
        return self.width * self.page_size if self.num_pages else 0


def bytes_in_layer(dtype: str, kv_heads: int, dims: tuple[int, int], scales: float) -> float:
    """Returns the bytes of a token's keys and values in one layer; ``attn_core.bytes_per_token`` counts all layers.

    Args:
        dtype: of the numbers in the pool.
        dims: head_dim and value_dim.
        scales: how many float32 scales the key of a token and head has, and its value as many.
    """
    channels = sum(-(-dim * (FLOAT_BITS | BITS)[dtype] // 8) for dim in dims)  # int4 has two channels in a byte
    return kv_heads * (channels + 2 * SCALE_BYTES * scales)


def describe(paged: PagedKV, kv_heads: int, head_dim: int, value_dim: int, dtype: str) -> str:
    """Returns a sentence about the bytes of a token.

    Args:
        dtype: of q, which the pool has unless it is quantised.
    """
    scales = {None: 0.0, "token": 1.0, "page": 1.0 / paged.page_size}[paged.scales]
    size = bytes_in_layer(paged.dtype or dtype, kv_heads, (head_dim, value_dim), scales)
    if paged.dtype is None:
        return f"{dtype}, {size:g} bytes per token and layer"
    plain = bytes_in_layer(dtype, kv_heads, (head_dim, value_dim), 0)
    each = f"a scale per {paged.scales} and kv head"
    return f"{paged.dtype} with {each}, {size:g} bytes per token and layer ({plain} in {dtype})"


def describe_pages(spec: AttentionSpec) -> str | None:
    """Returns how the pool of an ``AttentionSpec`` stores numbers, and the bytes of a token; None without pages."""
    if spec.paged is None:
        return None
    return describe(spec.paged, spec.num_kv_heads, spec.head_dim, spec.value_dim, spec.dtype)


def check_paged(spec: AttentionSpec, paged: PagedKV) -> None:
    """Raises SpecError for an ``AttentionSpec`` with pages and an option that calls on pages cannot have."""
    # New queries are the last tokens of their sequence, so their diagonal ends at the last key.
    if not spec.packed or spec.alignment != "bottom_right" or spec.kv_len != paged.capacity:
        raise SpecError(
            "paged: expected documents, bottom-right alignment and kv_len = width * page_size "
            f"({paged.capacity}), got documents={spec.documents}, {spec.alignment}, kv_len={spec.kv_len}"
        )
    if paged.dtype is not None:
        _check_quantised(spec, paged)
    if spec.needs_backward:
        raise SpecError("paged: expected no backward, because keys and values in pages have no gradient; use no_grad")
    for name in ("mask_shape", "bias_shape"):
        if getattr(spec, name) is not None:
            raise SpecError(f"paged: expected no {name.removesuffix('_shape')}, got shape {getattr(spec, name)}")
    if spec.dropout:
        raise SpecError(f"dropout={spec.dropout}: expected 0, because keys and values in pages have no backward")


def _check_quantised(spec: AttentionSpec, paged: PagedKV) -> None:
    if spec.dtype == "float64":  # scales and products are float32
        raise DTypeError(f"q: expected bfloat16, float16 or float32 with {paged.dtype} pages, got float64; cast it")
    for name in ("head_dim", "value_dim"):
        if paged.dtype == "int4" and getattr(spec, name) % 2:
            raise ShapeError(
                f"{name}={getattr(spec, name)}: expected an even number, because int4 pages have two a byte"
            )


Shape4 = tuple[int, int, int, int]
Shape = tuple[int, ...] | None
DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """The whole call: shapes, dtype, and every choice that changes its result. No tensor, no framework, no backend.

    Attributes:
        batch: rows; 1 when packed.
        q_len, kv_len: tokens of each row; all tokens of the row when packed.
        num_heads, num_kv_heads: query heads and key/value heads; query head ``h`` reads
            ``h // (num_heads // num_kv_heads)``.
        head_dim, value_dim: channels of q and k, and of v and the output.
        dtype: of q, k and v.
        causal: query ``i`` sees key ``j`` only if ``j <= i + offset``.
        alignment: ``"bottom_right"`` puts the diagonal at ``offset = kv_len - q_len``, ``"top_left"`` at 0. It also
            anchors the window and ALiBi. With packed documents the lengths are each document's own.
        window: inclusive distances ``(left, right)`` around that diagonal; None is unbounded.
        softcap: ``c`` in ``c * tanh(s / c)``, applied after scale and before bias, ALiBi and mask.
        scale: factor on ``q . k``; None becomes ``1 / sqrt(head_dim)``.
        mask_shape, bias_shape: 4-D shapes broadcastable to ``[batch, num_heads, q_len, kv_len]``, or None.
        key_ranges_shape: ``(batch or 1, num_kv_heads or 1, kv_len, 1 or 2, 2)``, or None; see ``call.key_ranges``.
        mask_mod, score_mod: expressions, or None; aux: (shape, dtype) of their arrays; aux_gradients: the numbers of
            those whose gradient may be requested. See ``call.functions``.
        bias_dtype: of the bias; None if there is no bias or its dtype is ``dtype``.
        alibi_shape: ``(num_heads,)`` or ``(batch, num_heads)``, with pages ``(documents, num_heads)``, or None; adds
            ``-slope * |i + offset - j|``.
        sinks: one logit per head joins each row's softmax without a value.
        documents: how many documents are packed in the row, or None; max_len_q and max_len_k bound their lengths.
        dropout: probability of dropping a softmax weight.
        deterministic: the same bits on every run, gradients included.
        needs_backward: a gradient of q, k or v may be requested. bias_gradient: the bias's gradient may be, too.
        return_lse: the caller wants the log-sum-exp (natural log, float32, ``[batch, num_heads, q_len]``, packed
            ``[num_heads, tokens]``; float64 for float64 inputs).
        paged: the pool that keys and values are read from, or None. With a pool the documents are its sequences, q is
            packed, ``kv_len`` is the capacity of a row of the table, and there is no gradient.
        partial: the call sees only part of each row's keys and returns that part's log-sum-exp. Its backward takes the
            output and log-sum-exp of the whole row and returns the part's gradients. Sinks belong to the whole row.
        invariant: "batch": the bits of a row's or document's out, lse, dq, dk and dv do not depend on what is beside it
            or on its place. "prefix": besides, those of a query's out and lse depend on its own and earlier tokens, not
            on how these were cut into calls or lie in pages. None promises neither.

    Raises:
        ShapeError, DTypeError, SpecError: if the values do not describe a call.
    """

    batch: int
    q_len: int
    kv_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str
    causal: bool = False
    alignment: Alignment = "bottom_right"
    window: tuple[int | None, int | None] = (None, None)
    softcap: float | None = None
    scale: float | None = None
    mask_shape: Shape4 | None = None
    key_ranges_shape: tuple[int, ...] | None = None
    mask_mod: Expression | None = None
    score_mod: Expression | None = None
    aux: tuple[Aux, ...] = ()
    bias_shape: Shape4 | None = None
    bias_dtype: str | None = None
    alibi_shape: tuple[int, ...] | None = None
    sinks: bool = False
    documents: int | None = None
    max_len_q: int | None = None
    max_len_k: int | None = None
    dropout: float = 0.0
    deterministic: bool = False
    needs_backward: bool = False
    bias_gradient: bool = False
    aux_gradients: tuple[int, ...] = ()
    return_lse: bool = False
    paged: PagedKV | None = None
    partial: bool = False
    invariant: Invariant | None = None

    def __post_init__(self) -> None:
        _check_field_types(self)
        _check_shapes(self)
        check_functions(self)
        options = _check_choices(self)
        scale = 1.0 / math.sqrt(self.head_dim) if options.scale is None else options.scale
        for name, value in (("softcap", options.softcap), ("scale", scale), ("dropout", options.dropout)):
            object.__setattr__(self, name, value)  # floats: 50 and 50.0 are one call, and must have one key
        object.__setattr__(self, "_hash_of_others", hash(_others_of(self)))
        object.__setattr__(self, "_hash", _hash_of(self))

    def __hash__(self) -> int:  # computed once: a spec is a cache key on every call
        return self._hash  # type: ignore[attr-defined]

    def __reduce__(self) -> tuple[object, tuple[()]]:  # the stored hash must not travel to another process
        return partial(AttentionSpec, **{field.name: getattr(self, field.name) for field in fields(self)}), ()

    def with_lengths(
        self, batch: int, q_len: int, kv_len: int, mask_shape: Shape = None, bias_shape: Shape = None
    ) -> AttentionSpec:
        """Returns the same call of other sizes, for one without packed documents, slopes and key ranges.

        It is several times as fast as a new spec because it checks nothing: the sizes must be numbers, and the caller
        must have compared the shapes.
        """
        spec = object.__new__(AttentionSpec)
        tables = {"mask_shape": mask_shape and tuple(mask_shape), "bias_shape": bias_shape and tuple(bias_shape)}
        sizes = {"batch": batch, "q_len": q_len, "kv_len": kv_len, "symbolic": False, **tables}
        object.__setattr__(spec, "__dict__", self.__dict__ | sizes)
        spec.__dict__["_hash"] = _hash_of(spec)
        return spec

    @property
    def packed(self) -> bool:
        """Whether the row holds packed documents, separated by cumulative lengths."""
        return self.documents is not None

    @lazy_property
    def symbolic(self) -> bool:
        """Whether a size is a symbol: a dimension that ``jax.export`` leaves open."""
        return not all(map(is_number, (self.batch, self.q_len, self.kv_len, self.documents or 0)))

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def empty(self) -> bool:
        """Whether the call has no rows or no keys, so that the result does not depend on any value."""
        return 0 in (self.batch, self.q_len, self.kv_len)

    @property
    def rounds_bias(self) -> bool:
        """Whether casting the bias to the dtype of q, k and v would round it."""
        if self.bias_shape is None or self.bias_dtype in (None, self.dtype):
            return False
        # Wider dtypes represent every value of these. Neither half dtype represents all values of the other.
        wider = {"float64": ("float32", "bfloat16", "float16"), "float32": ("bfloat16", "float16")}
        return self.bias_dtype not in wider.get(self.dtype, ())

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the output: ``[batch, q_len, num_heads, value_dim]``, packed ``[tokens, num_heads, value_dim]``."""
        tail = (self.q_len, self.num_heads, self.value_dim)
        return tail if self.packed else (self.batch, *tail)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Shape of the log-sum-exp: ``[batch, num_heads, q_len]``, packed ``[num_heads, tokens]``."""
        return (self.num_heads, self.q_len) if self.packed else (self.batch, self.num_heads, self.q_len)

    @property
    def lse_dtype(self) -> str:
        """float32, or float64 for float64 inputs."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def key(self) -> str:
        """A text with every field and its value, the same in every process (``hash`` of a string is not)."""
        return ";".join(f"{field.name}={_text(getattr(self, field.name))}" for field in fields(self))

    def digest(self, *extra: str) -> str:
        """Returns a content hash of the spec and of extra words, as hexadecimal text."""
        return hashlib.sha256("|".join((self.key, *extra)).encode()).hexdigest()

    def __str__(self) -> str:
        heads = f"{self.num_heads}/{self.num_kv_heads}"
        parts = [
            self.dtype,
            f"batch {self.batch}",
            f"q_len {self.q_len}",
            f"kv_len {self.kv_len}",
            f"heads {heads}",
            f"head_dim {self.head_dim}" + (f"/{self.value_dim}" if self.value_dim != self.head_dim else ""),
        ]
        return ", ".join(parts + [text for text in map(self._text_of, fields(self)) if text])

    def _text_of(self, field: Field[object]) -> str:  # the optional fields that differ from their defaults
        name, value = field.name, getattr(self, field.name)
        if field.default is value or value == field.default or name in _WRITTEN_FIRST:
            return ""
        return name if value is True else f"{name}={value}"


def _text(value: object) -> str:
    """Returns a field's value as text with nothing left out; the repr of an expression is a formula for people."""
    return value.key if isinstance(value, Expression) else repr(value)


_SIZES = ("batch", "q_len", "kv_len", "mask_shape", "bias_shape")
"""What ``with_lengths`` changes."""
_sizes_of = attrgetter(*_SIZES)
_others_of = attrgetter(*(field.name for field in fields(AttentionSpec) if field.name not in _SIZES))


def _hash_of(spec: AttentionSpec) -> int:
    """Returns the hash of all fields; ``with_lengths`` need not compute that of the others again."""
    return hash((spec._hash_of_others, _sizes_of(spec)))  # type: ignore[attr-defined]


_WRITTEN_FIRST = (
    "batch",
    "q_len",
    "kv_len",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "value_dim",
    "dtype",
    "scale",
)


def _check_shapes(spec: AttentionSpec) -> None:
    """Raises ShapeError or DTypeError for sizes of q, k and v that no call has; then checks the tables."""
    for name in ("batch", "q_len", "kv_len"):
        # A symbolic size cannot be compared with 0.
        if is_number(getattr(spec, name)) and getattr(spec, name) < 0:
            raise ShapeError(f"{name}={getattr(spec, name)}: expected a length of 0 or more")
    for name in ("num_heads", "num_kv_heads", "head_dim", "value_dim"):
        if getattr(spec, name) < 1:
            raise ShapeError(f"{name}={getattr(spec, name)}: expected at least 1")
    if spec.num_heads % spec.num_kv_heads:
        raise ShapeError(
            f"k: expected kv heads that divide the {spec.num_heads} query heads, got {spec.num_kv_heads}; "
            "query head h reads kv head h // (num_heads // num_kv_heads)"
        )
    if spec.dtype not in DTYPES:
        raise DTypeError(f"q: expected one of {', '.join(DTYPES)}, got {spec.dtype}")
    if spec.packed and spec.batch != 1:
        raise ShapeError(f"seq_info: packed documents live in one row, got batch {spec.batch}; concatenate the rows")
    _check_tables(spec)


def _check_choices(spec: AttentionSpec) -> Options:
    """Raises SpecError for an option that no call can have, or that does not fit the others; returns the options."""
    options = check_options(Options(**{name: getattr(spec, name) for name in PLAIN}))
    if spec.bias_dtype is not None and (spec.bias_shape is None or spec.bias_dtype not in DTYPES):
        raise SpecError(f"bias_dtype={shown(spec.bias_dtype)}: expected one of {', '.join(DTYPES)}, with a bias_shape")
    if spec.bias_gradient and spec.bias_shape is None:
        raise SpecError("bias_gradient=True: expected a bias_shape, got none")
    if spec.partial and (spec.sinks or spec.dropout or spec.paged is not None):
        raise SpecError("partial=True: expected no sinks, dropout or pages, because they belong to whole rows")
    if spec.invariant is not None:
        _check_invariant(spec)
    if spec.paged is not None:
        check_paged(spec, spec.paged)
    return options


def _check_invariant(spec: AttentionSpec) -> None:
    """Raises SpecError for the first property of a spec with ``invariant`` that makes it impossible."""
    # Key ranges say themselves what a query sees.
    is_prefix = spec.invariant == "prefix" and spec.key_ranges_shape is None
    sees_later_keys = is_prefix and not spec.causal and spec.window[1] != 0
    excluded = (
        (spec.dropout, f"dropout={spec.dropout}", "which weights drop depends on a row's place in the batch"),
        (spec.bias_gradient, "a gradient of the bias", "it is a sum over all rows that share the bias"),
        (spec.aux_gradients, "a gradient of aux", "it is a sum over all rows that read the array"),
        (spec.partial, "a part of each row's keys", "the parts of context parallelism depend on the number of ranks"),
        (sees_later_keys, "keys behind a query", "a query's result would depend on tokens after it"),
    )
    for present, what, why in excluded:
        if present:
            raise SpecError(f"invariant={spec.invariant!r}: expected no {what.removeprefix('a ')}, because {why}")


def _check_field_types(spec: AttentionSpec) -> None:
    """Checks the types of the fields that ``check_options`` does not check."""
    for name in ("batch", "q_len", "kv_len", "num_heads", "num_kv_heads", "head_dim", "value_dim"):
        if not is_size(getattr(spec, name)):
            raise ShapeError(f"{name}={shown(getattr(spec, name))}: expected an int")
    for name in ("documents", "max_len_q", "max_len_k"):
        if getattr(spec, name) is not None and not is_size(getattr(spec, name)):
            raise SpecError(f"{name}={shown(getattr(spec, name))}: expected an int, or None")
    for name in ("mask_shape", "key_ranges_shape", "bias_shape", "alibi_shape"):
        if getattr(spec, name) is not None:
            check_kind(name, getattr(spec, name), tuple, "a tuple of ints, or None")
            check_hashable(name, getattr(spec, name))
    for name in ("sinks", "needs_backward", "bias_gradient", "partial"):
        check_flag(name, getattr(spec, name))
    if not isinstance(spec.window, tuple) or len(spec.window) != 2:
        raise SpecError(
            f"window={shown(spec.window)}: expected a pair (left, right) of inclusive distances, None unbounded"
        )
    check_hashable("dtype", spec.dtype)
    if spec.paged is not None:
        check_kind("paged", spec.paged, PagedKV, "a PagedKV, or None")


def _check_tables(spec: AttentionSpec) -> None:
    """Raises ShapeError, naming the table, unless the shapes of an ``AttentionSpec``'s tables fit its sizes."""
    full = (spec.batch, spec.num_heads, spec.q_len, spec.kv_len)
    for name in ("mask", "bias"):
        shape = getattr(spec, f"{name}_shape")
        if shape is not None and (len(shape) != 4 or any(n not in (1, m) for n, m in zip(shape, full, strict=True))):
            raise ShapeError(
                f"{name}: expected a shape broadcastable to [batch, heads, q, kv] = {list(full)}, got {list(shape)}"
            )
    check_shape(spec.key_ranges_shape, spec.batch, spec.num_kv_heads, spec.kv_len if spec.paged is None else spec.q_len)
    # With pages the sequences are the spec's documents.
    rows, axis = (spec.batch, "batch") if spec.paged is None else (spec.documents, "sequences")
    if spec.alibi_shape is not None and spec.alibi_shape not in ((spec.num_heads,), (rows, spec.num_heads)):
        raise ShapeError(
            f"alibi_slopes: expected shape [heads] = [{spec.num_heads}] or [{axis}, heads] = "
            f"[{rows}, {spec.num_heads}], got {list(spec.alibi_shape)}"
        )
