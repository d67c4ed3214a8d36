"""sentencepiece's tokenizer.model as it is stored: its pieces, and what it does to a text first.

Knows the format, of which it reads a few fields, and no tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from orca_dist.errors import ModelError
from orca_dist.weights.sentencepiece import SentencePieces, TokenType


class Segmentation(IntEnum):
    """How a text becomes pieces, by sentencepiece's numbers; it has two more kinds."""

    UNIGRAM = 1
    BPE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceModel:
    """What the file says.

    `charsmap` are its rules for other spellings of characters, in the format's own coding.
    `adds_prefix`: a space is put before the text. `trims`: spaces at its ends and repeated
    ones go. `byte_fallback`: what has no piece is spelled in bytes.
    """

    pieces: SentencePieces
    segmentation: Segmentation
    byte_fallback: bool
    charsmap: bytes
    adds_prefix: bool
    trims: bool

    @property
    def changes_text(self) -> bool:
        """Whether more happens to a text than a space before it."""
        return bool(self.charsmap) or self.trims


def read_piece_model(path: Path) -> PieceModel:
    """Raises ModelError for a file that can't be read, or says what isn't supported."""
    document = _message_class()()
    try:
        document.ParseFromString(path.read_bytes())
    except (OSError, DecodeError) as error:
        raise ModelError(f"{path} is not sentencepiece's, or can't be read: {error}") from None
    if not document.pieces:
        raise ModelError(f"{path} holds no pieces: fetch a folder with tokenizer.json instead")
    trainer, normalizer = document.trainer_spec, document.normalizer_spec
    _refuse_others(path, trainer, normalizer)
    return PieceModel(
        pieces=SentencePieces(
            path=path,
            tokens=[piece.piece for piece in document.pieces],
            scores=[piece.score for piece in document.pieces],
            types=[piece.type for piece in document.pieces],
        ),
        segmentation=Segmentation(trainer.model_type),
        byte_fallback=trainer.byte_fallback,
        charsmap=normalizer.precompiled_charsmap,
        adds_prefix=normalizer.add_dummy_prefix,
        trims=normalizer.remove_extra_whitespaces,
    )


def _refuse_others(path: Path, trainer: Any, normalizer: Any) -> None:
    if trainer.model_type not in tuple(Segmentation):
        supported = ", ".join(f"{kind.name.lower()} ({kind.value})" for kind in Segmentation)
        raise ModelError(
            f"{path}: model_type {trainer.model_type} is not supported; supported: {supported}: "
            "give a folder with tokenizer.json"
        )
    if trainer.treat_whitespace_as_suffix or not normalizer.escape_whitespaces:
        raise ModelError(
            f"{path}: pieces whose space is behind them, or isn't spelled, are not supported: "
            "give a folder with tokenizer.json"
        )


_FIELD = FieldDescriptorProto
_FIELDS = {  # of sentencepiece_model.proto: what is read here, by its numbers there
    "Piece": (
        ("piece", 1, _FIELD.TYPE_STRING, ""),
        ("score", 2, _FIELD.TYPE_FLOAT, "0"),
        ("type", 3, _FIELD.TYPE_INT32, str(int(TokenType.NORMAL))),
    ),
    "Trainer": (
        ("model_type", 3, _FIELD.TYPE_INT32, str(int(Segmentation.UNIGRAM))),
        ("treat_whitespace_as_suffix", 24, _FIELD.TYPE_BOOL, "false"),
        ("byte_fallback", 35, _FIELD.TYPE_BOOL, "false"),
    ),
    "Normalizer": (
        ("precompiled_charsmap", 2, _FIELD.TYPE_BYTES, ""),
        ("add_dummy_prefix", 3, _FIELD.TYPE_BOOL, "true"),
        ("remove_extra_whitespaces", 4, _FIELD.TYPE_BOOL, "true"),
        ("escape_whitespaces", 5, _FIELD.TYPE_BOOL, "true"),
    ),
}
_MODEL = (
    ("pieces", 1, "Piece", _FIELD.LABEL_REPEATED),
    ("trainer_spec", 2, "Trainer", _FIELD.LABEL_OPTIONAL),
    ("normalizer_spec", 3, "Normalizer", _FIELD.LABEL_OPTIONAL),
)


def _message_class() -> Any:
    """Of the whole file."""
    file = FileDescriptorProto(name="sentencepiece_model.proto", package="orca", syntax="proto2")
    for message, fields in _FIELDS.items():
        entry = file.message_type.add(name=message)
        for name, number, kind, default in fields:
            entry.field.add(
                name=name,
                number=number,
                type=kind,
                label=_FIELD.LABEL_OPTIONAL,
                default_value=default,
            )
    model = file.message_type.add(name="Model")
    for name, number, message, label in _MODEL:
        model.field.add(
            name=name,
            number=number,
            type=_FIELD.TYPE_MESSAGE,
            type_name=f".orca.{message}",
            label=label,
        )
    pool = DescriptorPool()
    pool.Add(file)
    return GetMessageClass(pool.FindMessageTypeByName("orca.Model"))
