"""Exceptions for single types of transformers' models in the sweep: their sizes, and comparisons that are
impossible."""

from __future__ import annotations

from typing import Any

VERSION = "5.23.0"
"""The version of transformers that these lists are for; with another version, types that are not named are left out."""

EXTRA: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8},
    "encoder-decoder.decoder": {"is_decoder": True, "add_cross_attention": True},
    "esm": {"vocab_size": 97, "pad_token_id": 0, "mask_token_id": 95},
    "esmc": {"num_key_value_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "mamba_n_heads": 8, "mamba_d_head": 8},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8},
    "luke": {"entity_vocab_size": 10},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "neomme": {"head_dim": 16},
    "qwen3_asr": {"eos_token_id": 2},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "roc_bert": {"pronunciation_vocab_size": 97, "shape_vocab_size": 97},
    "swin": {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2, "patch_size": 2},
    "swinv2": {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2, "patch_size": 2},
    "donut-swin": {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2, "patch_size": 2},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "zaya": {"num_experts_per_tok": 1},
}
"""Sizes of a type, or of a part of it, in addition to the sizes that fit every type."""

FIRST: dict[str, int] = dict.fromkeys(
    ["camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"], 1
)
"""The position of a document's first token if it is not 0: these types count from their padding token on."""

DOUBLE = {"mobilebert": "no norms: its gradients grow to 100, and float32 rounding with them"}
"""Compared in float64."""

MIXED: dict[str, str] = dict.fromkeys(
    ["bailing_hybrid", "kimi_linear", "minimax", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"]
    + ["qwen3_5_text", "qwen3_next"],
    "linear attention carries its state from document to document",
)
MIXED |= dict.fromkeys(
    ["bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "mamba", "mamba2", "nemotron_h"]
    + ["recurrent_gemma", "xlstm"],
    "a recurrent layer carries its state from document to document",
)
MIXED |= dict.fromkeys(
    ["inkling_text", "inkling2_text", "lfm2_moe", "lfm3", "zaya"],
    "a convolution reads the last tokens of the document before",
)
MIXED["deepseek_v4"] = "a compressor pools runs of tokens, counted from the row's start"
"""Types that mix packed documents outside of attention: compared with the packed row on eager."""

NO_ATTENTION = "no attention"
UNBUILDABLE: dict[str, str] = {
    "causal blt": "its byte tables alone are 96 million parameters",
    "causal cohere_compass_text": "its layers have no rope_parameters for full attention",
    "causal dbrx": "its attn_config has no rope_theta",
    "causal dots3_note": "num_key_value_heads differs from layer to layer, and must match the heads",
    "causal dots3_note_text": "num_key_value_heads differs from layer to layer, and must match the heads",
    "causal gemma3n": "needs timm",
    "causal gemma4_assistant": "its layers read the cache of another model",
    "causal gemma4_unified_assistant": "its layers read the cache of another model",
    "causal musicgen": "several text configurations",
    "causal musicgen_melody": "several text configurations",
    "causal qwen4_exp": "its default configuration leaves sizes out",
    "causal qwen4_exp_text": "its default configuration leaves sizes out",
    "causal xlstm": NO_ATTENTION,
    "causal zamba": "shared layers at fixed places of 76",
    "causal zamba2": "shared layers at fixed places of 54",
    "seq2seq nemo_speechlm": "widths of several parts that must match",
    "seq2seq vibevoice_asr": "its acoustic parts are 686 million parameters",
    "seq2seq voxtral_realtime": "takes sound beside text",
    "vision bit": NO_ATTENTION,
    "vision convnext": NO_ATTENTION,
    "vision convnextv2": NO_ATTENTION,
    "vision efficientnet": NO_ATTENTION,
    "vision hgnet_v2": NO_ATTENTION,
    "vision poolformer": NO_ATTENTION,
    "vision pp_lcnet": NO_ATTENTION,
    "vision regnet": NO_ATTENTION,
    "vision resnet": NO_ATTENTION,
    "vision shieldgemma2": "takes text beside pictures",
    "vision siglip2": "takes patches of pictures, not pictures",
    "vision textnet": NO_ATTENTION,
    "vision timm_wrapper": "needs timm",
}
"""Types without a small model here, or whose small model does not run on eager with the sweep's inputs."""
