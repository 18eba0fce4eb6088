"""Tests libraries that train transformers' models: TRL, PEFT and accelerate, on our attention and on ``eager``."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers_models import build as build_model

from torch_frontend import huggingface

pytestmark = pytest.mark.usefixtures("registered")

VOCABULARY, RATE = 97, 0.05
LENGTHS = (5, 9, 3, 7, 6, 4, 8, 5)
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1}


def build(name: str) -> Any:
    return build_model(transformers.LlamaConfig(**SIZES), name, factor=5.0, noise=0.0)


def documents() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]


def loss_alone(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean loss of a batch's labels, from each document by itself: documents begin where positions are 0."""
    rows, labels = batch["input_ids"], batch["labels"]
    positions = batch.get("position_ids", torch.arange(rows.shape[1]).expand(rows.shape))
    total, count = torch.zeros(()), 0
    for row, mine, places in zip(rows, labels, positions):
        starts = (places == 0).nonzero().flatten().tolist()
        for begin, end in zip(starts, [*starts[1:], len(row)]):
            logits = model(input_ids=row[None, begin:end]).logits[0, :-1]
            wanted = mine[begin + 1 : end]
            total = total + torch.nn.functional.cross_entropy(logits, wanted, ignore_index=-100, reduction="sum")
            count += int((wanted != -100).sum())
    return total / count


def step(model: Any, loss: torch.Tensor) -> None:
    """One step of gradient descent."""
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= RATE * parameter.grad


def compare_steps(actual: Any, expected: Any, start: Any, share: float = 2e-3, rounding: float = 0.0) -> list[str]:
    """Compares what two models learned since their start, parameter by parameter; returns the parameters' names."""
    starts, others = dict(start.named_parameters()), dict(expected.named_parameters())
    learning = {name: mine for name, mine in actual.named_parameters() if mine.requires_grad}
    for name, mine in learning.items():
        learned = (others[name] - starts[name]).detach().abs().max()
        error = (mine - others[name]).detach().abs().max()
        assert learned > 0 and error <= share * learned + rounding, f"{name}: {error}"
    return list(learning)


PACKING: dict[str, dict[str, Any]] = {
    "padding_free": {"padding_free": True, "max_length": None},
    "padding_free, padded to a multiple": {"padding_free": True, "max_length": None, "pad_to_multiple_of": 8},
    "bfd": {"packing": True, "packing_strategy": "bfd", "max_length": 16},
    "bfd, checkpointed": {"packing": True, "packing_strategy": "bfd", "max_length": 16, "gradient_checkpointing": True},
    "wrapped": {"packing": True, "packing_strategy": "wrapped", "max_length": 16},
    "wrapped, padding_free": {"packing": True, "packing_strategy": "wrapped", "max_length": 16, "padding_free": True},
    "padded": {"max_length": None},
}


@pytest.mark.parametrize("how", PACKING)
def test_trl_trains_on_documents_as_if_each_were_alone(how: str, tmp_path: Path) -> None:
    """Two steps of SFTTrainer: the losses, and what every parameter learned. With "wrapped", TRL cuts the stream of
    all documents into rows, and each row counts as one document."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w1"))
    names = {"pad_token": "w0", "bos_token": "w1", "eos_token": "w2"}
    options = {"gradient_checkpointing": False} | PACKING[how]
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2, report_to="none", use_cpu=True,
        bf16=False, optim="sgd", learning_rate=RATE, lr_scheduler_type="constant", max_grad_norm=0.0, logging_steps=1,
        save_strategy="no", disable_tqdm=True, **options,
    )  # fmt: skip
    model = build(huggingface.NAME)
    trainer = trl.SFTTrainer(
        model,
        arguments,
        train_dataset=datasets.Dataset.from_dict({"input_ids": documents()}),
        processing_class=transformers.PreTrainedTokenizerFast(tokenizer_object=words, **names),
    )
    batches: list[dict[str, torch.Tensor]] = []
    model.register_forward_pre_hook(lambda _, args, given: batches.append(dict(given)), with_kwargs=True)
    trainer.train()
    assert model.config._attn_implementation == huggingface.NAME and len(batches) == 2
    packed = "padding_free" in how or "bfd" in how
    assert all(("cu_seq_lens_q" in batch and batch["input_ids"].shape[0] == 1) == packed for batch in batches)
    alone, start = build("eager"), build("eager")
    for batch, logged in zip(batches, trainer.state.log_history):
        if how == "padded":
            given = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
            loss = alone(**given, labels=batch["labels"]).loss
        else:
            loss = loss_alone(alone, batch)
        assert abs(logged["loss"] - float(loss)) < 2e-5 * float(loss)
        step(alone, loss)
    compare_steps(model, alone, start, rounding=1e-7)


def test_mixed_documents_would_be_noticed() -> None:
    """Documents that see each other change the loss by 50 times what the test above allows."""
    ids, model = torch.tensor([documents()[1] + documents()[3]]), build(huggingface.NAME)
    positions = torch.cat([torch.arange(9), torch.arange(7)])[None]
    labels = ids.masked_fill(positions == 0, -100)
    alone = loss_alone(model, {"input_ids": ids, "labels": labels, "position_ids": positions})
    assert abs(float(model(ids, labels=labels).loss) - float(alone)) > 1e-3 * float(alone)
    assert abs(float(model(ids, labels=labels, position_ids=positions).loss) - float(alone)) < 2e-5 * float(alone)


def rows() -> dict[str, torch.Tensor]:
    """Two rows of documents with padding to the right of the first."""
    ids = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(2))
    keep = torch.ones_like(ids)
    keep[0, 6:] = 0
    return {"input_ids": ids * keep, "attention_mask": keep, "labels": ids.masked_fill(keep == 0, -100)}


def adapted(name: str, config: Any) -> Any:
    """A model with adapters; equal weights for every attention."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(build(name), config)
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    return model


