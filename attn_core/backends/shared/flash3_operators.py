"""FlashAttention 3's two torch operators, whichever package brings them, and their arguments laid out by name.

Builds differ in what their operators take: arguments at the end, names without a default. An argument that we do not
set keeps the schema's default.
"""

from __future__ import annotations

from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any, NamedTuple

from attn_core.backends.shared.cached_once import cached_once
from attn_core.call.spec import AttentionSpec

PACKAGES = ("flash_attn_3", "fa3_fwd")
"""Each has an extension ``_C`` that registers ``torch.ops.<package>.fwd`` and ``bwd``. The first one there is used."""


class Operators(NamedTuple):
    """The operators of the installed build, and whose they are, e.g. ``"tokenspeed-fa3 3.0.0"``."""

    forward: Any
    backward: Any
    build: str


@cached_once
def operators() -> Operators:
    """The installed operators; raises whatever the import of their extension raises."""
    import torch

    package = next((name for name in PACKAGES if find_spec(name)), PACKAGES[0])
    import_module(f"{package}._C")
    library = getattr(torch.ops, package)
    distribution = metadata.packages_distributions().get(package, [package])[0]
    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:  # a build that was copied into place
        version = "of unknown version"
    return Operators(library.fwd.default, library.bwd.default, f"{distribution} {version}")


class Plan(NamedTuple):
    """An operator's arguments in its own order, tensors still missing, and where each name stands."""

    values: tuple[Any, ...]
    places: dict[str, int]

    def filled(self, **tensors: Any) -> list[Any]:
        """All arguments, with the tensors in their places; KeyError for a name that the operator does not have."""
        values = list(self.values)
        for name, tensor in tensors.items():
            values[self.places[name]] = tensor
        return values


def plan(schema: Any, settings: dict[str, Any]) -> Plan:
    """Lays settings out as a schema (``torch._C.FunctionSchema``) orders them.

    Arguments without a setting have the schema's default, or None where it has none: those are tensors.

    Raises:
        TypeError: when the operator has no argument of a setting's name.
    """
    places = {argument.name: place for place, argument in enumerate(schema.arguments)}
    if unknown := settings.keys() - places.keys():
        raise TypeError(f"{schema.name}: this build takes no {', '.join(sorted(unknown))}")
    return Plan(tuple(settings.get(argument.name, argument.default_value) for argument in schema.arguments), places)


LONGEST_SPLIT = 2**15
"""Rows (queries times heads) up to which the keys may be split: 256 tiles of queries, two for each of 132 SMs."""
LONG_DOCUMENTS = 2**10
"""Mean queries of packed documents from which tiles of one head each are faster than the tiles of a whole group of
heads, which the kernel takes for every packed call: on an H200, head_dim 128, heads 32/8, with equal bits. Shorter ones
fill less of them."""


def forward_tiles(spec: AttentionSpec) -> dict[str, Any]:
    """How the forward cuts its work; equal for equal shapes (and packed lengths), so that equal calls give equal bits.

    num_splits = 0 lets the kernel split the keys where queries are too few to fill the GPU, which decoding lives on; it
    is 1 in builds without splits. Of many queries every split would take memory: packed, and where a head's keys do not
    fit into the L2 cache. pack_gqa = None is for the kernel to choose; where it splits, it must.
    """
    whole = spec.q_len * (1 if spec.packed else spec.batch) * spec.num_heads > LONGEST_SPLIT
    long = spec.documents is not None and spec.paged is None and spec.q_len >= LONG_DOCUMENTS * spec.documents
    return {"num_splits": 1 if whole else 0, "pack_gqa": False if whole and long else None}
