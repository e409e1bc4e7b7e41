"""Engines: the same ids, proved before use; what is said where gigatoken cannot be used; bounded caches."""

from __future__ import annotations

import json
import pickle
import unicodedata
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimegatron import long_text
from trimegatron.errors import ConfigError
from trimegatron.long_text import LongText
from trimegatron.preprocess import engine as engines
from trimegatron.preprocess import records
from trimegatron.preprocess.encode import Encoder
from trimegatron.preprocess.engine import PROBES, GigatokenEngine, TokenizersEngine, choose_engine
from trimegatron.preprocess.inputs import Source
from trimegatron.preprocess.reader import Chunk, Place
from trimegatron.preprocess.sample import sample_texts
from trimegatron.tokenizer import NullTokenizer, Tokenizer, build_tokenizer

GPT2 = Path(__file__).parents[1] / "golden" / "gpt2"
needs_gigatoken = pytest.mark.skipif(find_spec("gigatoken") is None, reason="gigatoken is not installed")


def gpt2(megatron_compat: int = 2026) -> Tokenizer:
    files = {"vocab_file": GPT2 / "vocab.json", "merge_file": GPT2 / "merges.txt"}
    return build_tokenizer("GPT2BPETokenizer", **files, megatron_compat=megatron_compat)


@pytest.fixture(scope="module", params=[2022, 2026])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return gpt2(request.param)


@pytest.fixture(scope="module")
def gigatoken(tokenizer: Tokenizer) -> GigatokenEngine:
    pytest.importorskip("gigatoken")
    found, line = choose_engine("gigatoken", tokenizer, lambda: ["some text", "more"], 2)
    assert isinstance(found, GigatokenEngine)
    assert "as tokenizers on 2 documents" in line
    return found


WORDS = [
    "a",
    "'",
    "s",
    "'ll",
    "7",
    " ",
    "\n",
    "\t",
    "\u00a0",
    "é",
    "<|endoftext|>",
    "!",
    "\U0001f600",
    "\u4f60",
    "\0",
    "\u088f",
]


@settings(max_examples=150, deadline=None)
@given(texts=st.lists(st.lists(st.sampled_from(WORDS) | st.text(max_size=3), max_size=20).map("".join), max_size=5))
def test_gigatoken_gives_the_ids_of_tokenizers(
    gigatoken: GigatokenEngine, tokenizer: Tokenizer, texts: list[str]
) -> None:
    assert [a.tolist() for a in gigatoken.encode(texts)] == [a.tolist() for a in tokenizer.encode_flat(texts)]


def test_every_character_that_came_late_to_unicode(gigatoken: GigatokenEngine, tokenizer: Tokenizer) -> None:
    """Where the tables of the two may differ: what this Python's older tables do not know. It is tried alone, since
    one disputed character sends its whole text to tokenizers; all others in one batch go to gigatoken.
    """
    planes = [code for code in range(0x40000) if unicodedata.category(chr(code)) == "Cn"]
    texts = [f"a{chr(c)}a 1{chr(c)}1 {chr(c)}'ll !{chr(c)}!" for c in planes]
    sure = [text for text in texts if not engines.has_disputed(text)]
    assert 1000 < len(texts) - len(sure) < 5000
    ids, lengths = gigatoken.encode(sure)
    expected, expected_lengths = tokenizer.encode_flat(sure)
    assert np.array_equal(lengths, expected_lengths)
    assert np.array_equal(ids, expected)
    disputed = ["plain", "\u88f0\u0890 \u088f'll", "", "\U000323b0's \U00033479a", "é"]
    assert [a.tolist() for a in gigatoken.encode(disputed)] == [a.tolist() for a in tokenizer.encode_flat(disputed)]
    assert [engines.has_disputed(text) for text in disputed] == [False, True, False, True, False]


