"""The training command line: the blog's, precedence, resolution, --explain, the saved form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.config.train_line import LINE, read
from trimegatron.config import Config, ParallelConfig, Schedule, parse_train_args
from trimegatron.errors import ConfigError

BLOG = (
    "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --num-layers 12 --hidden-size 768 "
    "--num-attention-heads 12 --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 12 "
    "--global-batch-size 192 --lr 0.0005 --train-iters 150000 --lr-decay-iters 150000 --lr-decay-style cosine "
    "--lr-warmup-iters 2000 --weight-decay .1 --adam-beta2 .999 --fp16 --log-interval 10 --save-interval 2000 "
    "--eval-interval 200 --eval-iters 10 --vocab-file vocab.json --merge-file merges.txt --save CK --load CK "
    "--data-path codeparrot_content_document --tensorboard-dir experiments/tensorboard"
)
"""The pretrain_gpt.py arguments of https://huggingface.co/blog/megatron-training, literally."""


def test_the_blogs_line(work: Path) -> None:
    done = read(line=BLOG, world_size=8)
    config = done.config
    assert done.notes == []
    assert (config.model.num_layers, config.model.hidden_size, config.model.num_attention_heads) == (12, 768, 12)
    assert (config.model.ffn_hidden_size, config.model.kv_channels) == (3072, 64)
    assert (config.parallel.data_parallel_size, config.num_micro_batches) == (8, 2)
    assert (config.precision.params_dtype, config.precision.loss_scale) == ("float16", None)
    assert config.precision.attention_softmax_in_fp32  # query-key layer scaling asks for it
    assert config.optimizer.weight_decay == config.optimizer.start_weight_decay == 0.1
    assert (config.data.data_path, config.data.split) == (["codeparrot_content_document"], "969, 30, 1")
    assert config.schedule == Schedule(
        5e-4, 0.0, "cosine", 2000 * 192, 150000 * 192, 150000 * 192, 0.1, 0.1, "constant"
    )
    assert not (work / "CK").exists()


def test_abbreviations_of_2022(work: Path) -> None:
    line = BLOG.replace("--vocab-file", "--vocab").replace("--merge-file", "--merge")
    assert read(line=line, world_size=8).config == read(line=BLOG, world_size=8).config


def test_file_against_command_line(work: Path) -> None:
    (work / "run.yaml").write_text("optimizer: {lr: 2e-3, min-lr: 1e-4}\nseed: 7\nno-bias-gelu-fusion: true\n")
    done = read("--config run.yaml --bias-gelu-fusion", without="--lr")
    assert (done.config.optimizer.lr, done.config.training.seed) == (2e-3, 7)
    assert done.config.model.bias_gelu_fusion
    assert done.sources["lr"] == "run.yaml"
    assert done.sources["bias_gelu_fusion"] == done.sources["hidden_size"] == "command line"
    assert read("--config run.yaml").config.optimizer.lr == 1e-3


def test_resolution(work: Path) -> None:
    config = read("--bf16 --tensor-model-parallel-size 2", world_size=8).config
    assert config.training.global_batch_size == 16
    assert config.optimizer.lr_decay_iters == 20
    assert config.precision.accumulate_allreduce_grads_in_fp32
    assert config.precision.params_dtype == "bfloat16"
    assert (config.parallel.world_size, config.parallel.data_parallel_size) == (8, 4)


def test_sequence_parallel_needs_a_cut(work: Path) -> None:
    """Off where there is one tensor-parallel rank, as in Megatron, and said so."""
    cut = read("--sequence-parallel --tensor-model-parallel-size 2", world_size=2)
    assert cut.config.parallel.sequence_parallel and cut.notes == []
    whole = read("--sequence-parallel --seq-length 33", world_size=2)
    assert whole.config == read("--seq-length 33", world_size=2).config
    (note,) = whole.notes
    assert note.startswith("--sequence-parallel (True) became False")


def test_recompute(work: Path) -> None:
    for short, long in (
        ("--recompute-activations", "--recompute-granularity selective --recompute-modules core_attn"),
        ("--recompute-granularity full --recompute-method uniform", "--recompute-num-layers 1"),
    ):
        done = read(f"{short} {long}")
        assert done.notes == []
    assert read("--recompute-activations").config.recompute.recompute_granularity == "selective"
    for idle in ("--recompute-num-layers 2", "--recompute-modules core_attn"):
        (note,) = read(idle).notes
        assert note.startswith(f"{idle.split()[0]} has no effect: ")


def test_run_by_samples(work: Path) -> None:
    extra = "--train-samples 170 --lr-warmup-samples 16 --lr-decay-style linear"
    config = read(extra, without="--train-iters", world_size=2).config
    assert (config.training.train_iters, config.optimizer.lr_decay_samples) == (21, 170)
    assert config.optimizer.lr_decay_iters is None
    assert (config.schedule.warmup_samples, config.schedule.total_samples) == (16, 170)


def test_warmup_fraction(work: Path) -> None:
    config = read("--lr-warmup-fraction 0.25 --lr-decay-iters 10 --global-batch-size 8").config
    assert config.schedule.warmup_samples == 0.25 * 10 * 8


