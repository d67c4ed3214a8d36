"""A GGUF file's tokenizer as Hugging Face files: tokenizer.json and tokenizer_config.json.

Two kinds are rebuilt: byte-level BPE with a known splitting rule, and the
sentencepiece kind, in `gguf_sentencepiece`. A kind or rule that isn't in the tables is
refused by name, because a near one would silently give other tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from orca_dist.errors import ModelError
from orca_dist.weights.byte_level import SplittingRule, byte_level_tokenizer
from orca_dist.weights.gguf_file import GgufFile
from orca_dist.weights.gguf_sentencepiece import sentencepiece_tokenizer
from orca_dist.weights.sentencepiece import TokenType


def write_tokenizer(source: GgufFile, folder: Path, *, max_model_len: int) -> None:
    """tokenizer.json and tokenizer_config.json, the chat template in the latter."""
    build_tokenizer(source).save(str(folder / "tokenizer.json"))
    document = _tokenizer_config(source, max_model_len)
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def build_tokenizer(source: GgufFile) -> Tokenizer:
    """The tokenizer that the file describes; raises ModelError if its kind isn't supported."""
    kind = _one_of(source, "tokenizer.ggml.model", tuple(_KINDS))
    tokens: list[str] = source.need("tokenizer.ggml.tokens")
    types: list[int] = source.need("tokenizer.ggml.token_type")
    if len(types) != len(tokens):
        raise ModelError(f"{source.path}: {len(tokens)} tokens have {len(types)} types")
    tokenizer = _KINDS[kind](source)
    tokenizer.post_processor = _post_processor(source, tokens)
    _add_tokens(tokenizer, tokens, types)
    return tokenizer


def eos_token_ids(source: GgufFile) -> tuple[int, ...]:
    """Every id that ends an answer: of the text, and of a turn where that is another."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    ids = [source.get(key) for key in keys]
    return tuple(dict.fromkeys(token for token in ids if token is not None))


def _byte_level(source: GgufFile) -> Tokenizer:
    rule = _one_of(source, "tokenizer.ggml.pre", tuple(SplittingRule))
    tokens: list[str] = source.need("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in source.need("tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return byte_level_tokenizer(vocabulary, merges, SplittingRule(rule))


_KINDS: Mapping[str, Callable[[GgufFile], Tokenizer]] = {
    "gpt2": _byte_level,
    "llama": sentencepiece_tokenizer,
}


def _one_of(source: GgufFile, key: str, supported: tuple[str, ...]) -> str:
    value = source.need(key)
    if value not in supported:
        raise ModelError(
            f"{source.path}: {key} = {value!r} is not supported; supported: {', '.join(supported)}"
        )
    return str(value)


def _post_processor(source: GgufFile, tokens: list[str]) -> processors.PostProcessor:
    """What `add_special_tokens` adds: nothing, unless the file or the habit of its kind says so."""
    before = _wrapping(source, tokens, "bos", default=_has_bos_habit(source))
    after = _wrapping(source, tokens, "eos", default=False)
    if not before and not after:
        return processors.ByteLevel(trim_offsets=False)
    return processors.TemplateProcessing(
        single=[*before, "$A", *after],
        special_tokens=[(token, tokens.index(token)) for token in {*before, *after}],
    )


def _wrapping(source: GgufFile, tokens: list[str], name: str, *, default: bool) -> list[str]:
    if not source.get(f"tokenizer.ggml.add_{name}_token", default):
        return []
    return [tokens[source.need(f"tokenizer.ggml.{name}_token_id")]]


def _has_bos_habit(source: GgufFile) -> bool:
    if source.need("tokenizer.ggml.model") == "llama":
        return True
    return bool(source.need("tokenizer.ggml.pre") == "llama-bpe")


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """What is matched before text is split."""
    typed = list(zip(tokens, types, strict=True))
    special = [
        AddedToken(token, special=True, normalized=False)
        for token, kind in typed
        if kind in (TokenType.UNKNOWN, TokenType.CONTROL)
    ]
    plain = [
        AddedToken(token, special=False, normalized=False)
        for token, kind in typed
        if kind == TokenType.USER_DEFINED
    ]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


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
