"""Tokenizers: GPT-2's ids, what `<|endoftext|>` becomes, and folders that transformers loads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimegatron import byte_level
from trimegatron.errors import ConfigError, DataError
from trimegatron.tokenizer import Tokenizer, build_tokenizer, load_tokenizer

GPT2 = Path(__file__).parent / "golden" / "gpt2"
FILES = {"vocab_file": GPT2 / "vocab.json", "merge_file": GPT2 / "merges.txt"}
TEXT = "def f(x):\n\treturn x  # naïve 😀\r\n"


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    return build_tokenizer("GPT2BPETokenizer", **FILES)


def test_gpt2(gpt2: Tokenizer) -> None:
    assert (gpt2.type, gpt2.vocab_size, gpt2.eod) == ("GPT2BPETokenizer", 50257, 50256)
    assert gpt2.encode("Hello world, this is a plain document.") == [15496, 995, 11, 428, 318, 257, 8631, 3188, 13]
    assert gpt2.encode("a <|endoftext|>b") == [64, 220, 50256, 65]
    assert gpt2.encode("") == []
    assert gpt2.decode(gpt2.encode(TEXT)) == TEXT


def test_batches_equal_single_texts(gpt2: Tokenizer) -> None:
    texts = [TEXT, "", " x", "<|endoftext|>", "aaa " * 50]
    expected = [gpt2.encode(text) for text in texts]
    assert gpt2.encode_batch(texts) == expected
    tokens, lengths = gpt2.encode_flat(texts)
    assert (tokens.dtype, lengths.dtype) == (np.int32, np.int32)
    assert lengths.tolist() == [len(ids) for ids in expected]
    assert tokens.tolist() == [i for ids in expected for i in ids]
    assert [a.tolist() for a in gpt2.encode_flat([])] == [[], []]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(["a", "'", "s", "7", " ", "\n", "\t", "\u00a0", "é", "<|endoftext|>", "!"]), max_size=60)
)
def test_long_texts_in_pieces_give_the_same_tokens(gpt2: Tokenizer, parts: list[str]) -> None:
    text = "".join(parts)
    pieces = list(byte_level.split_long(text, 5))
    assert "".join(pieces) == text
    assert [i for piece in pieces for i in gpt2.encode(piece)] == gpt2.encode(text)


def test_long_text_is_cut_and_counted_once(gpt2: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [TEXT * 40, "x", "", "word " * 300]
    expected = [a.tolist() for a in gpt2.encode_flat(texts)]
    monkeypatch.setattr("trimegatron.tokenizer._PIECE", 50)
    monkeypatch.setattr("trimegatron.tokenizer._BATCH", 130)
    assert [a.tolist() for a in gpt2.encode_flat(texts)] == expected


def test_bytes_behind_each_token(gpt2: Tokenizer) -> None:
    sizes = gpt2.token_bytes()
    assert sizes is not None
    assert sizes[gpt2.encode(TEXT)].sum() == len(TEXT.encode())
    assert sizes[50256] == 0


def test_hugging_face_from_folder_file_and_vocabulary(gpt2: Tokenizer, tmp_path: Path) -> None:
    gpt2.save(tmp_path / "saved")
    for path in (tmp_path / "saved", tmp_path / "saved" / "tokenizer.json", GPT2):
        loaded = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=path)
        assert (loaded.type, loaded.vocab_size, loaded.eod) == ("HuggingFaceTokenizer", 50257, 50256)
        assert loaded.encode(TEXT) == gpt2.encode(TEXT)


def word_level(folder: Path, *, eos: str | None = None, limit: int | None = None) -> Path:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers, processors

    backend = Backend(models.WordLevel({"a": 0, "b": 1, "<s>": 2, "</s>": 7}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    if limit is not None:
        backend.enable_truncation(limit)
        backend.enable_padding(length=limit)
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    if eos is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": eos}, "chat_template": "x"}))
    return folder


def test_hugging_face_end_token_and_nothing_added_or_cut(tmp_path: Path) -> None:
    tokenizer = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=word_level(tmp_path / "a", eos="</s>", limit=3))
    assert (tokenizer.vocab_size, tokenizer.eod) == (8, 7)
    assert tokenizer.encode("a b a b b") == [0, 1, 0, 1, 1]
    assert tokenizer.encode_batch(["b"]) == [[1]]
    assert tokenizer.token_bytes() is None
    tokenizer.save(tmp_path / "b")
    again = load_tokenizer(tmp_path / "b")
    assert (again.type, again.eod, again.encode("b a")) == ("HuggingFaceTokenizer", 7, [1, 0])
    assert json.loads((tmp_path / "b" / "tokenizer_config.json").read_text())["chat_template"] == "x"
    without = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=word_level(tmp_path / "c"))
    assert without.eod is None


def test_save_and_load(gpt2: Tokenizer, tmp_path: Path) -> None:
    gpt2.save(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json"}
    assert json.loads((tmp_path / "vocab.json").read_text()) == json.loads((GPT2 / "vocab.json").read_text())
    assert (tmp_path / "merges.txt").read_text() == (GPT2 / "merges.txt").read_text()
    loaded = load_tokenizer(tmp_path)
    assert (loaded.type, loaded.vocab_size, loaded.eod) == ("GPT2BPETokenizer", 50257, 50256)
    assert loaded.encode(TEXT) == gpt2.encode(TEXT)


def test_transformers_loads_a_saved_folder(gpt2: Tokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, GPT2TokenizerFast

    gpt2.save(tmp_path)
    for cls in (AutoTokenizer, GPT2TokenizerFast):
        loaded = cls.from_pretrained(tmp_path, local_files_only=True)
        assert loaded(TEXT)["input_ids"] == gpt2.encode(TEXT)
        assert (len(loaded), loaded.eos_token_id, loaded.bos_token_id) == (50257, 50256, 50256)
        assert loaded.decode(gpt2.encode(TEXT)) == TEXT


def test_null_tokenizer_is_megatrons(tmp_path: Path) -> None:
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=70000)
    assert (tokenizer.vocab_size, tokenizer.eod) == (70001, 70000)
    assert tokenizer.encode("1 2 69999") == [1, 2, 69999]
    assert tokenizer.decode([1, 2]) == "1 2"
    for text in ("1 x", "70001", "-1"):
        with pytest.raises(DataError):
            tokenizer.encode(text)
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).eod == 70000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("GPT2BPETokenizer", {"merge_file": GPT2 / "merges.txt"}), "needs --vocab-file"),
        (("GPT2BPETokenizer", FILES | {"vocab_file": "nowhere.json"}), r"--vocab-file \(nowhere.json\): no such file"),
        (("GPT2BPETokenizer", FILES | {"merge_file": "nowhere"}), r"--merge-file \(nowhere\)"),
        (("HuggingFaceTokenizer", {}), "needs --tokenizer-model"),
        (("HuggingFaceTokenizer", {"tokenizer_model": "nowhere"}), "no such file or folder"),
        (("HuggingFaceTokenizer", {"tokenizer_model": GPT2.parent}), "must hold tokenizer.json"),
        (("HuggingFaceTokenizer", {"tokenizer_model": GPT2 / "vocab.json"}), "cannot be read as a tokenizer"),
        (("NullTokenizer", {}), "--vocab-size"),
        (("Sentence", {}), r"--tokenizer-type \(Sentence\) must be one of GPT2BPETokenizer"),
    ],
)
def test_what_is_missing_is_named(arguments, message: str) -> None:
    tokenizer_type, files = arguments
    with pytest.raises(ConfigError, match=message):
        build_tokenizer(tokenizer_type, **files)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"a": 0}', '{"a":'])
def test_broken_vocabulary_names_the_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "vocab.json").write_text(content)
    with pytest.raises(ConfigError, match=r"vocab\.json"):
        build_tokenizer("GPT2BPETokenizer", **(FILES | {"vocab_file": tmp_path / "vocab.json"}))


def test_vocabulary_without_an_end_token_has_no_eod(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({s: i for i, s in enumerate(byte_level.alphabet())}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=tmp_path)
    assert (tokenizer.vocab_size, tokenizer.eod) == (256, None)
    tokenizer.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").eod is None


def test_end_token_with_id_0(tmp_path: Path) -> None:
    """Where trainers that put special tokens first have it."""
    vocab = {s: i for i, s in enumerate([byte_level.END_OF_TEXT, *byte_level.alphabet()])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    files = {"vocab_file": tmp_path / "vocab.json", "merge_file": tmp_path / "merges.txt"}
    tokenizer = build_tokenizer("GPT2BPETokenizer", **files)
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 0)
    tokenizer.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").eod == 0
