"""Calls with any feature, under any observer: checks every argument, then runs a plan or the ops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from attn_core.call import checks
from attn_core.call.functions import are_given, aux_of
from attn_core.call.functions import named as aux_by_name
from attn_core.call.kinds import check_int32
from attn_core.call.options import Options, check_flag, check_options, check_traced_options, requested_names
from attn_core.call.seq_info import SeqInfo
from attn_core.call.tensors import Inputs
from attn_core.errors import SpecError
from attn_core.expressions.properties import check_ints
from attn_core.selection import NoBackendError, Selection, override, with_function
from attn_core.selection.row_maximum import with_max_logit
from torch_frontend.dispatch import (
    autocast,
    autograd,
    functions,
    in_parts,
    max_logit,
    offsets,
    ops,
    plan,
    run_plan,
    sdpa_flags,
    tensor_kinds,
    transforms,
    value_checks,
)
from torch_frontend.dispatch.dropout_words import draw_words
from torch_frontend.dispatch.op_arguments import OpOptions, join_names
from torch_frontend.dispatch.plan import Results
from torch_frontend.dispatch.prepared import Requested, layer_trains
from torch_frontend.dispatch.run_plan import in_ranges
from torch_frontend.dispatch.value_checks import in_checks


def gather_arguments(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: dict[str, Any], *, draw: bool = True
) -> tuple[Inputs, Options]:
    """Returns a call's arguments, each checked by itself. Without ``draw`` dropout's generator stays as it is.

    Args:
        given: the arguments of ``attention`` beside q, k and v, by name; no mask object.
    """
    named = {"q": q, "k": k, "v": v, **{name: given[name] for name in ("mask", "bias", "alibi_slopes", "sinks")}}
    for name, tensor in named.items():
        if tensor is not None or name in ("q", "k", "v"):
            plan.check_tensor(name, tensor)
    tensor_kinds.check_data(**named)
    q, k, v, named["bias"] = autocast.in_autocast(q, k, v, named["bias"])
    plan.check_gradient_free("alibi_slopes", named["alibi_slopes"])
    options = Options.of(given)
    options = check_traced_options(options) if torch.compiler.is_compiling() else check_options(options)
    generator = given["dropout_rng"]
    if generator is not None and not isinstance(generator, torch.Generator):
        raise SpecError(f"dropout_rng: expected a torch.Generator, or None for torch's own, got {type(generator)}")
    info = SeqInfo.coerce(given["seq_info"])
    inputs = Inputs(**(named | {"q": q, "k": k, "v": v}))
    if given["key_ranges"] is not None:
        inputs = inputs._replace(key_ranges=_ranges_as_tensor(q, given["key_ranges"]))
    if are_given(own := (given["mask_mod"], given["score_mod"], given["aux"])):
        mask_mod, score_mod, aux = functions.traced(q, k, own)
        arrays = [_aux_as_tensor(q, number, array) for number, array in enumerate(aux)]
        inputs = inputs._replace(**aux_by_name(arrays))
        options = options._replace(mask_mod=mask_mod, score_mod=score_mod)
        options = options._replace(aux_gradients=autograd.arrays_with_gradient(inputs, score_mod))
    if info is not None:
        attach = offsets.attach if transforms.is_one_op(q) else offsets.attach_complete  # an op completes them itself
        inputs, (max_len_q, max_len_k) = attach(info, inputs)
        options = options._replace(max_len_q=max_len_q, max_len_k=max_len_k)
    if draw and not torch.compiler.is_compiling() and checks.enabled() and not transforms.is_one_op(q):
        value_checks.check(inputs, options, info)
    # explain passes draw=False, because a question must not advance the generator of the training run.
    if options.dropout and draw:
        inputs = inputs._replace(rng=draw_words(q, generator))
    return inputs, options


def _ranges_as_tensor(q: torch.Tensor, key_ranges: torch.Tensor | np.ndarray) -> torch.Tensor:
    """Returns key ranges as a tensor; those of numpy, as ``attn_core.masks`` builds them, stay on the CPU."""
    if not isinstance(key_ranges, np.ndarray):
        return _as_tensor(q, "key_ranges", key_ranges)
    # Copies, because the caller may change the array before the backward reads it.
    if torch.compiler.is_compiling():  # Dynamo knows the dtype of a tensor alone
        ranges = torch.as_tensor(key_ranges, device="cpu").clone()
        check_int32("key_ranges", ranges.dtype)
        return ranges
    check_int32("key_ranges", key_ranges.dtype)
    array = np.array(key_ranges, order="C")
    return tensor_kinds.to_device_of(q, array) if tensor_kinds.is_watched(q) else torch.from_numpy(array)


def _as_tensor(q: torch.Tensor, name: str, array: torch.Tensor | np.ndarray) -> torch.Tensor:
    """Returns an argument as a checked tensor; an array of numpy moves to q's device."""
    if isinstance(array, np.ndarray):
        return tensor_kinds.to_device_of(q, array)
    plan.check_tensor(name, array)
    tensor_kinds.check_data(q, **{name: array})
    return array  # type: ignore[no-any-return]


