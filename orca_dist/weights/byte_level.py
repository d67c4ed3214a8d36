"""Byte-level BPE from a vocabulary and merges, by one of the known rules of splitting text.

The rule is no part of those two: whoever has them must know it. A near one would silently
give other tokens. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers


class SplittingRule(StrEnum):
    """llama.cpp's names."""

    SMOLLM = "smollm"
    GPT2 = "gpt-2"
    LLAMA3 = "llama-bpe"
    QWEN2 = "qwen2"


def byte_level_tokenizer(
    vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]], rule: SplittingRule
) -> Tokenizer:
    """Without its added tokens."""
    whole_words = rule in _WHOLE_WORD_RULES
    model = models.BPE(vocab=dict(vocabulary), merges=list(merges), ignore_merges=whole_words)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _SPLITTERS[rule]()
    if rule in _NORMALIZED_RULES:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _gpt2_splitter() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _smollm_splitter() -> pre_tokenizers.PreTokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, _gpt2_splitter()])


def _llama3_splitter() -> pre_tokenizers.PreTokenizer:
    return _pattern_splitter(r"\p{N}{1,3}")


def _qwen2_splitter() -> pre_tokenizers.PreTokenizer:
    return _pattern_splitter(r"\p{N}")


def _pattern_splitter(number: str) -> pre_tokenizers.PreTokenizer:
    """Contractions, words with what is before them, numbers, punctuation, line ends, spaces."""
    parts = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        number,
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
    split = pre_tokenizers.Split(Regex("|".join(parts)), behavior="isolated")
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, spell])


_SPLITTERS: Mapping[SplittingRule, Callable[[], pre_tokenizers.PreTokenizer]] = {
    SplittingRule.SMOLLM: _smollm_splitter,
    SplittingRule.GPT2: _gpt2_splitter,
    SplittingRule.LLAMA3: _llama3_splitter,
    SplittingRule.QWEN2: _qwen2_splitter,
}
_WHOLE_WORD_RULES = (SplittingRule.LLAMA3,)  # a word that is a token is taken whole, merges or not
_NORMALIZED_RULES = (SplittingRule.QWEN2,)
