"""Every type of transformers' text and vision models, as small as its configuration allows."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
import transformers_lists as lists
from transformers.models.auto import modeling_auto
from transformers_models import draw_weights

from attn_core.errors import SpecError

VOCABULARY = 97
KINDS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "encoder": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "vision": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
}
CASES = [(kind, name) for kind, names in KINDS.items() for name in names]
LARGEST = 8_000_000  # parameters

_WIDTH, _HEADS, _HEAD, _INNER, _LAYERS = 32, 4, 8, 48, 2
SIZES: dict[str, Any] = {}
for _value, _names in (
    (VOCABULARY, "vocab_size n_vocab text_vocab_size vocab_size_per_layer_input pad_vocab_size src_vocab_size"),
    (_WIDTH, "hidden_size d_model n_embd dim embed_dim embedding_size projection_dim word_embed_proj_dim emb_dim"),
    (_WIDTH, "encoder_hidden_size decoder_hidden_size lru_width attention_hidden_size hidden_dim mamba_d_model"),
    (_LAYERS, "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers"),
    (_LAYERS, "num_decoder_layers num_dense_layers first_k_dense_replace moe_layer_start_index n_hash_layers"),
    (_HEADS, "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads"),
    (2, "num_key_value_heads n_head_kv num_kv_heads multi_query_group_num"),
    (_HEAD, "head_dim d_kv attention_head_dim global_head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim"),
    (
        _HEAD,
        "rotary_dim kv_channels hidden_size_per_layer_input attention_head_size linear_key_head_dim index_head_dim",
    ),
    (_HEAD, "linear_value_head_dim mamba_d_head mamba_head_dim attn_head_dim swa_head_dim"),
    (_INNER, "intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim ffn_hidden_size inner_dim"),
    (16, "moe_intermediate_size q_lora_rank kv_lora_rank shared_expert_intermediate_size expert_ffn_hidden_size"),
    (16, "o_lora_rank shared_intermediate_size moe_shared_expert_intermediate_size moe_latent_size time_step_rank"),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts num_moe_experts n_group_experts"),
    (2, "num_experts_per_tok moe_k num_experts_per_token moe_topk top_k_experts num_selected_experts moe_top_k"),
    (1, "n_group topk_group n_groups n_shared_experts mamba_n_groups num_shared_experts num_nextn_predict_layers"),
    (4, "sliding_window attention_window_size local_attention_window mamba_d_state ssm_state_size state_size"),
    (_HEAD, "linear_head_dim"),
    (4, "linear_num_heads linear_num_key_heads linear_num_value_heads index_n_heads mamba_n_heads mamba_num_heads"),
    (64, "max_position_embeddings n_positions max_seq_len max_sequence_length max_source_positions"),
    (64, "max_target_positions context_length mamba_chunk_size"),
    (16, "image_size img_size"),
    (4, "patch_size"),
):
    SIZES |= dict.fromkeys(_names.split(), _value)
STILL = ("dropout", "dropout_rate", "drop_path_rate", "layerdrop", "pdrop", "jitter_noise", "dropout_prob", "_drop")
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "decoder_start_token_id": 1}


class Unbuildable(Exception):
    """A type without a small model here."""


def shrunk(config: Any) -> dict[str, Any]:
    """Keywords that make a type's configuration small, derived from its defaults."""
    given: dict[str, Any] = {}
    accepted = set(config.to_dict()) | set(getattr(config, "attribute_map", {}))
    for name in accepted:
        try:
            value = getattr(config, name, None)
        except Exception:  # a length that differs from layer to layer
            value = None
        if name in SIZES and (value is None or isinstance(value, int)):
            if value is not None or name in ("num_key_value_heads", "head_dim"):
                given[name] = SIZES[name]
        elif any(name.endswith(word) for word in STILL) and isinstance(value, float):
            given[name] = 0.0
        elif name in TOKENS:
            given[name] = TOKENS[name]
    if "kv_lora_rank" in given:  # each head has its own keys
        given["num_key_value_heads"] = _HEADS
    return given


def configured(kind: str, name: str, build: Any) -> Any:
    """A small configuration of a type for a class of models, with small parts."""
    config = _small(transformers.CONFIG_MAPPING[name], name)
    expected = getattr(build, "config_class", None)
    if expected is not None and not isinstance(config, expected):
        config = config.get_text_config()
    decoders = [config] if kind == "causal" else [config.decoder] if name == "encoder-decoder" else []
    for each in decoders:
        if hasattr(each, "is_decoder"):
            each.is_decoder = True
    return config


def _small(kind: Any, name: str) -> Any:
    default = kind()
    given = shrunk(default)
    fixed = getattr(type(default), getattr(default, "attribute_map", {}).get("layer_types", "layer_types"), None)
    if getattr(default, "layer_types", None) and not isinstance(fixed, property):
        types = list(dict.fromkeys(default.layer_types))
        given["layer_types"] = (types * _LAYERS)[: max(_LAYERS, len(types))]
        given["num_hidden_layers"] = len(given["layer_types"])
    if getattr(default, "mlp_layer_types", None):
        given["mlp_layer_types"] = list(default.mlp_layer_types)[-given.get("num_hidden_layers", _LAYERS) :]
    rope = getattr(default, "rope_parameters", None)
    if rope and "mrope_section" in str(rope):
        given["rope_parameters"] = rope | {"mrope_section": [2, 1, 1]}
    for part in getattr(default, "sub_configs", {}):
        child = getattr(default, part, None)
        if child is not None:
            given[part] = _small(type(child), f"{name}.{part}").to_dict()
    given |= lists.EXTRA.get(name, {})
    return kind(**{key: value for key, value in given.items() if value is not ...})


def model(kind: str, name: str, implementation: str) -> Any:
    """A small model of a type with the same weights for every implementation.

    Raises:
        Unbuildable: with transformers' error.
    """
    chosen = KINDS[kind][name]
    try:
        build = getattr(transformers, chosen[0] if isinstance(chosen, (tuple, list)) else chosen)
        with torch.device("meta"):
            config = configured(kind, name, build)
            size = sum(
                each.numel() for each in build._from_config(config, attn_implementation=implementation).parameters()
            )
    except SpecError:
        raise
    except Exception as error:
        raise Unbuildable(f"{type(error).__name__}: {error}") from error
    if size > LARGEST:
        raise Unbuildable(f"{size} parameters")
    torch.manual_seed(0)
    made = draw_weights(build._from_config(configured(kind, name, build), attn_implementation=implementation), 0.1)
    return made.double() if name in lists.DOUBLE else made


def accepts(made: Any, keyword: str) -> bool:
    """Whether a model's forward names a keyword."""
    return keyword in inspect.signature(made.forward).parameters
