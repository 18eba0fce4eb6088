"""Small random models of diffusers with inputs: one for every way in which its models call torch's attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch

diffusers = pytest.importorskip("diffusers")

BATCH, TEXT = 2, 7
Inputs = dict[str, Any]


class Family(NamedTuple):
    """A model, how its inputs are built, and the number of its attention calls in one forward."""

    model: Callable[[], torch.nn.Module]
    inputs: Callable[[], Inputs]
    calls: int
    masked: int = 0
    """The number of calls with a mask."""


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def keep(length: int = TEXT) -> torch.Tensor:
    """0/1 ``[batch, length]``, as tokenizers give it: padding behind in one row, in front and in a hole in the
    other."""
    kept = torch.ones(BATCH, length, dtype=torch.int64)
    kept[0, -3:], kept[1, 0], kept[1, 3] = 0, 0, 0
    return kept


def behind(length: int = TEXT) -> torch.Tensor:
    """The same with padding only behind, for models that take the first tokens of a row."""
    return torch.arange(length)[None, :] < torch.tensor([[length - 3], [length]])


STEPS = torch.tensor([3, 500])


def flux(heads: int = 3) -> torch.nn.Module:
    return diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=heads,
        joint_attention_dim=24,
        pooled_projection_dim=20,
        axes_dims_rope=(4, 4, 8),
    )


def flux_inputs(height: int = 3, width: int = 5, text: int = TEXT) -> Inputs:
    grid = torch.meshgrid(torch.zeros(1), torch.arange(float(height)), torch.arange(float(width)), indexing="ij")
    return {
        "hidden_states": random(BATCH, height * width, 4),
        "encoder_hidden_states": random(BATCH, text, 24),
        "pooled_projections": random(BATCH, 20),
        "timestep": STEPS / 1000,
        "img_ids": torch.stack(grid, -1).reshape(-1, 3),
        "txt_ids": torch.zeros(text, 3),
    }


def sd3() -> torch.nn.Module:
    return diffusers.SD3Transformer2DModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=24,
        caption_projection_dim=32,
        pooled_projection_dim=20,
        pos_embed_max_size=8,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )


def sd3_inputs() -> Inputs:
    return {
        "hidden_states": random(BATCH, 4, 6, 8),
        "encoder_hidden_states": random(BATCH, TEXT, 24),
        "pooled_projections": random(BATCH, 20),
        "timestep": STEPS,
    }


def unet() -> torch.nn.Module:
    return diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=24,
        attention_head_dim=2,
        norm_num_groups=8,
    )


def unet_inputs() -> Inputs:
    return {
        "sample": random(BATCH, 4, 8, 6),
        "timestep": STEPS,
        "encoder_hidden_states": random(BATCH, TEXT, 24),
        "encoder_attention_mask": keep(),
    }


def autoencoder() -> torch.nn.Module:
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
    )


def wan() -> torch.nn.Module:
    return diffusers.WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=24,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        image_dim=20,
        added_kv_proj_dim=24,
        rope_max_seq_len=16,
    )


def wan_inputs() -> Inputs:
    return {
        "hidden_states": random(BATCH, 4, 2, 6, 4),
        "timestep": STEPS,
        "encoder_hidden_states": random(
            BATCH, 512, 24
        ),  # the model takes the last 512 tokens for text, and those before for images
        "encoder_hidden_states_image": random(BATCH, 5, 20),
    }


def ltx() -> torch.nn.Module:
    return diffusers.LTXVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=12,
        cross_attention_dim=24,
        num_layers=2,
        caption_channels=20,
    )


def ltx_inputs() -> Inputs:
    return {
        "hidden_states": random(BATCH, 2 * 3 * 5, 4),
        "encoder_hidden_states": random(BATCH, TEXT, 20),
        "timestep": STEPS,
        "encoder_attention_mask": keep(),
        "num_frames": 2,
        "height": 3,
        "width": 5,
    }


def lumina2() -> torch.nn.Module:
    return diffusers.Lumina2Transformer2DModel(
        sample_size=8,
        in_channels=4,
        hidden_size=32,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=4,
        num_kv_heads=2,
        multiple_of=16,
        axes_dim_rope=(4, 2, 2),
        axes_lens=(32, 16, 16),
        cap_feat_dim=24,
    )


def lumina2_inputs() -> Inputs:
    return {
        "hidden_states": random(BATCH, 4, 8, 6),
        "timestep": STEPS / 1000,
        "encoder_hidden_states": random(BATCH, TEXT, 24),
        "encoder_attention_mask": behind(),
    }


def qwen_image() -> torch.nn.Module:
    return diffusers.QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=24,
        axes_dims_rope=(4, 6, 6),
    )


def qwen_image_inputs() -> Inputs:
    return {
        "hidden_states": random(BATCH, 15, 16),
        "encoder_hidden_states": random(BATCH, TEXT, 24),
        "encoder_hidden_states_mask": keep(),
        "timestep": STEPS / 1000,
        "img_shapes": [(1, 3, 5)] * BATCH,
    }


FAMILIES: Mapping[str, Family] = {
    "flux": Family(flux, flux_inputs, calls=3),
    "sd3": Family(sd3, sd3_inputs, calls=3),
    "unet": Family(unet, unet_inputs, calls=8, masked=4),
    "autoencoder": Family(autoencoder, lambda: {"sample": random(BATCH, 3, 12, 10)}, calls=2),
    "wan": Family(wan, wan_inputs, calls=6),
    "ltx": Family(ltx, ltx_inputs, calls=4, masked=2),
    "lumina2": Family(lumina2, lumina2_inputs, calls=4, masked=3),
    "qwen_image": Family(qwen_image, qwen_image_inputs, calls=2, masked=2),
}


def built(family: str, device: str) -> tuple[torch.nn.Module, Inputs]:
    """The model with weights so large that attention decides the result, and its inputs, in float32."""
    torch.manual_seed(0)
    model = FAMILIES[family].model().eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.mul_(3)
        elif not parameter.any():  # scale_shift tables and the like are initialised with zeros
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model.to(device), moved(FAMILIES[family].inputs(), device)


def moved(inputs: Inputs, *to: Any) -> Inputs:
    """Every tensor ``.to(device)``; a named dtype applies to floating tensors alone."""
    return {
        name: value.to(*to)
        if isinstance(value, torch.Tensor) and (isinstance(to[0], str) or value.is_floating_point())
        else value
        for name, value in inputs.items()
    }