def test_lora_adapters_train_and_merge() -> None:
    peft = pytest.importorskip("peft")
    names = ["q_proj", "k_proj", "v_proj", "o_proj"]
    models = [
        adapted(name, peft.LoraConfig(r=3, lora_alpha=6, target_modules=names, task_type="CAUSAL_LM", lora_dropout=0.0))
        for name in ("eager", huggingface.NAME)
    ]
    start = copy.deepcopy(models[0])
    for _ in range(2):
        losses = [model(**rows()).loss for model in models]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)
        for model, loss in zip(models, losses):
            step(model, loss)
    names = compare_steps(models[1], models[0], start)
    assert len(names) == 16 and all("lora_" in name for name in names)
    ours = models[1].eval()
    with torch.no_grad():
        apart = ours(**rows()).logits
        merged = ours.merge_and_unload()
        assert merged.config._attn_implementation == huggingface.NAME
        torch.testing.assert_close(merged(**rows()).logits, apart, rtol=1e-4, atol=1e-4)


def test_prefixes_in_the_cache_are_seen() -> None:
    """Prefix tuning puts trained keys and values before the row, and lengthens the padding mask."""
    peft = pytest.importorskip("peft")
    models = [
        adapted(name, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
        for name in ("eager", huggingface.NAME)
    ]
    given = {name: rows()[name] for name in ("input_ids", "attention_mask")}
    keep, outputs = given["attention_mask"].bool(), []
    for model in models:
        logits = model(**given).logits[keep]
        logits.square().mean().backward()
        slopes = [each.grad for each in model.parameters() if each.requires_grad]
        assert slopes
        outputs.append((logits.detach(), *slopes))
    for expected, actual in zip(*outputs):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
    assert not torch.allclose(outputs[1][0], build(huggingface.NAME)(**given).logits[keep], atol=1e-2)


@pytest.mark.parametrize(("precision", "share"), [("no", 2e-3), ("bf16", 0.1)])
def test_accelerate_accumulates_gradients(precision: str, share: float) -> None:
    """``Accelerator.prepare``, and two steps of two accumulated batches each, compared with ``eager``."""
    accelerate = pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState, GradientState

    trained = []
    for name in ("eager", huggingface.NAME):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        accelerator = accelerate.Accelerator(mixed_precision=precision, gradient_accumulation_steps=2, cpu=True)
        model = build(name)
        data = torch.randint(3, VOCABULARY, (8, 9), generator=torch.Generator().manual_seed(3))
        model, optimizer, loader = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=RATE), torch.utils.data.DataLoader(data, batch_size=2)
        )
        start, steps = copy.deepcopy(accelerator.unwrap_model(model)), 0
        for ids in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(input_ids=ids, labels=ids).loss)
                steps += accelerator.sync_gradients
                optimizer.step()
                optimizer.zero_grad()
        assert steps == 2
        trained.append(accelerator.unwrap_model(model))
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    compare_steps(trained[1], trained[0], start, share)


DEVICES: dict[str, dict[str, Any]] = {
    "one device": {"": "cpu"},
    "a layer on disk": {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    | {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"},
}


@pytest.mark.parametrize("where", DEVICES)
def test_hooks_of_device_maps_keep_the_mask(where: str, tmp_path: Path) -> None:
    """A loaded model whose layers' inputs accelerate moves to their device: logits and generated tokens."""
    pytest.importorskip("accelerate")
    build("eager").save_pretrained(tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model",
        device_map=DEVICES[where],
        offload_folder=str(tmp_path / "offload"),
        attn_implementation=huggingface.NAME,
        dtype=torch.float32,
    )
    assert (model.model.layers[1].self_attn.q_proj.weight.device.type == "meta") == (where == "a layer on disk")
    given = {name: rows()[name] for name in ("input_ids", "attention_mask")}
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1]] * 2)
    limits = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    eager, keep = build("eager").eval(), given["attention_mask"].bool()
    with torch.no_grad():
        torch.testing.assert_close(model(**given).logits[keep], eager(**given).logits[keep], rtol=1e-4, atol=1e-4)
        ids = given["input_ids"]
        expected = eager(ids, position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(model(ids, position_ids=positions).logits, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(model.generate(ids, **limits), eager.generate(ids, **limits))
