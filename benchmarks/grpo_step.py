"""Times a training step on completions that share a prompt: the prompt once, and a copy of it for every completion.

python -m benchmarks.grpo_step --json grpo.json       # on a GPU in bfloat16; without one in float32, minutes

The model is that of the training example. Both forms have the same loss and gradients. Each runs in processes of its
own, which take turns, so that its peak memory is its own.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional

from attn_core import SeqInfo, masks
from benchmarks.measure import device_name, environment, parser, write
from benchmarks.tables import COMPLETIONS, FORMS, LENGTH, PROMPT, grpo
from examples.training.config import GemmaConfig
from examples.training.torch_gemma import Gemma

STEPS = 3
"""Timed steps of a process, after one that warms up."""


def rows(form: str) -> dict[str, Any]:
    """Returns the tokens of a form, the arguments of the model, and where each completion token is predicted.

    In the shared form the last token of the prompt predicts the first one of every completion.
    """
    random = np.random.default_rng(0)
    prompt, completions = random.integers(0, 257, PROMPT), random.integers(0, 257, (COMPLETIONS, LENGTH))
    if form == "shared":
        tokens = np.concatenate([prompt, *completions])
        ranges = masks.shared_prefix(PROMPT, [LENGTH] * COMPLETIONS)
        places = np.concatenate([np.arange(PROMPT), *[PROMPT + np.arange(LENGTH)] * COMPLETIONS])
        starts = PROMPT + LENGTH * np.arange(COMPLETIONS)
        sources = np.concatenate([[PROMPT - 1, *range(start, start + LENGTH - 1)] for start in starts])
        return {"tokens": tokens, "sources": sources, "targets": completions.ravel()} | {
            "arguments": {"seq_info": None, "key_ranges": ranges, "positions": places[None]}
        }
    tokens = np.concatenate([np.concatenate([prompt, each]) for each in completions])
    starts = list(accumulate([PROMPT + LENGTH] * (COMPLETIONS - 1), initial=0))
    sources = np.concatenate([np.arange(start + PROMPT - 1, start + PROMPT + LENGTH - 1) for start in starts])
    info = SeqInfo.from_lengths([PROMPT + LENGTH] * COMPLETIONS)
    return {"tokens": tokens, "sources": sources, "targets": completions.ravel(), "arguments": {"seq_info": info}}


def run(form: str, device: str) -> dict[str, Any]:
    """Times the steps of one form; returns seconds, peak bytes, the loss and the norm of the gradients."""
    torch.manual_seed(0)
    # A window of row positions would count the other completions' tokens, so every layer sees the whole document.
    model = Gemma(GemmaConfig(window=1 << 16, max_positions=PROMPT + LENGTH)).to(device)
    data, dtype = rows(form), torch.bfloat16 if device == "cuda" else torch.float32
    tokens, sources, targets = (torch.from_numpy(data[name]).to(device) for name in ("tokens", "sources", "targets"))
    arguments = dict(data["arguments"])
    if "positions" in arguments:
        arguments["positions"] = torch.from_numpy(arguments["positions"]).to(device, torch.int32)
    seconds = []
    for _ in range(1 + STEPS):
        began = time.perf_counter()
        model.zero_grad()
        with torch.autocast(device, dtype, enabled=device == "cuda"):
            logits = model(tokens[None].int(), **arguments)
        loss = functional.cross_entropy(logits[0, sources], targets)
        loss.backward()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    gradients = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "seconds": seconds[1:],
        "peak_bytes": int(peak) * (1 if device == "cuda" else 1024),
        "loss": float(loss),
        "gradient_norm": float(gradients.double().norm()),
        "tokens": len(tokens),
    }


def main(arguments: list[str] | None = None) -> None:
    """Runs both forms in turns and writes the result."""
    options = parser(__doc__)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--form", choices=FORMS, help="runs one form in this process, and prints its result")
    options.add_argument("--turns", type=int, default=3, help="processes of each form")
    parsed = options.parse_args(arguments)
    if parsed.form:
        print(json.dumps(run(parsed.form, parsed.device)))
        return
    forms: dict[str, Any] = {}
    for _ in range(parsed.turns):
        for form in FORMS:
            command = [sys.executable, "-P", "-m", "benchmarks.grpo_step", "--form", form, "--device", parsed.device]
            said = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            if form in forms:
                said["seconds"] += forms[form]["seconds"]
                said["peak_bytes"] = max(said["peak_bytes"], forms[form]["peak_bytes"])
            forms[form] = said
    cuda = parsed.device == "cuda"
    result = {"device": device_name() if cuda else "CPU", "dtype": "bfloat16" if cuda else "float32"}
    result |= {"environment": environment(), "forms": forms}
    print(grpo(result))
    write(parsed.json, result)


if __name__ == "__main__":
    main()
