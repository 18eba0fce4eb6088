"""What flash-attn's functions need of a framework."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from attn_core.call.arguments import ArrayFacts


@dataclass(frozen=True)
class Frontend:
    """The functions and rules in which torch and JAX differ.

    Attributes:
        attention, attention_qkvpacked, paged_attention, apply_rotary: the frontend's own functions.
        attention_to_rows: ``attention`` with kv_lengths, the fourth argument, which shifts rows padded on the right as
            flash-attn does: the last query stands at the row's last key.
        numpy: the namespace of functions with numpy's names, ``torch`` or ``jax.numpy``.
        updates_in_place: whether new tokens are written into the caches; else a call returns new caches.
        portable: returns the backends that drop the same weights for every width of the values: plain operations.
        check_array: takes a name and a value, and raises TypeError unless that is an array.
        check_constant: likewise, and raises SpecError for an array with a derivative.
        facts: returns the metadata of an array. Its sizes are no arrays, in a trace neither.
        device: returns where new arrays beside an array belong.
        cast, stop_gradient: return an array in another dtype; without its derivative.
        empty: returns an array without numbers, beside an array and in a dtype.
        split: returns the parts of an array of such sizes along an axis.
        unstack: returns the parts of an array along an axis, without this axis.
        searchsorted: numpy's with ``side="right"``.
        repeated: returns a source of random numbers that draws what another one draws next.
        rows_as_table: returns the block table of a dense cache of a batch on a device, int32 ``[batch, 1]``.
        equal_offsets: returns the offsets of a batch of sequences of so many tokens on a device, int32 ``[batch + 1]``.
        positions: takes the lengths of a cache, a number of queries, and whether each has its own position. Returns
            int32 ``[batch, queries]``.
        values_on_host: takes q and three tables, each an array or None. Returns these for numpy, or None if the host
            would wait for them.
        without_gradient: runs a function that returns the results and the caches of a call, and refuses derivatives of
            the results by the arrays of the call, its keywords.
        seen: takes what ``cache.attend`` takes. Returns the results of a call that it knows a short way for, or None.
        on_mesh: runs a function of ``Cached`` on a call, which a mesh of devices may share; takes return_lse, too.
        planned: takes the tensors and keywords of ``paged_attention``, and raises its errors if an append would write
            before it does. Returns a function of both caches that attends.
        append: takes a call, its block table, the lengths that count the new tokens, and rotary_interleaved. Writes the
            new tokens, and returns both caches.
        attend_scaled: takes (q, k, v), their factors, keywords of ``attention`` and return_attn_probs. Runs a call in
            float8 on FlashAttention 3; returns None for another call. None where the framework refuses factors.
    """

    attention: Callable[..., Any]
    attention_qkvpacked: Callable[..., Any]
    paged_attention: Callable[..., Any]
    apply_rotary: Callable[..., Any]
    attention_to_rows: Callable[..., Any]
    numpy: ModuleType
    updates_in_place: bool
    portable: Callable[[], tuple[str, ...]]
    check_array: Callable[[str, Any], None]
    check_constant: Callable[[str, Any], None]
    facts: Callable[[Any], ArrayFacts]
    device: Callable[[Any], Any]
    cast: Callable[[Any, Any], Any]
    stop_gradient: Callable[[Any], Any]
    empty: Callable[[Any, Any], Any]
    split: Callable[[Any, list[int], int], tuple[Any, ...]]
    unstack: Callable[[Any, int], tuple[Any, ...]]
    searchsorted: Callable[[Any, Any], Any]
    repeated: Callable[[Any], Any]
    rows_as_table: Callable[[int, Any], Any]
    equal_offsets: Callable[[int, int, Any], Any]
    positions: Callable[[Any, int, bool], Any]
    values_on_host: Callable[..., tuple[Any, ...] | None]
    without_gradient: Callable[..., Any]
    seen: Callable[..., Any]
    on_mesh: Callable[..., Any]
    planned: Callable[..., Callable[..., Any]]
    append: Callable[..., tuple[Any, Any]]
    attend_scaled: Callable[..., Any] | None = None

    def with_caches(self, results: tuple[Any, ...], caches: tuple[Any, Any]) -> Any:
        """Returns what a call on caches returns: its results, and the caches unless it has written to them."""
        if not self.updates_in_place:
            return *results, *caches
        return results if len(results) > 1 else results[0]
