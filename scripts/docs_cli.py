"""Writes docs/cli.md from the commands' dataclasses; --check only compares.

A flag, its default and its help are what `orca-dist COMMAND --help` shows: both
come from the same fields.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from orca_dist.cli.bench import BENCHES
from orca_dist.cli.cluster import ACTIONS as CLUSTER_ACTIONS
from orca_dist.cli.knobs import Knob, knobs
from orca_dist.cli.main import commands
from orca_dist.cli.model import ACTIONS
from orca_dist.cli.settings import Settings
from orca_dist.config import Split

PAGE = Path(__file__).resolve().parents[1] / "docs" / "cli.md"

HEAD = """\
# Commands

Generated from the code by `python scripts/docs_cli.py`; a test keeps it so.

`orca-dist COMMAND --help` shows the same. Results go to stdout, all else to stderr.

## Settings

Every flag of `serve` is also a key of the YAML file that `--config` names
(`--max-batch-size 8` is `max_batch_size: 8`) and an environment variable
(`ORCA_MAX_BATCH_SIZE=8`). Flags win over the file, the file over variables, variables
over the defaults below. `ORCA_CONFIG` names a file too. A name that doesn't exist is an
error that lists near ones. Times are seconds. A list is `--split 8 7 7 8` on the command
line (after MODEL), `split: [8, 7, 7, 8]` in the file and `ORCA_SPLIT="8 7 7 8"`. The file may
also hold `network`, of `cluster slurm`, so that one file does for both.

Keys are in no flag and no YAML file: `ORCA_API_KEYS` (of `serve`) and `ORCA_API_KEY` (of its
clients) hold them, or the files that `--api-keys-file` and `--api-key-file` name
([security.md](security.md)).

## Exit codes

| code | meaning |
|---|---|
| 0 | done |
| 1 | the call failed |
| 2 | usage or configuration |
| 3 | the server could not start |
| 4 | the pipeline was lost |
| 130, 143 | ended by SIGINT, SIGTERM |
"""

SPOKEN = {"simulate-paper": "simulate paper"}

JSON_DOCUMENTS = """
## JSON

`--json` prints one document with `"schema": 1` on stdout.

- `generate`: `text`, `token_ids`, `finish_reason` (`stop` or `length`),
  `usage` {`prompt_tokens`, `completion_tokens`, `cached_tokens`}
- `info`: `model`, `stages` [{`index`, `node`, `pid`, `actor_id` (empty outside Ray),
  `device`, `layers` (their numbers), `state`}], `epoch`, `max_model_len`, `kv_tokens`,
  `version`
- `bench scheduler`: `rows` [{`waiting`, `running`, `us_per_iteration`, `select_us`,
  `on_result_us`}]
- `bench offline`: `total_tok_s`, `output_tok_s`, `wall_s`, `startup_s`, `ttft_s` (median),
  `stages` [{`busy`, `bubble`}], `peak_rss_mb` (all processes, shared pages once),
  `prompt_tokens`, `output_tokens`, `cached_tokens`, `preempted`, `iterations`
- `bench frontend`: `rows` [{`stages`, `streams`, `iterations`, `batch` (requests in one, on
  average), `cpu_ms` (of the serving process, an iteration) = `front_ms` + `master_ms` +
  `control_ms` + `grpc_ms`, `generator_ms` (CPU time of the process that reads the streams),
  `wall_ms`, `messages` (that reached it, an iteration), `tokens_s`, `tpot_s`}], `max_streams`
  [{`stages`, `streams`}]
- `bench kernels`: `rows` [{`kernel`, `shape`, `dtype`, `threads`, `kernel_us` and `reference_us`
  (each {`median`, `low`, `high`}, the quartiles), `ratio` (reference over kernel)}]
- `bench roofline`: `wall_s`, `total_tok_s`, `iterations`, `dtype`, `threads_per_stage`,
  `distinct_rows` (of batches), `timed_rows` (numbers of rows that were timed), `matmul_s` (of all
  stages), `busiest_stage`, `share` (its `matmul_s` over `wall_s`), `stages` [{`weight_bytes`,
  `matmul_s` + `other_compute_s` = `computing_s`; `computing_s` + `receiving_s` + `sending_s` +
  `waiting_s` = `wall_s`; `read_gb_s` (memory, all stages reading), `weight_read_s` (the weights
  once an iteration at that rate)}]
- `bench predict`: `measured`, `simulated` and `ratio` (simulated over measured), each
  {`throughput_req_s`, `normalized_latency_s`, `ttft_s`} (medians)
- `bench chaos`: `rounds`, `requests` (during them), `lost`, `duplicated` and `differing` (of them),
  `recoveries` (more than rounds where one fault took several), `leaked_slots`, `detection_s`,
  `recovery_s` and `first_token_s` (each {`median`, `max`}, from the fault until the pipeline is
  NOT_SERVING, SERVING again, and has brought a token), `faults` {word: {`rounds`, the same times}},
  `each` [{`fault`, `stage`, the three times}]
- `bench soak`: `requests`, `answered`, `cancelled`, `refused`, `failed` (ended as it should not),
  `preempted`, `leaked_blocks`, `leaked_entries` (of all tables that have one for a request),
  `leaked_threads`, `leaked_files` (sockets among them) and `rss_growth_mb` (each of the process
  where it is worst), `warm` and `end` {`rss_mb`, `threads`, `files`} (of the server's process, then
  of the stages)
