"""Jobs of ``context_torch_worker`` for ``test_tensor_parallel``: layers and models whose heads are split over ranks."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from context_torch_scenes import error_of
from context_torch_worker import mesh_of
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from attn_core import SeqInfo
from torch_frontend.module import Attention

FEATURES, LENGTH = 24, 7
RANKS = 2


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def split(layer: Attention) -> Attention:
    """The layer with its heads split over all ranks; also its sinks."""
    mesh = mesh_of((RANKS,))
    plan = dict.fromkeys(("q_proj", "k_proj", "v_proj"), ColwiseParallel()) | {"o_proj": RowwiseParallel()}
    parallelize_module(layer, mesh, plan)
    if layer.sink_logits is not None:
        layer.sink_logits = nn.Parameter(distribute_tensor(layer.sink_logits.detach(), mesh, [Shard(0)]))
    return layer


def turned(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A rotary function that scales q and k by their positions."""
    scale = 1 + positions[..., None, None] / 10
    return q * scale, k / scale


def layer(options: dict[str, Any], documents: list[int] | None) -> dict[str, float]:
    """By how much the output and all gradients of a split layer differ from the whole layer's, relative to the largest.

    Args:
        options: of the layer, with "rotary" if there shall be one; documents: their lengths in a packed row.
    """
    torch.manual_seed(0)
    whole = Attention(in_features=FEATURES, **options | ({"rotary": turned} if "rotary" in options else {}))
    if whole.sink_logits is not None:
        nn.init.normal_(whole.sink_logits)
    parts = split(copy.deepcopy(whole))
    x = torch.randn(2, LENGTH, FEATURES) if documents is None else torch.randn(LENGTH, FEATURES)
    info = None if documents is None else SeqInfo.from_lengths(documents)
    found = []
    for each in (whole, parts):
        inputs = x.clone().requires_grad_()
        out = each(inputs, seq_info=info)
        (out * torch.linspace(-1, 1, out.numel()).reshape(out.shape)).sum().backward()
        slopes = {name: whole_of(parameter.grad) for name, parameter in each.named_parameters()}
        found.append({"out": out.detach(), "x": inputs.grad, **slopes})
    expected, actual = found
    assert expected.keys() == actual.keys()
    sizes = {name: float(each.abs().max()) for name, each in expected.items()}
    scales = {name: size + 1e-3 * max(sizes.values()) for name, size in sizes.items()}
    # This gradient is 0 in exact arithmetic, a sum of the terms that also make the gradient of the weight. So its
    # rounding errors count relative to that one.
    if "k_proj.bias" in sizes:
        scales["k_proj.bias"] += sizes["k_proj.weight"]
    return {name: float((actual[name] - each).abs().max()) / scales[name] for name, each in expected.items()}


def refusal(options: dict[str, Any], split_sinks: bool) -> str:
    """The error of a layer whose heads cannot be split."""
    made = Attention(in_features=FEATURES, **options)
    sinks = made.sink_logits
    parts = split(made)
    if not split_sinks:
        parts.sink_logits = sinks
    return error_of(lambda: parts(torch.zeros(1, LENGTH, FEATURES)))


def model(folder: str, ids: Any) -> dict[str, Any]:
    """The logits, and the generated tokens, of a model that transformers splits over ranks as its own plan says."""
    os.environ |= {"WORLD_SIZE": str(RANKS), "RANK": str(torch.distributed.get_rank())}
    os.environ |= {"LOCAL_RANK": os.environ["RANK"], "LOCAL_WORLD_SIZE": str(RANKS), "HF_HUB_OFFLINE": "1"}
    from transformers import AutoModelForCausalLM

    from torch_frontend import huggingface

    huggingface.register()
    made = AutoModelForCausalLM.from_pretrained(
        folder, tp_plan="auto", device_map=None, attn_implementation=huggingface.NAME, dtype=torch.float32
    ).eval()
    tokens = torch.tensor(ids)
    out = made(tokens, use_cache=False).logits
    weight = made.model.layers[0].self_attn.q_proj.weight
    held = (weight.to_local() if isinstance(weight, DTensor) else weight).shape[0]
    with torch.no_grad():
        written = made.generate(tokens, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
    return {"logits": whole_of(out).detach().numpy(), "written": written.tolist(), "rows of q_proj": held}
