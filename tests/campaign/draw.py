"""Draws the cases of a campaign. A place in a campaign gives the same call on every machine.

Sizes are small and mostly distinct primes, so that swapped axes cannot fit, and a float64 reference takes a
millisecond. Options are drawn independently of each other, so that every pair of them meets.
"""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

from attn_core.call.spec import AttentionSpec
from attn_core.expressions.properties import aux_numbers
from tests.campaign.case import Lengths
from tests.campaign.functions import MASKS, SCORES, fields_of


class Sizes(NamedTuple):
    """The sizes of a kind of device. A size that stands twice is drawn twice as often."""

    lengths: tuple[int, ...]
    widths: tuple[tuple[int, int], ...]
    dtypes: tuple[str, ...]
    most_work: int


SIZES = {
    "cpu": Sizes(
        lengths=(0, 1, 1, 2, 3, 5, 7, 7, 11, 13, 16, 17, 23, 33, 64, 67, 131),
        widths=((3, 3), (8, 8), (11, 11), (16, 16), (16, 16), (19, 19), (32, 32), (64, 64), (7, 13), (24, 16)),
        dtypes=("float32", "float32", "float32", "bfloat16", "float16", "float64"),
        most_work=2**22,
    ),
    "cuda": Sizes(
        lengths=(0, 1, 1, 2, 7, 16, 31, 64, 65, 127, 128, 131, 197, 257, 389, 523),
        widths=(
            (64, 64),
            (64, 64),
            (128, 128),
            (128, 128),
            (80, 80),
            (96, 96),
            (256, 256),
            (16, 16),
            (192, 128),
            (11, 11),
        ),
        dtypes=("bfloat16", "bfloat16", "bfloat16", "float16", "float32", "float64"),
        most_work=2**26,
    ),
}
"""By kind of device. ``most_work`` bounds the multiplications of q with k, which the reference does in float64."""

KV_HEADS, GROUPS, BATCHES = (1, 1, 2, 3, 5), (1, 1, 2, 3, 4), (1, 2, 2, 3)


class Place(NamedTuple):
    """A place in a campaign: the cases of one block share their structure if the entry compiles for it."""

    seed: int
    block: int
    number: int


def structure(place: Place, kind: str, *, packed: bool | None = None) -> tuple[AttentionSpec, Lengths | None]:
    """Draws a spec with gradients in half of the cases, and the documents of a packed one.

    Args:
        kind: "cpu" or "cuda".
        packed: whether the call has packed documents; drawn if None.
    """
    random, sizes = Random(f"structure/{place.seed}/{place.block}"), SIZES[kind]
    while True:
        head_dim, value_dim = random.choice(sizes.widths)
        kv_heads = random.choice(KV_HEADS)
        fields: dict[str, Any] = {
            "num_heads": kv_heads * random.choice(GROUPS),
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
            "value_dim": value_dim,
            "dtype": random.choice(sizes.dtypes),
        }
        lengths = _documents(random, sizes) if (random.random() < 0.3 if packed is None else packed) else None
        fields |= _rows(random, sizes) if lengths is None else _packed(random, lengths)
        work = fields["batch"] * fields["num_heads"] * fields["q_len"] * fields["kv_len"] * head_dim
        if work <= sizes.most_work:
            break
    return AttentionSpec(**fields, **_options(random, fields, lengths is not None)), lengths


def new_lengths(spec: AttentionSpec, place: Place) -> Lengths:
    """Draws other documents for a packed spec: as many, no longer, and no more tokens."""
    random = Random(f"lengths/{place.seed}/{place.number}")
    assert spec.documents is not None
    sides = []
    for tokens, longest in ((spec.q_len, spec.max_len_q), (spec.kv_len, spec.max_len_k)):
        side: list[int] = []
        for _ in range(spec.documents):
            side.append(random.randint(0, min(longest or 0, tokens - sum(side))))
        random.shuffle(side)
        sides.append(tuple(side))
    return sides[0], sides[1]


