"""Support: the claims of one backend; Build: what an installed build of its kernel lacks; and kinds of devices.

The names that a Target has for the devices of one vendor are one kind.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

ANY = "any"
"""The claim of every device: for kernels written in a framework's own operations, which run wherever the framework
does. Also the key of the order of preference on a kind of device that has no order of its own."""

STARTS = {"cuda": "sm", "rocm": "gfx"}
"""How the names of a kind's devices start: NVIDIA's GPUs by compute capability, AMD's by architecture."""

BRIDGED = ("cpu", "cuda")
"""The kinds of devices on which JAX reaches torch's kernels: XLA hands its buffers to torch there."""


def kind_of(device: str) -> str:
    """Returns "cuda" for a device such as "sm90", "rocm" for one such as "gfx942", else the device itself."""
    for kind, start in STARTS.items():
        if device.startswith(start):
            return kind
    return device


def compute_capability(device: str) -> int:
    """Returns 90 for ``"sm90"``, and 0 for a device that is no NVIDIA GPU."""
    return int(device[2:]) if device.startswith("sm") and device[2:].isdigit() else 0


def half_dtype(device: str) -> str:
    """Returns the usual half precision of a device: NVIDIA's GPUs before sm80 have no bfloat16."""
    return "float16" if 0 < compute_capability(device) < 80 else "bfloat16"


def in_words(devices: tuple[str, ...]) -> str:
    """Returns what a kernel for these devices runs on, in words: "a TPU", "a GPU of AMD", or "a GPU"."""
    kinds = {kind_of(device) for device in devices}
    return {"tpu": "a TPU", "rocm": "a GPU of AMD"}.get(kinds.pop() if len(kinds) == 1 else "", "a GPU")


@dataclass(frozen=True, kw_only=True)
class Support:
    """A backend's claims. Everything is denied unless claimed; generated tests prove every claim.

    Attributes:
        kernel: the kernel's name in refusals, e.g. ``"the aten CPU flash kernel"``.
        devices: names such as ``"cpu"``, ``"sm90"``, ``"tpu"``; kinds, ``"cuda"`` (any NVIDIA GPU), ``"rocm"`` (any GPU
            of AMD); or ANY, every device of the framework.
        dtypes: of q, k and v.
        max_head_dim: largest head_dim and value_dim, or None; head_dim_multiple: both must divide by it.
        value_dim: value_dim may differ from head_dim.
        grouped_heads: fewer kv heads than heads.
        alignments: the causal/window alignments it has when q_len and kv_len differ (or documents are packed).
        causal, window, softcap, mask, key_ranges, mask_mod, score_mod, bias, bias_gradient, aux_gradients, alibi,
        sinks, packed, dropout: the features.
        paged: it takes keys and values in pages; page_dtypes: it reads quantised pages of these dtypes, either scales.
            paged_alibi, paged_starts: with pages it takes alibi_slopes, and a first visible key of each sequence.
        deterministic: it can promise equal bits on every run.
        lse: it returns the log-sum-exp; lse_gradient: its backward takes a gradient of it.
        partial: it can attend to a part of each row's keys: it returns the log-sum-exp, and its backward computes with
            the output and the log-sum-exp of whole rows.
        portable_dropout: it drops exactly those weights that ``arithmetic.dropout_keeps`` drops, none by a generator of
            its own.
        invariant: which promises of ``AttentionSpec.invariant`` it keeps.
        symbolic: it takes a batch, lengths and a number of documents that ``jax.export`` leaves open.
        approximate: its numbers are not right to the precision of its dtypes (quantised inputs, say), so that it runs
            only when requested by name.
        unproven: this project never ran its kernel on such a device, so it runs only when requested by name.
    """

    kernel: str
    devices: tuple[str, ...]
    dtypes: tuple[str, ...]
    max_head_dim: int | None = None
    head_dim_multiple: int = 1
    value_dim: bool = False
    grouped_heads: bool = False
    alignments: tuple[str, ...] = ()
    causal: bool = False
    window: bool = False
    softcap: bool = False
    mask: bool = False
    key_ranges: bool = False
    mask_mod: bool = False
    score_mod: bool = False
    bias: bool = False
    bias_gradient: bool = False
    aux_gradients: bool = False
    alibi: bool = False
    sinks: bool = False
    packed: bool = False
    dropout: bool = False
    deterministic: bool = False
    lse: bool = False
    lse_gradient: bool = False
    portable_dropout: bool = False
    approximate: bool = False
    unproven: bool = False
    paged: bool = False
    page_dtypes: tuple[str, ...] = ()
    partial: bool = False
    symbolic: bool = False
    paged_alibi: bool = False
    paged_starts: bool = False
    invariant: tuple[str, ...] = ()

    def runs_on(self, device: str) -> bool:
        """Returns whether the claim covers a device such as ``"cpu"`` or ``"sm90"``."""
        return device in self.devices or ANY in self.devices or kind_of(device) in self.devices

    @property
    def never_run(self) -> str | None:
        """What this project never did with an unproven kernel, as words; None for any other kernel."""
        return f"never run on {in_words(self.devices)} by this project" if self.unproven else None


@dataclass(frozen=True)
class Build:
    """The properties of an installed build of a kernel, determined once. Plain data.

    Attributes:
        name: the build's name in refusals, e.g. ``"ROCm CK"``.
        without: claims of Support that it lacks, and ``"backward"`` if it has no gradient.
        max_head_dim: the largest head dimension it was compiled for, if that is less than its Support says.
        head_dims: the widths it was compiled for, ascending; empty if every width runs.
        version: of the library whose faults matter, e.g. cuDNN's ``(9, 19, 0)``; empty if it does not matter.
    """

    name: str
    without: tuple[str, ...] = ()
    max_head_dim: int | None = None
    head_dims: tuple[int, ...] = ()
    version: tuple[int, ...] = ()


def limit_to_build(support: Support | None, build: Build | None) -> Support | None:
    """Returns the claims of ``support`` that hold for an installed build; None for a backward that it lacks."""
    if support is None or build is None:
        return support
    # Claims are the fields that are False by default. The others are sizes and names, which a build does not lose.
    claims = [field.name for field in fields(Support) if field.default is False]
    lost: dict[str, Any] = {name: False for name in claims if name in build.without}
    # head_dims are ascending, so the last one is the largest; the slice is empty if every width runs.
    limits = [limit for limit in (support.max_head_dim, build.max_head_dim, *build.head_dims[-1:]) if limit is not None]
    limit = min(limits, default=None)
    if not lost and limit == support.max_head_dim:
        return support
    return replace(support, kernel=f"{support.kernel} ({build.name})", max_head_dim=limit, **lost)
