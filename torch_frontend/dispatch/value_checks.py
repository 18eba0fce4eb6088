"""The values of an eager call as numpy arrays, for ``attn_core.checks``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from attn_core.call import cache_rows
from attn_core.call.arguments import Arrays, build_spec
from attn_core.call.checks import warn_of_values
from attn_core.call.key_ranges import check_values
from attn_core.call.options import Options
from attn_core.call.seq_info import SeqInfo
from attn_core.call.tensors import Inputs
from torch_frontend.dispatch import plan


def check(inputs: Inputs, options: Options, info: SeqInfo | None) -> None:
    """Warns of mistakes in the values of a call. Reads every tensor, so it waits for the device."""
    facts = Arrays(*(entry and plan.facts(*entry) for entry in plan.metadata(inputs)))  # type: ignore[arg-type]
    tokens = None if info is None else int(info.cu_seqlens_q[-1])
    arrays = {name: as_numpy(tensor) for name, tensor in zip(Arrays._fields, inputs, strict=False)}
    spec = build_spec(facts, options)
    if inputs.key_ranges is not None:
        check_values(arrays["key_ranges"], spec.q_len)
    warn_of_values(spec, arrays, tokens)


def check_cache(qkv: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
    """Runs ``check`` for a call on rows of a cache, with the tensors and the keywords of its form with key ranges."""
    inputs, options = cache_rows.as_inputs(qkv, keywords)
    check(inputs, options, None)


def as_numpy(tensor: torch.Tensor | None) -> Any:
    """Returns a tensor's values as a numpy array, bfloat16 as float32; None for an absent tensor."""
    if tensor is None:
        return None
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
