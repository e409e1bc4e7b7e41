"""Training a tokenizer, and nothing heavy loaded by preprocessing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trimegatron.errors import ConfigError, DataError
from trimegatron.preprocess.tokenizer_cli import main
from trimegatron.tokenizer import build_tokenizer, load_tokenizer

SOURCES = sorted(Path(json.__file__).parent.glob("*.py"))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"content": source.read_text()}) + "\n" for source in SOURCES))
    return path


def test_end_of_text_is_the_last_id_and_the_files_serve_every_tokenizer(corpus: Path, tmp_path: Path) -> None:
    line = f"train --input {corpus} --json-keys content --vocab-size 600 --output {tmp_path / 'out'}"
    assert main(line.split()) == 0
    out = tmp_path / "out"
    vocab = json.loads((out / "vocab.json").read_text())
    assert sorted(vocab.values()) == list(range(600))
    assert vocab["<|endoftext|>"] == 599
    assert len((out / "merges.txt").read_text().splitlines()) == 600 - 257 + 1  # and the version line
    gpt2 = build_tokenizer("GPT2BPETokenizer", vocab_file=out / "vocab.json", merge_file=out / "merges.txt")
    text = SOURCES[0].read_text() + " 😀\x00<|endoftext|>"
    ids = gpt2.encode(text)
    assert (gpt2.eod, ids[-1]) == (599, 599)
    assert gpt2.decode(ids) == text
    assert len(ids) < 0.6 * len(text.encode())
    assert load_tokenizer(out).encode(text) == ids
    assert build_tokenizer("HuggingFaceTokenizer", tokenizer_model=out).encode(text) == ids
    assert main(line.replace(str(out), str(tmp_path / "again")).split()) == 0
    for name in ("vocab.json", "merges.txt", "tokenizer.json"):
        assert (tmp_path / "again" / name).read_bytes() == (out / name).read_bytes()


def test_small_text_says_that_it_gives_fewer_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").write_text('{"text": "ab ab"}\n')
    assert main(["train", "--input", str(tmp_path / "in"), "--vocab-size", "300", "--output", str(tmp_path / "o")]) == 0
    tokenizer = load_tokenizer(tmp_path / "o")
    assert tokenizer.vocab_size < 300
    assert tokenizer.eod == tokenizer.vocab_size - 1
    assert f"{tokenizer.vocab_size} ids, not --vocab-size 300" in capsys.readouterr().out


def test_what_is_wrong_is_named_and_nothing_written(corpus: Path, tmp_path: Path) -> None:
    good = {"--input": str(corpus), "--json-keys": "content", "--vocab-size": "300", "--output": str(tmp_path / "o")}

    def train(**changes: str) -> None:
        arguments = good | {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
        main(["train", *(word for pair in arguments.items() for word in pair)])

    with pytest.raises(DataError, match=r"in\.jsonl:1: no key 'text'; the keys here are: content"):
        train(json_keys="text")
    with pytest.raises(ConfigError, match="nowhere"):
        train(input="nowhere")
    with pytest.raises(ConfigError, match=r"--vocab-size.*257"):
        train(vocab_size="256")
    with pytest.raises(ConfigError, match="only subcommand is train"):
        main(["teach"])
    assert not (tmp_path / "o").exists()


def test_preprocessing_loads_no_heavy_library() -> None:
    code = (
        "import sys, trimegatron.preprocess.cli, trimegatron.preprocess.tokenizer_cli, trimegatron.data.gpt_dataset, "
        "trimegatron.data.sampler, trimegatron.tokenizer\n"
        "print({'torch', 'triton', 'transformers', 'tokenizers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
