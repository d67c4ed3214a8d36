"""A model folder is data: nothing in it is run, and none of it leads out of the folder."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from orca_dist.errors import InvalidRequest, ModelError
from orca_dist.text import ChatTemplate
from orca_dist.weights.headers import INDEX_FILE, read_headers

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [*(ROOT / "orca_dist").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]
RUNS_DATA = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
RUNS_CODE = {"eval", "exec", "compile", "__import__", "breakpoint"}
LOADERS = {  # attributes of modules that unpickle or run what they read
    "torch": {"load", "hub", "package", "jit"},
    "np": {"load"},
    "numpy": {"load"},
    "yaml": {"load", "unsafe_load", "full_load", "load_all"},
    "runpy": {"run_path", "run_module"},
}


# ---- files -------------------------------------------------------------


@pytest.mark.parametrize(
    "shard",
    [
        "../secret.safetensors",
        "/etc/secret.safetensors",
        "sub/secret.safetensors",
        "..\\secret.safetensors",
        "..",
        ".",
        "",
        "/etc/passwd",
        "config.json",
        "a\0.safetensors",
        7,
        None,
        ["model.safetensors"],
    ],
)
def test_an_index_names_files_of_its_folder_alone(tmp_path: Path, shard: object) -> None:
    index = {"weight_map": {"lm_head.weight": shard}}
    (tmp_path / INDEX_FILE).write_text(json.dumps(index), encoding="utf-8")
    (tmp_path.parent / "secret.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=r"index\.json: .* is not the name of a safetensors file"):
        read_headers(tmp_path)


# ---- templates ---------------------------------------------------------


@pytest.mark.parametrize(
    "template",
    [
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__closure__[0].cell_contents }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
        "{{ self._TemplateReference__context.environment.loader.list() }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os.getcwd() }}",
        "{% extends '../config.json' %}",
        "{{ range(10 ** 9) | list }}",
        "{{ messages.append({}) }}",
    ],
)
def test_a_template_gets_nowhere_beyond_the_messages(tmp_path: Path, template: str) -> None:
    (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    chat = ChatTemplate.load(tmp_path)
    with pytest.raises(InvalidRequest, match="the chat template refuses it"):
        chat.render([{"role": "user", "content": "hi"}])


# ---- our own code ------------------------------------------------------


def test_no_module_unpickles_or_runs_what_it_reads() -> None:
    assert len(SOURCES) > 100
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in SOURCES
        for line, what in dangers(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "eval('1')",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "from torch import load",
    ],
)
def test_the_search_finds_them(code: str) -> None:
    assert list(dangers(ast.parse(code)))


def dangers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and word of whatever could turn data into code."""
    for node in ast.walk(tree):
        for word in words(node):
            yield node.lineno, word  # type: ignore[attr-defined]


def words(node: ast.AST) -> list[str]:
    match node:
        case ast.Import(names=names):
            return [name.name for name in names if name.name.partition(".")[0] in RUNS_DATA]
        case ast.ImportFrom(module=str(module), names=names):
            unsafe = LOADERS.get(module, set())
            all_of_it = module.partition(".")[0] in RUNS_DATA
            return [f"{module}.{n.name}" for n in names if all_of_it or n.name in unsafe]
        case ast.Attribute(value=ast.Name(id=module), attr=attr):
            return [f"{module}.{attr}"] if attr in LOADERS.get(module, set()) else []
        case ast.Call(func=ast.Name(id=name)):
            return [name] if name in RUNS_CODE else []
    return []
