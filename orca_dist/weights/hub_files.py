"""One file of a Hub repository into the Hub's own cache: resumed, checked by its hash, then named.

The cache is huggingface_hub's (HF_HOME), in its documented layout, so that what is here
already is used and what is fetched here serves other programs. A file is written beside
its place and gets its name once its hash is right; what a cut connection or a killed
process left is taken up again. HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE are the library's.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers, disable_progress_bars

from orca_dist.errors import ModelError
from orca_dist.weights.source import HubModel

PARTIAL_SUFFIX = ".orca-partial"  # never a name that anything reads

OnPosition = Callable[[int], None]  # bytes of the file that are here

_ETAG = re.compile(r"[\w.-]{1,128}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_GIT_SHA1 = re.compile(r"[0-9a-f]{40}")
_CHUNK_BYTES = 2**22


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A file as the Hub describes it; `etag` is the sha256 of a large one, git's sha1 of others."""

    model: HubModel
    name: str
    url: str
    etag: str
    num_bytes: int


def cached_folder(model: HubModel) -> Path:
    """Where the files of `model` are, or will be."""
    return _storage(model.repo) / "snapshots" / model.commit


def remote_file(model: HubModel, name: str) -> RemoteFile:
    """Asks for the head of a file; raises ModelError saying why it can't be had."""
    url = hf_hub_url(model.repo, name, revision=model.commit)
    with hub_errors(model.repo, name):
        found = get_hf_file_metadata(url)
    if found.size is None or not found.etag or not _ETAG.fullmatch(found.etag):
        raise ModelError(
            f"{model.repo}: {constants.ENDPOINT} gives no size or hash of {name}: it is no Hub; "
            "check HF_ENDPOINT"
        )
    return RemoteFile(model=model, name=name, url=url, etag=found.etag, num_bytes=found.size)


def fetch_file(file: RemoteFile, on_position: OnPosition = lambda position: None) -> Path:
    """The file's place in the cache, fetched if it isn't there; one process at a time does it."""
    place = cached_folder(file.model) / file.name
    storage = _storage(file.model.repo)
    blob = storage / "blobs" / file.etag
    locks = Path(constants.HF_HUB_CACHE) / ".locks" / storage.name
    with _disk_errors(place):
        for folder in (place.parent, blob.parent, locks):
            folder.mkdir(parents=True, exist_ok=True)
        with FileLock(locks / f"{file.etag}.lock"):
            if not blob.exists():
                _download(file, blob, on_position)
            _link(place, blob)
    return place


def remember_revision(model: HubModel, revision: str) -> None:
    """Which commit a branch or tag was, for times without a network."""
    path = _ref(model.repo, revision)
    with _disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(model.commit, encoding="utf-8")


def remembered(repo: str, revision: str) -> HubModel | None:
    """What `revision` was when it was fetched last; None if it never was."""
    try:
        commit = _ref(repo, revision).read_text(encoding="utf-8").strip()
    except OSError:
        commit = revision
    return HubModel(repo=repo, commit=commit) if _GIT_SHA1.fullmatch(commit) else None


def log_once() -> None:
    """The library has a handler of its own: where lines are written anyway, it says all twice."""
    if logging.getLogger().handlers:
        logging.getLogger("huggingface_hub").handlers.clear()


@contextlib.contextmanager
def hub_errors(repo: str, what: str) -> Iterator[None]:
    """What the library raises about `what`, as one line that says what to do."""
    try:
        yield
    except OfflineModeIsEnabled:
        raise ModelError(
            f"{repo}: {what} is not in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is "
            "set: unset it, or fetch the model where there is a network"
        ) from None
    except HFValidationError:
        raise ModelError(f"{repo} is no id of the Hub: give org/name, or a folder") from None
    except HfHubHTTPError as error:
        raise ModelError(_refusal(repo, what, error)) from None
    except HTTPError as error:
        raise ModelError(
            f"{repo}: {what} can't be fetched from {constants.ENDPOINT}: {_said(error)}; check "
            "the network and try again: what has come is kept"
        ) from None


