"""Every rule: what is refused, and that the message has field, value, rule and way out."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.config.train_line import read
from trimegatron.config import parse_split
from trimegatron.config.blend import Blend
from trimegatron.errors import ConfigError

GPT2 = "--tokenizer-type GPT2BPETokenizer"
PP2 = "--pipeline-model-parallel-size 2"
VIRTUAL = "--num-layers-per-virtual-pipeline-stage"
FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"


@pytest.mark.parametrize(
    ("extra", "parts"),
    [
        # Shapes
        ("--num-attention-heads 5", ["--num-attention-heads (5) must divide --hidden-size (64)", "leaves 4"]),
        ("--seq-length 65", ["--seq-length (65) must not be above --max-position-embeddings (64)"]),
        ("--num-layers 0", ["--num-layers (0) must be at least 1"]),
        # Saving and stopping
        (
            "--save x --save-interval 4 --save-retain-interval 6",
            ["--save-retain-interval (6) must be a multiple of --save-interval (4)", "leaves 2"],
        ),
        ("--keep-last 0", ["--keep-last (0) must be at least 1"]),
        ("--on-save-error wait", ["--on-save-error (wait) must be one of continue, stop"]),
        ("--exit-signal SIGKILL", ["--exit-signal (SIGKILL) must be one of SIGTERM, SIGUSR1"]),
        (
            "--hang-timeout-in-mins 10.5",
            ["--hang-timeout-in-mins (10.5) must not be above --distributed-timeout-minutes (10)"],
        ),
        ("--hidden-size -64", ["--hidden-size (-64) must be at least 1"]),
        ("--layernorm-epsilon 0", ["--layernorm-epsilon (0.0) must be above 0"]),
        ("--attention-dropout 1", ["--attention-dropout (1.0) must be in [0, 1)"]),
        ("--hidden-dropout -0.1", ["--hidden-dropout (-0.1) must not be negative"]),
        ("--hidden-dropout 1.5", ["--hidden-dropout (1.5) must be in [0, 1)"]),
        ("--kernels cuda", ["--kernels (cuda) must be one of auto, triton, reference"]),
        (
            "--overlap-param-gather",
            ["--overlap-param-gather (True) acts with --use-distributed-optimizer only", "Add that, or leave"],
        ),
        ("--ddp-bucket-size 0", ["--ddp-bucket-size (0) must be at least 1"]),
        ("--recompute-num-layers 3", ["--recompute-num-layers (3) must not be above --num-layers (2)"]),
        # Recomputation
        (
            "--recompute-granularity full",
            ["--recompute-method is required with --recompute-granularity full", "uniform", "block"],
        ),
        (
            "--recompute-activations --recompute-granularity full --recompute-method block",
            ["--recompute-activations and --recompute-granularity full exclude", "means selective"],
        ),
        ("--recompute-method block", ["--recompute-method (block) needs --recompute-granularity full", "not given"]),
        (
            "--recompute-activations --recompute-method uniform",
            ["--recompute-method (uniform) needs --recompute-granularity full", "the granularity is selective"],
        ),
        ("--recompute-granularity core", ["--recompute-granularity (core) must be one of full, selective"]),
        ("--recompute-modules mlp", ["--recompute-modules (mlp) must be one of core_attn"]),
        ("--recompute-num-layers 0", ["--recompute-num-layers (0) must be at least 1"]),
        # Batch and length
        (
            "--global-batch-size 6",
            ["--global-batch-size (6)", "--micro-batch-size (4)", "6 / 4 leaves 2", "multiple of 4"],
        ),
        ("--train-samples 80", ["--train-iters (20) and --train-samples (80) exclude", "from command line"]),
        ("--train-iters 0", ["--train-iters (0) must be at least 1"]),
        ("--micro-batch-size 0", ["--micro-batch-size (0) must be at least 1"]),
        ("--seed 0", ["--seed (0) must be at least 1"]),
        ("--seed 4294967296", ["--seed (4294967296) must be in 1..4294967295"]),
        ("--eval-interval 0", ["--eval-interval (0) must be at least 1"]),
        ("--eval-iters -1", ["--eval-iters (-1) must not be negative"]),
        ("--num-workers -1", ["--num-workers (-1) must not be negative"]),
        ("--device tpu", ["--device (tpu) must be one of auto, cpu, cuda"]),
        # Schedule
        ("--min-lr 0.1", ["--min-lr (0.1) must not be above --lr (0.001)"]),
        ("--lr-warmup-iters 20", ["--lr-warmup-iters (20) must be below --lr-decay-iters (20)"]),
        ("--lr-warmup-iters 5 --lr-decay-iters 5", ["--lr-warmup-iters (5) must be below --lr-decay-iters (5)"]),
        ("--lr-warmup-fraction 1", ["--lr-warmup-fraction (1.0) must be in [0, 1)"]),
        (
            "--lr-warmup-fraction .1 --lr-warmup-iters 2",
            ["--lr-warmup-iters (2) and --lr-warmup-fraction (0.1) exclude"],
        ),
        ("--lr-decay-samples 8", ["--lr-decay-samples (8) needs a run by samples", "Use --lr-decay-iters"]),
        ("--lr-warmup-samples 8", ["--lr-warmup-samples (8) needs a run by samples", "Use --lr-warmup-iters"]),
        ("--lr-warmup-init 0.1", ["--lr-warmup-init (0.1) must not be above --lr (0.001)"]),
        ("--lr-decay-style WSD", ["--lr-wsd-decay-iters is required with --lr-decay-style WSD"]),
        (
            "--lr-decay-style WSD --lr-wsd-decay-samples 8",
            ["--lr-wsd-decay-samples (8) needs a run by samples", "Use --lr-wsd-decay-iters"],
        ),
        (
            "--lr-decay-style WSD --lr-wsd-decay-iters 18 --lr-warmup-iters 3",
            ["--lr-wsd-decay-iters (18) must fit between", "the warm-up ends at sample 12, the decay at 80", "72"],
        ),
        ("--lr-wsd-decay-style sqrt", ["--lr-wsd-decay-style (sqrt) must be one of exponential, linear"]),
        # Optimizer
        ("--adam-beta1 1", ["--adam-beta1 (1.0) must be in [0, 1)"]),
        ("--adam-beta2 -0.5", ["--adam-beta2 (-0.5) must not be negative"]),
        ("--clip-grad -1", ["--clip-grad (-1.0) must not be negative"]),
        ("--start-weight-decay 0.1", ["--start-weight-decay (0.1) needs a ramp"]),
        (
            "--weight-decay-incr-style linear --start-weight-decay 0.1",
            ["--end-weight-decay is required with --weight-decay-incr-style linear"],
        ),
        (
            "--weight-decay-incr-style linear --start-weight-decay 0.2 --end-weight-decay 0.1",
            ["--start-weight-decay (0.2) must not be above --end-weight-decay (0.1)"],
        ),
        (
            "--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler",
            ["--override-opt-param-scheduler (True) and --use-checkpoint-opt-param-scheduler exclude"],
        ),
        # Precision
        ("--fp16 --bf16", ["--fp16 (True) and --bf16 exclude each other"]),
        ("--loss-scale 128", ["--loss-scale (128.0) acts with --fp16 only"]),
        ("--fp16 --loss-scale 0", ["--loss-scale (0.0) must be above 0"]),
        (
            "--min-loss-scale 2 --initial-loss-scale 1",
            ["--min-loss-scale (2.0) must not be above --initial-loss-scale (1)"],
        ),
        ("--hysteresis 0", ["--hysteresis (0) must be at least 1"]),
        # Parallelism: Megatron-LM would lower the size silently
        (
            "--tensor-model-parallel-size 2",
            ["--tensor-model-parallel-size (2)", "must divide the number of processes", "the number of processes 1"],
        ),
        ("--distributed-backend mpi", ["--distributed-backend (mpi) must be one of nccl, gloo"]),
        # Checkpoints
        ("--save out", ["--save-interval is required with --save (out)"]),
        # Data and tokenizer
        ("--data-path other", ["--data-path (other)", "no file other.bin"]),
        ("--data-path set.bin", ["--data-path (set.bin)", "Leave out the ending: --data-path set."]),
        ("--data-path 0.5 set 0.5 other", ["--data-path (other)", "no file other.bin"]),
        ("--data-path set other", ["--data-path (other)", "no file other.bin"]),
        ("--data-path 0.5 set 0.5", ["--data-path (0.5 set 0.5) must end with a prefix", "the weight 0.5 has none"]),
        ("--data-path 0.5 set set set", ["mixes weights and bare prefixes", "'set' is where a weight is due"]),
        ("--data-path -0.5 set 1 set", ["must have weights of at least 0", "got -0.5"]),
        ("--data-path nan set 1 set", ["must have weights of at least 0", "got nan"]),
        ("--data-path 0 set 0 set", ["must have weights with a sum above 0"]),
        ("--train-data-path set", ["--train-data-path (set) and --data-path exclude each other"]),
        ("--data-impl fast", ["--data-impl (fast) must be one of infer, mmap, lazy, cached"]),
        ("--megatron-compat 2023", ["--megatron-compat (2023) must be one of 2022, 2026"]),
        ("--dataloader-type external", ["--dataloader-type (external) is not supported yet", "Use single or cyclic"]),
        ("--data-path", ["--data-path is required"]),
        ("--tokenizer-type SentencePieceTokenizer", ["--tokenizer-type (SentencePieceTokenizer) must be one of"]),
        (GPT2, ["--vocab-file is required with --tokenizer-type GPT2BPETokenizer"]),
        (f"{GPT2} --vocab-file vocab.json", ["--merge-file is required with"]),
        (f"{GPT2} --vocab-file no.json --merge-file merges.txt", ["--vocab-file (no.json) must be an existing file"]),
        (f"{GPT2} --vocab-file . --merge-file merges.txt", ["--vocab-file (.) must be an existing file"]),
        ("--tokenizer-type HuggingFaceTokenizer", ["--tokenizer-model is required with"]),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model no", ["--tokenizer-model (no) must be an existing"]),
        # Splits
        ("--split -1,1,0", ["--split (-1,1,0) must be proportions of at least 0"]),
        ("--split 90,abc5,5", ["--split (90,abc5,5) must be numbers", "'abc5' is not one"]),
        ("--split 0,0,0", ["--split (0,0,0) must have a sum above 0"]),
        ("--split 1,2,3,4", ["--split (1,2,3,4) must have at most three numbers", "got 4"]),
    ],
)
def test_refused(work: Path, extra: str, parts: list[str]) -> None:
    read()
    with pytest.raises(ConfigError) as raised:
        read(extra)
    message = str(raised.value)
    for part in parts:
        assert part in message
    assert "\n" not in message
    assert "None" not in message


@pytest.mark.parametrize(
    ("extra", "world_size", "parts"),
    [
        ("--tensor-model-parallel-size 2", 3, ["--tensor-model-parallel-size (2)", "the number of processes 3"]),
        (
            "--tensor-model-parallel-size 8",
            8,
            ["--num-attention-heads (4) must be a multiple of --tensor-model-parallel-size (8)", "leaves 4"],
        ),
        (
            "--tensor-model-parallel-size 2 --ffn-hidden-size 97",
            2,
            ["--ffn-hidden-size (97) must be a multiple of --tensor-model-parallel-size (2)", "leaves 1"],
        ),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --seq-length 33",
            2,
            ["--seq-length (33) must be a multiple of --tensor-model-parallel-size (2) with --sequence-parallel"],
        ),
        ("--global-batch-size 4", 2, ["--global-batch-size (4)", "data parallel size (2)", "leaves 4"]),
        # Pipeline: 2 layers, micro-batches of 4
        (
            "--pipeline-model-parallel-size 4",
            4,
            ["--pipeline-model-parallel-size (4) must divide --num-layers (2)", "leaves 2", "--decoder-first-pipeline"],
        ),
        ("--pipeline-schedule interleaved", 2, ["(interleaved) needs --num-layers-per-virtual-pipeline-stage"]),
        ("--pipeline-schedule dual", 2, ["--pipeline-schedule (dual) must be one of gpipe, 1f1b, interleaved"]),
        (
            "--pipeline-schedule InterleavedZeroBubble",
            2,
            ["is not offered", "operation twice", "Use 1f1b or interleaved"],
        ),
        ("--pipeline-schedule zero-bubble", 2, ["--pipeline-schedule (zero-bubble) is not offered"]),
        ("--pipeline-schedule ZBV", 2, ["--pipeline-schedule (ZBV) is not offered"]),
        (
            f"{PP2} {VIRTUAL} 1 --pipeline-schedule gpipe",
            2,
            ["--pipeline-schedule (gpipe) and --num-layers-per-virtual-pipeline-stage (1) exclude each other"],
        ),
        (f"{VIRTUAL} 1", 2, [f"{VIRTUAL} (1) needs --pipeline-model-parallel-size above 1"]),
        (f"{FIRST} 1", 2, [f"{FIRST} (1) needs --pipeline-model-parallel-size above 1"]),
        (f"{PP2} {VIRTUAL} 1 --global-batch-size 8", 2, [f"{VIRTUAL} (1) x", "into two or more; the product is 2"]),
        (
            f"{PP2} {VIRTUAL} 1 --num-layers 4 --global-batch-size 12",
            2,
            [f"{VIRTUAL} (1) needs a number of micro-batches", "multiple of --pipeline-model", "it is 3"],
        ),
        (f"{PP2} {VIRTUAL} 1 {FIRST} 1", 2, [f"{FIRST} (1) and {VIRTUAL} (1) exclude each other"]),
        (
            f"{PP2} {FIRST} 2",
            2,
            [f"{FIRST} (2) must leave, of --num-layers (2), layers for 1 equal stages; 0 are left"],
        ),
        (f"{PP2} {FIRST} 1 {LAST} 2", 2, [f"{FIRST} (1) and {LAST} (2) must leave", "none; -1 are left"]),
        (
            f"--pipeline-model-parallel-size 4 --num-layers 8 {LAST} 1",
            4,
            [f"{LAST} (1) must leave, of --num-layers (8), layers for 3 equal stages; 7 are left"],
        ),
        (f"{FIRST} 0", 2, [f"{FIRST} (0) must be at least 1"]),
    ],
)
def test_refused_in_parallel(work: Path, extra: str, world_size: int, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        read(extra, world_size=world_size)
    for part in parts:
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("without", "extra", "part"),
    [
        ("--hidden-size", "", "--hidden-size is required: width of the model"),
        ("--lr", "", "--lr is required"),
        ("--train-iters", "", "--train-iters or --train-samples is required"),
        ("--vocab-size", "", "--vocab-size is required with --tokenizer-type NullTokenizer"),
        ("--data-path", "", "--data-path is required"),
        ("--train-iters", "--train-samples 3", "--train-samples (3) must hold at least one global batch (4)"),
        ("--train-iters", "--train-samples 90 --rampup-batch-size 4 4", "(4 4) must be three whole numbers"),
        ("--train-iters", "--train-samples 90 --rampup-batch-size 4 4 4 4", "START INCREMENT SAMPLES; got 4"),
        (
            "--train-iters",
            "--train-samples 90 --rampup-batch-size 4 4 1.5",
            "--rampup-batch-size (1.5) must be a whole",
        ),
        ("--train-iters", "--train-samples 90 --rampup-batch-size 4 0 8", "--rampup-batch-size (0) must be at least 1"),
        ("--train-iters", "--train-samples 90 --rampup-batch-size 4 4 8", "must start below --global-batch-size (4)"),
        (
            "--train-iters",
            "--train-samples 90 --global-batch-size 16 --rampup-batch-size 4 8 8",
            "--rampup-batch-size (4 8 8) must reach --global-batch-size (16) in whole increments; (16 - 4)",
        ),
        (
            "--train-iters",
            "--train-samples 90 --global-batch-size 16 --rampup-batch-size 4 3 8",
            "--micro-batch-size (4) x data parallel size (1) only; the batch of 7 leaves 3",
        ),
        ("--train-iters", "--train-iters 9 --rampup-batch-size 4 4 8 --global-batch-size 8", "needs a run by samples"),
        ("--train-iters", "--train-samples 80 --lr-decay-iters 5", "--lr-decay-iters (5) needs a run by iterations"),
        ("--train-iters", "--train-samples 80 --lr-warmup-iters 5", "Use --lr-warmup-samples or --train-iters"),
        ("--train-iters", "--train-samples 80 --lr-warmup-samples 80", "must be below --lr-decay-samples (80)"),
    ],
)
def test_missing_or_mixed(work: Path, without: str, extra: str, part: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read(extra, without=without)
    assert part in str(raised.value)


def test_everything_missing_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        read(line="--fp16")
    assert "--num-layers, --hidden-size, --num-attention-heads" in str(raised.value)
    assert "--lr, --seq-length are required" in str(raised.value)


def test_exclusive_options_from_two_places(work: Path) -> None:
    (work / "run.yaml").write_text("train-samples: 80\n")
    with pytest.raises(ConfigError, match=r"from command line, the second from run\.yaml"):
        read("--config run.yaml")


def test_tensorboard_not_installed(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboard" else find(name))
    read()
    with pytest.raises(ConfigError) as raised:
        read("--tensorboard-dir tb")
    assert "--tensorboard-dir (tb)" in str(raised.value)
    assert "trimegatron[tensorboard]" in str(raised.value)


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        ("969, 30, 1", (969.0, 30.0, 1.0)),
        ("90/5/5", (90.0, 5.0, 5.0)),
        ("1", (1.0, 0.0, 0.0)),
        ("0.8,0.2", (0.8, 0.2, 0.0)),
        ("0,0,1", (0.0, 0.0, 1.0)),
    ],
)
def test_splits(text: str, weights: tuple[float, ...]) -> None:
    assert parse_split(text) == weights


@pytest.mark.parametrize("text", ["nan,1,1", "inf,1,1", "1,,1", "", "1;2;3"])
def test_splits_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--split"):
        parse_split(text)


def test_kv_channels_free_the_heads(work: Path) -> None:
    config = read("--num-attention-heads 5 --kv-channels 16").config
    assert (config.model.num_attention_heads, config.model.kv_channels) == (5, 16)


def test_where_the_samples_come_from(work: Path) -> None:
    def blends(extra: str) -> dict[str, Blend]:
        return read(extra, without="--data-path").config.data.blends()

    assert blends("--data-path set") == {"data": Blend(("set",), None)}
    assert blends("--data-path set set") == {"data": Blend(("set", "set"), None)}
    assert blends("--data-path 3 set 0 nowhere") == {"data": Blend(("set", "nowhere"), (3.0, 0.0))}
    each = blends("--train-data-path 1 set 2 set --valid-data-path set")
    assert each == {"train": Blend(("set", "set"), (1.0, 2.0)), "valid": Blend(("set",), None)}
    with pytest.raises(ConfigError, match="--train-data-path is required with --valid-data-path"):
        blends("--valid-data-path set")
    with pytest.raises(ConfigError, match="--data-path is required"):
        blends("")
    (note,) = read("--train-data-path set --split 9,1,0", without="--data-path").notes
    assert note.startswith("--split has no effect")


def test_the_rules_of_2022_take_the_first_three_numbers(work: Path) -> None:
    assert read("--split 1,2,3,4 --megatron-compat 2022").config.data.split == "1,2,3,4"
