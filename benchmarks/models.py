"""Times whole transformers models, random weights, with each attention implementation: generate, prefill, training.

python -m benchmarks.models --json models.json                       # without a GPU: small models
python -m benchmarks.models --json models.json --only generate       # a part of it: see PARTS
python -m benchmarks.models --json models.json --seconds 190         # starts nothing new after that time

Implementations take turns. Each is compared with eager attention in a wider dtype. An implementation that refuses a
model or fails is recorded with its message. The file is written after every group.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: models come from configurations

import torch
import transformers
from torch.profiler import ProfilerActivity, profile

from benchmarks import tables
from benchmarks.measure import Calls, Row, device_name, environment, measure, parser, reason, release, write
from torch_frontend import huggingface

OURS = huggingface.NAME
PARTS = ("generate", "models", "flex")
"""Generate; models without flex; models with flex beside ours, which spends most of its time on compilation."""
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
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZE = SIZES[DEVICE]
SHAPES = {
    "Llama-8B": (4096, 14336, 32, 8, 128, 0),
    "Gemma-2-9B": (3584, 14336, 16, 8, 256, 4096),
    "Gemma-3-12B": (3840, 15360, 16, 8, 256, 1024),
    "Qwen-3-8B": (4096, 12288, 32, 8, 128, 0),
    "gpt-oss-20B": (2880, 2880, 64, 8, 64, 128),
}
"""(hidden, MLP, heads, kv_heads, head_dim, window) of each family; on the CPU an eighth as wide."""
CPU_DIVISORS = (8, 8, 4, 4, 2, 16)


def config(family: str, tokens: int) -> Any:
    """Returns the configuration of four layers with a family's shapes."""
    divisors = CPU_DIVISORS if DEVICE == "cpu" else (1,) * 6
    width, ffn, heads, kv_heads, dim, window = (each // by for each, by in zip(SHAPES[family], divisors, strict=True))
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


def build(kind: Any, family: str, implementation: str) -> Any:
    """Returns a model with the same weights for every implementation."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        made = config(family, max(SIZE.tokens, sum(SIZE.prompt)))
        return kind.from_config(made, attn_implementation=implementation, dtype=SIZE.dtype).eval()


def timed(calls: Calls, rounds: int, failures: dict[str, str] | None = None) -> Row:
    """Times calls one by one; "failures" names those that raise, and why."""
    found = measure(calls, rounds=rounds)
    return {"seconds": found["seconds"], "failures": {**(failures or {}), **found["not_run"]}}


def kernels_of(run: Callable[[], Any]) -> list[str]:
    """Returns the backends that our attention runs in a call, from the ranges that a profile shows."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        run()
    ranges = (event.name for event in recorded.events() if event.name.startswith("attn."))
    return list(dict.fromkeys(name.split()[0].removeprefix("attn.") for name in ranges))


def generate(cache: str, compiled: bool, new_lengths: bool = False) -> Row:
    """Times generate with sdpa and with ours.

    Args:
        new_lengths: whether the prompts of each call are longer than every row before, as with prompts of many users.
            Else the calls repeat the same lengths, for which kernels were prepared before.
    """
    rows, prompt = SIZE.prompt
    lengths = dict.fromkeys(("sdpa", OURS), prompt)
    longest = prompt + SIZE.steps * (SIZE.generations + 20)
    drawn = torch.randint(2, 4096, (rows, longest), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    limits = {"max_new_tokens": SIZE.steps, "min_new_tokens": SIZE.steps, "do_sample": False, "use_cache": True}
    limits |= {"cache_implementation": cache, "disable_compile": not compiled}
    models = {name: build(transformers.AutoModelForCausalLM, "Llama-8B", name) for name in lengths}

    def call(name: str) -> Any:
        ids = drawn[:, : lengths[name]]
        if new_lengths:
            lengths[name] += SIZE.steps
        with torch.no_grad():
            return models[name].generate(ids, attention_mask=torch.ones_like(ids), **limits)[:, ids.shape[1] :]

    used = kernels_of(partial(call, OURS))
    equal = float((call("sdpa") == call(OURS)).float().mean()) if not new_lengths else None
    facts = {"cache": cache, "compiled": compiled, "new_lengths": new_lengths, "backends": used, "equal_tokens": equal}
    facts |= {"rows": rows, "prompt": prompt, "tokens": SIZE.steps}
    return facts | timed({name: partial(call, name) for name in models}, SIZE.generations)


def whole_model(family: str, names: tuple[str, ...]) -> list[Row]:
    """Times prefill and a training step of one family, and compares them with eager attention in a wider dtype."""
    ids = torch.randint(2, 4096, (1, SIZE.tokens), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    weights = torch.randn(SIZE.tokens, 1, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    models, refused = {}, {}
    for name in names:
        try:
            models[name] = build(transformers.AutoModel, family, name)
        except Exception as error:  # any error of any implementation is a result of the benchmark
            refused[name] = reason(error)

    def prefill(model: Any, tokens: int | None = None) -> Any:
        with torch.no_grad():
            return model(ids, use_cache=True).last_hidden_state

    def train(model: Any, tokens: int | None = None) -> Any:
        model.zero_grad(set_to_none=True)
        hidden = model(ids[:, :tokens], use_cache=False).last_hidden_state
        (hidden.float() ** 2 * weights[: hidden.shape[1]]).mean().backward()
        return model.get_input_embeddings().weight.grad

    results = []
    for mode, run in (("prefill", prefill), ("training step", train)):
        errors = _errors(family, models, lambda model, run=run: run(model, 1024))
        for model in models.values():
            model.train(mode != "prefill")
        used = kernels_of(partial(run, models[OURS])) if OURS in models else []
        facts = {"family": family, "mode": mode, "tokens": SIZE.tokens, "backends": used, "errors": errors}
        found = timed({name: partial(run, model) for name, model in models.items()}, SIZE.rounds, refused)
        results.append(facts | found)
        for model in models.values():
            model.zero_grad(set_to_none=True)
    return results


def _errors(family: str, models: dict[str, Any], run: Callable[[Any], Any]) -> dict[str, float]:
    """Returns each implementation's mean error divided by that of eager in the same dtype.

    The reference is eager attention in float32 for bfloat16, in float64 for float32.
    """
    wide = torch.float32 if SIZE.dtype == torch.bfloat16 else torch.float64
    exact = run(build(transformers.AutoModel, family, "eager").to(wide)).double()
    allowed = float((run(build(transformers.AutoModel, family, "eager")).double() - exact).abs().mean())
    errors = {}
    for name, model in models.items():
        try:
            errors[name] = float((run(model).double() - exact).abs().mean()) / allowed
        except Exception as error:  # the timing of this implementation records it
            print(f"{family}, {name}: {reason(error)}", flush=True)
    release()
    return errors


def jobs(parts: tuple[str, ...], families: tuple[str, ...]) -> dict[str, tuple[str, Callable[[], list[Row]]]]:
    """Returns the groups of the parts by title: the list of the result that they belong to, and what measures them."""
    found: dict[str, tuple[str, Callable[[], list[Row]]]] = {}
    calls: dict[str, dict[str, Any]] = {
        "dynamic": {"cache": "dynamic", "compiled": False},
        "static": {"cache": "static", "compiled": False},
        "new lengths": {"cache": "dynamic", "compiled": False, "new_lengths": True},
    }
    if DEVICE == "cuda":
        calls["static, compiled"] = {"cache": "static", "compiled": True}
    if "generate" in parts:
        for title, options in calls.items():
            found[f"generate, {title}"] = "generate", lambda options=options: [generate(**options)]
    for part, names in (("models", IMPLEMENTATIONS), ("flex", ("flex_attention", OURS))):
        if part in parts:
            found |= {f"{part}, {family}": ("models", partial(whole_model, family, names)) for family in families}
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measures the requested parts, writes the file after each group, and prints the tables."""
    options = parser(__doc__)
    options.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    options.add_argument("--families", nargs="+", choices=tuple(SHAPES), default=tuple(SHAPES))
    options.add_argument("--seconds", type=float, default=float("inf"))
    parsed = options.parse_args(arguments)
    began = time.perf_counter()
    huggingface.register()
    result: dict[str, Any] = {"environment": environment() | {"threads": torch.get_num_threads()}}
    result["environment"]["device"] = device_name() if DEVICE == "cuda" else "CPU"
    result |= {"dtype": str(SIZE.dtype).removeprefix("torch."), "generate": [], "models": [], "not_run": []}
    for title, (part, job) in jobs(parsed.only, parsed.families).items():
        spent = time.perf_counter() - began
        if spent > parsed.seconds:
            result["not_run"].append(f"{title}: after {spent:.0f} s")
            continue
        try:
            result[part] += job()
        except Exception as error:  # the other groups still run
            result["not_run"].append(f"{title}: {reason(error)}")
        print(f"{title}: {time.perf_counter() - began - spent:.1f} s", flush=True)
        release()
        write(parsed.json, result)
    print("\n\n".join(table(result) for table in (tables.generate, tables.models, tables.failures)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
