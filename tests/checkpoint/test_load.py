"""What ``--load`` takes, what it refuses and with which words, and how much of the files it reads."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.parallel import run_ranks
from tests.runs import tiny_flags, train_tiny
from trimegatron import train
from trimegatron.checkpoint import storage, stored
from trimegatron.config import parse_train_args

SIZES = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")


@pytest.fixture(scope="module")
def saved(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of a model with nothing at its default."""
    folder = tmp_path_factory.mktemp("saved")
    sizes = {"ffn_hidden_size": 48, "layernorm_epsilon": 1e-6, "no_bias_gelu_fusion": True}
    train_tiny(corpus, metrics=folder / "m.jsonl", save=folder / "c", save_interval=2, train_iters=2, **sizes)
    return folder / "c"


def fails(corpus: Path, capfd: pytest.CaptureFixture, code: int, **changes) -> str:
    capfd.readouterr()
    assert run_ranks(1, train.main, tiny_flags(corpus, **changes)) == [code]
    error = capfd.readouterr().err
    assert "Traceback" not in error
    return error


def test_sizes_from_the_checkpoint(corpus: Path, saved: Path, tmp_path: Path, capfd: pytest.CaptureFixture):
    """None need be given, and one that is given gives way; each is said."""
    asked = dict.fromkeys(SIZES) | {"load": saved, "use_checkpoint_args": True, "hidden_size": 64}
    lines = train_tiny(corpus, metrics=tmp_path / "m.jsonl", train_iters=3, **asked)
    assert [line["iteration"] for line in lines] == [3]
    out = capfd.readouterr().out
    assert (
        f"note: --use-checkpoint-args takes from {saved / 'iter_0000002'}: --num-layers 2, --hidden-size 32 (in " in out
    )
    for words in (
        "(in place of 64, from the command line)",
        "--ffn-hidden-size 48",
        "--kv-channels 8",
        "--layernorm-epsilon 1e-06",
        "--no-bias-gelu-fusion",
    ):
        assert words in out
    run_ranks(1, train.main, [*tiny_flags(corpus, **asked), "--explain"])
    assert f"hidden-size                          32 features                  {saved}" in capfd.readouterr().out


def test_sizes_from_nothing(corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture):
    assert "--use-checkpoint-args needs --load" in fails(corpus, capfd, 2, use_checkpoint_args=True)
    assert "does not exist" in fails(corpus, capfd, 4, use_checkpoint_args=True, load=tmp_path / "typo")
    first = {"load": tmp_path / "c", "save": tmp_path / "c", "save_interval": 2, "use_checkpoint_args": True}
    config = parse_train_args(tiny_flags(corpus, **first), world_size=1)
    assert config.model.hidden_size == 32
    assert "--hidden-size is required" in fails(corpus, capfd, 2, hidden_size=None, **first)


def test_another_model_is_refused_with_the_flags_of_this_one(corpus: Path, saved: Path, capfd: pytest.CaptureFixture):
    error = fails(corpus, capfd, 4, load=saved, hidden_size=64, num_layers=3, vocab_size=300)
    for difference in (
        "num_layers is 2 there and 3 here (--num-layers 2)",
        "hidden_size is 32 there and 64 here (--hidden-size 32)",
        "ffn_hidden_size is 48 there and 256 here (--ffn-hidden-size 48)",
        "vocab_size is 211 there and 301 here (--vocab-size 210)",
        "layernorm_epsilon is 1e-06 there and 1e-05 here (--layernorm-epsilon 1e-06)",
        "bias_gelu_fusion is False there and True here (--no-bias-gelu-fusion)",
        "--use-checkpoint-args",
    ):
        assert difference in error


def test_hashes_can_be_left_out(corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture):
    where = {"save": tmp_path / "c", "load": tmp_path / "c", "save_interval": 2}
    train_tiny(corpus, metrics=tmp_path / "m.jsonl", train_iters=2, **where)
    shard = tmp_path / "c" / "iter_0000002" / "shard-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes(data)
    assert "holds no complete checkpoint" in fails(corpus, capfd, 4, train_iters=4, **where)
    lines = train_tiny(corpus, metrics=tmp_path / "m.jsonl", train_iters=4, no_verify_checkpoint=True, **where)
    assert lines[-1]["iteration"] == 4


