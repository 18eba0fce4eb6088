"""Runs the demo, from the weights to the report."""

from __future__ import annotations

import resource
import statistics
from collections.abc import Sequence

import numpy as np

from examples.smollm2 import jax_side, layers, torch_side, weights
from examples.smollm2.decoding import Generation, capacity_for, greedy, reread_difference
from examples.smollm2.packing import pack
from examples.smollm2.report import Report
from examples.stages import Stages


def run(questions: Sequence[str], new_tokens: int, stages: Stages) -> Report:
    """Loads the model, answers in both frameworks with at most ``new_tokens`` tokens, and compares."""
    with stages.stage("loading the weights (GGUF, dequantised to float32)"):
        loaded = weights.load()
        prompts = [weights.prompt_tokens(loaded.tokenizer, question) for question in questions]
        in_torch = torch_side.TorchForward(loaded.model, capacity_for(prompts, new_tokens), capture_steps=2)
    with stages.stage("torch: answering", total=new_tokens) as advance:
        ours = greedy(in_torch, prompts, new_tokens, loaded.tokenizer.eos_token_id, advance)
    theirs, changed = _answer_in_jax(loaded, prompts, new_tokens, stages)
    with stages.stage("comparing every layer's attention", total=len(in_torch.captured)) as advance:
        checks = layers.compare(in_torch.captured, advance)
        chosen = layers.selections(in_torch.captured[0])
    return Report(
        weights=loaded.path.name,
        versions=weights.versions(),
        questions=list(questions),
        torch_texts=loaded.tokenizer.batch_decode(ours.tokens),
        jax_texts=loaded.tokenizer.batch_decode(theirs.tokens),
        same_tokens=ours.tokens == theirs.tokens,
        reread_tokens_differ=changed,
        logit_difference=float(np.abs(ours.prefill_logits - theirs.prefill_logits).max()),
        largest_logit=float(np.abs(ours.prefill_logits).max()),
        smallest_lead=min(ours.lead, theirs.lead),
        layers=checks,
        selections={"torch": str(chosen[0]), "JAX": str(chosen[1])},
        seconds={**stages.seconds, **_step_times("torch", ours), **_step_times("JAX", theirs)},
        memory_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,  # Linux counts in KiB
    )


def _answer_in_jax(
    loaded: weights.Loaded, prompts: list[list[int]], new_tokens: int, stages: Stages
) -> tuple[Generation, int]:
    """Returns the answers, and the number of tokens that one pass over the finished row would choose differently."""
    capacity, none_cached = capacity_for(prompts, new_tokens), [0] * len(prompts)
    with stages.stage("JAX: converting the weights"):
        model = jax_side.convert(loaded.model)
        forward = jax_side.JaxForward(model, capacity)
    with stages.stage("JAX: compiling prefill and decoding", total=2) as advance:
        for new in (prompts, [[0] for _ in prompts]):
            forward.compile(pack(none_cached, new, capacity))
            advance()
    with stages.stage("JAX: answering", total=new_tokens) as advance:
        generation = greedy(forward, prompts, new_tokens, loaded.tokenizer.eos_token_id, advance)
    with stages.stage("JAX: reading the finished row again, without a cache"):
        changed = reread_difference(lambda rows: jax_side.reread(model, rows), prompts, generation.tokens)
    return generation, changed


def _step_times(framework: str, generation: Generation) -> dict[str, float]:
    times = {f"{framework}: prefill, all prompts": generation.prefill_seconds}
    if generation.decode_seconds:
        times[f"{framework}: decoding step, all prompts (median)"] = statistics.median(generation.decode_seconds)
    return times