def test_warm_up_stable_decay(work: Path) -> None:
    line = "--lr-decay-style WSD --lr-wsd-decay-iters 5 --lr-warmup-init 1e-4 --lr-warmup-iters 4"
    done = read(line)
    schedule = done.config.schedule
    assert (schedule.start_lr, schedule.wsd_style, schedule.wsd_samples) == (1e-4, "exponential", 20)
    lines = [" ".join(line.split()) for line in done.text().splitlines()]
    assert "start: iteration 0 sample 0 learning rate 0.0001" in lines
    assert "decay begins: iteration 15 sample 60 learning rate 0.001" in lines
    by_samples = read(
        "--train-samples 80 --lr-decay-style WSD --lr-wsd-decay-samples 30 --lr-wsd-decay-style minus_sqrt",
        without="--train-iters",
    )
    assert by_samples.config.schedule.stable_samples == 50


def test_saved_form_round_trip(work: Path) -> None:
    for line, world_size in ((BLOG, 8), (LINE, 1), (LINE + " --bf16 --eval-at-start", 2)):
        config = read(line=line, world_size=world_size).config
        saved = json.loads(json.dumps(config.to_dict()))
        assert Config.from_dict(saved) == config
        assert saved["parallel"]["world_size"] == world_size
    samples = read("--train-samples 170", without="--train-iters").config
    assert Config.from_dict(samples.to_dict()) == samples


def test_saved_form_from_elsewhere(work: Path) -> None:
    saved = read().config.to_dict()
    with pytest.raises(ConfigError, match="unknown group 'modle'"):
        Config.from_dict(saved | {"modle": {}})
    with pytest.raises(ConfigError, match="Unknown option 'hidden_sise' of model"):
        Config.from_dict(saved | {"model": saved["model"] | {"hidden_sise": 1}})
    with pytest.raises(ConfigError, match="--num-attention-heads is required"):
        Config.from_dict(saved | {"model": {"num_layers": 1, "hidden_size": 8, "max_position_embeddings": 64}})
    del saved["logging"], saved["training"]["seed"]
    assert Config.from_dict(saved) == read().config


def test_config_made_by_hand_is_resolved(work: Path) -> None:
    config = read().config
    again = Config(
        model=config.model,
        optimizer=config.optimizer,
        training=config.training,
        data=config.data,
        parallel=ParallelConfig(world_size=1),
    )
    assert again == config


def test_explain(work: Path) -> None:
    (work / "run.yaml").write_text("seed: 7\n")
    extra = "--config run.yaml --lr-warmup-iters 5 --lr-decay-style cosine --global-batch-size 16"
    done = read(extra + " --explain --mmap-warmup", world_size=2)
    assert done.explain
    assert not read().explain
    text = done.text()
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for expected in (
        "hidden-size 64 features command line",
        "ffn-hidden-size 256 features derived: 4 x hidden-size",
        "seed 7 run.yaml",
        "adam-beta1 0.9 default",
        "initial-loss-scale 4294967296 default",
        "attention-softmax-in-fp32 yes derived",
        "data-parallel-size 2 derived",
        "params-dtype float32 derived",
        "global batch: 16 samples = 4 (micro-batch) x 2 (data parallel) x 2 (micro-batches a step)",
        "whole run: 20 iterations, 320 samples, 10,240 tokens; 512 tokens a step",
        "start: iteration 0 sample 0 learning rate 0",
        "warm-up ends: iteration 5 sample 80 learning rate 0.001",
        "decay ends: iteration 20 sample 320 learning rate 0",
        "--mmap-warmup has no effect: files are read as they are needed.",
    ):
        assert expected in lines
    for group in done.config.to_dict().values():
        for field in group:
            assert field.replace("_", "-") in text


def test_explain_never_trains(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_train_args(LINE.split(), world_size=1) == read().config
    assert capsys.readouterr().out == ""
    with pytest.raises(SystemExit) as exited:
        parse_train_args([*LINE.split(), "--explain"], world_size=1)
    assert exited.value.code == 0
    assert capsys.readouterr().out == read("--explain").text()


@pytest.mark.parametrize(
    ("extra", "note"),
    [
        ("--save-interval 5", "--save-interval has no effect: there is no --save."),
        ("--lr-warmup-init 1e-4", "--lr-warmup-init has no effect: there is no warm-up."),
        ("--lr-wsd-decay-iters 4", "--lr-wsd-decay-iters has no effect: --lr-decay-style is not WSD."),
        ("--finetune", "--finetune has no effect: there is no --load."),
        ("--hysteresis 4", "--hysteresis has no effect: only --fp16 scales the loss."),
        ("--no-load-rng --load x", "--no-load-rng has no effect: randomness is a function of the seed"),
        (
            "--bf16 --no-accumulate-allreduce-grads-in-fp32",
            "--accumulate-allreduce-grads-in-fp32 (False) became True: other options ask for it.",
        ),
    ],
)
def test_options_without_effect_are_noted(work: Path, extra: str, note: str) -> None:
    (found,) = read(extra).notes
    assert found.startswith(note)


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_train_args(["--help"], world_size=1)
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "Optimizer and learning rate:",
        "--norm-epsilon X epsilon of layer norm (default: 1e-05)",
        "--lr-warmup-iters N linear warm-up [iterations] (default: 0)",
        "--exit-duration-in-mins X save and exit after this time [minutes]",
        "where the dynamic loss scale starts (default: 4294967296)",
        "--no-mask-padded-vocab",
        "accepted without effect: --onnx-safe",
    ):
        assert part in text
