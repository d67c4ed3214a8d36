"""`orca-dist serve` as a process, with a scripted engine: ready, talked to, and ended."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from orca_dist.cli.main import main
from orca_dist.client import Client, ServerUnavailable
from orca_dist.engine.engine import Engine
from orca_dist.errors import PipelineLost
from orca_dist.text import Tokenizer
from tests.fixtures.checkpoints import byte_tokenizer
from tests.fixtures.scripted_engine import ScriptedEngine
from tests.fixtures.serve_scripted import LOSING

ROOT = Path(__file__).resolve().parents[2]
END_S = 30.0
SCRIPTED = "tests.fixtures.serve_scripted"
PROMPT = [5]
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 5,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "vocab_size": 315,
    "max_position_embeddings": 64,
}


def model_of(folder: Path, *, chat_template: str | None = None) -> Path:
    """What a server reads of a model, without weights."""
    byte_tokenizer(folder, chat_template=chat_template)
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return folder


@contextmanager
def served(folder: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and the address it says it is ready at."""
    folder = model_of(folder)
    process = subprocess.Popen(
        [sys.executable, "-m", SCRIPTED, "serve", str(folder), "--port", "0", *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        word, address = process.stdout.readline().split()
        assert word == "ready"
        yield process, address
    finally:
        process.kill()
        process.wait()


def end_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and stderr; whatever else was printed must not be on stdout."""
    out, err = process.communicate(timeout=END_S)
    assert out == ""
    assert "Traceback" not in err
    return process.returncode, err


def test_sigterm_ends_the_server_and_its_calls(tmp_path: Path) -> None:
    with served(tmp_path) as (process, address), Client(address) as client:
        chunks = client.stream(PROMPT)
        next(chunks)
        process.terminate()
        with pytest.raises(ServerUnavailable, match="shutting down"):
            for _ in chunks:
                pass
        code, err = end_of(process)
    assert code == 143
    assert "noise of a library" in err


def test_sigint_ends_an_idle_server(tmp_path: Path) -> None:
    with served(tmp_path) as (process, _):
        process.send_signal(signal.SIGINT)
        assert end_of(process)[0] == 130


def test_a_lost_pipeline_ends_the_server_with_exit_code_4(tmp_path: Path) -> None:
    with served(tmp_path) as (process, address), Client(address) as client:
        with pytest.raises(PipelineLost, match="stage 1 is lost: killed"):
            client.generate([LOSING])
        code, err = end_of(process)
    assert code == 4
    assert err.splitlines()[-1] == "error: stage 1 is lost: killed"


def test_the_tokenizer_is_loaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class LostEngine(ScriptedEngine):
        def attach(self, *, lose: Callable[[PipelineLost], None], **others: object) -> None:
            lose(PipelineLost("before the first request"))

    loads: list[Path] = []
    load = Tokenizer.load

    def counting(folder: Path) -> Tokenizer:
        loads.append(folder)
        return load(folder)

    monkeypatch.setattr(Tokenizer, "load", counting)
    monkeypatch.setattr(Engine, "start", lambda *_, **__: LostEngine().__enter__())
    assert main(["serve", str(model_of(tmp_path)), "--port", "0"]) == 4
    assert loads == [tmp_path]


def test_a_broken_chat_template_is_found_before_a_stage_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def too_early(*_: object, **__: object) -> None:
        raise AssertionError("the engine was started")

    monkeypatch.setattr(Engine, "start", too_early)
    folder = model_of(tmp_path, chat_template="{% for %}")
    assert main(["serve", str(folder), "--port", "0"]) == 3
    assert "is not valid Jinja" in capfd.readouterr().err


def test_commands_talk_to_the_server(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def told(line: str) -> tuple[int, str, str]:
        code = main([*line.split(), "--address", address])
        return (code, *capfd.readouterr())

    with served(tmp_path, "--served-model-name", "tiny-one") as (_, address):
        plain = told("generate AB --max-tokens 3")
        document = told("generate AB --max-tokens 3 --json")
        stopped = told("generate AB --stop X --stop AAA")
        included = told("generate AB --stop AA --include-stop")
        refused = told("generate AB --top-p 7")
        chat = told("generate AB --chat")
        info = told("info")
        info_document = told("info --json")
    assert plain == (0, "AAA\n", "")
    assert json.loads(document[1]) == {
        "schema": 1,
        "text": "AAA",
        "token_ids": [263, 263, 263],
        "finish_reason": "length",
        "usage": {"prompt_tokens": 3, "completion_tokens": 3, "cached_tokens": 0},
    }
    assert stopped == (0, "\n", "")
    assert included == (0, "AA\n", "")
    assert refused == (2, "", "error: top_p: 7.0 is not in (0, 1]\n")
    assert chat[0] == 1
    assert "no chat template" in chat[2]
    assert info[1].startswith("model tiny-one   epoch 1   max_model_len 100000")
    assert json.loads(info_document[1])["stages"][1] == {
        "index": 1,
        "node": "b",
        "pid": 8,
        "actor_id": "",
        "device": "cpu",
        "layers": [3, 4],
        "state": "ready",
    }
