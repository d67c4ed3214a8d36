"""Tokenizers of folders without tokenizer.json, from the files that came before it.

sentencepiece's tokenizer.model (Llama 2, Mistral), or vocab.json and merges.txt (GPT-2, Qwen2).
They say less than tokenizer.json: how text is split and which tokens are added follows from
tokenizer_config.json, read as transformers reads it. A class that isn't known here is refused
by name, since a near one would silently give other tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from orca_dist.errors import ModelError
from orca_dist.text.files import read_json, special_token
from orca_dist.text.piece_model import PieceModel, Segmentation, read_piece_model
from orca_dist.text.unigram import unigram_tokenizer
from orca_dist.weights.byte_level import SplittingRule, byte_level_tokenizer
from orca_dist.weights.sentencepiece import PrefixScheme, TokenType, bpe_tokenizer

PIECES_FILE, VOCAB_FILE, MERGES_FILE = "tokenizer.model", "vocab.json", "merges.txt"

PIECES_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")
VOCABULARY_CLASSES = {
    "GPT2Tokenizer": SplittingRule.GPT2,
    "GPT2TokenizerFast": SplittingRule.GPT2,
    "Qwen2Tokenizer": SplittingRule.QWEN2,
    "Qwen2TokenizerFast": SplittingRule.QWEN2,
}
_END_OF_TEXT = "<|endoftext|>"
_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


def build_from_older_files(folder: Path) -> Tokenizer:
    """Raises ModelError naming the file that is missing, damaged or not supported."""
    settings = read_json(folder / "tokenizer_config.json")
    if (folder / PIECES_FILE).exists():
        return _from_sentencepiece(folder, settings)
    if (folder / VOCAB_FILE).exists() and (folder / MERGES_FILE).exists():
        return _from_vocabulary(folder, settings)
    raise ModelError(
        f"{folder} has no tokenizer: needs tokenizer.json, {PIECES_FILE}, or {VOCAB_FILE} with "
        f"{MERGES_FILE}"
    )


# ---- sentencepiece -----------------------------------------------------


def _from_sentencepiece(folder: Path, settings: Mapping[str, Any]) -> Tokenizer:
    path = folder / PIECES_FILE
    _one_of(folder, settings.get("tokenizer_class") or PIECES_CLASSES[0], PIECES_CLASSES)
    model = read_piece_model(path)
    tokenizer = _BUILDERS[model.segmentation](model, settings)
    _add(tokenizer, path, _piece_tokens(model))
    _add_configured(tokenizer, folder, settings, {"bos_token": "<s>", "eos_token": "</s>"})
    _wrap(tokenizer, settings, {"bos_token": "<s>", "eos_token": "</s>"}, adds_bos=True)
    return tokenizer


def _bpe(model: PieceModel, settings: Mapping[str, Any]) -> Tokenizer:
    if model.changes_text:
        raise ModelError(
            f"{model.pieces.path}: its normalizer changes the text first, which is not supported "
            "of BPE: give a folder with tokenizer.json"
        )
    scheme: PrefixScheme = "always" if settings.get("legacy") else "first"
    return bpe_tokenizer(model.pieces, prefix=_has_prefix(model, settings), scheme=scheme)


def _unigram(model: PieceModel, settings: Mapping[str, Any]) -> Tokenizer:
    scheme: PrefixScheme = "always" if settings.get("legacy", True) else "first"
    return unigram_tokenizer(model, prefix=_has_prefix(model, settings), scheme=scheme)


_BUILDERS = {Segmentation.BPE: _bpe, Segmentation.UNIGRAM: _unigram}


def _has_prefix(model: PieceModel, settings: Mapping[str, Any]) -> bool:
    prefix = settings.get("add_prefix_space")
    return model.adds_prefix if prefix is None else bool(prefix)


def _piece_tokens(model: PieceModel) -> dict[int, AddedToken]:
    """Pieces that are matched before the text is cut; those of users are, where BPE would join."""
    kinds = {TokenType.UNKNOWN: True, TokenType.CONTROL: True}
    if model.segmentation is Segmentation.BPE:
        kinds[TokenType.USER_DEFINED] = False
    typed = enumerate(zip(model.pieces.tokens, model.pieces.types, strict=True))
    return {
        index: AddedToken(token, special=kinds[TokenType(kind)], normalized=False)
        for index, (token, kind) in typed
        if kind in kinds
    }


# ---- vocabulary and merges ---------------------------------------------


def _from_vocabulary(folder: Path, settings: Mapping[str, Any]) -> Tokenizer:
    name = settings.get("tokenizer_class") or _class_of_family(folder)
    rule = VOCABULARY_CLASSES[_one_of(folder, name, tuple(VOCABULARY_CLASSES))]
    if settings.get("add_prefix_space"):
        raise ModelError(
            f"{folder}: add_prefix_space is not supported with {VOCAB_FILE}: give a folder with "
            "tokenizer.json"
        )
    vocabulary, merges = read_json(folder / VOCAB_FILE), _merges(folder / MERGES_FILE)
    _check_merges(folder, vocabulary, merges)
    tokenizer = byte_level_tokenizer(vocabulary, merges, rule)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    defaults = {"eos_token": _END_OF_TEXT, "unk_token": _END_OF_TEXT}
    if rule is SplittingRule.GPT2:
        defaults["bos_token"] = _END_OF_TEXT
    else:
        defaults["pad_token"] = _END_OF_TEXT
    _add_configured(tokenizer, folder, settings, defaults)
    _wrap(tokenizer, settings, defaults, adds_bos=False)
    return tokenizer


def _class_of_family(folder: Path) -> str:
    family = read_json(folder / "config.json").get("model_type")
    return "Qwen2Tokenizer" if family in ("qwen2", "qwen3") else "none"


def _merges(path: Path) -> list[tuple[str, str]]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} can't be read: {error}") from None
    if lines[0].startswith("#version"):
        lines = lines[1:]
    pairs = [tuple(line.split(" ")) for line in lines if line.strip()]
    for pair in pairs:
        if len(pair) != 2:
            raise ModelError(f"{path}: {' '.join(pair)!r} is not two pieces: fetch it again")
    return pairs  # type: ignore[return-value]


def _check_merges(
    folder: Path, vocabulary: Mapping[str, Any], merges: list[tuple[str, str]]
) -> None:
    for pair in merges:
        for piece in (*pair, "".join(pair)):
            if piece not in vocabulary:
                raise ModelError(
                    f"{folder / MERGES_FILE}: {piece!r} is not in {VOCAB_FILE}: the files are of "
                    "different tokenizers; fetch both again"
                )


# ---- added tokens ------------------------------------------------------


def _add_configured(
    tokenizer: Tokenizer, folder: Path, settings: Mapping[str, Any], defaults: Mapping[str, str]
) -> None:
    """Those of tokenizer_config.json and added_tokens.json, each at the id that it has there."""
    tokens = {
        int(index): AddedToken(**{key: entry[key] for key in _ADDED_KEYS if key in entry})
        for index, entry in (settings.get("added_tokens_decoder") or {}).items()
    }
    known = {str(token.content) for token in tokens.values()}
    for token, index in read_json(folder / "added_tokens.json").items():
        if token not in known:
            tokens[index] = AddedToken(token, normalized=False)
    _add(tokenizer, folder / "tokenizer_config.json", tokens)
    named = [_named(settings, name, defaults) for name in _NAMES]
    listed = [special_token(entry) for entry in settings.get("additional_special_tokens") or ()]
    special = [token for token in (*named, *listed) if token is not None]
    tokenizer.add_special_tokens(
        [
            AddedToken(t, special=True, normalized=False)
            for t in special
            if t not in known and tokenizer.token_to_id(t) is not None
        ]
    )


_ADDED_KEYS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


def _add(tokenizer: Tokenizer, path: Path, tokens: Mapping[int, AddedToken]) -> None:
    for index in sorted(tokens):
        tokenizer.add_tokens([tokens[index]])
        if tokenizer.token_to_id(tokens[index].content) != index:
            raise ModelError(
                f"{path}: {tokens[index].content!r} can't have the id {index}: ids before it are "
                "missing; give a folder with tokenizer.json"
            )


def _named(settings: Mapping[str, Any], name: str, defaults: Mapping[str, str]) -> str | None:
    """A special token by its role; null in the file means none."""
    if name not in settings:
        return defaults.get(name)
    return special_token(settings[name])


def _wrap(
    tokenizer: Tokenizer,
    settings: Mapping[str, Any],
    defaults: Mapping[str, str],
    *,
    adds_bos: bool,
) -> None:
    """What stands around a text by default."""
    before = _around(tokenizer, settings, "bos", defaults, default=adds_bos)
    after = _around(tokenizer, settings, "eos", defaults, default=False)
    if before or after:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            special_tokens=[(t, tokenizer.token_to_id(t)) for t in {*before, *after}],
        )


def _around(
    tokenizer: Tokenizer,
    settings: Mapping[str, Any],
    role: str,
    defaults: Mapping[str, str],
    *,
    default: bool,
) -> list[str]:
    wanted = settings.get(f"add_{role}_token")
    token = _named(settings, f"{role}_token", defaults)
    if not (default if wanted is None else wanted) or token is None:
        return []
    return [token] if tokenizer.token_to_id(token) is not None else []


def _one_of(folder: Path, name: str, supported: tuple[str, ...]) -> str:
    if name not in supported:
        raise ModelError(
            f"{folder / 'tokenizer_config.json'}: tokenizer_class = {name} can't be built without "
            f"tokenizer.json; supported: {', '.join(supported)}"
        )
    return name
