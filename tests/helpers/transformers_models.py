"""Small random models of transformers, with weights so large that attention decides their results."""

from __future__ import annotations

from typing import Any

import torch
import transformers

NAME = "attn_core"
VOCABULARY, WINDOW = 97, 5
DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
DECODERS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**DECODER),
    "gemma2": lambda: transformers.Gemma2Config(
        **DECODER | ALTERNATING, attn_logit_softcapping=3.0, query_pre_attn_scalar=17
    ),
    "mistral": lambda: transformers.MistralConfig(**DECODER, sliding_window=WINDOW),
    "qwen3": lambda: transformers.Qwen3Config(**DECODER | ALTERNATING, use_sliding_window=True),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **DECODER | ALTERNATING,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        experts_implementation="eager",  # math, which has every dtype on every device
    ),
}
"""Full attention; a window in every second layer, with a softcap; a window; in every second layer; with sinks."""


def build(
    config: Any,
    implementation: str = NAME,
    kind: Any = transformers.AutoModelForCausalLM,
    *,
    factor: float = 6.0,
    noise: float = 0.3,
    seed: int = 0,
    device: str = "cpu",
) -> Any:
    """A model with the same weights for every implementation.

    Args:
        factor: of all matrices; noise: the size of what is added to vectors, so that sinks and biases differ.
    """
    torch.manual_seed(seed)
    model = kind.from_config(config, attn_implementation=implementation).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(factor)
        elif noise:
            parameter.data.add_(torch.randn_like(parameter) * noise)
    return model.to(device)


def draw_weights(model: Any, noise: float) -> Any:
    """Draws the matrices of a model in eval mode anew, each for outputs of one size, and adds noise to its vectors."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.eval().parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(drawn * (1.5 / max(parameter[:1].numel(), 1) ** 0.5))
            else:
                parameter.add_(drawn * noise)
    return model


def check_gradients(ours: Any, eager: Any, rounding: float = 0.0) -> None:
    """Compares the gradient of every parameter of two models.

    Args:
        rounding: the share of the largest gradient that a gradient may differ by: that of a bias of keys is 0 in exact
            arithmetic.
    """
    largest = max(float(each.grad.abs().max()) for each in eager.parameters() if each.grad is not None)
    for (name, other), (_, parameter) in zip(ours.named_parameters(), eager.named_parameters(), strict=True):
        if parameter.grad is None:
            assert other.grad is None, name
            continue
        torch.testing.assert_close(
            other.grad,
            parameter.grad,
            rtol=1e-3,
            atol=1e-4 * float(parameter.grad.abs().max()) + 1e-7 + rounding * largest,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def slopes_of(model: Any, logits: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradient of every parameter that has one, of a loss that weights all logits differently."""
    model.zero_grad()
    (logits * torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def check_slopes(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str = "") -> None:
    """Compares gradients by name, relative to the largest number of each, and a little of all."""
    assert actual.keys() == expected.keys()
    largest = max(float(each.abs().max()) for each in expected.values() if each.numel())
    for name, slope in ((name, each) for name, each in expected.items() if each.numel()):
        error = float((actual[name] - slope).abs().max())
        assert error <= 2e-3 * float(slope.abs().max()) + 1e-5 * largest, f"gradient of {name}{what}: {error}"
