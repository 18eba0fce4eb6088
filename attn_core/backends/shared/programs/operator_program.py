"""The program of a call whose backend runs operators of torch alone: XLA runs them without Python.

``shared.programs.operator_recorder`` records what the backend's own forward or backward does. So both
lanes run the same operators on the same operands, and their results have the same bits.
"""

from __future__ import annotations

from typing import Any

from attn_core.backends.shared import dry_run
from attn_core.backends.shared.programs import operator_library, operator_recorder
from attn_core.backends.shared.programs.kernel_programs import OPERATOR, Buffer, KernelProgram, KernelStep
from attn_core.backends.shared.programs.operator_recorder import FAKE_DEVICE, Functions
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs, dtype_name


def refuses(spec: AttentionSpec, device: str) -> tuple[str, ...]:
    """Returns why no call of torch's operators without Python can be made of a supported call."""
    reasons = []
    if not device.startswith("sm"):
        reasons.append(f"{device}: calls of operators have been proven on NVIDIA's GPUs only")
    if spec.paged is not None:
        reasons.append("keys and values in pages: other backends have kernels that XLA launches")
    if spec.dropout:
        reasons.append("dropout: its random numbers come from a generator of torch")
    library = operator_library.missing()
    return tuple(reasons) if library is None else (*reasons, library)


def program(
    functions: Functions,
    spec: AttentionSpec,
    direction: str,
    with_dlse: bool = False,
    as_one: bool = False,
    device: str = FAKE_DEVICE,
) -> KernelProgram:
    """Returns a call as one step of operators, and its buffers.

    Args:
        direction: "forward" or "backward"; with_dlse: whether a backward has the gradient of the log-sum-exp.
        as_one: whether q, k and v are one array ``[..., tokens, 3, heads, head_dim]``, and their gradients another.

    Raises:
        Unrecordable: if the operators depend on values.
    """
    with operator_recorder.without_memory():
        inputs = _inputs(spec, as_one, device)
        saved = _saved(spec, with_dlse, device) if direction == "backward" else {}
        results = _gradients(spec, inputs, as_one) if direction == "backward" else _results(spec, device)
        run = _run_backward if direction == "backward" else _run_forward
        tensors = [*inputs.values(), *saved.values(), *results.values()]
        text = operator_recorder.record(
            lambda: run(functions, spec, inputs, saved, results), tensors, functions.fake_results
        )
        named = {**inputs, **saved, **results}
        buffers = tuple(Buffer(name, tuple(each.shape), dtype_name(each)) for name, each in named.items())
    first = len(buffers) - len(results)
    reads, writes = tuple(range(first)), tuple(range(first, len(buffers)))
    attributes = {"operators": text}
    return KernelProgram(buffers, (KernelStep(OPERATOR, reads, writes, _compiles_nothing, lambda: attributes),))


def _compiles_nothing() -> None:
    """Stands for the compilation of a step whose operators are compiled already."""


def _inputs(spec: AttentionSpec, as_one: bool, device: str) -> dict[str, Any]:
    """Returns the operands by name, without memory.

    Sinks are in float32, because a spec does not say their dtype: XLA converts them and their gradient.
    """
    import torch

    # Empty tensors, because torch remembers the values of small tensors that are made from numbers.
    every = {
        name: torch.empty_like(each) for name, each in dry_run.zeros(spec, device)._asdict().items() if each is not None
    }
    if spec.sinks:
        every["sinks"] = every["sinks"].float()
    if not as_one:
        return every
    q = every["q"]
    qkv = torch.empty((*q.shape[:-2], 3, *q.shape[-2:]), dtype=q.dtype, device=device)
    return {"qkv": qkv, **{name: each for name, each in every.items() if name not in ("q", "k", "v")}}


def _results(spec: AttentionSpec, device: str) -> dict[str, Any]:
    import torch

    out = torch.empty(spec.out_shape, dtype=getattr(torch, spec.dtype), device=device)
    lse = {"lse": torch.empty(spec.lse_shape, dtype=torch.float32, device=device)} if spec.return_lse else {}
    return {"out": out, **lse}


def _saved(spec: AttentionSpec, with_dlse: bool, device: str) -> dict[str, Any]:
    import torch

    out, lse = torch.empty(spec.out_shape, dtype=getattr(torch, spec.dtype), device=device), spec.lse_shape
    of_rows = {name: torch.empty(lse, dtype=torch.float32, device=device) for name in ("lse", *["dlse"] * with_dlse)}
    return {"out": out, "dout": torch.empty_like(out), **of_rows}


def _gradients(spec: AttentionSpec, inputs: dict[str, Any], as_one: bool) -> dict[str, Any]:
    import torch

    names = ["qkv"] if as_one else ["q", "k", "v"]
    names += ["bias"] if spec.bias_gradient else []
    names += ["sinks"] if spec.sinks else []
    return {f"d{name}": torch.empty_like(inputs[name]) for name in names}


def _gathered(inputs: dict[str, Any]) -> Inputs:
    if "qkv" not in inputs:
        return Inputs(**inputs)
    q, k, v = inputs["qkv"].unbind(-3)
    return Inputs(q, k, v, **{name: each for name, each in inputs.items() if name != "qkv"})


def _run_forward(
    functions: Functions, spec: AttentionSpec, inputs: dict[str, Any], saved: dict[str, Any], results: dict[str, Any]
) -> None:
    buffers = results["out"], results.get("lse")
    computed = functions.forward(spec, _gathered(inputs), *([buffers] if functions.writes_into else []))
    _copy(computed, buffers)


def _run_backward(
    functions: Functions, spec: AttentionSpec, inputs: dict[str, Any], saved: dict[str, Any], results: dict[str, Any]
) -> None:
    places = dict(results)
    if "dqkv" in places:
        places |= dict(zip(("dq", "dk", "dv"), places.pop("dqkv").unbind(-3), strict=True))
    buffers = Gradients(**places)
    into = [buffers] if functions.writes_into else []
    extras = saved["out"], saved["lse"], saved["dout"], saved.get("dlse")
    _copy(functions.backward(spec, _gathered(inputs), *extras, *into), buffers)


def _copy(computed: tuple[Any, ...], buffers: tuple[Any, ...]) -> None:
    for result, buffer in zip(computed, buffers, strict=True):
        if buffer is not None and result is not buffer:
            buffer.copy_(result)
