"""A GGUF file's tokenizer as Hugging Face files: tokenizer.json and tokenizer_config.json.

Only byte-level BPE with a known splitting rule is rebuilt; a rule that isn't in the
table is refused by name, because a near one would silently give other tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from orca_dist.errors import ModelError
from orca_dist.weights.gguf_file import GgufFile


class TokenType(IntEnum):
    """GGUF's kinds of tokens that a tokenizer must match before it splits text."""

    CONTROL = 3
    USER_DEFINED = 4


def write_tokenizer(source: GgufFile, folder: Path, *, max_model_len: int) -> None:
    """tokenizer.json and tokenizer_config.json, the chat template in the latter."""
    build_tokenizer(source).save(str(folder / "tokenizer.json"))
    document = _tokenizer_config(source, max_model_len)
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def build_tokenizer(source: GgufFile) -> Tokenizer:
    """The tokenizer that the file describes; raises ModelError if its kind isn't supported."""
    _one_of(source, "tokenizer.ggml.model", ("gpt2",))
    rule = _one_of(source, "tokenizer.ggml.pre", tuple(_SPLITTERS))
    tokens: list[str] = source.need("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in source.need("tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = _SPLITTERS[rule]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = _post_processor(source, tokens)
    _add_tokens(tokenizer, tokens, source.need("tokenizer.ggml.token_type"))
    return tokenizer


def eos_token_ids(source: GgufFile) -> tuple[int, ...]:
    """Every id that ends an answer: of the text, and of a turn where that is another."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    ids = [source.get(key) for key in keys]
    return tuple(dict.fromkeys(token for token in ids if token is not None))


def _gpt2_splitter() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _smollm_splitter() -> pre_tokenizers.PreTokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, _gpt2_splitter()])


_SPLITTERS: Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "smollm": _smollm_splitter,
    "gpt-2": _gpt2_splitter,
}


def _one_of(source: GgufFile, key: str, supported: tuple[str, ...]) -> str:
    value = source.need(key)
    if value not in supported:
        raise ModelError(
            f"{source.path}: {key} = {value!r} is not supported; supported: {', '.join(supported)}"
        )
    return str(value)


def _post_processor(source: GgufFile, tokens: list[str]) -> processors.PostProcessor:
    """What `add_special_tokens` adds: by default nothing."""
    before = _wrapping(source, tokens, "bos")
    after = _wrapping(source, tokens, "eos")
    if not before and not after:
        return processors.ByteLevel(trim_offsets=False)
    return processors.TemplateProcessing(
        single=[*before, "$A", *after],
        special_tokens=[(token, tokens.index(token)) for token in {*before, *after}],
    )


def _wrapping(source: GgufFile, tokens: list[str], name: str) -> list[str]:
    if not source.get(f"tokenizer.ggml.add_{name}_token", False):
        return []
    return [tokens[source.need(f"tokenizer.ggml.{name}_token_id")]]


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    for token, kind in zip(tokens, types, strict=True):
        if kind == TokenType.CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == TokenType.USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])


def _tokenizer_config(source: GgufFile, max_model_len: int) -> dict[str, Any]:
    tokens = source.need("tokenizer.ggml.tokens")
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {name: source.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    special = {f"{name}_token": tokens[i] for name, i in ids.items() if i is not None}
    template = source.get("tokenizer.chat_template")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_model_len,
        **special,
        **({"chat_template": template} if template else {}),
    }
