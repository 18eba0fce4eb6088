"""What ``register_backend`` asks of a record. Imports no kernel: it compares claims with ``refuses`` and ``lower``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from traceback import extract_tb
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from attn_core.backends.contract import TORCH_FLAGS, Backend
from attn_core.backends.shared.claims import unmet_claims
from attn_core.backends.support import ANY, Support, kind_of
from attn_core.call.functions import trace
from attn_core.call.kinds import check_kind
from attn_core.call.options import Alignment, Invariant
from attn_core.call.spec import BITS, DTYPES, AttentionSpec, PagedKV
from attn_core.errors import SpecError, shown
from attn_core.expressions.tracing import Aux

Changes = dict[str, Any]
Function = Callable[..., object] | None

DEVICE = re.compile(r"(?!gpu$|nvidia|amd)[a-z][a-z0-9_]*")
"""A device as a Target names it. ``gpu`` is JAX's word for GPUs of all vendors."""

DEVICES_OF = {"cuda": ("sm90", "sm80", "sm100", "sm120", "sm75"), "rocm": ("gfx942",), ANY: ("cpu",)}
"""Devices that stand for a kind: a claim of the kind must hold on one of them."""

KNOWN: dict[str, tuple[str, ...]] = {
    "dtypes": DTYPES,
    "alignments": get_args(Alignment),
    "page_dtypes": tuple(BITS),
    "invariant": get_args(Invariant),
}
"""What the tuples of a Support may hold."""


def source_of(record: Backend) -> str:
    """Returns the file that defines a backend's forward."""
    function: Any = getattr(record.forward, "func", record.forward)  # of a partial
    try:
        return inspect.getsourcefile(function) or "a file without a name"
    except TypeError:  # it is no function
        return "a file without a name"


def place_of(error: BaseException) -> str:
    """Returns the place in a plug-in where an error began, as words to append; empty if no file of a plug-in raised."""
    ours = Path(__file__).parent
    frames = [frame for frame in extract_tb(error.__traceback__) if Path(frame.filename).is_file()]
    of_others = [frame for frame in frames if ours not in Path(frame.filename).parents]
    return f" (in {of_others[-1].filename}, line {of_others[-1].lineno})" if of_others else ""


def check(record: Backend) -> None:
    """Checks a record and those of its kinds of devices.

    Raises:
        SpecError: names the plug-in, the member, its value, what was expected, and the file.
    """
    check_kind("backend", record, Backend, "an attn_core.Backend")
    _check_members(record)
    for variant in record.variants:
        check(variant)
    for kind, other in record.on.items():
        _check_members(other)
        if kind == "cpu" or (other.name, other.framework) != (record.name, record.framework) or other.on:
            expected = "expected the record for another kind than cpu, of the same name and framework, and without on"
            raise fault(record, f"on[{kind!r}]", expected)
    for each in (record, *record.on.values()):
        for member, expected in _wrong_values(each):
            raise fault(each, member, expected)
        _check_claims(each, each.forward_claims, gradient=False)
        if each.backward_claims is not None:
            _check_claims(each, each.backward_claims, gradient=True)


def names_of_others(record: Backend) -> Iterator[tuple[Backend, str, str]]:
    """Yields each name of a backend that a record, its variants, or those of its kinds of devices hold."""
    for each in (record, *record.on.values()):
        timing = each.timing
        members = {"in_pages": each.in_pages, "timing.behind": timing.behind}
        members["timing.behind_without_time"] = timing.behind_without_time
        for member, name in members.items():
            if name is not None:
                yield each, member, name
        for name in timing.model_of or ():
            yield each, "timing.model_of", name
    for variant in record.variants:
        yield from names_of_others(variant)


def fault(record: Backend, member: str, why: str) -> SpecError:
    """Returns the error about a member of a record."""
    return SpecError(f"plug-in {record.name!r}: {member}: {why} (in {source_of(record)})")


def _check_members(record: Backend) -> None:
    """Checks the type of each field."""
    hints = get_type_hints(Backend)
    for field in fields(Backend):
        value = getattr(record, field.name)
        if not _fits(value, hints[field.name]):
            raise fault(record, field.name, f"expected {field.type}, got {shown(value)}")