- `bench serve`: `requests` (sent), `completed`, `unfinished` (out when interrupted), `errors`
  {status: count}, `duration_s`, `throughput_req_s`, `output_tok_s`, `total_tok_s`,
  `prompt_tokens`, `output_tokens`, `cached_tokens`, `normalized_latency_s`, `ttft_s`, `tpot_s`,
  `inter_token_s`, `latency_s` (each {`p50`, `p90`, `p99`}, null where there is nothing to
  measure), `goodput` {`slo` {`ttft_s`, `tpot_s`}, `share`, `req_s`} (null without bounds),
  `max_lag_s` (how late a request was sent), `interrupted`; with `--rates`: `interrupted` and
  `points` [{`rate`, and all the others}]
- `simulate`: `throughput_req_s`, `normalized_latency_s`, `ttft_s` and `tpot_s` (each {`p50`,
  `p90`, `p99`}), `stages` [{`busy`, `bubble`}], `decode_steps`, `slot_utilization`,
  `preemptions`; with `--rates`, `points` [{`rate`, the same}]
- `simulate paper`: `points` {`175b_at_190ms` {`orca_req_s`, `ft_req_s`, `ratio`}, `175b_peak`,
  ...}, `efficiency`, `sensitivity` by its factor, `orca_batches` and `ft_batches` by their sizes
  {`peak_req_s`, `at_target_req_s`, `latency_s`}, `homogeneous_peak_req_s`
- `plan`: `gpu`, `num_devices`, `rate`, `slo_s`, `num_requests`, `candidates` (the best first)
  [{`stages`, `tensor_parallel`, `num_devices`, `servable` (by `serve` of this version),
  `max_batch_size`, `micro_batch_size`, `batching`, `forming`, `meets_slo`, `keeps_up`,
  `throughput_req_s`, `normalized_latency_s` {`p50`, `p90`, `p99`}, `preemptions`, `kv_tokens`,
  `bubble`, `reason`, `split` [{`node`, `num_layers`, `weights_bytes`, `kv_bytes`,
  `room_bytes`} of all devices of a stage]}], `no_room` [{`stages`, `tensor_parallel`,
  `needed_bytes`, `room_bytes`} of a device]
- `doctor`: `verdict` (the worst: `pass`, `warn` or `fail`), `findings` [{`check`, `verdict`,
  `seen`, `remedy` (empty where nothing is wrong), `node` (its address; empty: of the whole
  cluster)}], `links` [{`source`, `target`, `latency_s` (there and back), `bytes_s`, `offset_s` (of
  the target's clock) within `error_s`, `problem`}], `nodes` [{`node`, and what was gathered there,
  or `problem`}]
- `model show`: what the folder holds, as the plain output
"""


NESTED: dict[str, dict[str, Any]] = {"model": ACTIONS, "bench": BENCHES, "cluster": CLUSTER_ACTIONS}


def page() -> str:
    """The whole of docs/cli.md."""
    sections = [HEAD]
    for name, command in commands(Settings()).items():
        if name in NESTED:
            sections += [
                _section(f"{name} {action}", kind) for action, kind in NESTED[name].items()
            ]
        else:
            sections.append(_section(SPOKEN.get(name, name), type(command)))
    return "\n".join(sections) + JSON_DOCUMENTS


def _section(name: str, kind: type) -> str:
    own = knobs(kind)
    words = " ".join(knob.name.upper() for knob in own if knob.positional)
    title = f"## orca-dist {name} {words}".rstrip()
    return "\n".join([title, "", _doc(kind), "", *_table(own)]) + "\n"


def _doc(kind: type) -> str:
    return " ".join((kind.__doc__ or "").split())


def _table(own: list[Knob]) -> list[str]:
    rows = list(_rows(own))
    return ["| flag | default | meaning |", "|---|---|---|", *rows] if rows else []


def _rows(own: list[Knob]) -> Iterator[str]:
    """A group's knobs follow the command's own ones, as in --help."""
    for knob in own:
        if not dataclasses.is_dataclass(knob.type):
            yield f"| {_word(knob)} | {_default(knob)} | {knob.help} |"
    for knob in own:
        if isinstance(knob.type, type) and dataclasses.is_dataclass(knob.type):
            yield from _rows(knobs(knob.type))


def _word(knob: Knob) -> str:
    if knob.positional:
        return f"`{knob.name.upper()}`"
    value = _value(knob.type)
    return f"`{knob.flag}`" + (f" {value}" if value else "")


def _value(kind: Any) -> str:
    """How a value of a type is written; "" for a switch."""
    options = [option for option in get_args(kind) if option is not NoneType]
    if kind == tuple[int | Split, ...]:
        return "auto \\| even \\| numbers"
    if kind == tuple[int, ...]:
        return "numbers"
    if kind == tuple[str, ...]:
        return "text"
    if kind == tuple[Path, ...]:
        return "paths"
    if options:
        return _value(options[0])
    if issubclass(kind, StrEnum):
        return " \\| ".join(member.value for member in kind)
    return {int: "number", float: "number", str: "text", Path: "path", bool: ""}[kind]


def _default(knob: Knob) -> str:
    if knob.default in (dataclasses.MISSING, None, "", ()) or isinstance(knob.default, bool):
        return ""
    if isinstance(knob.default, tuple):
        return f"`{' '.join(map(str, knob.default))}`"
    return f"`{knob.default}`"


def main(arguments: list[str]) -> int:
    if "--check" not in arguments:
        PAGE.write_text(page(), encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page():
        print("docs/cli.md differs from the code: run scripts/docs_cli.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