def test_long_texts_and_types(
    gigatoken: GigatokenEngine, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [PROBES[0] * 40, "", *PROBES, "word " * 300]
    expected = [a.tolist() for a in tokenizer.encode_flat(texts)]
    for size in (50, 1 << 22):
        monkeypatch.setattr(engines, "_PIECE", size)
        ids, lengths = gigatoken.encode(texts, np.dtype("<u2"))
        assert ids.dtype == np.uint16
        assert [ids.tolist(), lengths.tolist()] == expected
    assert [a.tolist() for a in gigatoken.encode([])] == [[], []]
    assert [a.tolist() for a in pickle.loads(pickle.dumps(gigatoken)).encode(texts)] == expected
    assert [a.tolist() for a in pickle.loads(pickle.dumps(TokenizersEngine(tokenizer))).encode(texts)] == expected


def test_cache_is_thrown_away_when_it_has_grown(gigatoken: GigatokenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    first = gigatoken._backend
    monkeypatch.setattr(engines, "resident_bytes", lambda: gigatoken._memory + gigatoken.cache_bytes)
    gigatoken.encode(["a"])
    assert gigatoken._backend is first
    monkeypatch.setattr(engines, "resident_bytes", lambda: gigatoken._memory + gigatoken.cache_bytes + 1)
    expected = gigatoken.encode(["b c"])
    assert gigatoken._backend is not first
    assert expected[0].tolist() == [65, 269]
    second = gigatoken._backend
    monkeypatch.setattr(engines, "resident_bytes", lambda: 0)  # a system that does not tell
    monkeypatch.setattr(engines, "_CHECK_EVERY", gigatoken._characters)
    gigatoken.encode(["a"])
    assert gigatoken._backend is not second


def test_memory_is_read() -> None:
    before = engines.resident_bytes()
    block = np.ones(50_000_000, np.uint8)
    assert 40e6 < engines.resident_bytes() - before < 100e6
    del block


def test_without_gigatoken_a_line_says_what_it_would_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: None)
    found, line = choose_engine("auto", gpt2(), lambda: [], 1)
    assert found.name == "tokenizers"
    assert "not installed" in line and "times as fast: pip install 'trimegatron[fast]'" in line
    with pytest.raises(ConfigError, match=r"--tokenizer-engine \(gigatoken\) cannot be used.*not installed"):
        choose_engine("gigatoken", gpt2(), lambda: [], 1)


@needs_gigatoken
def test_other_ids_and_what_it_cannot_load_are_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    encode = GigatokenEngine.encode

    def wrong(self: GigatokenEngine, texts: list[str], dtype: object = np.int32) -> tuple[np.ndarray, np.ndarray]:
        ids, lengths = encode(self, texts, dtype)
        return np.where(ids == 1212, 1213, ids), lengths  # "This"

    monkeypatch.setattr(GigatokenEngine, "encode", wrong)
    assert choose_engine("auto", gpt2(), lambda: ["that"], 1)[0].name == "gigatoken"
    found, line = choose_engine("auto", gpt2(), lambda: ["This"], 1)
    assert (found.name, "gives other ids" in line) == ("tokenizers", True)
    with pytest.raises(ConfigError, match="gives other ids"):
        choose_engine("gigatoken", gpt2(), lambda: ["This"], 1)

    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    Backend(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    words = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=tmp_path)
    found, line = choose_engine("auto", words, lambda: [], 1)
    assert (found.name, "cannot load this tokenizer" in line) == ("tokenizers", True)


def test_null_tokenizer_and_asked_for_tokenizers() -> None:
    assert choose_engine("auto", NullTokenizer(9), lambda: [], 1)[0].name == "NullTokenizer"
    found, line = choose_engine("tokenizers", gpt2(), lambda: [], 1)
    assert (found.name, line) == ("tokenizers", "Tokenizer engine: tokenizers, as asked for.")


def test_the_sample_is_spread_over_the_input(tmp_path: Path) -> None:
    rows = [json.dumps({"t": f"{k} " + "x" * 1000, "n": k}) for k in range(5000)]
    rows[0] = "not json"
    (tmp_path / "a").write_text("\n".join(rows))
    texts = sample_texts([Source(tmp_path / "a")], ["t"])
    numbers = [int(text.split()[0]) for text in texts]
    assert numbers[0] == 1
    assert len({n // 500 for n in numbers}) == 10
    assert 150_000 < sum(map(len, texts)) < 350_000
    (tmp_path / "b").write_text(json.dumps({"t": "y" * 2_000_000}))  # no whole line fits
    assert set("".join(sample_texts([Source(tmp_path / "b")], ["t"]))) <= set('{"t": y}')
    assert sample_texts([Source(tmp_path / "a"), Source(tmp_path / "b")], ["t"])[: len(texts) // 4] != []


@pytest.mark.parametrize("engine", ["tokenizers", pytest.param("gigatoken", marks=needs_gigatoken)])
def test_long_lines_in_pieces_give_the_same_tokens(
    tokenizer: Tokenizer, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "LONG", 400)
    monkeypatch.setattr("trimegatron.preprocess.encode.LONG", 400)
    monkeypatch.setattr(long_text, "PIECE", 20)
    found, _ = choose_engine(engine, tokenizer, lambda: [], 1)
    encoder = Encoder(["t", "u"], found, tokenizer.vocab_size, np.dtype("int32"), None, skip=True)
    text = "".join(f"{word} x{k}\n  \\n \u00e9 \U0001f600 {word}" for k, word in enumerate(WORDS * 4))
    rows = [{"t": text, "u": "short"}, {"t": ["a", text, "b"], "u": text[:300]}, {"t": "x" * 999, "u": ""}]
    raw = [json.dumps(row, ensure_ascii=k % 2 == 0).encode() for k, row in enumerate(rows)]
    raw.append(b'{"t": "other", "t": ' + json.dumps(text).encode() + b', "u": "v"}')
    assert isinstance(records.parse_long_line(raw[0], 1, ["t"])[0][0], LongText)
    assert len(list(records.parse_long_line(raw[0], 1, ["t"])[0][0])) > 20
    bad = b"y " * 400
    raw += [
        b'{"t": "%b\\ud83d", "u": ""}' % bad,
        b'{"t": "%b\xff", "u": ""}' % bad,
        b'{"t": "%b\n", "u": ""}' % bad,
        b'{"t": "%b\\x", "u": ""}' % bad,
        b'{"t": "", "u": "", "v": "%b\xff"}' % bad,
        b'{"t": "%b", "u": "\\udfff0"}' % bad,
        b'{"t": "%b}' % bad,
        b'{"t": "%b"}' % bad,
    ]
    result = encoder(Chunk(Path("x"), range(1, len(raw) + 1), list(raw), 0, Place(), 1.0))
    monkeypatch.setattr(records, "LONG", 1 << 30)
    monkeypatch.setattr("trimegatron.preprocess.encode.LONG", 1 << 30)
    whole = encoder(Chunk(Path("x"), range(1, len(raw) + 1), list(raw), 0, Place(), 1.0))
    assert [reject.number for reject in result.rejects] == list(range(5, 13))
    assert result.rejects == whole.rejects
    for pieces, at_once in zip(result.keys, whole.keys, strict=True):
        assert [np.asarray(part).tolist() for part in pieces] == [np.asarray(part).tolist() for part in at_once]
