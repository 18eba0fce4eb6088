"""Tests the command line: the output of each command, and its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from cost_tables import made_up_table, tables_in_force
from typer.testing import CliRunner

import attn_core
from attn_core.cli import devices, drawings, in_torch, trial
from attn_core.cli.app import app
from attn_core.cli.spec_options import SpecOptions, defaults_on
from attn_core.cli.timing import DeviceLostError
from attn_core.errors import SpecError
from attn_core.selection import Target

WIDE, NARROW = ({"COLUMNS": columns, "NO_COLOR": "1"} for columns in ("200", "80"))


def attn(*arguments: str, env: dict[str, str] = WIDE):
    return CliRunner().invoke(app, list(arguments), env=env)


def on_80_columns(*arguments: str) -> list[str]:
    """Runs a command on a terminal of 80 columns. Returns its lines on stdout, without the spaces at their ends."""
    done = attn(*arguments, env=NARROW)
    assert max(map(len, done.output.splitlines())) <= 80, done.output
    return [line.rstrip() for line in done.stdout.splitlines()]


def test_version_prints_the_version() -> None:
    assert attn("--version").stdout == f"attn-core {attn_core.__version__}\n"


COMMANDS = ["doctor", "explain", "compare", "mask", "context-plan"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command(command: str) -> None:
    done = attn(command, "--help")
    assert done.exit_code == 0, done.output


def test_the_shell_completes_commands() -> None:
    variables = {"_ATTN_COMPLETE": "complete_bash", "COMP_WORDS": "attn con", "COMP_CWORD": "1"}
    assert CliRunner().invoke(app, [], env=variables, prog_name="attn").stdout.split() == ["context-plan"]
    assert "--install-completion" in attn("--help").stdout


# explain


GEMMA = ["--heads", "32", "--kv-heads", "8", "--head-dim", "128", "--causal", "--softcap", "50"]
GEMMA_SPEC = SpecOptions(heads=32, kv_heads=8, head_dim=128, causal=True, softcap=50.0)


def test_explain_prints_the_text_of_the_selection() -> None:
    """tests/selection/test_selection.py has this text, of a GPU."""
    spec = GEMMA_SPEC.filled(defaults_on("sm90")).spec("sm90")
    with tables_in_force({}):
        text = str(attn_core.explain(spec, Target("torch", "sm90"))).replace("selection.text(everything=True)", "--all")
        printed = on_80_columns("explain", *GEMMA, "--device", "sm90", "--assume-installed")
    assert printed == [*text.splitlines(), "(every backend is assumed to be installed)"]


def test_explain_on_a_cpu() -> None:
    assert on_80_columns("explain", "--softcap", "50", "--assume-installed") == [
        "selected: math",
        "  because: the first in the usual order that can run the call",
        "  call: attention in torch on cpu: float32, batch 1, q_len 128, kv_len 128,",
        "    heads 8/8, head_dim 64, softcap=50.0",
        "can run it too:",
        "  flex",
        "one change away:",
        "  sdpa_flash  softcap=50.0: the aten CPU flash kernel has none",
        "19 others cannot run it on cpu; every reason: --all",
        "(every backend is assumed to be installed)",
    ]


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        ("flash3", "  device cpu: the FlashAttention 3 kernel needs sm90"),
        ("sdpa_flash", "  softcap=50.0: the aten CPU flash kernel has none"),
    ],
)
def test_explain_of_a_refused_backend_puts_its_reasons_first(backend: str, reason: str) -> None:
    arguments = ["explain", "--backend", backend, "--dtype", "bf16", "--softcap", "50", "--assume-installed"]
    lines = on_80_columns(*arguments)
    assert lines[:2] == [f"backend='{backend}' cannot run this call:", reason]
    assert "can run it, but a backend requested by name never falls back:" in lines
    assert attn(*arguments).exit_code == 1


def test_explain_shows_predicted_times_and_their_source() -> None:
    with tables_in_force({("torch", "cpu"): made_up_table({"math": 12.0, "sdpa_flash": 1250.0})}):
        lines = on_80_columns("explain", "--assume-installed")
    assert lines[0] == "selected: math, about 12 µs" and "made-up calls" in " ".join(lines)
    assert "can run it too:" in lines
    assert "  sdpa_flash  about 1.25 ms" in lines


def test_explain_all_has_every_reason() -> None:
    lines = on_80_columns("explain", *GEMMA, "--device", "sm90", "--assume-installed", "--all")
    spec = GEMMA_SPEC.filled(defaults_on("sm90")).spec("sm90")
    printed = " ".join(" ".join(lines).split())
    for name, reasons in attn_core.explain(spec, Target("torch", "sm90")).refusals:
        assert f" {name} " in printed and all(reason in printed for reason in reasons), name


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("device", ["cpu", "sm75", "b200", "5090", "mi300"])
def test_explain_fits_80_columns(framework: str, device: str) -> None:
    for more in ([], ["--backward"], ["--dtype", "fp32", "--sinks"], ["--backend", "flash2"], ["--all"], ["--here"]):
        lines = on_80_columns("explain", *GEMMA, "--device", device, "--framework", framework, *more)
        assert lines[0].startswith(("selected: ", "no backend can run this call", "backend='flash2' cannot"))


# Devices


@pytest.mark.parametrize(
    ("word", "device"),
    [
        *(("h100", "sm90"), ("H200", "sm90"), ("a100", "sm80"), ("4090", "sm89"), ("RTX 4090", "sm89")),
        *(("l40s", "sm89"), ("b200", "sm100"), ("rtx-5090", "sm120"), ("t4", "sm75"), ("mi300", "gfx942")),
        *(("sm90", "sm90"), ("SM90", "sm90"), ("cpu", "cpu"), ("gfx90a", "gfx90a"), ("RTX A6000", "sm86")),
        *(("Tesla T4", "sm75"), ("7.5", "sm75"), ("12.0", "sm120"), ("NVIDIA H100 80GB HBM3", "sm90")),
        *(("NVIDIA A100-SXM4-80GB", "sm80"), ("Tesla V100-SXM2-16GB", "sm70"), ("NVIDIA A10G", "sm86")),
        *(("NVIDIA GeForce RTX 4090", "sm89"), ("NVIDIA L4", "sm89"), ("NVIDIA RTX A6000", "sm86")),
    ],
)
def test_products_are_devices(word: str, device: str) -> None:
    assert devices.device_named(word, "torch") == device


@pytest.mark.parametrize(
    ("word", "dtype"),
    [("t4", "float16"), ("v100", "float16"), ("p100", "float16"), ("a100", "bfloat16"), ("tpu", "bfloat16")],
)
def test_a_device_without_bfloat16_is_asked_for_float16(word: str, dtype: str) -> None:
    framework = ["--framework", "jax"] if word == "tpu" else []
    lines = on_80_columns(
        "explain", "--causal", "--head-dim", "128", "--device", word, "--assume-installed", *framework
    )
    assert f": {dtype}, batch 1" in " ".join(lines)
    if word in ("t4", "v100"):
        assert lines[0] == "selected: sdpa_efficient"
    assert defaults_on(devices.device_named(word, "torch")).dtype == dtype


def test_no_product_is_of_two_devices() -> None:
    aliases = [alias for named in devices.DEVICES.values() for alias in named]
    assert len(aliases) == len(set(aliases)) and not {devices.HERE, *devices.DEVICES} & set(aliases)


def test_the_word_cuda_means_the_gpu_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "find_spec", lambda name: object())
    monkeypatch.setattr(devices, "devices_of", lambda framework: ("cpu", "sm90"))
    assert devices.device_named("cuda", "torch") == "sm90"
    monkeypatch.setattr(devices, "devices_of", lambda framework: ("cpu", "sm199"))
    assert devices.device_named("sm199", "torch") == "sm199", "a GPU that is newer than the table, but is here"
    monkeypatch.setattr(devices, "devices_of", lambda framework: ("cpu",))
    with pytest.raises(SpecError, match="--device=cuda: torch has no GPU here; name one"):
        devices.device_named("cuda", "torch")


def test_a_device_that_does_not_exist_is_refused_with_the_list() -> None:
    done = attn("explain", "--device", "sm91", env=NARROW)
    assert done.exit_code == 2
    assert done.stderr.startswith("attn: --device='sm91': no such device; did you mean sm90? Expected one of\n")
    assert all(device in done.stderr for device in devices.DEVICES)
    assert max(map(len, done.stderr.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--window", "5"], "--window=5: expected --causal with an int"),
        (["--window", "5"], "pass inclusive distances, such as --window=4,4"),
        (["--window", "0,-1"], "--window=0,-1: expected a right distance of 0 or more, got -1; none is unbounded"),
        (["--heads", "6", "--kv-heads", "4"], "divide the 6 query heads, got 4; change --heads or --kv-heads"),
        (["--softcap", "-1"], "--softcap=-1.0: expected a finite number above 0; leave it out to switch it off"),
        (["--dtype", "foo"], "got foo; name one by --dtype"),
        (["--lengths", "3,4", "--kv-lengths", "1"], "--kv-lengths: expected one length for each of the 2"),
        (["--cu-seqlens", "0,5,3"], "--cu-seqlens: expected non-decreasing offsets"),
        (["--window", "x"], "--window='x': expected W, or LEFT,RIGHT such as 5,0 or none,3"),
        (["--kv-heads", "3"], "k: expected kv heads that divide the 8 query heads, got 3"),
        (["--softcap", "0"], "softcap=0.0: expected a finite number above 0"),
        (["--dtype", "int8"], "got int8"),
        (["--alignment", "left"], "alignment='left'"),
        (["--backend", "flsh3"], "backend='flsh3': unknown backend; did you mean flash3"),
        (["--device", "npu"], "--device='npu': no such device; did you mean xpu? Expected one of"),
        (["--framework", "tf"], "--framework='tf': expected torch or jax"),
        (["--lengths", "3,x"], "--lengths='3,x': expected whole numbers"),
        (["--lengths", "3", "--documents", "2"], "--documents and --lengths: expected only one"),
        (["--lengths", "3,4", "--q-len", "9"], "--q-len=9: expected the documents' 7 tokens"),
        (["--cu-seqlens", "3,4"], "expected to start at 0, got 3"),
        (["--cu-seqlens", "0,3000000000"], "--cu-seqlens=0,3000000000: expected offsets of at most 2147483647"),
        (["--kv-lengths", "3,4"], "--kv-lengths: expected --lengths as well"),
        (["--documents", "0"], "--documents=0: expected at least 1"),
        (["--mask", "--padding"], "--mask and --padding: expected only one of these options"),
        (["--segment-ids", "--documents", "2"], "--segment-ids: expected no packed documents, because both say"),
    ],
)
def test_bad_options_are_named_and_exit_with_2(arguments: list[str], text: str) -> None:
    done = attn("explain", "--assume-installed", *arguments)
    assert done.exit_code == 2
    assert text in done.stderr.replace("\n", " ")
    assert max(map(len, done.stderr.splitlines())) <= 80
    assert "Traceback" not in done.output


# Options become fields of the spec


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({}, {"q_len": 128, "kv_len": 128, "num_heads": 8, "num_kv_heads": 8, "head_dim": 64, "value_dim": 64}),
        ({"dtype": "bf16"}, {"dtype": "bfloat16"}),
        ({"dtype": "fp16"}, {"dtype": "float16"}),
        ({"q_len": 7, "kv_len": 11, "value_dim": 32}, {"q_len": 7, "kv_len": 11, "value_dim": 32}),
        ({"window": "3", "causal": True}, {"window": (2, 0)}),
        ({"window": "none,3"}, {"window": (None, 3)}),
        ({"window": "5,"}, {"window": (5, None)}),
        ({"mask": True, "batch": 3, "q_len": 2}, {"mask_shape": (3, 1, 2, 2)}),
        ({"padding": True, "batch": 3, "q_len": 2, "kv_len": 5}, {"mask_shape": (3, 1, 1, 5)}),
        ({"segment_ids": True, "batch": 3, "q_len": 2}, {"aux": (((3, 2), "int32"),), "mask_shape": None}),
        ({"segment_ids": True, "q_len": 2, "kv_len": 5}, {"aux": (((1, 2), "int32"), ((1, 5), "int32"))}),
        ({"bias": True, "q_len": 2}, {"bias_shape": (1, 8, 2, 2)}),
        ({"alibi": True, "sinks": True}, {"alibi_shape": (8,), "sinks": True}),
        ({"lengths": "3,0,5"}, {"q_len": 8, "kv_len": 8, "documents": 3, "max_len_q": 5, "max_len_k": 5}),
        ({"lengths": "3,4", "kv_lengths": "5,6"}, {"q_len": 7, "kv_len": 11, "documents": 2, "max_len_k": 6}),
        ({"cu_seqlens": "0,3,7"}, {"q_len": 7, "documents": 2, "max_len_q": 4}),
        ({"documents": 3, "q_len": 11, "kv_len": 13}, {"q_len": 11, "kv_len": 13, "documents": 3, "max_len_k": 5}),
        ({"backward": True, "return_lse": True, "dropout": 0.5}, {"needs_backward": True, "dropout": 0.5}),
    ],
)
def test_options_become_fields_of_the_spec(options: dict, fields: dict) -> None:
    spec = SpecOptions(**options).spec()
    assert {name: getattr(spec, name) for name in fields} == fields


def test_defaults_fill_only_what_the_options_leave_open() -> None:
    def spec(**options: object) -> attn_core.AttentionSpec:
        return SpecOptions(**options).filled(defaults_on("sm90")).spec("sm90")

    assert (spec().dtype, spec().q_len, spec().kv_len) == ("bfloat16", 2048, 2048)
    assert (spec(dtype="fp32", q_len=7).dtype, spec(q_len=7).q_len) == ("float32", 7)
    assert spec(lengths="3,4").q_len == spec(cu_seqlens="0,3,7").q_len == 7
    assert (spec(documents=2).q_len, spec(documents=2).max_len_q) == (2048, 1024)
    assert SpecOptions().spec().dtype == "float32"


def test_every_field_of_the_spec_has_an_option() -> None:
    elsewhere = {"max_len_q": "lengths", "max_len_k": "kv_lengths", "bias_gradient": None, "bias_dtype": None}
    elsewhere["paged"] = None  # fields of explain_paged, which each frontend has
    elsewhere |= {"mask_mod": "segment_ids", "aux": "segment_ids"}
    elsewhere |= {"score_mod": None, "aux_gradients": None}  # a Python function, and the gradients of its arrays
    elsewhere["partial"] = None  # fields of the tiles that context-plan shows, never of a user's call
    renamed = {
        **{"num_heads": "heads", "num_kv_heads": "kv_heads", "mask_shape": "mask", "bias_shape": "bias"},
        **{"alibi_shape": "alibi", "needs_backward": "backward", "key_ranges_shape": "key_ranges"},
    }
    for name in attn_core.AttentionSpec.__dataclass_fields__:
        option = elsewhere.get(name, renamed.get(name, name))
        assert option is None or option in SpecOptions.__dataclass_fields__, name


def test_explain_answers_for_segment_ids_as_the_frontend_does_if_their_values_are_unknown() -> None:
    jax, frontend = pytest.importorskip("jax"), pytest.importorskip("jax_frontend")
    q, ids = jax.numpy.zeros((2, 5, 4, 8)), jax.numpy.zeros((2, 5), "int32")
    expected = frontend.explain(q, q, q, causal=True, q_segment_ids=ids).spec
    assert SpecOptions(batch=2, q_len=5, heads=4, head_dim=8, causal=True, segment_ids=True).spec() == expected
    lines = on_80_columns("explain", "--segment-ids", "--causal", "--device", "h100", "--assume-installed")
    assert "  flash2          mask_mod: the FlashAttention 2 kernel has none" in lines


def test_no_strategy_shares_a_call_with_segment_ids() -> None:
    done = attn("context-plan", "--segment-ids")
    assert done.exit_code == 2 and "segment ids: expected none in context parallelism" in done.stderr


def test_the_frameworks_own_functions_are_no_peers_of_a_call_with_functions() -> None:
    assert trial.is_plain(SpecOptions(padding=True).spec())
    assert not trial.is_plain(SpecOptions(segment_ids=True).spec())


# mask


def test_mask_draws_documents() -> None:
    done = attn("mask", "--lengths", "2,3", "--causal")
    drawn = [line.split()[1:] for line in done.stdout.splitlines()[1:6]]
    assert ["".join(line) for line in drawn] == ["■····", "■■···", "··■··", "··■■·", "··■■■"]
    assert done.exit_code == 0


def test_mask_draws_large_masks_in_blocks() -> None:
    seen = np.tril(np.ones((100, 100), bool))
    drawn = drawings.draw(seen, columns=24).splitlines()  # room for 10 signs
    assert drawn[0].split()[1:] == ["▪", *"·········"]
    assert drawn[9].split()[1:] == [*"■■■■■■■■■", "▪"]
    assert "10 x 10" in drawn[-1]
    assert "nothing to draw" in drawings.draw(np.ones((3, 0), bool))


def test_mask_writes_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = attn("mask", "--lengths", "3,4,5", "--png", str(tmp_path / "mask.png"))
    assert done.exit_code == 0, done.output
    assert (tmp_path / "mask.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("arguments", [["--mask"], ["--padding"], ["--segment-ids"], ["--q-len", "100000"]])
def test_mask_refuses_calls_that_it_cannot_draw(arguments: list[str]) -> None:
    assert attn("mask", *arguments).exit_code == 2


# compare runs kernels


def test_compare_prints_errors_and_bits() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    arguments = ["--q-len", "13", "--heads", "6", "--kv-heads", "3", "--causal", "--backward"]
    done = attn("compare", *arguments, "--json")
    assert done.exit_code == 0, done.output
    actual = json.loads(done.stdout)
    ran = [row for row in actual["rows"] if not row["reasons"]]
    assert {row["framework"] for row in ran} == {"torch", "jax"}
    for row in ran:
        assert row["ok"] and set(row["quantities"]) == {"out", "dq", "dk", "dv"}, row
    assert actual["bit_equal"]["sdpa_flash"] is True
    assert actual["bit_equal"]["math"] is True


def test_compare_times_each_backend_beside_the_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    timed, known = attn_core.cli.compare.timed, {}

    def once(trial, framework, device, names, rounds):
        """The second command prints the times of the first."""
        place = framework, trial.spec.needs_backward
        return known.get(place) or known.setdefault(place, timed(trial, framework, device, names, rounds))

    monkeypatch.setattr(attn_core.cli.compare, "timed", once)
    arguments = ["compare", "--time", "--q-len", "13", "--heads", "4", "--kv-heads", "2", "--causal", "--repeats", "2"]
    lines = on_80_columns(*arguments)
    assert lines[0].startswith("float32, batch 1, q_len 13") and "needs_backward" not in lines[0]
    assert lines[2].split() == ["backend", "in", "forward", "ratio", "training", "ratio"]
    rows = {tuple(line.split()[:2]): line for line in lines[3:]}
    assert {("sdpa_flash", "torch"), ("math", "torch"), ("F.sdpa", "torch"), ("jax_xla", "jax"), ("jax.nn", "jax")} <= {
        *rows
    }
    assert rows["sdpa_flash", "torch"].count("*") == 2, "automatic choice"
    for framework in ("torch", "jax"):
        lines = [f"{line} " for (_, where), line in rows.items() if where == framework]
        assert sum(line.count(" 1.00 ") for line in lines) >= 2, lines
    timed = json.loads(attn(*arguments, "--json").stdout)["rows"]
    for row in timed:
        for direction, entry in row["entries"].items():
            assert len(entry["microseconds"]) in (1, 2) and entry["median"] > 0 and entry["difference"] < 1e-4, (
                row,
                direction,
            )


def test_compare_times_packed_documents() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    lines = on_80_columns("compare", "--time", "--heads", "2", "--lengths", "3,0,5", "--repeats", "1")
    assert {"sdpa_flash", "jax_xla"} <= {line.split()[0] for line in lines if line}
    assert not {"F.sdpa", "jax.nn"} & {line.split()[0] for line in lines if line}, "they take no documents"


def test_compare_times_name_what_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")

    def timed(trial, framework, device, names, rounds):
        return {"sdpa_flash": {"median": 2.0, "difference": 0.0}, "math": {"median": 9.0, "difference": 0.5}} | {
            "flex": {"failed": "ValueError: no"}
        }

    monkeypatch.setattr(attn_core.cli.compare, "timed", timed)
    done = attn("compare", "--time", "--q-len", "5")
    assert done.exit_code == 1
    assert "math in torch, forward: WRONG: it differs by 0.5" in done.stdout
    assert "flex in torch, training: FAILED: ValueError: no" in done.stdout


def test_a_device_that_fails_ends_a_command_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(*arguments: object) -> None:
        raise DeviceLostError("flash3: CUDA error")

    monkeypatch.setattr(attn_core.cli.compare, "timed", timed)
    done = attn("compare", "--time", "--q-len", "5")
    assert done.exit_code == 1
    assert "attn: the device failed and cannot be used again: flash3: CUDA error\n" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--lengths", "3,0,5", "--kv-lengths", "4,2,5"],
        ["--mask", "--bias", "--alibi", "--sinks", "--return-lse"],
        ["--padding", "--segment-ids", "--q-len", "7"],
    ],
    ids=["packed", "added", "padded"],
)
def test_compare_takes_every_kind_of_tensor(arguments: list[str]) -> None:
    pytest.importorskip("torch")
    done = attn("compare", "--heads", "2", "--q-len" if "--mask" in arguments else "--batch", "1", *arguments)
    assert done.exit_code == 0, done.output
    assert "math" in done.stdout and "refused" not in done.stdout


def test_compare_prints_the_table_last_and_refusals_on_request() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    arguments = ["compare", "--heads", "2", "--q-len", "5", "--softcap", "50"]
    lines = on_80_columns(*arguments)
    assert lines[0].startswith("float32, batch 1, q_len 5")
    assert lines[1].endswith("backends cannot run it on cpu; every reason: --all") and lines[2] == ""
    assert lines[3].split()[:3] == ["backend", "in", "of"]
    assert {line.split()[0] for line in lines[4:]} == {"math", "flex", "jax_xla"}
    everything = on_80_columns(*arguments, "--all")
    assert [line.split()[:2] for line in everything[-len(lines[3:]) :]] == [line.split()[:2] for line in lines[3:]]
    assert "softcap=50.0: the aten CPU flash kernel has none" in " ".join(" ".join(everything).split())


def test_compare_reports_a_wrong_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    right = in_torch.run

    def wrong(*arguments, **keywords):
        return {name: 1.01 * array for name, array in right(*arguments, **keywords).items()}

    monkeypatch.setattr(in_torch, "run", wrong)
    done = attn("compare", "--q-len", "5")
    assert done.exit_code == 1
    assert "WRONG" in done.stdout and "differ" in done.stdout


@pytest.mark.parametrize(
    "arguments", [["--dropout", "0.5"], ["--device", "sm10"], ["--device", "gpu"], ["--window", "2"]]
)
def test_compare_refuses_calls_that_it_cannot_run(arguments: list[str]) -> None:
    assert attn("compare", *arguments).exit_code == 2


def test_trial_values_are_exact_in_the_dtype() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.random.default_rng(0).standard_normal(10_000)
    expected = values.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
    assert trial.rounded(values, "bfloat16").tobytes() == expected.tobytes()


def test_mask_draws_a_constructor_of_key_ranges() -> None:
    done = attn("mask", "--key-ranges", "tree([-1, 0, 0, 2])", "--kv-heads", "1")
    assert done.exit_code == 0
    assert "0  ■ · · ·\n1  ■ ■ · ·\n2  ■ · ■ ·\n3  ■ · ■ ■" in done.stdout


def test_explain_says_how_kernels_without_key_ranges_compute_them() -> None:
    """Without a GPU, for a GPU. On sm90 a kernel with block tables computes them as a whole."""
    for device, how in (("sm80", "parts: 2 kernel calls of"), ("sm90", "selected: flash4")):
        done = attn("explain", "--device", device, "--assume-installed", "--key-ranges", "prefix_lm(4096, 8192)")
        assert done.exit_code == 0
        words = " ".join(done.stdout.split())
        assert how in words and "2576 of 4096 blocks" in words
        assert ("parts:" in words) == (device == "sm80")


def test_explain_names_key_ranges_and_why_other_kernels_refuse_them() -> None:
    done = attn("explain", "--key-ranges", "prefix_lm(3, 64)")
    assert done.exit_code == 0
    assert "selected: math" in done.stdout and "key_ranges of shape [1, 1, 64, 1, 2]" in done.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prefix_lm(3)", "tokens"),
        ("prefix_lm(9, 4)", "lengths: expected at most tokens=4, got 9"),
        ("open('x')", "of one of block_diffusion, blocks"),
        ("prefix_lm(3, len([1]))", "numbers, lists"),
        ("prefix_lm(3,", "no Python expression"),
        ("prefix_lm([1, 2], 4)", "key_ranges: expected shape"),
    ],
)
def test_a_wrong_text_of_key_ranges_is_refused(text: str, message: str) -> None:
    done = attn("mask", "--key-ranges", text)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())


def test_ranks_share_key_ranges() -> None:
    done = attn("context-plan", "--ranks", "2", "--key-ranges", "prefix_lm(3, 64)", "--layout", "contiguous")
    assert done.exit_code == 0 and "selected" in done.stdout
    done = attn("context-plan", "--ranks", "2", "--key-ranges", "prefix_lm([3, 4], 64)", "--batch", "2")
    assert done.exit_code == 2
    assert "key_ranges: expected shape" in " ".join(done.stderr.split())
