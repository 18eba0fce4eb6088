"""FlashAttention 3's two torch operators, from whichever package provides them, and their arguments by name.

The operators of different builds take different arguments. So arguments are laid out by the schema of the installed
operator, and an argument that we do not set keeps the schema's default.
"""

from __future__ import annotations

from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any, NamedTuple

from attn_core.backends.shared.cached_once import cached_once
from attn_core.call.spec import AttentionSpec

PACKAGES = ("flash_attn_3", "fa3_fwd")
"""Packages whose extension ``_C`` registers ``torch.ops.<package>.fwd`` and ``bwd``. The first one found is used."""


class Operators(NamedTuple):
    """The operators of the installed build. build: its distribution and version, e.g. ``"tokenspeed-fa3 3.0.0"``."""

    forward: Any
    backward: Any
    build: str


@cached_once
def operators() -> Operators:
    """Returns the installed operators. Errors from importing their extension propagate."""
    import torch

    # If neither is installed, importing the first one raises an error that names it.
    package = next((name for name in PACKAGES if find_spec(name)), PACKAGES[0])
    import_module(f"{package}._C")
    library = getattr(torch.ops, package)
    distribution = metadata.packages_distributions().get(package, [package])[0]
    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:  # a build copied into site-packages by hand has no metadata
        version = "of unknown version"
    return Operators(library.fwd.default, library.bwd.default, f"{distribution} {version}")


class ArgumentOrder(NamedTuple):
    """An operator's arguments in the operator's own order, still without tensors, and the position of each name."""

    values: tuple[Any, ...]
    places: dict[str, int]

    def filled(self, **tensors: Any) -> list[Any]:
        """Returns all arguments with the tensors filled in. Raises KeyError if the operator lacks a name."""
        values = list(self.values)
        for name, tensor in tensors.items():
            values[self.places[name]] = tensor
        return values


def plan(schema: Any, settings: dict[str, Any]) -> ArgumentOrder:
    """Orders settings as a schema (``torch._C.FunctionSchema``) orders its arguments.

    Arguments without a setting have the schema's default. Arguments without a default are tensors, and None here.

    Raises:
        TypeError: if the operator has no argument with a setting's name.
    """
    places = {argument.name: place for place, argument in enumerate(schema.arguments)}
    if unknown := settings.keys() - places.keys():
        raise TypeError(f"{schema.name}: this build takes no {', '.join(sorted(unknown))}")
    return ArgumentOrder(
        tuple(settings.get(argument.name, argument.default_value) for argument in schema.arguments), places
    )


LONGEST_SPLIT = 2**15
"""Rows (queries times heads) up to which the keys may be split: 256 tiles of queries, two for each of 132 SMs."""
LONG_DOCUMENTS = 2**10
"""Mean number of queries per packed document from which tiles of one head are faster than tiles of a whole group of
heads (the kernel's own choice for every packed call). Measured on an H200, head_dim 128, heads 32/8; the bits are
equal. Shorter documents would leave tiles of one head partly empty."""


def forward_tiles(spec: AttentionSpec) -> dict[str, Any]:
    """Returns the forward's tiling arguments. They depend on shapes alone, so that equal calls give equal bits.

    num_splits = 0 lets the kernel split the keys if the queries alone do not fill the GPU, as in decoding; builds
    without splits take it as 1. With many queries we set 1, because each split takes memory for packed calls and for
    heads whose keys do not fit into the L2 cache. pack_gqa = None lets the kernel choose, which splitting requires.
    """
    # ``documents`` counts for the mean length; the lengths themselves are on the device and unknown here.
    whole = spec.q_len * (1 if spec.packed else spec.batch) * spec.num_heads > LONGEST_SPLIT
    long = spec.documents is not None and spec.paged is None and spec.q_len >= LONG_DOCUMENTS * spec.documents
    return {"num_splits": 1 if whole else 0, "pack_gqa": False if whole and long else None}