def _rows(random: Random, sizes: Sizes) -> dict[str, int]:
    q_len = random.choice(sizes.lengths)
    kv_len = q_len if random.random() < 0.5 else random.choice(sizes.lengths)
    return {"batch": random.choice(BATCHES), "q_len": q_len, "kv_len": kv_len}


def _documents(random: Random, sizes: Sizes) -> Lengths:
    short = [length for length in sizes.lengths if length <= max(sizes.lengths) // 2]
    queries = tuple(random.choice(short) for _ in range(random.randint(1, 5)))
    same = random.random() < 0.6
    return queries, queries if same else tuple(random.choice(short) for _ in queries)


def _packed(random: Random, lengths: Lengths) -> dict[str, int]:
    tails = (0, 0) if random.random() < 0.7 else (random.randint(0, 5), random.randint(0, 5))
    # An upper bound is as good as the longest document.
    slack = random.choice((0, 0, 3))
    queries, keys = lengths
    return {
        "batch": 1,
        "q_len": sum(queries) + tails[0],
        "kv_len": sum(keys) + tails[1],
        "documents": len(queries),
        "max_len_q": max(queries) + slack,
        "max_len_k": max(keys) + slack,
    }


def _options(random: Random, fields: dict[str, Any], packed: bool) -> dict[str, Any]:  # noqa: C901
    def present(share: float = 0.2) -> bool:
        return random.random() < share

    batch, heads, q_len, kv_len = (fields[name] for name in ("batch", "num_heads", "q_len", "kv_len"))
    options: dict[str, Any] = {"causal": present(0.5), "alignment": random.choice(("bottom_right", "top_left"))}
    if present():
        options["window"] = (random.choice((None, 0, 1, 3, 17)), random.choice((None, 0, 0, 2, 17)))
    if present():
        options["softcap"] = random.choice((0.7, 5.0, 50.0))
    if present():
        options["scale"] = random.choice((0.05, 0.31, 1.0))
    table = [random.choice((1, size)) for size in (batch, heads, q_len, kv_len)]
    if present():
        options["mask_shape"] = tuple(table)
    if present(0.15):
        options["bias_shape"] = tuple(random.choice((1, size)) for size in (batch, heads, q_len, kv_len))
    if present(0.1):
        options["alibi_shape"] = (heads,) if packed or present(0.5) else (batch, heads)
    if present(0.15):
        options["sinks"] = True
    if present(0.1):
        options["deterministic"] = True
    if present(0.4):
        options["return_lse"] = True
    if present(0.5):
        options["needs_backward"] = True
        options["bias_gradient"] = "bias_shape" in options and present(0.5)
    if present(0.06):
        options["dropout"] = random.choice((0.1, 0.5))
    if present(0.15):  # last, so that a place of an earlier campaign still gives the rest of its call
        axes = [random.choice((1, size)) for size in (batch, fields["num_kv_heads"])]
        options["key_ranges_shape"] = (*axes, kv_len, random.choice((1, 2)), 2)
    if present(0.12):
        names = random.choice((None, *MASKS)), random.choice((None, *SCORES))
        options |= fields_of(*names, (batch, heads, q_len, kv_len)) if any(names) else {}
    read = aux_numbers(options["score_mod"]) if options.get("score_mod") is not None else ()
    if read and "needs_backward" in options and present(0.5):
        options["aux_gradients"] = tuple(n for n in read if options["aux"][n].dtype == "float32")
    return options


def random_choice(place: Place, names: tuple[str, ...]) -> str:
    """Draws a name for a block."""
    return Random(f"choice/{place.seed}/{place.block}/{len(names)}").choice(names)


def number_seed(place: Place) -> int:
    """Returns the seed of a case's numbers."""
    return Random(f"numbers/{place.seed}/{place.number}").randrange(2**31)
