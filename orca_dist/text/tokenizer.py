"""Text to token ids and back, from a model folder's tokenizer.json or the files before it.

A thin layer over the tokenizers library that adds what serving needs: every id that
ends an answer, and a decode whose result is the same whether done at once or token by
token. Knows nothing of requests; imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer as HFTokenizer

from orca_dist.errors import InvalidRequest, ModelError
from orca_dist.spec import token_ids
from orca_dist.text.files import read_json, special_token
from orca_dist.text.older_files import build_from_older_files
from orca_dist.text.pieces import Pieces


class Tokenizer:
    """Make one with `load`. Safe to share between threads."""

    def __init__(self, tokenizer: HFTokenizer, pieces: Pieces, eos_token_ids: frozenset[int]):
        added = tokenizer.get_added_tokens_decoder().items()
        self.pieces = pieces
        self.eos_token_ids = eos_token_ids
        self.special_ids = frozenset(token for token, entry in added if entry.special)
        self._known_ids = frozenset(tokenizer.get_vocab().values())
        self._text_ids = self._known_ids - self.special_ids
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Reads `folder`; raises ModelError naming the file that is missing or damaged."""
        path = folder / "tokenizer.json"
        if path.exists():
            document, tokenizer = read_json(path), _build(path)
        else:
            tokenizer = build_from_older_files(folder)
            document = json.loads(tokenizer.to_str())
        pieces = Pieces(tokenizer, document.get("decoder"))
        return cls(tokenizer, pieces, _eos_token_ids(folder, tokenizer))

    @property
    def vocab_size(self) -> int:
        """Number of ids with a text, added ones included; a model may have more rows."""
        return self._tokenizer.get_vocab_size()

    @property
    def num_ids(self) -> int:
        """One more than the highest id with a text; there may be gaps below it."""
        return max(self._known_ids) + 1

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; raises InvalidRequest if it isn't Unicode text."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            problem = f"is not valid Unicode at character {error.start}"
            raise InvalidRequest("text", problem) from None
        # The batch call lets other threads run meanwhile; the single one holds the GIL.
        (encoding,) = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        return encoding.ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`, as a `Detokenizer` gives it.

        The tokenizers library's own, but for byte-fallback runs that mix whole characters
        with broken ones: there it drops the whole ones too, which a stream has sent already.
        """
        kept = self.with_text(ids, skip_special_tokens=skip_special_tokens)
        first = [self.pieces.first(token) for token in kept[:1]]
        later = [self.pieces.later(token) for token in kept[1:]]
        return self.pieces.utf8().push(b"".join(first + later), final=True)

    def with_text(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> list[int]:
        """`ids` less those without a text: unknown ones and, by default, special ones."""
        kept = self._text_ids if skip_special_tokens else self._known_ids
        return [token for token in ids if token in kept]


def _build(path: Path) -> HFTokenizer:
    try:
        tokenizer = HFTokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
        raise ModelError(f"{path} can't be read: {error}") from None
    tokenizer.no_truncation()  # settings of training, kept in some files
    tokenizer.no_padding()
    return tokenizer


def _eos_token_ids(folder: Path, tokenizer: HFTokenizer) -> frozenset[int]:
    """The union of what the three config files say: each is right about some model."""
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        ids.update(token_ids(read_json(folder / name).get("eos_token_id")))
    token = special_token(read_json(folder / "tokenizer_config.json").get("eos_token"))
    if token is not None and (index := tokenizer.token_to_id(token)) is not None:
        ids.add(index)
    return frozenset(ids)