def test_why_a_checkpoint_was_passed_over(corpus: Path, saved: Path, capfd: pytest.CaptureFixture):
    error = fails(corpus, capfd, 4, load=saved, ckpt_step=4, use_checkpoint_args=True)
    assert f"{saved / 'iter_0000004'} cannot be read" in error
    (saved / "iter_0000009").mkdir()
    (saved / "iter_0000008").mkdir()
    (saved / "iter_0000008" / "manifest.json").write_text("{")
    assert run_ranks(1, train.main, tiny_flags(corpus, load=saved, use_checkpoint_args=True, train_iters=2)) == [0]
    out = capfd.readouterr().out
    (saved / "iter_0000008" / "manifest.json").unlink()
    for number in (8, 9):
        (saved / f"iter_000000{number}").rmdir()
    assert f"loaded {saved / 'iter_0000002'}; going on at iteration 2" in out
    # The tracker names the complete one, so nothing is passed over until it is gone.
    assert "passed over" not in out


class Counted:
    """A safetensors file that counts what is read of it."""

    def __init__(self, file, path: Path, read: Counter):
        self.file, self.path, self.read = file, path, read

    def __enter__(self) -> Counted:
        self.file = self.file.__enter__()
        self.read["opened"] += 1
        return self

    def __exit__(self, *error: object) -> None:
        self.file.__exit__(*error)

    def __getattr__(self, name: str):
        return getattr(self.file, name)

    def get_tensor(self, name: str):
        raise AssertionError("a whole tensor is read")

    def get_slice(self, name: str):
        part, read = self.file.get_slice(name), self.read

        class Slice:
            get_shape, get_dtype = part.get_shape, part.get_dtype

            def __getitem__(self, where):
                found = part[where]
                read["bytes"] += found.nbytes
                return found

        return Slice()


def counted_run(flags: list[str]) -> tuple[tuple[int, int], int]:
    """Headers read and files opened, and bytes read of their tensors, on one rank."""
    read: Counter = Counter()
    real, read_header = storage.safe_open, stored.read_safetensors
    storage.safe_open = lambda path, framework: Counted(real(path, framework=framework), path, read)
    stored.read_safetensors = lambda path: read.update(headers=1) or read_header(path)
    assert train.main(flags) == 0
    return (read["headers"], read["opened"]), read["bytes"]


def test_a_rank_reads_what_it_needs(corpus: Path, tmp_path: Path):
    """Of a checkpoint of one process, two ranks of a sharded optimizer read each element once between them; with two
    ranks of tensor parallelism only what both hold is read twice. Each header is read once, and then the file."""
    train_tiny(corpus, metrics=tmp_path / "m.jsonl", save=tmp_path / "c", save_interval=2, train_iters=2)
    shard = tmp_path / "c" / "iter_0000002" / "shard-00000.safetensors"
    tensors = load_file(shard)
    total = sum(tensor.nbytes for tensor in tensors.values())
    common = {"load": tmp_path / "c", "train_iters": 2, "ddp_bucket_size": 3000}
    sharded = run_ranks(2, counted_run, tiny_flags(corpus, use_distributed_optimizer=True, **common))
    assert sum(size for _, size in sharded) == total
    assert max(size for _, size in sharded) < 0.6 * total
    assert [opened for opened, _ in sharded] == [(1, 1), (1, 1)]
    replicated = ("layernorm", "position_embeddings", "proj.bias", "4h_to_h.bias", "dense.bias")
    both = sum(tensor.nbytes for name, tensor in tensors.items() if any(word in name for word in replicated))
    cut = run_ranks(2, counted_run, tiny_flags(corpus, tensor_model_parallel_size=2, **common))
    assert sum(size for _, size in cut) == total + both
