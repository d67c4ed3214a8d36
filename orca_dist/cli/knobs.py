"""A dataclass's fields as knobs: name, type, default and help, read once from its source.

What a flag, a YAML key, an ORCA_* variable and a row of docs/cli.md have in common.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from tyro.conf import Positional

from orca_dist.errors import ConfigError

VARIABLE_PREFIX = "ORCA_"
NO_SECRETS = "there is no such setting, for a secret would be there for others to read: "
REFUSED = {
    "api_key": f"{NO_SECRETS}set ORCA_API_KEY, or name a file by --api-key-file",
    "api_keys": f"{NO_SECRETS}set ORCA_API_KEYS, or name a file by --api-keys-file",
    "trust_remote_code": "there is no such setting: code that comes with a model is never run; "
    "models of the families in docs/models.md need none, whatever their config.json says",
}
VLLMS = {  # its names for settings of ours; docs/from-vllm.md has the same, and more
    "pipeline_parallel_size": "stages",
    "tensor_parallel_size": "tensor_parallel",
    "distributed_executor_backend": "launcher",
    "max_num_seqs": "max_batch_size",
    "max_num_batched_tokens": "max_batch_tokens",
    "no_enable_chunked_prefill": "chunked_prefill",
    "gpu_memory_utilization": "memory_share",
    "num_gpu_blocks_override": "kv_tokens",
    "no_enable_prefix_caching": "prefix_cache",
    "ssl_certfile": "tls_cert",
    "ssl_keyfile": "tls_key",
    "ssl_ca_certs": "tls_client_ca",
    "enforce_eager": "cuda_graphs",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One setting. `default` is dataclasses.MISSING where a value has to be given."""

    name: str
    type: Any
    default: object
    help: str
    positional: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return VARIABLE_PREFIX + self.name.upper()


def knobs(kind: type) -> list[Knob]:
    """The fields of a dataclass, in their order; a field's help is the string below it."""
    types, helps = get_type_hints(kind, include_extras=True), _field_docs(kind)
    return [
        Knob(
            name=field.name,
            type=_plain(types[field.name]),
            default=field.default,
            help=helps.get(field.name, ""),
            positional=Positional in get_args(types[field.name]),
        )
        for field in dataclasses.fields(kind)
    ]


def refuse_by_name(word: str) -> None:
    """Raises ConfigError for what people look for here: left out on purpose, or named otherwise."""
    name = word.removeprefix(VARIABLE_PREFIX).strip("-").replace("-", "_").lower()
    if name in REFUSED:
        raise ConfigError(f"{word}: {REFUSED[name]}")
    if name in VLLMS:
        flag = "--" + VLLMS[name].replace("_", "-")
        raise ConfigError(f"{word}: no such setting; that is {flag} here, see docs/from-vllm.md")


def near(word: str, known: Iterable[str]) -> str:
    """ " (did you mean a or b?)" where known words resemble `word`, else ""."""
    words = difflib.get_close_matches(word, list(known), n=3, cutoff=0.7)
    return f"; did you mean {' or '.join(words)}?" if words else ""


def _plain(hint: Any) -> Any:
    """A type without the marks that tyro reads."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _field_docs(kind: type) -> dict[str, str]:
    """Help by field, of a dataclass and those it builds on."""
    bases = [base for base in reversed(kind.__mro__) if dataclasses.is_dataclass(base)]
    return {name: text for base in bases for name, text in _own_docs(base).items()}


@cache
def _own_docs(kind: type) -> dict[str, str]:
    """Parsing takes most of what a command takes to start: once a class is enough."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    return {
        field.target.id: " ".join(doc.value.value.split())
        for field, doc in pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(doc, ast.Expr)
        and isinstance(doc.value, ast.Constant)
        and isinstance(doc.value.value, str)
    }
