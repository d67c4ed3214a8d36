"""The sentencepiece kind of tokenizer (Llama 2, TinyLlama, Mistral) from a GGUF file."""

from __future__ import annotations

from tokenizers import Tokenizer

from orca_dist.errors import ModelError
from orca_dist.weights.gguf_file import GgufFile
from orca_dist.weights.sentencepiece import SentencePieces, bpe_tokenizer, refuse_missing_bytes


def sentencepiece_tokenizer(source: GgufFile) -> Tokenizer:
    """Without its added tokens. Raises ModelError for what would give other tokens."""
    for key in ("tokenizer.ggml.remove_extra_whitespaces", "tokenizer.ggml.precompiled_charsmap"):
        if source.get(key):
            raise ModelError(f"{source.path}: {key} is not supported: it changes the text first")
    tokens: list[str] = source.need("tokenizer.ggml.tokens")
    types: list[int] = source.need("tokenizer.ggml.token_type")
    refuse_missing_bytes(source.path, tokens, types)
    scores: list[float] = source.need("tokenizer.ggml.scores")
    pieces = SentencePieces(path=source.path, tokens=tokens, scores=scores, types=types)
    return bpe_tokenizer(pieces, prefix=source.get("tokenizer.ggml.add_space_prefix", True))
