"""The calls that ``attn bench`` measures, as data. Forward and training are both measured but for decoding."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from attn_core.call.spec import AttentionSpec

TOKENS = 16384
"""Tokens of a case, all rows together. The batch is chosen so that each case has about this many."""


@dataclass(frozen=True)
class SweepCase:
    """One call to measure.

    Attributes:
        name: unique; describes the call.
        spec: the call, without a backward.
        lengths: the tokens of each packed document, queries and keys alike; None when not packed.
        training: whether its gradients are measured as well.
    """

    name: str
    spec: AttentionSpec
    lengths: tuple[int, ...] | None = None
    training: bool = True


def plain_fields(spec: AttentionSpec) -> dict[str, Any]:
    """Returns the fields of a spec that differ from their defaults, for JSON."""
    values = {field.name: getattr(spec, field.name) for field in fields(spec)}
    return {field.name: values[field.name] for field in fields(spec) if values[field.name] != field.default}


def spec_of(plain: dict[str, Any]) -> AttentionSpec:
    """Inverts ``plain_fields``, also if JSON has turned tuples into lists."""
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()}
    return AttentionSpec(**values)


def _case(what: str, seq: int, **options: Any) -> SweepCase:
    """Builds a case with the sweep's defaults: bfloat16, heads 32/8, head_dim 128, as many rows as TOKENS allows."""
    lengths = options.pop("lengths", None)
    training = options.pop("training", True)
    keys = options.pop("kv_len", seq)
    heads, kv_heads = options.pop("heads", (32, 8))
    head_dim = options.pop("head_dim", 128)
    batch = options.pop("batch", max(1, TOKENS // max(seq, keys)))
    settings: dict[str, Any] = {"dtype": "bfloat16", "value_dim": head_dim} | options
    if lengths:
        settings |= {"documents": len(lengths), "max_len_q": max(lengths), "max_len_k": max(lengths)}
    spec = AttentionSpec(
        batch=batch,
        q_len=seq,
        kv_len=keys,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        **{name: _shaped(name, value, (batch, heads, seq, keys)) for name, value in settings.items()},
    )
    widths = f"{head_dim}" if spec.value_dim == head_dim else f"{head_dim}/{spec.value_dim}"
    rows = f"{batch}x{seq}" if seq == keys else f"{batch}x{seq}:{keys}"
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[spec.dtype]
    return SweepCase(f"{what} {rows} h{heads}/{kv_heads} d{widths} {short}", spec, lengths, training)


def _shaped(name: str, value: Any, full: tuple[int, int, int, int]) -> Any:
    """Returns the shape of a mask or bias from the axes that are not broadcast, such as ``"b11k"``; else the value."""
    if name not in ("mask_shape", "bias_shape"):
        return value
    return tuple(size if axis != "1" else 1 for axis, size in zip(value, full))


CAUSAL: dict[str, Any] = {"causal": True}


def _dense() -> list[SweepCase]:
    long = (512, 1024, 2048, 4096, 8192, 16384)
    cases = [_case("full", seq, head_dim=dim) for dim in (64, 128) for seq in long]
    cases += [_case("causal", seq, head_dim=dim, **CAUSAL) for dim in (64, 128) for seq in (128, *long)]
    for dim, heads in ((96, (32, 8)), (192, (16, 16)), (256, (16, 4))):
        cases += [_case("full", seq, head_dim=dim, heads=heads) for seq in (1024, 4096)]
        cases += [_case("causal", seq, head_dim=dim, heads=heads, **CAUSAL) for seq in (512, 1024, 4096, 16384)]
    # Values narrower than keys, as in multi-head latent attention.
    cases += [_case("causal", seq, heads=(128, 128), head_dim=192, value_dim=128, **CAUSAL) for seq in (1024, 4096)]
    for dim in (64, 128):  # one row, as in a small service
        cases += [_case("full", seq, batch=1, head_dim=dim) for seq in (128, 512, 2048)]
        cases += [_case("causal", seq, batch=1, head_dim=dim, **CAUSAL) for seq in (128, 512, 2048)]
    return cases


def _windows() -> list[SweepCase]:
    rows = ((256, 1024), (256, 4096), (256, 16384), (1024, 2048), (1024, 4096), (1024, 16384), (4096, 8192))
    cases = [_case(f"window {keys}", seq, window=(keys - 1, 0), **CAUSAL) for keys, seq in (*rows, (4096, 16384))]
    narrow = ((256, 4096), (1024, 8192))
    cases += [_case(f"window {keys}", seq, head_dim=64, window=(keys - 1, 0), **CAUSAL) for keys, seq in narrow]
    cases += [_case("window 1024", 4096, head_dim=256, heads=(16, 4), window=(1023, 0), **CAUSAL)]
    cases += [_case("window ±128", seq, head_dim=64, heads=(12, 12), window=(128, 128)) for seq in (1024, 8192)]
    return cases


def _softcaps() -> list[SweepCase]:
    cap = {"softcap": 50.0}
    cases = [_case("softcap causal", seq, **cap, **CAUSAL) for seq in (512, 1024, 4096, 16384)]
    cases += [_case("softcap full", seq, **cap) for seq in (1024, 4096)]
    cases += [_case("softcap causal", 4096, head_dim=64, **cap, **CAUSAL)]
    # Heads, width and softcap as in Gemma 2.
    cases += [_case("softcap causal", seq, head_dim=256, heads=(16, 8), **cap, **CAUSAL) for seq in (1024, 4096)]
    cases += [_case("softcap window 1024", 4096, window=(1023, 0), **cap, **CAUSAL)]
    cases += [_case("softcap window 4096", 8192, window=(4095, 0), **cap, **CAUSAL)]
    cases += [_case("softcap window 1024", 4096, head_dim=256, heads=(16, 8), window=(1023, 0), **cap, **CAUSAL)]
    return cases


MANY_SHORT = (128,) * 128
UNEVEN_SHORT = (61, 203, 127, 349, 97, 511, 31, 257, 173, 239) * 8  # 80 documents, 16384 tokens
MIXED = (96, 4096, 640, 2048, 1312, 4096, 4096)
LONG_AND_SHORT = (12288, *(64, 192, 448, 320) * 4)


def _packed() -> list[SweepCase]:
    layouts = {
        "128 documents": MANY_SHORT,
        "80 uneven documents": UNEVEN_SHORT,
        "32 documents": (512,) * 32,
        "7 mixed documents": MIXED,
        "17 documents, one long": LONG_AND_SHORT,
        "2 long documents": (8192, 8192),
    }

    def packed(what: str, name: str, **options: Any) -> SweepCase:
        lengths = layouts[name]
        return _case(f"packed {what}: {name},", sum(lengths), batch=1, lengths=lengths, **options)

    cases = [packed("causal", name, **CAUSAL) for name in layouts]
    cases += [packed("full", name) for name in ("128 documents", "7 mixed documents")]
    cases += [packed("causal", name, head_dim=64, **CAUSAL) for name in ("80 uneven documents", "7 mixed documents")]
    cases += [packed("full", name, head_dim=64, heads=(12, 12)) for name in ("80 uneven documents",)]
    cases += [packed("causal", "7 mixed documents", head_dim=256, heads=(16, 4), **CAUSAL)]
    cases += [packed("window 256", name, window=(255, 0), **CAUSAL) for name in ("32 documents", "7 mixed documents")]
    cases += [packed("softcap causal", name, softcap=50.0, **CAUSAL) for name in ("32 documents", "7 mixed documents")]
    cases += [packed("causal sinks", "7 mixed documents", sinks=True, **CAUSAL)]
    return cases


def _heads_and_dtypes() -> list[SweepCase]:
    cases = [_case("causal", seq, heads=(32, 1), **CAUSAL) for seq in (1024, 4096, 16384)]
    cases += [_case("causal", seq, heads=(32, 32), **CAUSAL) for seq in (1024, 4096, 16384)]
    cases += [_case("full", 4096, heads=(32, 1)), _case("causal", 4096, heads=(16, 16), head_dim=64, **CAUSAL)]
    cases += [_case("causal", seq, dtype="float16", **CAUSAL) for seq in (1024, 4096)]
    cases += [_case("full", 2048, head_dim=64, dtype="float16")]
    cases += [_case("packed causal: 32 documents,", TOKENS, lengths=(512,) * 32, dtype="float16", **CAUSAL)]
    exact: dict[str, Any] = {"dtype": "float32", "heads": (16, 16), "head_dim": 64}
    cases += [_case("causal", seq, batch=2, **exact, **CAUSAL) for seq in (512, 2048)]
    cases += [_case("full", 1024, batch=2, **exact), _case("softcap full", 1024, batch=2, softcap=50.0, **exact)]
    return cases


def _cross_and_decode() -> list[SweepCase]:
    lengths = ((128, 4096), (1024, 4096), (512, 16384), (16, 4096))
    cases = [_case("causal", queries, kv_len=keys, batch=4, **CAUSAL) for queries, keys in lengths]
    cases += [_case("full", queries, kv_len=keys, batch=4) for queries, keys in ((4096, 512), (1024, 4096))]
    # Decoding has no backward.
    once: dict[str, Any] = {"training": False, "causal": True}
    rows = [(keys, batch) for keys in (1024, 4096, 16384) for batch in (8, 64)]
    cases += [_case("decode", 1, kv_len=keys, batch=batch, **once) for keys, batch in (*rows, (4096, 1))]
    cases += [_case("decode", 1, kv_len=4096, batch=8, heads=heads, **once) for heads in ((32, 1), (32, 32))]
    cases += [_case("decode", 1, kv_len=keys, batch=8, head_dim=64, **once) for keys in (1024, 16384)]
    cases += [_case("decode window 1024", 1, kv_len=4096, batch=8, window=(1023, 0), **once)]
    cases += [_case("decode softcap", 1, kv_len=4096, batch=8, softcap=50.0, **once)]
    cases += [_case("decode padding mask", 1, kv_len=4096, batch=8, mask_shape="b11k", **once)]
    return cases


def _scores() -> list[SweepCase]:
    """Returns the cases with masks, biases, ALiBi and sinks."""
    cases = [_case("padding mask", seq, head_dim=dim, mask_shape="b11k") for seq, dim in ((1024, 64), (4096, 128))]
    cases += [_case("padding mask", 512, head_dim=64, heads=(12, 12), mask_shape="b11k")]
    cases += [_case("mask", seq, mask_shape="11qk") for seq in (1024, 2048, 4096)]
    cases += [_case("mask causal", 2048, head_dim=64, mask_shape="b1qk", **CAUSAL)]
    cases += [_case("bias", 1024, head_dim=64, heads=(16, 16), bias_shape="1hqk")]
    cases += [_case("alibi causal", seq, heads=(32, 32), alibi_shape=(32,), **CAUSAL) for seq in (1024, 4096)]
    # Heads, width and window as in gpt-oss.
    cases += [_case("sinks causal", seq, heads=(64, 8), head_dim=64, sinks=True, **CAUSAL) for seq in (1024, 4096)]
    cases += [_case("sinks window 128", 4096, heads=(64, 8), head_dim=64, sinks=True, window=(127, 0), **CAUSAL)]
    return cases


SWEEP: tuple[SweepCase, ...] = tuple(
    case
    for family in (_dense, _windows, _softcaps, _packed, _heads_and_dtypes, _cross_and_decode, _scores)
    for case in family()
)
"""Every case of a full sweep."""

QUICK: tuple[SweepCase, ...] = (
    _case("quick full", 64, batch=2, heads=(4, 4), head_dim=16, dtype="float32"),
    _case("quick causal", 64, batch=2, heads=(4, 2), head_dim=16, dtype="float32", **CAUSAL),
    _case("quick window 16", 64, batch=2, heads=(4, 2), head_dim=16, dtype="float32", window=(15, 0), **CAUSAL),
    _case("quick softcap", 64, batch=2, heads=(4, 2), head_dim=16, dtype="float32", softcap=50.0, **CAUSAL),
    _case("quick packed:", 64, batch=1, heads=(4, 2), head_dim=16, dtype="float32", lengths=(17, 5, 42), **CAUSAL),
    _case("quick mask", 64, batch=2, heads=(4, 2), head_dim=16, dtype="float32", mask_shape="b11k"),
    _case("quick decode", 1, kv_len=64, batch=2, heads=(4, 2), head_dim=16, dtype="float32", training=False, **CAUSAL),
)
"""A few tiny cases that a CPU runs in seconds. They test ``attn bench`` itself; their times mean nothing."""
