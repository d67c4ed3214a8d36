"""Files that start a cluster, one folder for each kind of it: which there are, and copies.

They live in the repository's cluster/, of which orca_dist/templates is a link, and ship with
the package.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import orca_dist
from orca_dist.cli.knobs import near
from orca_dist.errors import ConfigError

TEMPLATES = Path(orca_dist.__file__).with_name("templates")
MAX_NAMED = 5


def kinds() -> list[str]:
    """What `cluster init` can set up."""
    return sorted(path.name for path in TEMPLATES.iterdir() if path.is_dir())


def copy_template(kind: str, folder: Path) -> list[Path]:
    """The files of `kind`, written to `folder`, which is made if need be.

    Raises ConfigError, and writes nothing, where there is no such kind or a file is there already.
    """
    if kind not in kinds():
        raise ConfigError(f"{kind}: no such kind{near(kind, kinds())}; {_choices()}")
    sources = _files(TEMPLATES / kind)
    targets = [folder / source.relative_to(TEMPLATES / kind) for source in sources]
    _refuse_to_overwrite(targets)
    try:
        for source, target in zip(sources, targets, strict=True):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)  # with its mode
    except OSError as error:
        raise ConfigError(f"{error.filename}: can't be written: {error.strerror}") from None
    return targets


def _choices() -> str:
    return f"choose one of {', '.join(kinds())}"


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _refuse_to_overwrite(targets: list[Path]) -> None:
    there = [str(target) for target in targets if target.exists() or target.is_symlink()]
    if there:
        more = f" and {len(there) - MAX_NAMED} more" if len(there) > MAX_NAMED else ""
        raise ConfigError(
            f"{', '.join(there[:MAX_NAMED])}{more}: there already, and not overwritten; choose "
            "another folder, or move them away"
        )
