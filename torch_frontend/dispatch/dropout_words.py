"""Draws the two seed words of a call with dropout."""

from __future__ import annotations

from typing import Any

import torch

from torch_frontend.dispatch.tensor_kinds import match_fake

Tensor = torch.Tensor


def draw_words(q: Tensor, generator: torch.Generator | None) -> Tensor:
    """Returns int64 ``[2]`` of the generator, or of torch's own if None."""
    words = torch.randint(-(2**63), 2**63 - 1, (2,), generator=generator, device=_device(q, generator))
    return match_fake(q, words)


def _device(q: Tensor, generator: torch.Generator | None) -> Any:
    """Returns the device on which the words are drawn: the CPU, where kernels read them.

    During the capture of a CUDA graph it is q's device, so that every replay draws new words.
    """
    if generator is not None:
        return generator.device
    compiling = torch.compiler.is_compiling()
    return q.device if q.is_cuda and not compiling and torch.cuda.is_current_stream_capturing() else "cpu"
