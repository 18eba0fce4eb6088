"""Draws the two seed words of a call with dropout. Apart from the call, because it defines operators for compilers."""

from __future__ import annotations

import torch
from torch.fx import traceback
from torch.fx.experimental import proxy_tensor
from torch.utils.checkpoint import CheckpointPolicy

from attn_core.errors import SpecError
from torch_frontend.dispatch import transforms
from torch_frontend.dispatch.tensor_kinds import match_fake

Tensor = torch.Tensor


def draw_words(q: Tensor, generator: torch.Generator | None) -> Tensor:
    """Returns int64 ``[2]`` of the generator, or of torch's own if None."""
    if generator is None and torch.compiler.is_compiling():
        if not transforms.are_active():  # vmap has rules for torch's own operation
            return match_fake(q, torch.ops.attn.dropout_words(q))
        _check_budget()
    return match_fake(q, _random(_device(q, generator), generator))


def _random(device: torch.device | str, generator: torch.Generator | None = None) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (2,), generator=generator, device=device)


def _device(q: Tensor, generator: torch.Generator | None) -> torch.device | str:
    """Returns the device on which the words are drawn: the CPU, where kernels read them.

    During the capture of a CUDA graph it is q's device, so that every replay draws new words.
    """
    if generator is not None:
        return generator.device
    return q.device if q.is_cuda and torch.cuda.is_current_stream_capturing() else "cpu"


def _check_budget() -> None:
    budget = torch._functorch.config.activation_memory_budget
    if budget < 1:
        raise SpecError(
            "dropout: expected torch._functorch.config.activation_memory_budget = 1 in a compiled transform, got "
            f"{budget}; the backward would draw other numbers, so use torch.utils.checkpoint to save memory"
        )


vars(_check_budget).update(_dynamo_marked_constant=True)  # Dynamo takes the result and does not trace it


def _traced_words(q: Tensor) -> Tensor:
    """Draws as an operation that compilers trace, with a mark in a graph that they cut into a forward and a backward.

    To save memory they may draw again in the backward, without a word and in another state of the generator
    (pytorch#190717). An operation with this mark is drawn again, too, but in the state that the forward saves for it.
    """
    mode = proxy_tensor.get_proxy_mode()
    places = () if mode is None else mode.tracer.graph.find_nodes(op="placeholder")
    if not any("tangents" in node.name for node in places):
        return torch.ops.attn.draw_words(device="cpu")  # Inductor would replace torch's own by one without the mark
    meta = traceback.get_current_meta()
    before = meta.get("recompute")
    meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    try:
        return torch.ops.attn.draw_words(device="cpu")
    finally:
        if before is None:
            del meta["recompute"]
        else:
            meta["recompute"] = before


_library = torch.library.Library("attn", "FRAGMENT")
_library.define("dropout_words(Tensor q) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("dropout_words", _traced_words, "CompositeImplicitAutograd")
_library.define(
    "draw_words(*, Device device) -> Tensor", tags=(torch.Tag.pt2_compliant_tag, torch.Tag.nondeterministic_seeded)
)
_library.impl("draw_words", _random, "CompositeExplicitAutograd")
torch.library.register_fake(
    "attn::draw_words", lambda device: torch.empty(2, dtype=torch.int64, device=device), lib=_library
)