def _refusal(repo: str, what: str, error: HfHubHTTPError) -> str:
    status, hub = error.response.status_code, constants.ENDPOINT
    if isinstance(error, GatedRepoError):
        return (
            f"{repo} is gated ({status} from {hub}): ask for access on its page, and set HF_TOKEN "
            "to a token of that account"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"{repo} has no revision {what} ({status} from {hub}): give a branch, tag or commit"
    if isinstance(error, EntryNotFoundError):
        return f"{repo} has no {what} ({status} from {hub}): give another repository or revision"
    if status in (401, 403):
        return (
            f"{repo} can't be read ({status} from {hub}): it is private, or does not exist; check "
            "the name, and set HF_TOKEN to a token that may read it"
        )
    if isinstance(error, RepositoryNotFoundError) or status == 404:
        return (
            f"{repo} does not exist ({status} from {hub}), and is no folder here either: check the "
            "name; for a private repository set HF_TOKEN"
        )
    return f"{repo}: {what} can't be fetched: {hub} answers {status}; try again later"


def _said(error: Exception) -> str:
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def _storage(repo: str) -> Path:
    return Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"


def _ref(repo: str, revision: str) -> Path:
    return _storage(repo) / "refs" / revision


def _download(file: RemoteFile, blob: Path, on_position: OnPosition) -> None:
    """Into `blob`, or nowhere. Only what the network cut short is kept for a second try."""
    partial = blob.with_name(blob.name + PARTIAL_SUFFIX)
    try:
        with _Told(partial, on_position) as out:
            if out.tell() > file.num_bytes:
                out.truncate(0)
            _get(file, out)
        _check(file, partial)
        partial.replace(blob)
    except _Interrupted as error:
        raise error.told from None
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt | SystemExit):
            partial.unlink(missing_ok=True)
        raise


class _Interrupted(Exception):
    """The network's fault; `told` is what to say."""

    def __init__(self, told: ModelError) -> None:
        super().__init__(str(told))
        self.told = told


class _Told:
    """A file to append to, which tells how long it has become."""

    def __init__(self, path: Path, on_position: OnPosition) -> None:
        self._path = path
        self._on_position = on_position

    def __enter__(self) -> _Told:
        self._file = self._path.open("ab")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: bytes) -> int:
        written = self._file.write(data)
        self._on_position(self._file.tell())
        return written

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, position: int) -> int:
        return self._file.seek(position)

    def truncate(self, size: int | None = None) -> int:
        return self._file.truncate(size)


def _get(file: RemoteFile, out: _Told) -> None:
    """The rest of the file; the library asks again a few times while bytes still come."""
    disable_progress_bars("huggingface_hub.http_get")  # ours counts all stages together
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    try:
        with hub_errors(file.model.repo, file.name):
            http_get(
                file.url,
                out,  # type: ignore[arg-type]
                resume_size=out.tell(),
                headers=headers,
                expected_size=file.num_bytes,
                displayed_filename=file.name,
            )
    except ModelError as error:
        raise _Interrupted(error) from None
    except ValueError as error:  # the library's limit for a single file
        raise ModelError(f"{file.model.repo}: {file.name}: {_said(error)}") from None
    except OSError as error:
        if error.errno is not None:
            raise
        raise ModelError(_wrong(file, f"{out.tell()} bytes", f"{file.num_bytes}")) from None


def _check(file: RemoteFile, path: Path) -> None:
    """Raises ModelError unless the file at `path` is the one that the Hub described."""
    actual = path.stat().st_size
    if actual != file.num_bytes:
        raise ModelError(_wrong(file, f"{actual} bytes", f"{file.num_bytes}"))
    if _SHA256.fullmatch(file.etag):
        found = _digest(path, hashlib.sha256())
    elif _GIT_SHA1.fullmatch(file.etag):
        found = _digest(path, hashlib.sha1(b"blob %d\0" % actual, usedforsecurity=False))
    else:
        return
    if found != file.etag:
        raise ModelError(_wrong(file, f"hash {found}", file.etag))


def _wrong(file: RemoteFile, found: str, wanted: str) -> str:
    return (
        f"{file.model.repo}: {file.name} came with {found}, must be {wanted}: it was damaged on "
        "its way, or a proxy gave another file; it has been removed, try again"
    )


def _digest(path: Path, digest: hashlib._Hash) -> str:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _link(place: Path, blob: Path) -> None:
    """A relative link, as the library makes them."""
    with contextlib.suppress(FileExistsError):
        place.symlink_to(os.path.relpath(blob, place.parent))


@contextlib.contextmanager
def _disk_errors(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
        why = f"the disk is full ({error.strerror})" if full else str(error)
        raise ModelError(
            f"{place} can't be written: {why}; free space there, or set HF_HOME to another disk"
        ) from None
