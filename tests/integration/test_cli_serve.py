"""`orca-dist serve` as a process, with a scripted engine: ready, talked to, and ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from orca_dist.cli.main import main
from orca_dist.client import Client
from orca_dist.engine.engine import Engine
from orca_dist.errors import PipelineLost, ServerClosing
from orca_dist.params import SamplingParams
from orca_dist.text import Tokenizer
from tests.fixtures.certificates import Certificates
from tests.fixtures.checkpoints import byte_tokenizer
from tests.fixtures.scripted_engine import ScriptedEngine
from tests.fixtures.serve_scripted import LOSING

ROOT = Path(__file__).resolve().parents[2]
END_S = 30.0
SCRIPTED = "tests.fixtures.serve_scripted"
PROMPT = [5]
CLOSING = "the server is shutting down"
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
def served(
    folder: Path, *flags: str, variables: Mapping[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and the address it says it is ready at."""
    folder = model_of(folder)
    process = subprocess.Popen(
        [sys.executable, "-m", SCRIPTED, "serve", str(folder), "--port", "0", *flags],
        cwd=ROOT,
        env=os.environ | (variables or {}),
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


def test_sigterm_lets_answers_end_and_takes_no_more(tmp_path: Path) -> None:
    with served(tmp_path, "--drain-s", "60") as (process, address), Client(address) as client:
        streams = [client.stream(PROMPT, SamplingParams(max_tokens=1000)) for _ in range(2)]
        num_tokens = [len(next(chunks).token_ids) for chunks in streams]
        process.terminate()
        while client.health():  # until it is told, which is at once
            pass
        with pytest.raises(ServerClosing, match=f"^{CLOSING}$") as raised:
            client.generate(PROMPT)
        assert raised.value.retry_after_s == 1.0
        for index, chunks in enumerate(streams):
            num_tokens[index] += sum(len(chunk.token_ids) for chunk in chunks)
        assert num_tokens == [1000, 1000]
        code, err = end_of(process)
    assert code == 143
    assert "noise of a library" in err
    assert "running answers have 60 s to end" in err


def test_answers_that_outlast_the_drain_end_with_unavailable(tmp_path: Path) -> None:
    with served(tmp_path, "--drain-s", "0.3") as (process, address), Client(address) as client:
        chunks = client.stream(PROMPT)
        next(chunks)
        process.terminate()
        with pytest.raises(ServerClosing, match=f"^the answer was cut off: {CLOSING}$"):
            for _ in chunks:
                pass
        assert end_of(process)[0] == 143


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_answers_at_once(tmp_path: Path, signum: int) -> None:
    with served(tmp_path, "--drain-s", "3600") as (process, address), Client(address) as client:
        chunks = client.stream(PROMPT)
        next(chunks)
        process.send_signal(signum)
        while client.health():
            pass
        next(chunks)
        process.send_signal(signum)
        with pytest.raises(ServerClosing, match=f"^the answer was cut off: {CLOSING}$"):
            for _ in chunks:
                pass
        assert end_of(process)[0] == 128 + signum


# ---- keys and certificates ---------------------------------------------

KEYS = {"alice": "a-secret-of-alices", "bob": "a-secret-of-bobs", "eve": "a-guess-of-eves"}


def orca(*arguments: str, variables: Mapping[str, str] | None = None) -> tuple[int, str]:
    """A client command's exit code and all that it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "orca_dist", *arguments],
        cwd=ROOT,
        env=os.environ | (variables or {}),
        capture_output=True,
        text=True,
        timeout=END_S,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_keys_over_tls_from_files_and_variables_and_never_shown(tmp_path: Path) -> None:
    pems = Certificates(tmp_path)
    config = pems.server()
    for name, text in (("keys", f"alice:{KEYS['alice']}\n"), ("key", KEYS["alice"])):
        (tmp_path / name).touch(mode=0o600)
        (tmp_path / name).write_text(text)
    flags = ("--api-keys-file", str(tmp_path / "keys"), "--log-level", "debug")
    tls = ("--tls-cert", str(config.tls_cert), "--tls-key", str(config.tls_key))
    tls += ("--tls-client-ca", str(pems.ca))
    mine = pems.client("alice")
    said = ""
    with served(tmp_path, *flags, *tls, variables={"ORCA_API_KEYS": f"bob:{KEYS['bob']}"}) as (
        process,
        address,
    ):
        shown = ("--tls-client-cert", str(mine.cert), "--tls-client-key", str(mine.key))
        server = ("--address", address, "--tls-ca", str(pems.ca), *shown)
        code, out = orca("info", *server, "--api-key-file", str(tmp_path / "key"), "--json")
        assert (code, json.loads(out)["epoch"]) == (0, 1)
        said += out
        for name, expected in (("bob", 0), ("eve", 1)):
            variables = {"ORCA_API_KEY": KEYS[name], "ORCA_LOG_LEVEL": "debug"}
            code, out = orca("generate", "A", "--max-tokens", "3", *server, variables=variables)
            assert code == expected
            said += out
        code, out = orca("info", *server)
        assert (code, out) == (1, "error: this server needs a valid API key\n")
        process.terminate()
        said += end_of(process)[1]
    assert "refused a call" in said
    assert [secret for secret in KEYS.values() if secret in said] == []


@pytest.mark.parametrize(
    ("command", "flag", "fix"),
    [("serve", "--api-keys", "--api-keys-file"), ("generate", "--api-key", "--api-key-file")],
)
def test_no_flag_takes_a_key_and_what_was_given_is_not_repeated(
    command: str, flag: str, fix: str, capfd: pytest.CaptureFixture[str]
) -> None:
    for arguments in ([flag, KEYS["alice"]], [f"{flag}={KEYS['alice']}"]):
        assert main([command, *arguments]) == 2
        err = capfd.readouterr().err
        assert f"{flag}: there is no such setting" in err
        assert fix in err
        assert KEYS["alice"] not in err


def test_a_bad_key_in_a_variable_is_named_and_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ORCA_API_KEYS", f"alice:{KEYS['alice']} {KEYS['bob']}")
    assert main(["serve", str(model_of(tmp_path)), "--port", "0"]) == 2
    err = capfd.readouterr().err
    assert err.startswith("error: ORCA_API_KEYS, key 2: needs name:key")
    assert "secret" not in err
    assert "ORCA_API_KEYS" not in os.environ  # stages would inherit it


def test_a_port_open_to_all_is_refused_by_name(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(model_of(tmp_path)), "--port", "0", "--host", "0.0.0.0"]) == 2
    assert "--allow-insecure on" in capfd.readouterr().err


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
