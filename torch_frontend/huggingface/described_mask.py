"""DescribedMask: a mask that transformers' models pass from their mask function to attention without building it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch
from torch.utils._pytree import tree_map

from attn_core.call.seq_info import SeqInfo
from attn_core.errors import SpecError
from torch_frontend.context_parallel.layers import ActiveMesh

Tensor = torch.Tensor


class VisibleKeys(NamedTuple):
    """The keys that an attention call can see: query i sees key j iff ``-left <= j - (i + offset) <= right``.

    Attributes:
        left, right: inclusive distances, None for unbounded; ``right=0`` is causal.
        offset: the first query's own position among the keys.
        lengths: (q_len, kv_len).
        keys: bool ``[batch, kv_len]``, False for padding; or None.
        seq_info: the documents of all rows laid end to end; or None.
        context: the ``use_context_parallel`` block that splits the rows; or None. In a block, left and right apply to
            whole rows, and offset is unused.
        key_ranges: the whole mask as key ranges in numpy, instead of all the others but lengths; or None.
    """

    left: int | None
    right: int | None
    offset: int
    lengths: tuple[int, int]
    keys: Tensor | None = None
    seq_info: SeqInfo | None = None
    context: ActiveMesh | None = None
    key_ranges: np.ndarray | None = None


NEED_FLOATS = {"deepseek_v4", "gemma4_audio", "PPDocLayoutV2ReadingOrderConfig"}
"""Model types, or configurations without one, whose own code computes with the mask's floats."""


def needs_floats(config: object) -> bool:
    """Returns whether models of a configuration need a mask of 0 and the lowest float, as ``eager`` has it.

    DeepSeek V4 appends columns of 0 and -inf for keys of its own: a bool mask would turn them around. The others
    compute attention themselves, as parts of larger models.
    """
    return (getattr(config, "model_type", None) or type(config).__name__) in NEED_FLOATS


class DescribedMask:
    """A bool mask ``[batch, 1, q_len, kv_len]`` that is not built: ``visible`` describes it to the attention call.

    Models and ``generate`` can read its shape, dtype and device. Every other operator, method or torch function builds
    the dense mask and applies to that, so that no operation gives a wrong result. It is not a Tensor, because compilers
    trace a plain object and its numbers more easily than a subclass.

    Arithmetic raises: a model that adds its mask to scores expects 0 and -inf, not the 1 and 0 of a bool mask.
    """

    dtype, ndim = torch.bool, 4

    def __init__(
        self, batch: int, device: torch.device | str, visible: VisibleKeys, build: Callable[[], Tensor]
    ) -> None:
        self.shape = torch.Size((batch, 1, *visible.lengths))
        self.device, self.visible, self.build = device, visible, build
        self.position_documents: Any = None  # the documents that an earlier layer read from the position ids
        self.shared: dict[tuple[int | None, ...], Any] = {}  # LayerCalls by (q_len, kv_len, sliding_window)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "").strip("_") in _ARITHMETIC:
            _refuse_arithmetic(function.__name__)
        args, kwargs = tree_map(lambda each: each.build() if isinstance(each, cls) else each, (args, kwargs or {}))
        return function(*args, **kwargs)

    def dim(self) -> int:
        """4."""
        return self.ndim

    def size(self, dim: int | None = None) -> torch.Size | int:
        """The shape, or the length of one axis."""
        return self.shape if dim is None else self.shape[dim]

    def to(self, *place: Any, **keywords: Any) -> Tensor | DescribedMask:
        """Returns the description on another device, for hooks of multi-device models; dense for other conversions."""
        if len(place) != 1 or keywords.keys() - {"non_blocking"} or not isinstance(place[0], (str, int, torch.device)):
            return self.build().to(*place, **keywords)
        if torch.device(place[0]) == torch.device(self.device):  # itself, with the documents that earlier layers read
            return self
        keys = self.visible.keys
        visible = self.visible if keys is None else self.visible._replace(keys=keys.to(place[0], **keywords))
        return DescribedMask(self.shape[0], torch.device(place[0]), visible, lambda: self.build().to(place[0]))

    def contiguous(self, **_: object) -> DescribedMask:
        """Returns itself, because it has no memory: ``generate`` asks for contiguous masks with a static cache."""
        return self

    def __len__(self) -> int:
        return self.shape[0]

    def __getattr__(self, name: str) -> Any:  # Python calls this only for undefined attributes
        if name.startswith("__") or name == "build":
            raise AttributeError(name)
        if name.strip("_") in _ARITHMETIC:
            _refuse_arithmetic(name)
        return getattr(self.build(), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.build()[index]

    def __invert__(self) -> Tensor:
        return ~self.build()


Mask = Tensor | DescribedMask | None
"""A mask that transformers hands to a layer."""


def describe(table: Tensor, described: DescribedMask) -> None:
    """Attaches a description to the dense mask with the same meaning; ``description_of`` returns it."""
    if not table.is_inference():  # inference tensors do not count their changes
        table._attn_core_description = (ref(table), table._version, described)  # type: ignore[attr-defined]


def description_of(mask: object) -> DescribedMask | None:
    """Returns the description of a dense mask, or None if it has none, is a copy, or was changed in place since."""
    found = getattr(mask, "_attn_core_description", None)
    return found[2] if found is not None and found[0]() is mask and found[1] == mask._version else None


def _operator(name: str) -> Callable[[DescribedMask, object], Any]:
    """Returns an operator of the dense mask; Python looks operators up without ``__getattr__``."""

    def operator(self: DescribedMask, other: object) -> Any:
        if name.strip("_") in _ARITHMETIC:
            _refuse_arithmetic(name)
        return getattr(self.build(), name)(other.build() if isinstance(other, DescribedMask) else other)

    return operator


def _refuse_arithmetic(name: str) -> None:
    raise SpecError(
        f"attention_mask: expected a model that hands its mask on to attention, or combines it with &, | and ~; got "
        f"{name} on a bool mask (True = visible). A model that computes attention itself needs a mask of 0 and -inf: "
        "load it with attn_implementation='eager'"
    )


_ARITHMETIC = {f"{prefix}{name}" for name in ("add", "sub", "mul", "div", "truediv") for prefix in ("", "r", "i")}
_ARITHMETIC |= {"subtract", "multiply", "divide", "true_divide"}

for _name in ("and", "or", "xor", "add", "sub", "mul", "truediv"):
    for _place in ("", "r"):
        setattr(DescribedMask, f"__{_place}{_name}__", _operator(f"__{_place}{_name}__"))
