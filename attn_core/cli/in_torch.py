"""Runs a trial through torch_frontend. The twin of in_jax."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attn_core.call.functions import AUX
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec
from attn_core.cli.devices import torch_device
from attn_core.cli.timing import Calls
from attn_core.cli.trial import Arrays, Trial, arrays_of_call, as_keywords, dtype_of, is_plain, keywords_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor


SDPA = "F.sdpa"
"""The name under which torch's own F.scaled_dot_product_attention is timed."""


def run(trial: Trial, backend: str, device: str = "cpu", shifted: bool = False) -> Arrays:
    """Runs one backend. Returns its results. shifted: q, k and v begin one element behind an aligned address."""
    from torch_frontend import attention, paged_attention

    attend: Any = attention if trial.spec.paged is None else paged_attention
    where = torch_device(device)
    tensors, cotangents = tensors_of(trial, where), cotangents_of(trial, where)
    tensors |= {name: _shifted(tensors[name]) for name in "qkv" if shifted}
    output = attend(**tensors, **keywords_of(trial.spec, trial.seq_info), backend=backend)
    results = named_results(trial, output, tensors, cotangents)
    # float64 represents every value of the other dtypes, so the comparison of bits loses nothing.
    return {name: tensor.detach().cpu().double().numpy() for name, tensor in results.items()}


def _shifted(tensor: Tensor) -> Tensor:
    room = tensor.new_empty(tensor.numel() + 1)
    room[1:] = tensor.detach().flatten()
    return room[1:].view(tensor.shape).requires_grad_(tensor.requires_grad)


def tensors_of(trial: Trial, where: torch.device) -> dict[str, Any]:
    """Returns the tensor arguments of ``attention`` on a torch device; None for an absent one."""
    tensors = {name: _tensor(trial, name, where) for name in arrays_of_call(trial)}
    for name in trial.learned:
        tensors[name].requires_grad_(True)
    return as_keywords(tensors)


def cotangents_of(trial: Trial, where: torch.device) -> list[Tensor]:
    """Returns the gradient of the output, and that of the log-sum-exp if there is one."""
    import torch

    # The dtype before the device: Apple's GPUs have no float64.
    cotangents = [torch.from_numpy(trial.dout).to(getattr(torch, trial.spec.dtype)).to(where)]
    if trial.dlse is not None:
        cotangents.append(torch.from_numpy(trial.dlse).to(getattr(torch, trial.spec.lse_dtype)).to(where))
    return cotangents


def named_results(trial: Trial, output: Any, tensors: dict[str, Any], cotangents: list[Tensor]) -> dict[str, Tensor]:
    """Returns an output of ``attention`` and the gradients of the learned inputs by name."""
    import torch

    results = list(output) if trial.spec.return_lse else [output]
    named = dict(zip(("out", "lse"), results))
    if trial.learned:
        aux = dict(zip(AUX, tensors.get("aux", ()), strict=False))
        learned = [aux[name] if name in aux else tensors[name] for name in trial.learned]
        gradients = torch.autograd.grad(results[: len(cotangents)], learned, cotangents, allow_unused=False)
        named |= {f"d{name}": gradient for name, gradient in zip(trial.learned, gradients)}
    return named


def _tensor(trial: Trial, name: str, where: torch.device) -> Any:
    import torch

    if (array := getattr(trial.inputs, name)) is None:
        return None
    return torch.from_numpy(array).to(getattr(torch, dtype_of(trial, name))).to(where)


@contextmanager
def timed_calls(trial: Trial, device: str) -> Iterator[Calls]:
    """Yields a trial's call on a backend by name, or torch's own function by SDPA: ``(out, *gradients)``."""
    import torch

    from torch_frontend import attention

    where = torch_device(device)
    tensors, cotangents = tensors_of(trial, where), cotangents_of(trial, where)
    learned = [tensors[name] for name in trial.learned]
    keywords = tensors | keywords_of(trial.spec, trial.seq_info)
    if (info := trial.seq_info) is not None:
        # On the device, where a training step has them.
        q, k = (torch.from_numpy(offsets).to(where) for offsets in (info.cu_seqlens_q, info.cu_seqlens_k))
        keywords["seq_info"] = replace(info, cu_seqlens_q=q, cu_seqlens_k=k)
    sdpa = _sdpa(trial.spec, tensors)

    def call(name: str) -> tuple[Tensor, ...]:
        output = sdpa() if name == SDPA else attention(**keywords, backend=name)
        results = output if isinstance(output, tuple) else (output,)
        if not learned:
            return results[:1]
        return (results[0].detach(), *torch.autograd.grad(results[: len(cotangents)], learned, cotangents))

    def wait(results: object) -> None:
        getattr(torch, where.type).synchronize()

    yield Calls(call, None if where.type in ("cpu", "cuda") else wait, cuda_events=where.type == "cuda")


def own_functions(spec: AttentionSpec, device: str) -> tuple[str, ...]:
    """Returns SDPA if torch's own function has arguments for the call."""
    dense = [shape for shape in (spec.mask_shape, spec.bias_shape) if shape is not None]
    if not is_plain(spec) or len(dense) > 1:
        return ()
    # is_causal is aligned top left, and cannot be combined with a mask.
    causal = spec.causal and spec.window[0] is None and spec.q_len == spec.kv_len and not dense
    return (SDPA,) if causal or _sees_all(spec) else ()


def _sees_all(spec: AttentionSpec) -> bool:
    return band(spec).hides_nothing(spec.q_len, spec.kv_len)


def _sdpa(spec: AttentionSpec, tensors: dict[str, Any]) -> Callable[[], Tensor]:
    """Returns a call of torch's own attention, as a program without this package would make it."""
    import torch.nn.functional as F

    dense = tensors["bias"] if tensors["mask"] is None else tensors["mask"]
    options: dict[str, Any] = {"attn_mask": dense, "is_causal": not _sees_all(spec), "scale": spec.scale}
    options["enable_gqa"] = spec.group_size > 1

    def sdpa() -> Tensor:
        heads_first = (tensors[name].transpose(1, 2) for name in ("q", "k", "v"))
        return F.scaled_dot_product_attention(*heads_first, **options).transpose(1, 2)

    return sdpa
