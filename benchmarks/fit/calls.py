"""The calls of a sweep as data: drawn at random from a distribution of real calls.

``random_call(seed, number, kind)`` returns the same call on every machine and in every process. The distribution, as
shares of the calls:

- kinds: self-attention .5; cross-attention .12; dense decoding .18 (1 query in three of four calls, else 2 to 16);
  packed documents .2. Decoding has no training.
- lengths: log-uniform, half of the time rounded to a multiple of 64, a quarter to a power of two.
- batch: log-uniform from 1 to 128, then lowered until the call fits the device's LIMITS.
- heads: pairs of (query heads, key/value heads) of published models, from MHA to MQA.
- head dims: of published models, mostly 64 and 128; sometimes 32, 72, 80, 96, 160, 192, 256, and 192 with values of
  128.
- bands: most self-attention and packed calls are causal, some have a window; cross-attention sees all keys.
- one more feature in about a third of the calls: mask (padding, shared by heads, per head), bias, softcap, sinks,
  ALiBi.
- dtypes: bfloat16 .7, float16 .15, float32 .15; on a CPU float32 .6, bfloat16 .4.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from random import Random
from typing import Any, NamedTuple

from attn_core.call.arithmetic import BACKWARD_WORK, pairs
from attn_core.call.masks import without_idle_sides
from attn_core.call.options import Options
from attn_core.call.spec import AttentionSpec


@dataclass(frozen=True)
class SweepCase:
    """One call to measure.

    Attributes:
        name: unique in a sweep; describes the call.
        spec: the call, without a backward.
        lengths: the tokens of each packed document, queries and keys alike; None when not packed.
        training: whether its gradients are measured as well.
        number: of the call among the calls of its seed.
    """

    name: str
    spec: AttentionSpec
    lengths: tuple[int, ...] | None = None
    training: bool = True
    number: int = 0


HEADS = (
    *((8, 8), (12, 12), (16, 16), (16, 16), (24, 24), (32, 32), (40, 40), (64, 64), (10, 10), (4, 4)),
    *((32, 8), (32, 8), (32, 8), (24, 8), (16, 8), (64, 8), (28, 4), (16, 4), (8, 2), (40, 8), (14, 2)),
    *((8, 1), (16, 1), (32, 1)),
)
"""Query heads and key/value heads, as in ViT, GPT, Llama, Qwen, Gemma, gpt-oss, T5 and Falcon."""

WIDTHS = (
    *(((64, 64),) * 9),
    *(((128, 128),) * 10),
    *((32, 32), (72, 72), (80, 80), (80, 80), (96, 96), (96, 96), (160, 160), (192, 192), (256, 256), (256, 256)),
    (192, 128),
)
"""Head dims of queries and keys, and of values."""

WINDOWS = (128, 256, 512, 1024, 1024, 4096)
"""Keys that a query sees: itself and the ones before it, or on both sides of it."""

FEATURES = {"mask": 10, "bias": 8, "softcap": 6, "sinks": 5, "alibi": 4, "": 67}
"""Shares of the calls with one more feature, in per cent."""


class Limits(NamedTuple):
    """The largest calls of a kind of device.

    Attributes:
        length: of a row of queries or keys.
        batch: rows.
        heads: the most query heads; a call with more is drawn with fewer.
        work: operations of the forward; an eighth of it for float32 on a GPU, which has no tensor cores for it.
        elements: of q, k, v and the output together.
        scores: elements of a mask or bias.
        dtypes: names and weights.
    """

    length: int
    batch: int
    heads: int
    work: float
    elements: float
    scores: float
    dtypes: dict[str, int]


LIMITS = {
    "cuda": Limits(30_000, 128, 128, 4e12, 2.0**29, 2.0**27, {"bfloat16": 70, "float16": 15, "float32": 15}),
    "cpu": Limits(8192, 16, 16, 8e9, 2.0**24, 2.0**24, {"float32": 60, "bfloat16": 40}),
}
"""Chosen so that a call takes at most about 20 ms forward on an H200, and a fraction of a second on a CPU."""


def random_calls(seed: int, kind: str) -> Iterator[SweepCase]:
    """Returns the calls of a seed for a kind of device ("cpu" or "cuda"), without end."""
    return (random_call(seed, number, kind) for number in count())


def random_call(seed: int, number: int, kind: str) -> SweepCase:
    """Returns one call of the distribution that the module's docstring describes. The same on every machine."""
    random, limits = Random(f"{seed} {number} {kind}"), LIMITS[kind]
    what = _pick(random, {"self": 50, "cross": 12, "decode": 18, "packed": 20})
    heads, kv_heads = random.choice([pair for pair in HEADS if pair[0] <= limits.heads])
    width, value_width = random.choice(WIDTHS)
    options: dict[str, Any] = {
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": width,
        "value_dim": value_width,
        "dtype": _pick(random, limits.dtypes),
    }
    q_len, kv_len = _lengths(random, what, limits)
    options |= {"q_len": q_len, "kv_len": kv_len, "batch": round(2 ** random.uniform(0, math.log2(limits.batch)))}
    options |= _band(random, what)
    lengths = None
    if what == "packed":
        lengths = _documents(random, q_len, limits)
        longest = {"documents": len(lengths), "max_len_q": max(lengths), "max_len_k": max(lengths)}
        options |= {"batch": 1, "q_len": sum(lengths), "kv_len": sum(lengths)} | longest
    feature = _pick(random, FEATURES)
    if feature == "softcap":
        options["softcap"] = random.choice((30.0, 50.0))
    if feature == "sinks":
        options["sinks"] = True
    if feature == "alibi":
        options["alibi_shape"] = (heads,)
    # A mask or bias does not say which document it belongs to, and packed calls are used to avoid masks.
    axes = _axes(random, feature) if what != "packed" else ""
    spec, lengths = _fitting(AttentionSpec(**options), lengths, feature, axes, limits)
    return SweepCase(
        f"#{number} {_name(what, spec, axes and f'{feature} {axes}')}", spec, lengths, what != "decode", number
    )


