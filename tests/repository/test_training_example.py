"""Tests the training example on a tiny model: torch and Flax give equal losses, JAX traces once, planted faults
show."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("flax")
pytest.importorskip("rich")

from rich.console import Console

from attn_core import SeqInfo
from attn_core.context_parallel.layout import LAYOUTS, build_layout
from attn_core.errors import SpecError
from examples.stages import Stages
from examples.training import __main__ as command
from examples.training import data, ranks, report, weights
from examples.training.config import AdamW, GemmaConfig, Options
from examples.training.jax_nn import JaxNNAttention, with_attention
from examples.training.jax_side import JaxTrainer
from examples.training.run import FAULT, JAX, TORCH, TWIN, compare
from examples.training.spread import FAULT as WRONG_LAYOUT
from examples.training.spread import RANKS, Spread, SpreadRun, packings
from examples.training.steps import train
from examples.training.torch_side import TorchTrainer

TINY = GemmaConfig(
    hidden_size=48,
    mlp_size=80,
    num_layers=2,
    num_heads=6,
    num_kv_heads=3,
    head_dim=8,
    window=7,
    attention_softcap=2.0,  # so low that even the scores and logits of the initial weights are capped
    final_softcap=3.0,
    max_positions=83,
)
OPTIMIZER = AdamW(warmup=2, weight_decay=0.1)
OPTIONS = Options(steps=8, length=211, longest=83, optimizer=OPTIMIZER)
CLOSE = report.CLOSE["float32"]
needs_bridge = pytest.mark.skipif(
    find_spec("jax_tvm_ffi") is None, reason="without jax-tvm-ffi JAX cannot reach torch's kernels"
)


@pytest.fixture(scope="module")
def text() -> data.Text:
    return data.python_documentation()


@pytest.fixture(scope="module")
def batches(text: data.Text) -> list[data.Batch]:
    """The batches that ``compare`` trains on."""
    endless = data.packed_batches(text, OPTIONS.length, OPTIONS.longest, OPTIONS.seed)
    return list(itertools.islice(endless, OPTIONS.steps))


@pytest.fixture(scope="module")
def first() -> weights.Weights:
    """The initial weights of ``compare``."""
    return weights.initial(TINY, OPTIONS.seed)


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    """The whole example on the tiny model, with its control runs."""
    with Stages(Console(file=io.StringIO())) as stages:
        actual = compare(TINY, OPTIONS, stages, controls=True)
    return json.loads(json.dumps(actual))


def torch_losses(
    config: GemmaConfig, first: weights.Weights, batches: list[data.Batch], optimizer: AdamW = OPTIMIZER
) -> np.ndarray:
    trainer = TorchTrainer(config, first, steps=OPTIONS.steps, optimizer=optimizer)
    return np.array(train(trainer, batches)["losses"])


def largest_difference(losses: np.ndarray, others: np.ndarray) -> float:
    return float((np.abs(losses - others) / others).max())


def test_batches_are_whole_documents_of_real_text_in_one_shape(text: data.Text, batches: list[data.Batch]) -> None:
    known = [bytes(paragraph[1:].astype(np.uint8)) for paragraph in text.paragraphs]
    for batch in batches:
        offsets = batch.seq_info.cu_seqlens_q
        assert offsets.shape == batches[0].seq_info.cu_seqlens_q.shape and offsets[-1] == OPTIONS.length
        tokens, targets, counted = (array[0] for array in batch[:3])
        spans = [(start, end) for start, end in itertools.pairwise(offsets) if end > start]
        assert len(spans) > 1
        for start, end in spans:
            assert tokens[start] == data.BEGIN
            document = bytes(tokens[start + 1 : end].astype(np.uint8))
            assert any(paragraph.startswith(document) for paragraph in known)
            assert (targets[start : end - 1] == tokens[start + 1 : end]).all()
            assert counted[start:end].tolist() == [1.0] * (end - start - 1) + [0.0]


def test_dense_rows_run_on_through_the_text(text: data.Text) -> None:
    one, two = itertools.islice(data.dense_batches(text, 3, 290, seed=3), 2)
    assert one.seq_info is None and one.tokens.shape == (3, 290)
    running = np.concatenate([one.tokens.ravel(), two.tokens.ravel()])
    begins = np.flatnonzero(running == data.BEGIN)
    known = {bytes(paragraph[1:].astype(np.uint8)) for paragraph in text.paragraphs}
    assert bytes(running[begins[0] + 1 : begins[1]].astype(np.uint8)) in known
    assert (one.targets[:, :-1] == one.tokens[:, 1:]).all() and one.counted.sum() == 3 * 289


@pytest.mark.slow
def test_losses_agree_and_jax_traces_once(result: dict[str, Any]) -> None:
    ours, theirs = (report.losses(result, name) for name in (TORCH, JAX))
    assert largest_difference(theirs, ours) <= CLOSE
    assert ours[-1] < ours[0] - 0.2, "nothing was learned, so the optimizers were not compared"
    assert result["traces"] == 1


def test_a_batch_of_another_shape_would_be_traced_again(batches: list[data.Batch], first: weights.Weights) -> None:
    trainer = JaxTrainer(replace(TINY, num_layers=1), weights.initial(replace(TINY, num_layers=1), 0), steps=2)
    info = batches[0].seq_info
    used = np.unique(info.cu_seqlens_q)  # without the spare offsets
    assert len(used) < len(info.cu_seqlens_q)
    train(trainer, [batches[0], batches[0]._replace(seq_info=replace(info, cu_seqlens_q=used, cu_seqlens_k=used))])
    assert trainer.traces == 2


def _one_document(batch: data.Batch) -> data.Batch:
    return batch._replace(seq_info=None)


def _boundaries_counted(batch: data.Batch) -> data.Batch:
    return batch._replace(counted=np.ones_like(batch.counted))


FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[data.Batch], data.Batch]]] = {
    "window one wider": ({"window": TINY.window + 1}, {}, lambda batch: batch),
    "window one narrower": ({"window": TINY.window - 1}, {}, lambda batch: batch),
    "no softcap on scores": ({"attention_softcap": None}, {}, lambda batch: batch),
    "no softcap on logits": ({"final_softcap": None}, {}, lambda batch: batch),
    "another base of RoPE": ({"rope_theta": 9000.0}, {}, lambda batch: batch),
    "documents see each other": ({"max_positions": OPTIONS.length}, {}, _one_document),
    "boundaries counted": ({}, {}, _boundaries_counted),
    "optax's own weight decay": ({}, {"weight_decay": 1e-4}, lambda batch: batch),
    "both libraries' own beta2": ({}, {"beta2": 0.999}, lambda batch: batch),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_one_framework_shows(
    name: str, batches: list[data.Batch], first: weights.Weights, result: dict[str, Any]
) -> None:
    model, optimizer, change = FAULTS[name]
    given = [change(batch) for batch in batches]
    losses = torch_losses(replace(TINY, **model), first, given, replace(OPTIMIZER, **optimizer))
    assert largest_difference(losses, report.losses(result, JAX)) > 3 * CLOSE


def test_packed_documents_have_the_loss_of_separate_documents(
    batches: list[data.Batch], first: weights.Weights
) -> None:
    """The loss of a row is that of its documents, each by itself and without seq_info."""
    batch = batches[0]
    expected, count = 0.0, 0.0
    for start, end in itertools.pairwise(batch.seq_info.cu_seqlens_q):
        if end - start > 1:
            alone = data.Batch(*(array[:, start:end] for array in batch[:3]), None)
            expected += torch_losses(TINY, first, [alone])[0] * alone.counted.sum()
            count += alone.counted.sum()
    assert torch_losses(TINY, first, [batch])[0] == pytest.approx(expected / count, rel=1e-6)


def test_the_model_has_the_same_losses_on_ours_and_on_jax_nn(result: dict[str, Any]) -> None:
    ours, theirs = (np.array(run["losses"]) for run in result["swap"]["runs"].values())
    assert largest_difference(ours, theirs) <= CLOSE and ours[-1] < ours[0] - 0.2


def test_the_replacing_attention_is_checked(first: weights.Weights) -> None:
    with pytest.raises(SpecError, match=r"name='flash'.*'ours' or 'jax\.nn'"):
        with_attention("flash", TINY, first, steps=4)
    with pytest.raises(SpecError, match=r"softcap=2\.0: jax\.nn"):
        JaxTrainer(TINY, first, steps=4, attention=JaxNNAttention)


@needs_bridge
def test_the_example_reports_no_failure(result: dict[str, Any]) -> None:
    assert report.failures(result) == []
    assert result["backends"][TORCH] == result["backends"][JAX] == ["math", "math"]
    assert report.difference(result, TWIN).max() > 0, "the control run says nothing about rounding"
    assert report.apart_at_first(result, FAULT) > 10 * report.apart_at_first(result, JAX)


def test_which_results_count_as_failure(result: dict[str, Any]) -> None:
    def failures(**changes: Any) -> str:
        return " ".join(report.failures({**result, **changes}))

    runs, flat = result["runs"], {"losses": [5.0] * 100, "seconds": [0.0] * 100}
    assert "losses differ by" in failures(runs={**runs, JAX: runs[FAULT]})
    assert "losses differ by" in failures(runs={**runs, JAX: {**runs[JAX], "losses": [np.nan] * OPTIONS.steps}})
    assert "traced the step 2 times" in failures(traces=2)
    assert "the attention kernels differ" in failures(backends={TORCH: ["math"], JAX: ["jax_xla"]})
    assert "planted fault changes losses by 0.0e+00" in failures(runs={**runs, FAULT: runs[TORCH]})
    assert "torch did not learn" in failures(runs={TORCH: flat, JAX: flat})


def test_page_and_plot_are_made_from_results(result: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from examples.training.plot import draw

    draw(result, tmp_path / "images" / "training.png")
    assert (tmp_path / "images" / "training.png").read_bytes().startswith(b"\x89PNG")
    page = report.page({"training": result})
    assert "images/training.png" in page and "8 keys in the window instead of 7" in page


def test_the_docs_page_matches_the_stored_results() -> None:
    stored = command.stored()
    assert "training" in stored
    stale = "stale: run python -m examples.training --render"
    assert command.PAGE.read_text(encoding="utf-8") == command.rendered(stored), stale
    for name, result in stored.items():
        assert command.stem(result) == name
        assert (command.IMAGES / f"{name}.png").is_file()
        assert report.failures(result) == []


def test_one_rounding_away_gives_the_nearest_other_weights(first: weights.Weights) -> None:
    for name, moved in weights.one_rounding_away(first, 3).items():
        array = first[name]
        assert moved.dtype == np.float32
        assert (np.abs(moved - array) <= np.spacing(np.abs(array))).all()
        assert (moved == array).all() == (array == 0).all()


def test_learning_rates_warm_up_and_fall_to_a_tenth() -> None:
    optimizer = AdamW(peak_rate=1.0, warmup=4)
    rates = optimizer.rates(20)
    assert rates[:4].tolist() == [0.25, 0.5, 0.75, 1.0]
    assert (np.diff(rates[4:]) < 0).all() and rates[-1] == pytest.approx(0.1, abs=0.02)


@pytest.mark.slow
def test_two_ranks_give_the_losses_of_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Both frameworks; the pieces do not divide a row's positions. A difference that counts as failure is found."""
    run = SpreadRun(TINY, replace(OPTIONS, steps=3, length=2 * 83), Spread(2, "ring"))
    with Stages(Console(file=io.StringIO())) as stages:
        actual = ranks.compare(run, stages)
    assert ranks.failures(actual, "float32") == []
    for runs in actual.values():
        losses = runs[RANKS]["losses"]
        assert len(losses) == 3 and losses[-1] < losses[0]
        assert all(how.startswith("ring on ") for how in runs["explained"])

    def failures(framework: str, **changes: Any) -> str:
        return " ".join(ranks.failures({**actual, framework: {**actual[framework], **changes}}, "float32"))

    right, wrong = actual[TORCH][RANKS], actual[TORCH][WRONG_LAYOUT]
    assert "torch: the first losses differ" in failures(TORCH, **{RANKS: wrong})
    assert "torch: the planted fault changes losses by" in failures(TORCH, **{WRONG_LAYOUT: right})
    halved = {**right, "moments": [value / 2 for value in right["moments"]]}
    assert "torch: gradients differ by 5.0e-01" in failures(TORCH, **{RANKS: halved})
    nothing = {"losses": [np.nan], "moments": [np.nan]}
    assert "over ranks, JAX's first losses differ by nan" in failures(JAX, **{RANKS: nothing})

    monkeypatch.setattr(ranks, "compare", lambda run, stages: actual)
    assert command.main(["--ranks", "2", "--steps", "3"]) == 0
    assert "attention: ring on" in capsys.readouterr().out
    actual[JAX][RANKS] = actual[JAX][WRONG_LAYOUT]
    assert command.main(["--ranks", "2", "--steps", "3"]) == 1
    assert "FAILED JAX: the first losses differ" in capsys.readouterr().out


