"""The sentencepiece kind of tokenizer (Llama 2, TinyLlama, Mistral) from a GGUF file."""

from __future__ import annotations

from tokenizers import Tokenizer

from orca_dist.errors import ModelError
from orca_dist.weights.gguf_file import GgufFile
from orca_dist.weights.sentencepiece import SentencePieces, bpe_tokenizer


def sentencepiece_tokenizer(source: GgufFile) -> Tokenizer:
    """Without its added tokens. Raises ModelError for what would give other tokens."""
    for key in ("tokenizer.ggml.remove_extra_whitespaces", "tokenizer.ggml.precompiled_charsmap"):
        if source.get(key):
            raise ModelError(f"{source.path}: {key} is not supported: it changes the text first")
    pieces = SentencePieces(
        path=source.path,
        tokens=source.need("tokenizer.ggml.tokens"),
        scores=source.get("tokenizer.ggml.scores", []),
        types=source.need("tokenizer.ggml.token_type"),
    )
    return bpe_tokenizer(pieces, prefix=source.get("tokenizer.ggml.add_space_prefix", True))
