"""The backends: one module each, loaded by name. This file holds their contract and the order of preference.

A backend module imports neither torch nor jax nor its kernel at module level; functions do, when they run. That is how
every backend can be selected, explained and documented on a machine that has none of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

from attn_core.cached_once import cached_once
from attn_core.errors import SpecError
from attn_core.spec import AttentionSpec
from attn_core.support import Build, Support

VARIANTS = {
    "flash3_fp8": ("flash3", "fp8"),
    "xformers_cutlass": ("xformers", "cutlass"),
    "xformers_flash": ("xformers", "flash"),
    "xformers_flash3": ("xformers", "flash3"),
    "xformers_splitk": ("xformers", "splitk"),
    "sage_fp16_cuda": ("sage", "fp16_cuda"),
    "sage_fp16_triton": ("sage", "fp16_triton"),
    "sage_fp8_cuda": ("sage", "fp8_cuda"),
    "sage_fp8_cuda_sm90": ("sage", "fp8_cuda_sm90"),
}
"""Names for one kernel among several of a package: (the backend's file, what its ``variant`` is asked for)."""
NAMES = (
    *("sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "flash2", "flash3", "flash4", "flex"),
    *("xformers", "xformers_cutlass", "xformers_flash", "xformers_flash3", "xformers_splitk"),
    *("flash3_fp8", "sage", "sage_fp16_cuda", "sage_fp16_triton", "sage_fp8_cuda", "sage_fp8_cuda_sm90"),
    *("triton_splitkv", "torch_varlen", "flashinfer", "math", "jax_cudnn", "jax_xla"),
)
"""Every name of the field's kernels. One without a file here is refused with that reason."""

_CUDA = ("flash3", "flash4", "sdpa_cudnn", "flash2", "sdpa_flash", "xformers", "sdpa_efficient", "flex")
PREFERENCE = {
    ("torch", "cpu"): ("sdpa_flash", "math", "flex"),
    ("jax", "cpu"): ("sdpa_flash", "math", "jax_xla", "flex"),
    ("torch", "cuda"): (*_CUDA, "math"),
    ("jax", "cuda"): (*_CUDA, "jax_cudnn", "jax_xla", "math"),
}
"""Automatic choice per (framework, kind of device), best first. A name left out runs only when asked for.

Both frameworks have the same order of torch's kernels, so that the same call gives the same bits in both. Where a
device was measured, ``attn_core.preference`` refines the order by the shape of the call."""

DECODING = "triton_splitkv"
_PAGED = ("flash3", "flash4", "flash2", DECODING, "torch_varlen")
PAGED_PREFERENCE = {
    **PREFERENCE,
    ("torch", "cuda"): (*_PAGED, "math"),
    ("jax", "cuda"): (*_PAGED, "jax_xla", "math"),
}
"""The same for keys and values in pages; where each sequence has few queries, DECODING comes first.

"flashinfer" is not here: it waits for the GPU on every call."""


class Inputs(NamedTuple):
    """The tensors of one call, of whatever framework the backend speaks.

    Shapes: q ``[batch, q_len, heads, head_dim]``, k ``[batch, kv_len, kv_heads, head_dim]``, v ``[batch, kv_len,
    kv_heads, value_dim]``; packed: no batch axis. mask (bool) and bias 4-D as the spec says; alibi_slopes and sinks
    float; cu_seqlens int32 ``[documents + 1]``; rng two integer words (seed, offset), given when dropout > 0.
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
    rng: Any = None


class PagedInputs(NamedTuple):
    """The tensors of a call whose keys and values are in pages: what ``forward`` gets where ``spec.paged``.

    Shapes: q ``[tokens, heads, head_dim]``, k and v pools ``[num_pages, page_size, kv_heads, dim]``, block_table int32
    ``[documents, width]``, seq_lens int32 ``[documents]``, cu_seqlens_q int32 ``[documents + 1]`` or None where every
    sequence has one query. Values of these three on a GPU may say anything, and must not lead out of a pool.
    """

    q: Any
    k: Any
    v: Any
    block_table: Any
    seq_lens: Any
    cu_seqlens_q: Any = None
    sinks: Any = None


class Gradients(NamedTuple):
    """dq, dk, dv in the dtypes and shapes of q, k, v; dbias when ``spec.bias_gradient``, dsinks when ``spec.sinks``."""

    dq: Any
    dk: Any
    dv: Any
    dbias: Any = None
    dsinks: Any = None


class Backend(Protocol):
    """What a backend module offers, in this order.

    FRAMEWORK: ``"torch"`` or ``"jax"``: whose tensors forward and backward take.
    REQUIRES: the upstream packages with their ranges, for people.
    FORWARD, BACKWARD: its claims; BACKWARD is None when there is no gradient.

    Besides, a module may have: ``WRITES_INTO = True``, and then its forward and backward take a last argument ``into``,
    buffers for their results: (out, lse) or Gradients. What they return counts; a result that is not the buffer itself
    is copied there by the caller. ``build()`` (see Support's Build), ``warm_up(spec)``, ``shortcut(spec)`` and
    ``variant(word)``: see the functions below.
    """

    FRAMEWORK: str
    REQUIRES: str
    FORWARD: Support
    BACKWARD: Support | None

    def refuses(self, spec: AttentionSpec, device: str, build: Build | None) -> tuple[str, ...]:
        """Reasons that join two facts, known upstream bugs among them; empty when there are none.

        device: such as ``"sm90"``; build: what is particular about the installed one, None for an ordinary one.
        """

    def probe(self) -> str:
        """Imports the kernel's symbols and returns the version; raises whatever the import raises."""

    def lower(self, spec: AttentionSpec) -> dict[str, Any]:
        """The kernel's own arguments for a spec: pure, no tensor."""

    def forward(self, spec: AttentionSpec, inputs: Inputs) -> tuple[Any, Any]:
        """(out, lse), shapes as ``spec.out_shape`` and ``spec.lse_shape``; never called when ``spec.empty``.

        lse is -inf where no key is seen, sinks or not. One that claims ``paged`` takes PagedInputs as well.
        """

    def backward(self, spec: AttentionSpec, inputs: Inputs, out: Any, lse: Any, dout: Any, dlse: Any) -> Gradients:
        """Gradients from the saved out and lse; dlse is None when nothing depends on the log-sum-exp."""


def shortcut(backend: Backend, spec: AttentionSpec) -> Callable[[Any, Any, Any], tuple[Any, Any]] | None:
    """What a backend offers for eager calls on q, k and v alone, where calling it costs more than the kernel.

    A backend may define ``shortcut(spec)``: None, or a function of (q, k, v) that returns the (out, lse) of ``forward``
    and under the framework's autograd records the same backward kernel that ``backward`` calls, so that both give the
    same bits. Most backends have none, and run through ``forward`` and ``backward``.
    """
    offered = getattr(backend, "shortcut", None)
    return None if offered is None or spec.empty else offered(spec)


def writes_into(backend: Backend) -> bool:
    """Whether the backend's functions take ``into``."""
    return getattr(backend, "WRITES_INTO", False)


def reads_pages_alone(backend: Backend) -> bool:
    """Whether the backend has ``PAGES_ALONE = True``: it refuses every call but those on keys and values in pages."""
    return getattr(backend, "PAGES_ALONE", False)


def program_refusals(backend: Backend, spec: AttentionSpec, device: str) -> tuple[str, ...] | None:
    """Why XLA cannot launch the kernels of a call by itself, as far as data tell; empty when it can.

    None for a backend that hands out no kernels: only one with a ``program_refuses(spec, device)`` does.
    """
    refuses = getattr(backend, "program_refuses", None)
    return None if refuses is None else refuses(spec, device)


def own_warm_up(backend: Backend) -> Callable[[AttentionSpec], None] | None:
    """What a backend that compiles its kernels offers for doing so ahead, on the current device."""
    return getattr(backend, "warm_up", None)


@cached_once
def load(name: str, kind: str = "cpu") -> Backend | None:
    """The module of a backend name for a kind of device, or None where this version has no such backend.

    ``flex_cuda.py`` is what "flex" means on a GPU, where there is such a file; else a name has one for all devices.

    Raises:
        SpecError: for a name nobody knows, with the close matches.
    """
    check_name(name)
    file, word = VARIANTS.get(name, (name, None))
    module = next((path for path in (f"{__name__}.{file}_{kind}", f"{__name__}.{file}") if find_spec(path)), None)
    return None if module is None else _import(module, word)


@cached_once
def _import(module: str, word: str | None) -> Backend:
    found: Any = importlib.import_module(module)
    return found if word is None else found.variant(word)


def files(name: str) -> dict[str, Backend]:
    """The modules behind a name, by kind of device: ``{"": module}``, or one for "cpu" and one for "cuda"."""
    main, cuda = load(name), load(name, "cuda")
    if main is None:
        return {}
    return {"": main} if cuda is main or cuda is None else {"cpu": main, "cuda": cuda}


def kind_of(device: str) -> str:
    """``"cuda"`` for a device such as "sm90", ``"rocm"`` for one such as "gfx942", else the device itself."""
    return "cuda" if device.startswith("sm") else "rocm" if device.startswith("gfx") else device


def check_name(name: str) -> None:
    """Raises SpecError for a name that is not in NAMES, with the close matches."""
    if name not in NAMES:
        from difflib import get_close_matches

        close = get_close_matches(str(name), NAMES, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"expected one of {', '.join(NAMES)}"
        raise SpecError(f"backend={name!r}: unknown backend; {hint}")


def built() -> tuple[str, ...]:
    """The names that this version has a file for."""
    return tuple(name for name in NAMES if load(name) is not None)


@cached_once
def availability(name: str, kind: str = "cpu") -> tuple[str | None, str | None]:
    """``(version, None)`` when the backend's kernel imports here, else ``(None, reason)``; any failure is a reason."""
    backend = load(name, kind)
    if backend is None:
        return None, _not_built(name)
    try:
        return backend.probe(), None
    except (Exception, SystemExit) as error:  # an import may fail in any way; it is this backend's reason alone
        return None, f"not available: {type(error).__name__}: {error} (needs {backend.REQUIRES})"


@cached_once
def installed_build(name: str, device: str) -> Build | None:
    """What is particular about the installed build of an available backend on a device of this machine, if anything.

    Raises whatever looking raises: the caller makes a reason of it.
    """
    backend = load(name, kind_of(device))
    look = getattr(backend, "build", None)
    return None if look is None else look()


def _not_built(name: str) -> str:
    from attn_core import __version__

    return f"this version ({__version__}) has no {name} backend"
