"""FlashAttention 3's two torch operators, from whichever package provides them, and their arguments by name.

The operators of different builds take different arguments. So arguments are laid out by the schema of the installed
operator, and an argument that we do not set keeps the schema's default.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module, metadata
from importlib.util import find_spec
from operator import itemgetter
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


def prepare(
    operator: Any, settings: dict[str, Any], tensors: tuple[str, ...], *, recorded: bool = False
) -> Callable[..., Any]:
    """Returns a function of some tensors that runs an operator with settings, both by the names in its schema.

    Arguments without a setting have the schema's default; tensors that are not named are None. The function calls the
    operator's CUDA kernel directly. The usual way goes through autograd, which costs time, and warns if the operator
    has no derivative.

    Raises:
        TypeError: if the operator has no argument with a setting's name.
        KeyError: if it has no argument with a tensor's name.
    """
    import torch

    arguments = operator._schema.arguments
    if unknown := settings.keys() - {argument.name for argument in arguments}:
        raise TypeError(f"{operator._schema.name}: this build takes no {', '.join(sorted(unknown))}")
    if missing := set(tensors) - {argument.name for argument in arguments}:
        raise KeyError(f"{operator._schema.name}: this build takes no {', '.join(sorted(missing))}")
    values = tuple(settings.get(argument.name, argument.default_value) for argument in arguments)
    # Where each argument is in (*tensors, *values).
    places = {name: place for place, name in enumerate(tensors)}
    in_order = itemgetter(
        *(places.get(argument.name, len(tensors) + place) for place, argument in enumerate(arguments))
    )
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    run = (lambda keys, *operands: operator(*operands)) if recorded else operator.redispatch
    if tensors == tuple(argument.name for argument in arguments[: len(tensors)]):  # no need to sort three dozen values
        others = values[len(tensors) :]
        return lambda *operands: run(keys, *operands, *others)
    return lambda *operands: run(keys, *in_order((*operands, *values)))


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
