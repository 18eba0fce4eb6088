"""Times whole transformers models, random weights, with each attention implementation: generate, prefill, training.

python -m benchmarks.models --json models.json                             # without a GPU: small models
python -m benchmarks.models --json models.json --only generate static      # parts of it: see PARTS
python -m benchmarks.models --json models.json --seconds 190               # starts nothing new after that time
python -m benchmarks.models_report --write                       # renders benchmarks/results/models-*.json

Implementations take turns. Each is compared with eager attention in a wider dtype. An implementation that refuses a
model or fails is recorded with its message. The file is written after every group.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: models come from configurations

import torch
import transformers

import torch_frontend
from benchmarks.measure import environment
from torch_frontend import huggingface
from torch_frontend.huggingface import attention as layers

OURS = huggingface.NAME
PARTS = ("generate", "models", "static", "flex")
"""Generate with a dynamic cache and an uncompiled static one; models without flex; generate with a compiled static
cache; models with flex beside ours. The last two spend most of their time on compilation."""
IMPLEMENTATIONS = ("eager", "sdpa", "flash_attention_2", OURS)
SLIDING = ["sliding_attention", "full_attention"] * 2


class Size(NamedTuple):
    """How large the calls of a device are."""

    dtype: torch.dtype
    tokens: int
    prompt: tuple[int, int]
    """Rows and tokens of the prompts that generate extends."""
    steps: int
    rounds: int
    generations: int
    """Rounds of generate."""


SIZES = {"cuda": Size(torch.bfloat16, 8192, (8, 2000), 100, 5, 3), "cpu": Size(torch.float32, 256, (4, 128), 24, 7, 9)}


def config(family: str, device: str, tokens: int) -> Any:
    """Returns the configuration of four layers with a family's shapes; on the CPU an eighth as wide."""
    width, ffn, heads, kv_heads, dim = {
        "Llama-8B": (4096, 14336, 32, 8, 128),
        "Gemma-2-9B": (3584, 14336, 16, 8, 256),
        "Gemma-3-12B": (3840, 15360, 16, 8, 256),
        "Qwen-3-8B": (4096, 12288, 32, 8, 128),
        "gpt-oss-20B": (2880, 2880, 64, 8, 64),
    }[family]
    window = {"Gemma-2-9B": 4096, "Gemma-3-12B": 1024, "gpt-oss-20B": 128}.get(family, 0)
    if device == "cpu":
        width, ffn, heads, kv_heads, dim, window = (
            width // 8,
            ffn // 8,
            heads // 4,
            kv_heads // 4,
            dim // 2,
            window // 16,
        )
    shape = {"hidden_size": width, "intermediate_size": ffn, "num_attention_heads": heads, "head_dim": dim}
    shape |= {"num_key_value_heads": kv_heads, "num_hidden_layers": 4, "vocab_size": 4096}
    shape |= {"max_position_embeddings": 2 * tokens, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    if family == "Llama-8B":
        return transformers.LlamaConfig(**shape)
    if family == "Gemma-2-9B":
        return transformers.Gemma2Config(**shape, sliding_window=window, layer_types=SLIDING, query_pre_attn_scalar=dim)
    if family == "Gemma-3-12B":
        kinds = ["sliding_attention"] * 3 + ["full_attention"]
        return transformers.Gemma3TextConfig(
            **shape, sliding_window=window, layer_types=kinds, query_pre_attn_scalar=dim
        )
    if family == "Qwen-3-8B":
        return transformers.Qwen3Config(**shape)
    # All experts serve every token, because the choice of experts is not continuous in the numbers.
    experts = {"num_local_experts": 4, "num_experts_per_tok": 4, "experts_implementation": "eager"}
    return transformers.GptOssConfig(**shape, **experts, sliding_window=window, layer_types=SLIDING)


FAMILIES = ("Llama-8B", "Gemma-2-9B", "Gemma-3-12B", "Qwen-3-8B", "gpt-oss-20B")


def build(kind: Any, family: str, device: str, implementation: str) -> Any:
    """Returns a model with the same weights for every implementation."""
    size = SIZES[device]
    torch.manual_seed(0)
    with torch.device(device):
        made = config(family, device, max(size.tokens, sum(size.prompt)))
        return kind.from_config(made, attn_implementation=implementation, dtype=size.dtype).eval()


def synchronize(device: str) -> None:
    """Waits for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def release(device: str) -> None:
    """Frees the memory of dropped models."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


class Turns:
    """Times candidates that take turns; one that raises is dropped, and its message recorded."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.seconds: dict[str, list[float]] = {}
        self.failures: dict[str, str] = {}

    def attempt(self, name: str, run: Callable[[], Any]) -> Any:
        """Returns the result of ``run``, or None after an error."""
        try:
            result = run()
            synchronize(self.device)
            return result
        except Exception as error:  # any error of any implementation is a result of the benchmark
            self.failures[name] = f"{type(error).__name__}: {error}"[:400]
            return None

    def time(self, candidates: dict[str, Callable[[], Any]], rounds: int, warm_up: int = 2) -> None:
        """Runs every candidate in every round and keeps its seconds."""
        for name, run in candidates.items():
            for _ in range(warm_up):
                if name not in self.failures:
                    self.attempt(name, run)
        for _ in range(rounds):
            for name, run in candidates.items():
                if name in self.failures:
                    continue
                synchronize(self.device)
                began = time.perf_counter()
                self.attempt(name, run)
                self.seconds.setdefault(name, []).append(time.perf_counter() - began)

    def results(self) -> dict[str, Any]:
        """Returns the times and the failures as JSON."""
        return {"seconds": {n: s for n, s in self.seconds.items() if n not in self.failures}, "failures": self.failures}


def generate(device: str, cache: str, compiled: bool, new_lengths: bool = False) -> dict[str, Any]:
    """Returns the times of generate with sdpa and with ours.

    Args:
        new_lengths: whether the prompts of each round are longer than every row before, as with prompts of many users.
            Else the rounds repeat the same lengths, for which kernels were prepared before.
    """
    size, turns = SIZES[device], Turns(device)
    rows, prompt = size.prompt
    longest = prompt + new_lengths * size.steps * size.generations
    drawn = torch.randint(2, 4096, (rows, longest), generator=torch.Generator().manual_seed(1)).to(device)
    ids = drawn[:, :prompt]
    limits = {"max_new_tokens": size.steps, "min_new_tokens": size.steps, "do_sample": False, "use_cache": True}
    limits |= {"cache_implementation": cache, "disable_compile": not compiled}
    models = {n: build(transformers.AutoModelForCausalLM, "Llama-8B", device, n) for n in ("sdpa", OURS)}

    def call(name: str, ids: Any = ids, **others: Any) -> Any:
        with torch.no_grad():
            return models[name].generate(ids, attention_mask=torch.ones_like(ids), **limits | others)

    used = backends_of(lambda: call(OURS, max_new_tokens=3, min_new_tokens=3, disable_compile=True))
    found = {name: turns.attempt(name, lambda name=name: call(name)[:, prompt:]) for name in models}
    for number in range(size.generations):
        ids = drawn[:, : prompt + new_lengths * size.steps * (number + 1)]
        turns.time({name: lambda name=name, ids=ids: call(name, ids) for name in models}, 1, warm_up=0)  # warm already
    single = {"max_new_tokens": 1, "min_new_tokens": 1}
    first = Turns(device)  # the prompt alone, to tell it from the steps
    first.time({name: lambda name=name: call(name, **single) for name in models}, size.generations, warm_up=1)
    equal = None if None in found.values() else float((found["sdpa"] == found[OURS]).float().mean())
    call_facts = {"cache": cache, "compiled": compiled, "new_lengths": new_lengths}
    call_facts |= {"rows": rows, "prompt": prompt, "tokens": size.steps}
    return call_facts | {"backends": used, "equal_tokens": equal, "prompt_only": first.results(), **turns.results()}


def backends_of(run: Callable[[], Any]) -> list[str]:
    """Returns the backends that our attention chooses during a run, in order of their first use."""
    used: list[str] = []
    plain = layers.attention

    def spy(*tensors: Any, trains: bool, **options: Any) -> Any:
        rows = [tensor.transpose(1, 2) for tensor in tensors]  # [batch, len, heads, head_dim]
        if options["seq_info"] is not None:
            rows = [tensor.flatten(0, 1) for tensor in rows]
        chosen = torch_frontend.explain(*rows, **options, needs_backward=trains).backend
        shape = "x".join(map(str, rows[0].shape[-3:-1])) + f":{rows[1].shape[-3]}"
        if (label := f"{chosen} ({shape})") not in used and len(used) < 8:
            used.append(label)
        return plain(*tensors, trains=trains, **options)

    layers.attention = spy
    try:
        run()
    except Exception as error:  # the benchmark reports it later
        used.append(f"{type(error).__name__}: {error}"[:200])
    finally:
        layers.attention = plain
    return used


def whole_model(family: str, device: str, names: tuple[str, ...], rounds: int) -> list[dict[str, Any]]:
    """Returns the times and errors of prefill and of a training step of one family."""
    size = SIZES[device]
    ids = torch.randint(2, 4096, (1, size.tokens), generator=torch.Generator().manual_seed(1)).to(device)
    turns = {mode: Turns(device) for mode in ("prefill", "training step")}
    models: dict[str, Any] = {}
    for name in names:
        model = turns["prefill"].attempt(name, lambda name=name: build(transformers.AutoModel, family, device, name))
        if model is not None:
            models[name] = model
    turns["training step"].failures |= turns["prefill"].failures

    def prefill(model: Any) -> Any:
        with torch.no_grad():
            return model(ids, use_cache=True).last_hidden_state

    def train(model: Any, tokens: int | None = None) -> Any:
        model.zero_grad(set_to_none=True)
        hidden = model(ids[:, :tokens], use_cache=False).last_hidden_state
        (hidden.float() ** 2 * weights[: hidden.shape[1]]).mean().backward()
        return model.get_input_embeddings().weight.grad

    weights = torch.randn(size.tokens, 1, generator=torch.Generator().manual_seed(2)).to(device)
    checks = check(family, device, models, {"prefill": prefill, "training step": lambda m: train(m, 1024)}, turns)
    results = []
    for mode, run in (("prefill", prefill), ("training step", train)):
        for model in models.values():
            model.train(mode != "prefill")
        turns[mode].time({name: lambda model=model, run=run: run(model) for name, model in models.items()}, rounds)
        used = backends_of(lambda run=run: run(models[OURS])) if OURS in models else []
        facts = {"family": family, "mode": mode, "tokens": size.tokens, "backends": used, "errors": checks[mode]}
        results.append(facts | turns[mode].results())
        for model in models.values():
            model.zero_grad(set_to_none=True)
    return results


def check(
    family: str, device: str, models: dict[str, Any], runs: dict[str, Callable[[Any], Any]], turns: dict[str, Turns]
) -> dict[str, dict[str, float]]:
    """Returns each implementation's mean error divided by that of eager in the same dtype.

    The reference is eager attention in float32 for bfloat16, in float64 for float32.
    """
    errors: dict[str, dict[str, float]] = {}
    reference = build(transformers.AutoModel, family, device, "eager")
    plain = build(transformers.AutoModel, family, device, "eager")
    reference = reference.to(torch.float32 if SIZES[device].dtype == torch.bfloat16 else torch.float64)
    for mode, run in runs.items():
        exact = run(reference).double()
        allowed = float((run(plain).double() - exact).abs().mean())
        errors[mode] = {}
        for name, model in models.items():
            actual = turns[mode].attempt(name, lambda model=model, run=run: run(model))
            if actual is not None:
                errors[mode][name] = float((actual.double() - exact).abs().mean()) / allowed
        del exact
    del reference, plain
    release(device)
    return errors


def main(arguments: list[str] | None = None) -> None:
    """Measures the requested parts and writes the file after each group."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True, type=Path)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args(arguments)
    began, device = time.perf_counter(), "cuda" if torch.cuda.is_available() else "cpu"
    huggingface.register()
    result: dict[str, Any] = {"environment": environment() | {"threads": torch.get_num_threads()}}
    result["environment"]["device"] = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    result |= {"dtype": str(SIZES[device].dtype).removeprefix("torch."), "generate": [], "models": [], "not_run": []}

    def group(key: str, title: str, run: Callable[[], list[dict[str, Any]]]) -> None:
        spent = time.perf_counter() - began
        if spent > options.seconds:
            result["not_run"].append(f"{title}: after {spent:.0f} s")
        else:
            try:
                result[key] += run()
            except Exception as error:  # the other groups still run
                result["not_run"].append(f"{title}: {type(error).__name__}: {error}"[:400])
            print(f"{title}: {time.perf_counter() - began - spent:.1f} s", flush=True)
        release(device)
        options.json.write_text(json.dumps(result, indent=1), encoding="utf-8")

    rounds = SIZES[device].rounds
    for part in options.only:
        if part == "generate":
            for cache in ("dynamic", "static"):
                group("generate", f"generate, {cache}", lambda cache=cache: [generate(device, cache, False)])
            group("generate", "generate, new lengths", lambda: [generate(device, "dynamic", False, new_lengths=True)])
        elif part == "static" and device == "cuda":
            group("generate", "generate, static, compiled", lambda: [generate(device, "static", True)])
        elif part in ("models", "flex"):
            names = IMPLEMENTATIONS if part == "models" else ("flex_attention", OURS)
            for family in options.families:
                run = lambda family=family, names=names: whole_model(family, device, names, rounds)  # noqa: E731
                group("models", f"{part}, {family}", run)


if __name__ == "__main__":
    main()
