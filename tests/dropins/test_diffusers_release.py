"""Tests what diffusers does around attention: whole pipelines, its processors and backends, context parallelism."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

import diffusers_scenes
from context_torch_worker import Failed, World, in_ranks
from diffusers.models.attention_dispatch import AttentionBackendName
from diffusers_models import FAMILIES, built, random
from frameworks import spied

from torch_frontend import diffusers as dropin
from torch_frontend.diffusers import installed

ROOT = Path(diffusers.__file__).parent


def vae() -> Any:
    """The autoencoder of images, with the latent channels of the transformers below."""
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2, latent_channels=4, norm_num_groups=4,
        up_block_types=("UpDecoderBlock2D",) * 2, scaling_factor=1.0, shift_factor=0.0, sample_size=8,
    )  # fmt: skip


def flux() -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=3,
        joint_attention_dim=24, pooled_projection_dim=20, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    parts = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipeline = diffusers.FluxPipeline(scheduler=scheduler, vae=vae(), transformer=transformer, **parts)
    call = {"prompt_embeds": random(1, 7, 24), "pooled_prompt_embeds": random(1, 20), "height": 12, "width": 16}
    return pipeline, call


def sd3() -> tuple[Any, dict[str, Any]]:
    transformer, _ = built("sd3", "cpu")
    names = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3")
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipeline = diffusers.StableDiffusion3Pipeline(
        transformer=transformer, scheduler=scheduler, vae=vae(), **dict.fromkeys(names)
    )
    text = {"prompt_embeds": random(1, 7, 24), "pooled_prompt_embeds": random(1, 20)}
    negative = {f"negative_{name}": value.flip(-1) for name, value in text.items()}
    return pipeline, {**text, **negative, "guidance_scale": 3.0, "height": 12, "width": 16}


def wan() -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    transformer = diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=16, out_channels=16, text_dim=24, freq_dim=16,
        ffn_dim=32, num_layers=2, rope_max_seq_len=16,
    )  # fmt: skip
    frames = diffusers.AutoencoderKLWan(base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    pipeline = diffusers.WanPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=frames,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=transformer,
    )
    text = {"prompt_embeds": random(1, 9, 24), "negative_prompt_embeds": random(1, 9, 24).flip(-1)}
    return pipeline, {**text, "guidance_scale": 3.0, "height": 32, "width": 48, "num_frames": 5}


# One decoder of images or video, and a transformer once per step and per prompt.
PIPELINES: dict[str, tuple[Callable[[], tuple[Any, dict[str, Any]]], int, int]] = {
    "flux": (flux, 2 * FAMILIES["flux"].calls, 1),
    "sd3": (sd3, 2 * FAMILIES["sd3"].calls, 1),  # both prompts in one batch
    "wan": (wan, 2 * 2 * 2 * 2, 2),  # steps, prompts, layers, self and text; the decoder runs for each latent frame
}
"""By name: the pipeline, its calls of attention in two steps, and those of its decoder."""


def produce(name: str) -> Any:
    """The pixels of two steps."""
    pipeline, call = PIPELINES[name][0]()
    pipeline.set_progress_bar_config(disable=True)
    seeded = torch.Generator().manual_seed(0)
    return pipeline(**call, num_inference_steps=2, output_type="pt", return_dict=False, generator=seeded)[0]


@pytest.mark.parametrize("name", PIPELINES)
def test_a_whole_pipeline_runs_on_ours(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, calls, decoder = PIPELINES[name]
    expected = produce(name)
    with spied() as ran, installed():
        actual = produce(name)
    assert len(ran) == calls + decoder
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    with monkeypatch.context() as patch, installed():
        right = dropin.attention_dispatch
        patch.setattr(dropin, "attention_dispatch", lambda *call, **options: right(*call, **options) * 1.1)
        wrong = produce(name)
    assert (wrong - expected).abs().max() > 1e-4


COMPUTE_SCORES_THEMSELVES = {
    "models/attention_processor.py": {
        *("AttnProcessor", "AttnAddedKVProcessor", "CustomDiffusionAttnProcessor", "IPAdapterAttnProcessor"),
        *("SlicedAttnProcessor", "SlicedAttnAddedKVProcessor"),
    },
    "pipelines/ledits_pp/pipeline_leditspp_stable_diffusion.py": {"LEDITSCrossAttnProcessor"},
    "pipelines/ledits_pp/pipeline_leditspp_stable_diffusion_xl.py": {"LEDITSCrossAttnProcessor"},
}
XFORMERS = {
    "models/attention_processor.py": {
        *("XFormersAttnProcessor", "XFormersAttnAddedKVProcessor", "XFormersJointAttnProcessor"),
        *("CustomDiffusionXFormersAttnProcessor", "IPAdapterXFormersAttnProcessor"),
    }
}
NO_SOFTMAX_OF_ALL_KEYS = {
    "models/attention_processor.py": {
        *("SanaMultiscaleAttnProcessor2_0", "SanaLinearAttnProcessor2_0"),
        *("PAGCFGSanaLinearAttnProcessor2_0", "PAGIdentitySanaLinearAttnProcessor2_0"),
    },
    "models/transformers/transformer_sana_video.py": {"SanaLinearAttnProcessor3_0"},
    "models/autoencoders/ltx2_diffusion_decoder.py": {"LTX2VideoVaeNeighborhoodNattenProcessor"},
}
"""Linear attention, and attention of neighbours by NATTEN."""


def processors() -> dict[tuple[str, str], str]:
    """The source of every attention processor, by (file, class), without deprecated pipelines."""
    found = {}
    for path in ROOT.rglob("*.py"):
        name = path.relative_to(ROOT).as_posix()
        if "Processor" in (text := path.read_text(encoding="utf-8")) and "/deprecated/" not in name:
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ClassDef) and "Processor" in node.name:
                    found[name, node.name] = ast.unparse(node)
    return found


@pytest.mark.slow
def test_every_processor_reaches_torchs_function_or_is_documented() -> None:
    escaping = {
        (file, name)
        for table in (COMPUTE_SCORES_THEMSELVES, XFORMERS, NO_SOFTMAX_OF_ALL_KEYS)
        for file, names in table.items()
        for name in names
    }
    sources = processors()
    reaching = {
        key
        for key, source in sources.items()
        if "dispatch_attention_fn(" in source or "F.scaled_dot_product_attention(" in source
    }
    assert len(reaching) > 90
    defining = {key for key, source in sources.items() if "def __call__(self, attn" in source}
    assert defining - reaching == escaping


OWN_KERNELS = {
    *("flash", "flash_hub", "flash_varlen", "flash_varlen_hub", "flash_4_hub", "_flash_3", "_flash_varlen_3"),
    *("_flash_3_hub", "_flash_3_varlen_hub", "aiter_fa2_hub", "flex", "_native_npu", "_native_xla", "sage", "sage_hub"),
    *("sage_blackwell_hub", "sage_varlen", "_sage_qk_int8_pv_fp8_cuda", "_sage_qk_int8_pv_fp8_cuda_sm90"),
    *("_sage_qk_int8_pv_fp16_cuda", "_sage_qk_int8_pv_fp16_triton", "xformers"),
}
"""diffusers' backends that do not call torch's function."""
TORCHS_FUNCTION = {"native", "_native_cudnn", "_native_efficient", "_native_flash", "_native_math"}


def test_the_documentation_lists_every_backend_of_diffusers() -> None:
    assert {member.value for member in AttentionBackendName} == OWN_KERNELS | TORCHS_FUNCTION
    page = (Path(__file__).parents[2] / "docs/how_to/migrate/diffusers.md").read_text()
    assert [name for name in sorted(OWN_KERNELS | TORCHS_FUNCTION) if f"`{name}`" not in page] == []


@pytest.mark.slow
@pytest.mark.parametrize("degree", ["ulysses_degree", "ring_degree"])
def test_context_parallelism_on_native(degree: str, tmp_path: Path) -> None:
    jobs = {degree: ("diffusers_scenes", "compared", (degree,))}
    for results in in_ranks([World("diffusers", 2, jobs)], tmp_path, seconds=550)["diffusers"]:
        assert not isinstance(results[degree], Failed), results[degree].text
        assert results[degree] == (diffusers_scenes.CALLS if degree == "ulysses_degree" else [])
