"""Checkpoints that the real Megatron-LM wrote, older ones and other layouts made from them, and wrong ones."""

from __future__ import annotations

import argparse
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.convert.models import random_source
from trimegatron.cli import main
from trimegatron.convert.from_megatron import layers_of_chunk, read_megatron
from trimegatron.convert.proof import build_model, logits_in_a_fresh_process
from trimegatron.convert.source import Source
from trimegatron.convert.to_hf import write_hf
from trimegatron.convert.to_megatron import save, write_megatron
from trimegatron.convert.to_ours import check_same
from trimegatron.convert.torch_file import Inert, read_torch_file
from trimegatron.convert.vocabulary import VocabularyConfig
from trimegatron.errors import CheckpointError, ConfigError
from trimegatron.lazy import LazyTensor

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoints"
H64 = VocabularyConfig(vocab_file=str(GOLDEN / "vocab.json"), merge_file=str(GOLDEN / "merges.txt"))
MICRO = VocabularyConfig(true_vocab_size=120)


def content_of(path: Path) -> dict[str, Any]:
    """A file's content with its tensors loaded, to be changed and saved again."""
    return loaded(read_torch_file(path))


def loaded(value: Any) -> Any:
    if isinstance(value, LazyTensor):
        return value.load()
    if isinstance(value, OrderedDict):
        return OrderedDict((key, loaded(item)) for key, item in value.items())
    if isinstance(value, dict):
        return {key: loaded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [loaded(item) for item in value]
    if type(value).__name__ == "Namespace":
        plain = {key: item for key, item in vars(value).items() if not isinstance(item, Inert)}
        return argparse.Namespace(**{key: item for key, item in plain.items() if key != "made_of"})
    return value


def test_golden_logits_in_transformers(tmp_path: Path):
    """Tensor × pipeline 2 × 2, 20 steps into its run: Megatron-LM's own logits, by transformers."""
    source = read_megatron(GOLDEN / "h64" / "iter20_tp2pp2", H64)
    assert (source.state.progress.iteration, source.config.model.vocab_size) == (20, 500)
    write_hf(source, tmp_path / "hf", verify=False)
    golden = np.load(GOLDEN / "h64" / "logits.npz")
    tokens = torch.from_numpy(np.load(GOLDEN / "tokens.npy")[:2].astype(np.int64))
    theirs = logits_in_a_fresh_process(tmp_path / "hf", tokens[:, :-1])[:, golden["positions"]]
    np.testing.assert_allclose(theirs, golden["iter20_logits"][..., :500], atol=1e-5, rtol=0)


def test_golden_logits_with_the_padding_as_words():
    source = read_megatron(GOLDEN / "h64" / "iter20_tp2pp2", H64, mask_padded_vocab=False)
    golden = np.load(GOLDEN / "h64" / "logits.npz")
    tokens = torch.from_numpy(np.load(GOLDEN / "tokens.npy")[:2].astype(np.int64))
    with torch.no_grad():
        mine = build_model(source)(tokens[:, :-1]).transpose(0, 1)
        losses = torch.nn.functional.cross_entropy(mine.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    np.testing.assert_allclose(mine[:, golden["positions"]], golden["iter20_logits"], atol=1e-5, rtol=0)
    np.testing.assert_allclose(losses.view(2, -1), golden["iter20_loss"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["fp32_iter10", "fp16_iter20"])
def test_written_files_are_as_megatron_wrote_them(name: str, tmp_path: Path):
    """Read and written again at the same layout: the same tables, in the same order, with the same values."""
    source = read_megatron(GOLDEN / "micro" / name, MICRO, mask_padded_vocab=False)
    write_megatron(source, tmp_path / "m", tp=1, pp=1)
    (mine,) = (tmp_path / "m").rglob("model_optim_rng.pt")
    (theirs,) = (GOLDEN / "micro" / name).rglob("model_optim_rng.pt")
    written, expected = content_of(mine), content_of(theirs)
    args, their_args = vars(read_torch_file(mine)["args"]), vars(read_torch_file(theirs)["args"])
    assert args["model_type"].made_of == their_args["model_type"].made_of == (1,)
    assert type(args["model_type"]).__name__ == "ModelType"
    for content in (written, expected):
        content.pop("args")
    expected.pop("rng_state")
    assert_alike(written, expected)
    for key in args.keys() & their_args.keys() - NOT_KEPT:
        assert args[key] == their_args[key], key


NOT_KEPT = {
    # Of the command that trained, not of the run:
    "data_path",
    "data_impl",
    "iteration",
    "merge_file",
    "model_type",
    "tokenizer_type",
    "vocab_file",
    # What query-key layer scaling implies is written down by us:
    "attention_softmax_in_fp32",
    "made_of",
}


def assert_alike(mine: Any, theirs: Any, where: str = "") -> None:
    if isinstance(theirs, torch.Tensor):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs), where
    elif isinstance(theirs, dict):
        assert list(mine) == list(theirs) if "model" in where else mine.keys() == theirs.keys(), where
        for key in theirs:
            assert_alike(mine[key], theirs[key], f"{where}.{key}")
    elif isinstance(theirs, list):
        assert len(mine) == len(theirs), where
        for i, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            assert_alike(one, other, f"{where}[{i}]")
    elif isinstance(theirs, float):
        assert mine == pytest.approx(theirs, rel=1e-12), where
    else:
        assert mine == theirs, where


def test_megatron_cores_names():
    """The checkpoint of 2026 and that of 2022 are of one run, which both computed alike."""
    core = read_megatron(GOLDEN / "micro" / "mcore_head_iter20", MICRO)
    assert core.config.data.megatron_compat == 2026
    old = read_megatron(GOLDEN / "micro" / "fp32_iter10", MICRO)
    assert old.config.data.megatron_compat == 2022
    assert core.model.keys() == old.model.keys()
    assert core.state.progress.consumed_samples == 160 and len(core.notes) == 1


def test_loss_scale_and_main_weights():
    source = read_megatron(GOLDEN / "micro" / "fp16_iter20", MICRO)
    assert source.state.scaler == {"scale": 65536.0, "clean_steps": 20, "tolerance": 2}
    assert source.state.optimizer_step == 20 and source.config.precision.fp16
    for name, tensor in source.model.items():
        assert torch.equal(source.tensors["optimizer.master"][name].load().half(), tensor.load()), name


def rewrite(root: Path, change: Callable[[dict[str, Any]], Any], ranks: str = "mp_rank_*") -> None:
    """Change the content of some ranks' files."""
    for path in root.glob(f"iter_*/{ranks}/model_optim_rng.pt"):
        content = content_of(path)
        change(content)
        save(content, path)


def test_steps_of_torchs_own_adam(tmp_path: Path):
    """Newer versions may keep the number of updates with each parameter, as a tensor."""
    source = random_source()
    write_megatron(source, tmp_path / "m", tp=1, pp=1)

    def change(content: dict[str, Any], last: float = 8.0) -> None:
        for group in content["optimizer"]["param_groups"]:
            group.pop("step", None)
        for number, state in content["optimizer"]["state"].items():
            state["step"] = torch.tensor(last if number == 27 else 8.0)

    rewrite(tmp_path / "m", change)
    back = read_megatron(tmp_path / "m")
    assert back.state.optimizer_step == 8 and check_same(source, back) == 84
    rewrite(tmp_path / "m", lambda content: change(content, 7.0))
    with pytest.raises(CheckpointError, match="it is at 2 different steps"):
        read_megatron(tmp_path / "m")


def map_query_key_value(content: dict[str, Any], pattern: str, heads: int) -> None:
    from einops import rearrange

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return rearrange(tensor, pattern, n=heads, three=3).contiguous() if "query_key_value" in name else tensor

    encoder = content["model"]["language_model"]["encoder"]
    groups = content["optimizer"]["state"]
    names = list(encoder)
    for name in names:
        encoder[name] = change(name, encoder[name])
    # In the optimizer the matrices come first, in the order of the model.
    embedding = content["model"]["language_model"].get("embedding", {})
    decayed = [*embedding, *(name for name in names if encoder[name].dim() > 1)]
    others = [name for name in names if encoder[name].dim() == 1]
    for number, name in enumerate([*decayed, *others]):
        groups[number] = {key: change(name, tensor) for key, tensor in groups[number].items()}


@pytest.mark.parametrize("version", [None, 0, 1.0, 2.0])
def test_older_versions(version: float | None, tmp_path: Path):
    """The orders of query, key and value before 2020-10 and the names before 2020-09."""
    source = random_source()
    write_megatron(source, tmp_path / "m", tp=2, pp=1)

    def change(content: dict[str, Any]) -> None:
        args = content["args"]
        if version is None:
            del content["checkpoint_version"]
        else:
            content["checkpoint_version"] = version
        args.model_parallel_size = args.tensor_model_parallel_size
        del args.tensor_model_parallel_size, args.pipeline_model_parallel_size
        patterns = {0: "(n three d) ... -> (three n d) ...", 1: "(n three d) ... -> (n d three) ..."}
        if int(version or 0) in patterns:
            map_query_key_value(content, patterns[int(version or 0)], 2)
        if not version:
            model = content["model"]["language_model"]
            model["transformer"] = OrderedDict(
                (name.replace("self_attention", "attention"), tensor) for name, tensor in model.pop("encoder").items()
            )

    rewrite(tmp_path / "m", change)
    assert check_same(source, read_megatron(tmp_path / "m")) == 84


def test_ranks_that_hold_padding_alone(tmp_path: Path):
    """Of 4 ranks two hold no word: their padding differs and is nobody's."""
    source = random_source(vocab_size=40, make_vocab_size_divisible_by=32)
    write_megatron(source, tmp_path / "m", tp=4, pp=2)

    def change(content: dict[str, Any]) -> None:
        for table in (content["model"]["language_model"].get("embedding", {}).get("word_embeddings"),):
            if table is not None:
                table["weight"].add_(torch.randn(()))

    rewrite(tmp_path / "m", change, "mp_rank_03_000")
    with pytest.raises(CheckpointError, match="must hold the same values"):  # as the head's copy, padding and all
        read_megatron(tmp_path / "m")
    write_megatron(source, tmp_path / "n", tp=4, pp=1)
    rewrite(tmp_path / "n", change, "mp_rank_03")
    assert check_same(source, read_megatron(tmp_path / "n")) == 84


def test_interleaved_stages(tmp_path: Path):
    """Two stages of two chunks each: stage 0 has layers 0 and 2, stage 1 has 1 and 3."""
    assert [layers_of_chunk(8, 2, 2, stage, chunk) for chunk in (0, 1) for stage in (0, 1)] == [
        range(0, 2), range(2, 4), range(4, 6), range(6, 8),
    ]  # fmt: skip
    source = random_source(num_layers=4, with_optimizer=False)
    write_megatron(source, tmp_path / "m", tp=1, pp=4)
    folder = next((tmp_path / "m").glob("iter_*"))
    ranks = [content_of(folder / f"mp_rank_00_{p:03d}" / "model_optim_rng.pt") for p in range(4)]
    shutil.rmtree(folder)
    for p in range(2):
        content = {key: value for key, value in ranks[p].items() if key != "model"}
        content["args"].pipeline_model_parallel_size = 2
        content |= {f"model{chunk}": ranks[2 * chunk + p]["model"] for chunk in range(2)}
        path = folder / f"mp_rank_00_{p:03d}" / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        save(content, path)
    back = read_megatron(tmp_path / "m", VocabularyConfig(true_vocab_size=1003))
    assert check_same(source, back) == 52


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    write_megatron(random_source(), tmp_path / "m", tp=2, pp=2)
    return tmp_path / "m"


def encoder(content: dict[str, Any]) -> dict[str, torch.Tensor]:
    return content["model"]["language_model"]["encoder"]


def truncate(root: Path) -> None:
    path = next(root.glob("iter_*/mp_rank_01_001/*.pt"))
    path.write_bytes(path.read_bytes()[:-100])


def change_one(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda root: rewrite(root, change, "mp_rank_01_001")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncate, r"mp_rank_01_001/model_optim_rng\.pt is not a file of torch\.save"),
        (lambda root: shutil.rmtree(next(root.glob("iter_*/mp_rank_01_000"))), r"2 × 2 .* holds 3; missing: \(1, 0\)"),
        (
            lambda root: shutil.copytree(
                next(root.glob("iter_*/mp_rank_01_000")), next(root.glob("iter_*")) / "mp_rank_02_000"
            ),
            r"holds 5; missing: none, too many: \(2, 0\)",
        ),
        (change_one(lambda content: content.update(iteration=8)), "mixes checkpoints: iteration is .*8"),
        (
            change_one(lambda content: encoder(content).update({"layers.0.rotary.weight": torch.zeros(1)})),
            r"no place in the target: language_model\.encoder\.layers\.0\.rotary\.weight",
        ),
        (
            change_one(lambda content: encoder(content).pop("final_layernorm.bias")),
            r"missing from the source is what becomes: final_layernorm\.bias",
        ),
        (
            change_one(lambda content: encoder(content).update({"final_layernorm.bias": torch.zeros(23)})),
            r"final_layernorm\.bias is \[23\] and must be \[24\]",
        ),
        (
            change_one(lambda content: encoder(content)["final_layernorm.bias"].add_(1)),
            "must hold the same values and do not",
        ),
        (
            change_one(lambda content: content["model"]["word_embeddings_for_head"]["weight"].mul_(2)),
            r"word_embeddings.* must hold the same values and do not",
        ),
        (change_one(lambda content: content.update(evil=eval)), "asks for .*eval"),
        (change_one(lambda content: content.update(args={})), "holds no args"),
        (
            lambda root: rewrite(root, lambda content: setattr(content["args"], "bf16", True)),
            r"holds torch\.float32 weights where its configuration says torch\.bfloat16",
        ),
        (change_one(lambda content: content.pop("model")), "holds no model"),
        (change_one(lambda content: setattr(content["args"], "swiglu", True)), None),
        (lambda root: rewrite(root, lambda c: setattr(c["args"], "swiglu", True)), "swiglu is True, not False"),
        (lambda root: rewrite(root, lambda c: setattr(c["args"], "num_experts", 8)), "num_experts is 8"),
        (lambda root: rewrite(root, lambda c: c["optimizer"]["state"].popitem()), "--no-load-optim converts"),
        (
            lambda root: (next(root.glob("iter_*/mp_rank_00_000")) / "distrib_optim.pt").touch(),
            "distributed optimizer .* --no-load-optim",
        ),
        (lambda root: (next(root.glob("iter_*")) / "metadata.json").write_text("{}"), r"has no \.metadata"),
        (lambda root: (root / "latest_checkpointed_iteration.txt").write_text("12"), "iter_0000012 does not exist"),
        (lambda root: (root / "latest_checkpointed_iteration.txt").unlink(), "Give --ckpt-step"),
    ],
)
def test_wrong_checkpoints(
    damage: Callable[[Path], Any], said: str | None, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    """Refused, named, exit code 4, nothing left behind."""
    damage(saved)
    before = sorted(path.name for path in tmp_path.iterdir())
    code = main(["convert", "from-megatron", "--load", str(saved), "--save", str(tmp_path / "out")])
    error = capsys.readouterr().err
    if said is None:  # the first rank's settings are the run's
        assert code == 0
        return
    assert code == 4
    assert re.search(said, error) and error.count("\n") == 1, error
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_weights_alone(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    """What cannot be taken along is left out on request, and said."""
    (next(saved.glob("iter_*/mp_rank_00_000")) / "distrib_optim.pt").touch()
    flags = ["convert", "from-megatron", "--load", str(saved), "--save", str(tmp_path / "out"), "--no-load-optim"]
    assert main(flags) == 0
    out = capsys.readouterr().out
    assert "go on with --no-load-optim" in out and "28 tensors read back, bit for bit" in out


def test_the_vocabulary_must_be_the_padded_one(tmp_path: Path, capsys: pytest.CaptureFixture):
    with pytest.raises(ConfigError, match=r"padded to 512, to a multiple of 128 × 2; the 600 words .* make 768"):
        read_megatron(GOLDEN / "h64" / "iter20_tp2pp2", VocabularyConfig(true_vocab_size=600))
    with pytest.raises(ConfigError, match="comes without a tokenizer"):
        read_megatron(GOLDEN / "h64" / "iter20_tp2pp2")
    with pytest.raises(ConfigError, match=r"--true-vocab-size \(499\) must be that of the tokenizer \(500\)"):
        read_megatron(
            GOLDEN / "h64" / "iter20_tp2pp2",
            VocabularyConfig(true_vocab_size=499, vocab_file=H64.vocab_file, merge_file=H64.merge_file),
        )


def test_the_activation_is_the_runs():
    def activation(is_core: bool = False, **args: Any) -> bool:
        from trimegatron.convert.megatron_args import config_from_args

        values = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "max_position_embeddings": 4}
        values |= {"micro_batch_size": 1, "seq_length": 4}
        return config_from_args(
            values | args, where=Path("x"), is_core=is_core, vocab_size=9, tokenizer_type="NullTokenizer"
        ).model.bias_gelu_fusion

    assert activation(bias_gelu_fusion=True) and activation(bias_gelu_fusion=False, openai_gelu=True)
    assert not activation(bias_gelu_fusion=False, openai_gelu=False)
    assert not activation(bias_gelu_fusion=False, openai_gelu=True, is_core=True) and activation(is_core=True)


def test_layouts_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture):
    source: Source = random_source(with_optimizer=False)
    with pytest.raises(ConfigError, match=r"--target-tensor-parallel-size \(3\) must divide the model's heads \(4\)"):
        write_megatron(source, tmp_path / "m", tp=3, pp=1)
    with pytest.raises(ConfigError, match=r"--target-pipeline-parallel-size \(4\) must divide the model's layers"):
        write_megatron(source, tmp_path / "m", tp=1, pp=4)
    words = random_source(with_optimizer=False, vocab_size=1008, mask_padded_vocab=False)
    with pytest.raises(ConfigError, match="would pad the vocabulary from 1008 to 1024 words"):
        write_megatron(words, tmp_path / "m", tp=4, pp=1)
    assert not (tmp_path / "m").exists()
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "precious").touch()
    with pytest.raises(ConfigError, match=r"--save .* must not exist yet, or be empty"):
        write_megatron(source, tmp_path / "m", tp=1, pp=1)


def test_a_file_that_ends_while_it_is_read(saved: Path, tmp_path: Path):
    source = read_megatron(saved)
    path = next(saved.glob("iter_*/mp_rank_00_000/*.pt"))
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(OSError, match="ends in the middle of a tensor"):
        source.model["embedding.word_embeddings.weight"].load()
    assert CheckpointError.exit_code == 4