PACKINGS = {
    "zigzag": (160, 83, [[80, 32, 16, 32], [16, 80, 16, 48]]),
    "documents": (176, 96, [[80, 32, 16, 48], [16, 96, 16, 48]]),
}
"""By layout: length and longest of the rows, and the lengths of the documents in each of two packings."""


def shard_of(kind: str, world: int, packing: Sequence[int]) -> int:
    return build_layout(kind, sum(packing), world, 1, tuple(itertools.accumulate(packing, initial=0))).shard


def test_dealt_shards_may_have_another_size_than_in_every_other_layout() -> None:
    """In the training below, and at the default length."""
    default = packings(Options().length, Options().longest)
    for of_row in (PACKINGS["documents"][2], default):
        assert any(shard_of("documents", 2, packing) > sum(packing) // 2 for packing in of_row)


@pytest.mark.slow
@pytest.mark.parametrize("layout", PACKINGS)
def test_two_ranks_give_the_losses_of_one_with_packed_documents(layout: str) -> None:
    """Both frameworks, two packings in turn; the bounds are those of dense rows, and the planted fault is found: a
    wrong layout, or dealt documents in reverse."""
    length, longest, expected = PACKINGS[layout]
    options = replace(OPTIONS, steps=4, length=length, longest=longest)
    run = SpreadRun(replace(TINY, max_positions=longest), options, Spread(2, None, layout, packed=True))
    batches = run.batches()
    lengths = [np.diff(batch.seq_info.cu_seqlens_q).tolist() for batch in batches]
    assert lengths == expected * 2 and run.length == length
    for batch, of_batch in zip(batches, lengths, strict=True):
        starts = np.cumsum([0, *of_batch])
        assert (batch.tokens[0, starts[:-1]] == data.BEGIN).all()
        assert batch.counted.sum() == length - 4 and (batch.counted[0, starts[1:] - 1] == 0).all()
    with Stages(Console(file=io.StringIO())) as stages:
        actual = ranks.compare(run, stages)
    assert ranks.failures(actual, "float32") == []
    assert all(len(runs[RANKS]["losses"]) == 4 for runs in actual.values())


@pytest.mark.parametrize("length", [160, 1000, 1024, 4096])
def test_packings_fit_the_model_and_the_planted_fault(length: int) -> None:
    """No document is longer than the model's positions, and a fault does not change the size of a shard."""
    for packing in packings(length, GemmaConfig().max_positions):
        assert sum(packing) == length // 16 * 16 and max(packing) <= GemmaConfig().max_positions
        for world in (2, 4, 8):
            names = {name: Spread(world, None, name).mistaken.layout for name in (*LAYOUTS, "window:64")}
            assert all(wrong != name for name, wrong in names.items() if name != "documents")
            del names["documents"]
            assert {shard_of(kind, world, packing) for kind in (*names, *names.values())} == {sum(packing) // world}
            assert shard_of("documents", world, packing) == shard_of("documents", world, packing[::-1])
            assert packing != packing[::-1]


def test_the_planted_fault_of_dealt_documents_reverses_them() -> None:
    info = SeqInfo.from_lengths((3, 5, 2))
    right = Spread(2, None, "documents", packed=True)
    assert right.for_model(info) is info and right.mistaken.for_model(None) is None
    assert right.mistaken.layout == "documents"
    assert np.diff(right.mistaken.for_model(info).cu_seqlens_q).tolist() == [2, 5, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--layout", "documents"),
            "--layout=documents: expected --packed, because dense rows have no documents to deal",
        ),
        (
            ("--layout", "window:0"),
            "argument --layout: layout='window:0': expected one of contiguous, zigzag, striped, ",
        ),
    ],
)
def test_layouts_are_checked(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["--ranks", "2", *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("--layout", "window:64"), ("--packed", "--layout", "documents")])
def test_layouts_reach_the_ranks(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Spread] = []

    class Taken(Exception):
        pass

    def compare(run: SpreadRun, stages: Stages) -> None:
        taken.append(run.spread)
        raise Taken

    monkeypatch.setattr(ranks, "compare", compare)
    with pytest.raises(Taken):
        command.main(["--ranks", "2", *arguments])
    assert taken == [Spread(2, None, arguments[-1], packed="--packed" in arguments)]


def test_a_failed_rank_reports_its_error() -> None:
    with pytest.raises(ranks.RankError, match=r"(?s)JAX ended with 1:.*FileNotFoundError"):
        ranks.run(JAX, ["examples.training.jax_ranks", "nowhere"])


def test_ranks_have_no_page() -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["--ranks", "2", "--write"])
