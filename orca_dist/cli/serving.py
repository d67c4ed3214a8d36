"""An engine and a server around it, as `orca-dist serve` and the demo start and end them."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from orca_dist.cli.interrupts import Interrupted, handling, interrupt
from orca_dist.config import EngineConfig, LogConfig, ServerConfig
from orca_dist.engine.engine import QUIET, Engine
from orca_dist.server import Listener, Server
from orca_dist.spec import load_spec
from orca_dist.text import ChatTemplate, Tokenizer
from orca_dist.weights.progress import load_progress


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model folder and what a server reads of it; a fault there is found before stages start."""

    folder: Path
    tokenizer: Tokenizer
    chat: ChatTemplate

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Raises ModelError naming the file at fault."""
        load_spec(folder)  # of a folder that is no model's, config.json is the file to name
        return cls(folder=folder, tokenizer=Tokenizer.load(folder), chat=ChatTemplate.load(folder))


@contextlib.contextmanager
def running_engine(
    model: ServedModel,
    config: EngineConfig,
    log_config: LogConfig = QUIET,
    on_progress: Callable[[str], None] | None = None,
) -> Iterator[Engine]:
    """An engine for the time of the block; no signal keeps it from ending all its stages."""
    engine = _start(model, config, log_config, on_progress)
    try:
        with handling(interrupt):  # Ray has left a handler of its own
            yield engine
    finally:
        with handling(signal.SIG_IGN):  # half an end leaves processes behind
            engine.close()


def make_server(
    engine: Engine,
    model: ServedModel,
    config: ServerConfig,
    *,
    max_queue: int,
    max_queue_tokens: int,
    listener: Listener | None = None,
) -> Server:
    """A server of `model`, not started; `listener` is a port taken earlier."""
    return Server(
        engine,
        model.tokenizer,
        model.chat,
        config,
        max_queue=max_queue,
        max_queue_tokens=max_queue_tokens,
        listener=listener,
    )


def _start(
    model: ServedModel,
    config: EngineConfig,
    log_config: LogConfig,
    on_progress: Callable[[str], None] | None,
) -> Engine:
    try:
        with load_progress("loading") as on_load:
            return Engine.start(
                model.folder,
                config,
                num_token_ids=model.tokenizer.num_ids,
                log_config=log_config,
                on_progress=on_progress,
                on_load=on_load,
            )
    except SystemExit:  # Ray's own handler of SIGTERM, in place while it starts
        raise Interrupted(signal.SIGTERM) from None
