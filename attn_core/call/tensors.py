"""The tensors of a call and of its gradients, in the backend's framework."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, Self, TypeVar

from attn_core.errors import DTypeError


class Array(Protocol):
    """An array of any framework: what torch tensors, JAX arrays and numpy arrays have in common.

    Code for one framework alone says ``torch.Tensor`` or ``jax.Array``. Code that returns an array of the framework of
    its argument says so by a type variable bound to Array.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def ndim(self) -> int: ...
    @property
    def dtype(self) -> Any: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: Any, /) -> Self: ...
    def reshape(self, size: int, /, *sizes: int) -> Self: ...
    def __add__(self, other: Any, /) -> Self: ...
    def __radd__(self, other: Any, /) -> Self: ...
    def __sub__(self, other: Any, /) -> Self: ...
    def __mul__(self, other: Any, /) -> Self: ...
    def __neg__(self) -> Self: ...
    def __invert__(self) -> Self: ...
    def __and__(self, other: Any, /) -> Self: ...
    def __or__(self, other: Any, /) -> Self: ...
    def __lt__(self, other: Any, /) -> Self: ...
    def __le__(self, other: Any, /) -> Self: ...
    def __gt__(self, other: Any, /) -> Self: ...
    def __ge__(self, other: Any, /) -> Self: ...


A = TypeVar("A", bound=Array)


def dtype_name(array: Array) -> str:
    """Returns the name of an array's dtype, such as "bfloat16", for torch tensors as for JAX arrays."""
    return str(array.dtype).removeprefix("torch.")


def mask_or_bias(name: str, table: A) -> tuple[A | None, A | None]:
    """Returns a host's mask as (mask, bias): bools say what is visible, floats are added. The other one is None.

    Raises:
        DTypeError: for any other dtype, naming the mask.
    """
    kind = dtype_name(table)
    if kind == "bool":
        return table, None
    if "float" in kind:
        return None, table
    raise DTypeError(
        f"{name}: expected bool (True = visible) or a float to be added, got {kind} of shape {list(table.shape)}; a "
        f"0/1 mask becomes bool by {name} != 0"
    )


def part_of(table: Any, rows: slice, keys: slice) -> Any:
    """Returns a view of rows and keys of a table ``[..., q_len or 1, kv_len or 1]``, whose axes of 1 stay; or None."""
    if table is None:
        return None
    part = table if table.shape[-2] == 1 else table[..., rows, :]
    return part if table.shape[-1] == 1 else part[..., keys]


class Inputs(NamedTuple):
    """The tensors of one call, in the backend's framework.

    Shapes: q ``[batch, q_len, heads, head_dim]``, k ``[batch, kv_len, kv_heads, head_dim]``, v ``[batch, kv_len,
    kv_heads, value_dim]``; packed: no batch axis. mask (bool) and bias 4-D as the spec says; alibi_slopes and sinks
    float; cu_seqlens int32 ``[documents + 1]``; key_ranges int32 5-D as the spec says; aux0 to aux3 the arrays of its
    functions; rng two integer words (seed, offset), present if dropout > 0.
    """

    q: Any
    k: Any
    v: Any
    mask: Any = None
    bias: Any = None
    alibi_slopes: Any = None
    sinks: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    key_ranges: Any = None
    aux0: Any = None
    aux1: Any = None
    aux2: Any = None
    aux3: Any = None
    rng: Any = None


class PagedInputs(NamedTuple):
    """The tensors of a call on paged keys and values; ``forward`` gets them if ``spec.paged``.

    Shapes: q ``[tokens, heads, head_dim]``, k and v pools ``[num_pages, page_size, kv_heads, dim]``, block_table int32
    ``[documents, width]``, seq_lens int32 ``[documents]``, cu_seqlens_q int32 ``[documents + 1]`` or None if every
    sequence has one query. The values of the last three are checked on a CPU, and unchecked on a GPU, where a backend
    must clamp them. key_ranges int32 ``[1, kv_heads or 1, tokens, 1 or 2, 2]``: the tokens of q that see each of the
    new tokens; the values are only compared. alibi_slopes float ``[heads]`` or ``[documents, heads]``. kv_starts int32
    ``[documents]``, the first key that each sequence sees; unchecked on a GPU, too. Quantised pages: k and v are
    float8_e4m3fn, int8, or uint8 with half the channels for int4 (see ``paged.quantised``), and k_scales and v_scales
    float32 ``[num_pages, kv_heads]`` or ``[num_pages, page_size, kv_heads]``, as ``spec.paged`` says.
    """

    q: Any
    k: Any
    v: Any
    block_table: Any
    seq_lens: Any
    cu_seqlens_q: Any = None
    sinks: Any = None
    key_ranges: Any = None
    alibi_slopes: Any = None
    kv_starts: Any = None
    k_scales: Any = None
    v_scales: Any = None


class Tangents(NamedTuple):
    """The tangents of a call's tensors in forward mode, each in the shape and dtype of its tensor; None for a zero."""

    dq: Any = None
    dk: Any = None
    dv: Any = None
    dbias: Any = None
    dsinks: Any = None


class Gradients(NamedTuple):
    """The gradients of a call, in the dtypes and shapes of its tensors.

    dbias if ``spec.bias_gradient``, dsinks if ``spec.sinks``, daux0 to daux3 of the arrays in ``spec.aux_gradients``.
    """

    dq: Any
    dk: Any
    dv: Any
    dbias: Any = None
    dsinks: Any = None
    daux0: Any = None
    daux1: Any = None
    daux2: Any = None
    daux3: Any = None

    @property
    def daux(self) -> tuple[Any, Any, Any, Any]:
        """The gradients of the aux arrays."""
        return self[5:]