def _pick(random: Random, weights: dict[str, int]) -> str:
    return random.choices(list(weights), list(weights.values()))[0]


def _length(random: Random, low: int, high: int) -> int:
    """Returns a log-uniform length: as drawn, a multiple of 64, or a power of two."""
    length, style = 2 ** random.uniform(math.log2(low), math.log2(high)), random.random()
    if style < 0.25:
        return round(length)
    rounded = 64 * round(length / 64) if style < 0.75 else 2 ** round(math.log2(length))
    return min(high, rounded) or round(length)


def _lengths(random: Random, what: str, limits: Limits) -> tuple[int, int]:
    """Returns queries and keys of a row; for packed calls the tokens of the row, twice."""
    if what == "cross":
        images = random.random() < 0.5  # text of 77 to 512 tokens for an image; else any two lengths
        queries = _length(random, 16, limits.length // 2)
        return queries, random.choice((77, 120, 226, 256, 512)) if images else _length(random, 16, limits.length // 2)
    if what == "decode":
        queries = 1 if random.random() < 0.75 else random.randint(2, 16)
        return queries, _length(random, 16, limits.length)
    queries = _length(random, 512 if what == "packed" else 8, limits.length)
    # A prefill that continues a cached prompt has more keys than queries.
    more = what == "self" and random.random() < 0.1
    return queries, min(limits.length, queries + _length(random, 16, limits.length)) if more else queries


def _documents(random: Random, tokens: int, limits: Limits) -> tuple[int, ...]:
    """Returns the lengths of packed documents: log-normal around a random mean, ``tokens`` together."""
    mean, spread = _length(random, 32, max(64, tokens)), random.choice((0.0, 0.5, 1.0, 1.5))
    lengths: list[int] = []
    while sum(lengths) < tokens:
        length = max(1, round(mean * random.lognormvariate(0.0, spread)))
        lengths.append(min(length, tokens - sum(lengths), limits.length))
    return tuple(lengths)


def _band(random: Random, what: str) -> dict[str, Any]:
    if what == "cross":
        return {}
    if random.random() < 0.15:
        keys = random.choice(WINDOWS)
        if what == "self" and random.random() < 0.3:
            return {"window": (keys // 2, keys // 2)}
        return {"causal": True, "window": (keys - 1, 0)}
    return {"causal": True} if what == "decode" or random.random() < 0.65 else {}


def _axes(random: Random, feature: str) -> str:
    """Returns the axes of a mask or bias that are not broadcast, such as "b11k"; "" for other features."""
    if feature == "mask":
        return _pick(random, {"b11k": 55, "11qk": 15, "b1qk": 20, "1hqk": 5, "bhqk": 5})
    return _pick(random, {"1hqk": 50, "11qk": 15, "b1qk": 15, "bhqk": 20}) if feature == "bias" else ""


def _fitting(
    spec: AttentionSpec, lengths: tuple[int, ...] | None, feature: str, axes: str, limits: Limits
) -> tuple[AttentionSpec, tuple[int, ...] | None]:
    """Returns the call with fewer rows, then shorter ones, until it is within the limits; and its documents."""
    while True:
        full = (spec.batch, spec.num_heads, spec.q_len, spec.kv_len)
        shape = tuple(size if axis != "1" else 1 for axis, size in zip(axes, full)) if axes else (0,)
        elements = spec.batch * (spec.q_len * spec.num_heads * 2 + spec.kv_len * spec.num_kv_heads * 2) * spec.head_dim
        work = flops(spec, lengths) * (8 if spec.dtype == "float32" and limits is LIMITS["cuda"] else 1)
        if work <= limits.work and elements <= limits.elements and math.prod(shape) <= limits.scores:
            changes: dict[str, Any] = {f"{feature}_shape": shape} if axes else {}
            return replace(spec, **changes), lengths
        if lengths is not None:
            fewer = lengths[: len(lengths) // 2] if len(lengths) > 1 else (lengths[0] // 2,)
            total, longest = sum(fewer), max(fewer)
            spec = replace(spec, q_len=total, kv_len=total, max_len_q=longest, max_len_k=longest, documents=len(fewer))
            lengths = fewer
        elif spec.batch > 1:
            spec = replace(spec, batch=spec.batch // 2)
        else:
            spec = replace(spec, q_len=-(-spec.q_len // 2), kv_len=-(-spec.kv_len // 2))


def _name(what: str, spec: AttentionSpec, dense: str) -> str:
    widths = f"{spec.head_dim}" if spec.value_dim == spec.head_dim else f"{spec.head_dim}/{spec.value_dim}"
    rows = f"{spec.batch}x{spec.q_len}" + (f":{spec.kv_len}" if spec.q_len != spec.kv_len else "")
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[spec.dtype]
    left, right = spec.window
    options = {
        f"{spec.documents} documents up to {spec.max_len_q}": spec.packed,
        "causal": spec.causal and left is None,
        f"window {left},{right}": (left, right) != (None, None),
        f"softcap {spec.softcap}": spec.softcap is not None,
        "sinks": spec.sinks,
        "alibi": spec.alibi_shape is not None,
        dense: bool(dense),
    }
    parts = [what, rows, f"h{spec.num_heads}/{spec.num_kv_heads}", f"d{widths}", short]
    return " ".join([*parts, *(text for text, present in options.items() if present)])


def as_called(spec: AttentionSpec) -> AttentionSpec:
    """Returns the spec that the frontends build for the call of a spec: see ``without_idle_sides``."""
    if spec.packed or spec.window == (None, None):
        return spec
    options = Options(causal=spec.causal, alignment=spec.alignment, window=spec.window, invariant=spec.invariant)
    options = without_idle_sides(options, spec.q_len, spec.kv_len)
    return replace(spec, causal=options.causal, window=options.window)  # type: ignore[arg-type]


def flops(spec: AttentionSpec, lengths: Iterable[int] | None = None) -> float:
    """Counts the floating-point operations of a call's matrix products, without pairs that the band hides.

    ``2 * batch * heads * pairs * (head_dim + value_dim)`` forward; 3.5 times that if a backward is needed.

    Args:
        lengths: the tokens of each packed document, if known (the same for queries and keys).
    """
    forward = 2.0 * spec.batch * spec.num_heads * pairs(spec, lengths) * (spec.head_dim + spec.value_dim)
    return forward * (1 + BACKWARD_WORK) if spec.needs_backward else forward