def _aux_as_tensor(q: torch.Tensor, number: int, array: torch.Tensor | np.ndarray) -> torch.Tensor:
    if not torch.compiler.is_compiling():  # Dynamo knows no values
        check_ints(number, array)
    tensor = _as_tensor(q, f"aux[{number}]", array)
    if isinstance(array, np.ndarray) and not torch.compiler.is_compiling():
        in_parts.keep_ids(tensor, array)
    return tensor


def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: dict[str, Any]) -> Results:
    """Checks the arguments of a call one by one, runs it, and returns its results as ``attention`` does.

    Args:
        given: the arguments of ``attention`` beside q, k and v, without those of caches, layouts and segments.
    """
    given = plan.without_mask_object(q, k, given)
    with_maximum = check_flag("return_max_logit", given["return_max_logit"])
    inputs, options = gather_arguments(q, k, v, given)
    capture = max_logit.Capture() if with_maximum else None
    results = attend(inputs, options, given["backend"], capture)
    results = run_plan.finish_results(results, inputs, given["seq_info"])
    if capture is None:
        return results
    top = max_logit.by_a_pass(inputs, options) if capture.max_logit is None else capture.max_logit
    return *(results if options.return_lse else (results,)), top


def explain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: dict[str, Any], needs_backward: bool | None
) -> Selection:
    """Returns what would run a call, as ``explain.explain`` does; ``given`` is that of ``run``."""
    given = plan.without_mask_object(q, k, given)
    with_maximum = check_flag("return_max_logit", given["return_max_logit"])
    inputs, options = gather_arguments(q, k, v, given, draw=False)
    trains, bias_gradient = autograd.gradients_needed(inputs)
    needs = trains if needs_backward is None else check_flag("needs_backward", needs_backward)
    requested = requested_names(given["backend"]) or override.requested()
    gradients = needs, bias_gradient and needs
    arguments = in_parts.metadata(inputs), options, *gradients, requested, sdpa_flags.now()
    selection = with_function(plan.explanation(*arguments), options.mask_mod)
    run_plan.check_host_values(selection.spec, inputs)
    tables = inputs.key_ranges, *aux_of(inputs)
    if all(table is None or table.is_cpu for table in tables):  # reading a GPU would wait for it
        # Few programs need it, and many modules load with it.
        from attn_core.context_parallel.one_device import described

        ranges, *arrays = (None if table is None else table.detach().numpy() for table in tables)
        selection = described(selection, ranges, arrays)
    documents = in_parts.documents_of(arguments, inputs)
    if with_maximum:  # a kernel that runs other calls than this one has no maxima of it
        selection = with_max_logit(selection if documents is None else replace(selection, backend=None))
    if documents is None:
        return selection
    return replace(documents, mask=selection.mask, max_logit=selection.max_logit)


def attend(inputs: Inputs, options: Options, backend: Requested, capture: max_logit.Capture | None = None) -> Results:
    """Runs a call with any feature: eagerly by a plan, or by the ops if a compiler or a transform observes the call.

    Args:
        capture: gets the largest logits of an eager call if the backend's forward has them; None if nobody wants them.
    """
    needs_backward, bias_gradient = autograd.gradients_needed(inputs)
    if transforms.is_one_op(inputs.q):
        if not torch.compiler.is_compiling():
            # The op checks, too, but only when it runs: perhaps in a graph, far from the line with the mistake.
            plan.check(in_parts.metadata(inputs), options)
        names = join_names(requested_names(backend), sdpa_flags.now())
        plain = OpOptions(options, needs_backward, bias_gradient, names)
        out, lse = (transforms if transforms.are_observing() else ops).traced(inputs, plain)
        return (out, lse) if options.return_lse else out
    call_plan, inputs = _resolve(inputs, options, needs_backward, bias_gradient, backend)
    # Around the backend's functions, each only if somebody asked for it: ranges of the profiler, the capture of the
    # largest logits, and checks of values.
    call_plan = in_ranges(call_plan)
    call_plan = in_checks(call_plan if capture is None else capture.of(call_plan, inputs.q.device))
    run_plan.check_host_values(call_plan.spec, inputs)
    with autocast.switched_off(inputs.q.device):
        return autograd.run(call_plan, needs_backward, *inputs)


def _resolve(
    inputs: Inputs, options: Options, needs_backward: bool, bias_gradient: bool, backend: Requested
) -> tuple[plan.Plan, Inputs]:
    """Returns the plan of a call, and the inputs that it takes; for a layer that trains see ``training_layer``."""
    entries, switches = in_parts.metadata(inputs), sdpa_flags.now()
    requested = requested_names(backend) or override.requested()
    if layer_trains() and not needs_backward:
        trained = inputs.bias is not None and inputs.bias.requires_grad
        try:
            return in_parts.resolve_eagerly((entries, options, True, trained, requested, switches), inputs)
        except NoBackendError:
            pass
    return in_parts.resolve_eagerly((entries, options, needs_backward, bias_gradient, requested, switches), inputs)