def _fits(value: object, hint: object) -> bool:
    """Returns whether a value has the type of an annotation."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in inner)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(each, inner[0]) for each in value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        pairs = value.items() if isinstance(value, Mapping) else [(None, None)]
        return all(_fits(key, inner[0]) and _fits(each, inner[1]) for key, each in pairs)
    return callable(value) if origin is Callable or not isinstance(hint, type) else isinstance(value, hint)


def _wrong_values(record: Backend) -> Iterator[tuple[str, str]]:
    """Yields each value that a member cannot have, and members that do not belong together, with what is expected."""
    mode, maximum = record.forward_mode, record.row_maximum
    if not (record.name.isidentifier() and record.name.islower()):
        yield "name", "expected lower-case letters, digits and underscores, such as 'my_kernel'"
    if record.framework not in ("torch", "jax"):
        yield f"framework={record.framework!r}", "expected 'torch' or 'jax'"
    if (record.backward is None) != (record.backward_claims is None):
        yield "backward", "expected backward and backward_claims together, or None for both"
    if not {*record.writes_into} <= {"forward", "backward", "jvp"}:
        yield f"writes_into={record.writes_into}", "expected some of forward, backward, jvp"
    if record.torch_flag not in (None, *TORCH_FLAGS):
        yield f"torch_flag={record.torch_flag!r}", f"expected one of {', '.join(TORCH_FLAGS)}, or None"
    if mode is not None and (mode.jvp is None) != (record.framework == "jax"):
        yield "forward_mode", "expected a jvp for a backend of torch, and jvp=None for one of JAX"
    for member in ("preference", "paged_preference", "keeps_order_on", "on"):
        for kind in getattr(record, member):
            if not DEVICE.fullmatch(kind) or kind_of(kind) != kind:
                yield f"{member}: {kind!r}", "expected a kind of device: cpu, cuda, rocm, tpu or any"
    claims = {"forward_claims": record.forward_claims, "backward_claims": record.backward_claims}
    claims |= {} if mode is None else {"forward_mode.claims": mode.claims}
    claims |= {} if maximum is None else {"row_maximum.claims": maximum.claims}
    for member, support in claims.items():
        yield from () if support is None else _wrong_claims(member, support)


def _wrong_claims(member: str, support: Support) -> Iterator[tuple[str, str]]:
    """Yields (the claim, what was expected) for each claim with a value that no call has."""
    for name, known in KNOWN.items():
        for value in getattr(support, name):
            if value not in known:
                yield f"{member}.{name}={value!r}", f"expected some of {', '.join(known)}"
    for device in support.devices:
        if not DEVICE.fullmatch(device):
            expected = "expected a device such as cpu, sm90, gfx942 or tpu, or a kind: cuda, rocm or any"
            yield f"{member}.devices={device!r}", expected
    if not support.devices or not support.dtypes:
        yield member, "expected at least one device and one dtype"


def _check_claims(record: Backend, support: Support, *, gradient: bool) -> None:
    """Checks that the plainest small call of each claim is covered by the claims, accepted, and lowered.

    An installed build may change what ``refuses`` says, so a backend with ``build`` is not asked.
    """
    member = "backward_claims" if gradient else "forward_claims"
    plain = _plain_call(record, support, gradient)
    for device in support.devices:
        for claim, alternatives in _uses(support, plain):
            faults = [
                _first_fault(record, support, {**plain, **changes}, here)
                for changes in alternatives
                for here in DEVICES_OF.get(device, (device,))
            ]
            if all(faults):
                way_out = f"claim less in {member}, or let refuses and lower take the call"
                raise fault(record, f"{member}.{claim}", f"claimed on {device}, but {faults[0]}; {way_out}")


def _first_fault(record: Backend, support: Support, call: Changes, device: str) -> str | None:
    """Returns why a backend does not run a call that it claims; None if it does."""
    try:
        spec = AttentionSpec(**call)
    except SpecError as error:  # this combination describes no call
        return str(error)
    try:
        for why in unmet_claims(support, spec, device):
            return f"no other claim covers {spec}: {why}"
        for why in record.refuses(spec, device, None) if record.build is None else ():
            return f"refuses says of {spec}: {why}"
        record.lower(spec)
    except Exception as error:  # a plug-in's function may raise anything
        return f"refuses or lower raises {type(error).__name__}: {error} for {spec}"
    return None


def _plain_call(record: Backend, support: Support, gradient: bool) -> Changes:
    """Returns the fields of a call that uses no claim."""
    width = max(1, min(64, support.max_head_dim or 64) // support.head_dim_multiple) * support.head_dim_multiple
    sizes = {"batch": 1, "q_len": 64, "kv_len": 64, "num_heads": 2, "num_kv_heads": 2}
    plain = {**sizes, "head_dim": width, "value_dim": width, "dtype": support.dtypes[0], "needs_backward": gradient}
    return {**plain, **_PAGED} if record.takes_pages_alone else plain


def _uses(support: Support, plain: Changes) -> Iterator[tuple[str, tuple[Changes, ...]]]:
    """Yields each claim with the changes of the plain call that use it; one of them must run."""
    for dtype in support.dtypes:
        yield f"dtypes={dtype!r}", ({"dtype": dtype},)
    for claim, alternatives in _FEATURES.items():
        if getattr(support, claim):
            yield claim, alternatives
    for alignment in support.alignments if support.causal or support.window else ():
        band = {**_FEATURES["causal" if support.causal else "window"][0], "alignment": alignment}
        yield f"alignments={alignment!r}", tuple({**band, **sizes} for sizes in _UNEVEN)
    for invariant in support.invariant:
        yield f"invariant={invariant!r}", ({"invariant": invariant}, {"invariant": invariant, "causal": True})
    if support.value_dim:
        width = plain["head_dim"]
        pairs = ((width, width // 2), (2 * width, width), (192, 128))
        yield "value_dim", tuple({"head_dim": head_dim, "value_dim": value_dim} for head_dim, value_dim in pairs)
    if not plain["needs_backward"]:
        yield from _uses_of_pages(support)


def _uses_of_pages(support: Support) -> Iterator[tuple[str, tuple[Changes, ...]]]:
    """Yields each claim about pages, and changes of the plain call that use it."""
    starts, slopes = {"paged": replace(_POOL, starts=True)}, {"alibi_shape": (2,)}
    claims: dict[str, Changes] = {"paged": {}, "paged_starts": starts, "paged_alibi": slopes}
    for claim, changes in claims.items():
        if getattr(support, claim):
            yield claim, ({**_PAGED, **changes},)
    for dtype in support.page_dtypes:
        stored = [replace(_POOL, dtype=dtype, scales=by) for by in ("page", "token")]
        forms = ({**_PAGED, "paged": each, "dtype": of_q} for each in stored for of_q in support.dtypes)
        yield f"page_dtypes={dtype!r}", tuple(forms)


def _functions(mask_mod: Function = None, score_mod: Function = None, aux: tuple[Aux, ...] = ()) -> Changes:
    """Returns the fields of a call with a mask function or a score function."""
    return dict(zip(("mask_mod", "score_mod", "aux"), trace(mask_mod, score_mod, aux)))


_POOL = PagedKV(num_pages=16, page_size=16, width=8)
_PAGED: Changes = {"paged": _POOL, "kv_len": 128, "documents": 1, "max_len_q": 64, "needs_backward": False}
_LEARNED = _functions(score_mod=lambda score, b, h, q, k, by: score - by[h], aux=(Aux((2,), "float32"),))
_FEATURES: dict[str, tuple[Changes, ...]] = {
    "grouped_heads": ({"num_kv_heads": 1},),
    "causal": ({"causal": True},),
    "window": ({"window": (3, 0)}, {"window": (3, 0), "causal": True}, {"window": (3, 3)}),
    "softcap": ({"softcap": 30.0},),
    "mask": ({"mask_shape": (1, 1, 64, 64)},),
    "key_ranges": ({"key_ranges_shape": (1, 1, 64, 1, 2)},),
    "mask_mod": (_functions(mask_mod=lambda b, h, q, k: k % 2 == q % 2),),
    "score_mod": (_functions(score_mod=lambda score, b, h, q, k: score - abs(q - k)),),
    "aux_gradients": ({**_LEARNED, "aux_gradients": (0,), "needs_backward": True},),
    "bias": ({"bias_shape": (1, 2, 64, 64)},),
    "bias_gradient": ({"bias_shape": (1, 2, 64, 64), "bias_gradient": True, "needs_backward": True},),
    "alibi": ({"alibi_shape": (2,)},),
    "sinks": ({"sinks": True},),
    "packed": ({"documents": 2, "max_len_q": 40, "max_len_k": 40},),
    "dropout": ({"dropout": 0.1},),
    "deterministic": ({"deterministic": True},),
    "lse": ({"return_lse": True, "needs_backward": False},),
    "lse_gradient": ({"return_lse": True, "needs_backward": True},),
    "partial": ({"partial": True},),
}
"""Claim -> what the plainest calls that use it have beside the sizes. Claims about a backend as a whole have none."""

_UNEVEN = ({"kv_len": 128}, _FEATURES["packed"][0], {"q_len": 1}, {"kv_len": 1})
"""Sizes with which the two alignments differ."""
