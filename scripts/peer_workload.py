"""The workload that the scripts of other engines and `orca-dist bench offline --workload` run."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

NUM_REQUESTS, PROMPT_LENS, OUTPUT_LENS, FIRST_ORDINARY_ID = 64, (32, 512), (1, 128), 100

Request = dict[str, object]

WARM_UP: list[Request] = [{"prompt": [1000] * 8, "out": 4}]


def arguments(about: str | None) -> argparse.ArgumentParser:
    """What every engine is told; each adds its own."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("model", type=Path)
    parser.add_argument("--workload", type=Path, default=Path("workload.json"))
    parser.add_argument("--vocab-size", type=int, default=49152)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def read_workload(options: argparse.Namespace) -> list[Request]:
    """The requests of the file, which is made if there is none."""
    path: Path = options.workload
    if not path.exists():
        requests = make_requests(options.vocab_size, random.Random(options.seed))
        path.write_text(json.dumps({"requests": requests}), encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))["requests"]


def make_requests(vocab_size: int, rng: random.Random) -> list[Request]:
    """The paper's mix of lengths, all there from the start; random tokens."""
    return [
        {
            "id": index,
            "prompt": rng.choices(
                range(FIRST_ORDINARY_ID, vocab_size), k=rng.randint(*PROMPT_LENS)
            ),
            "out": rng.randint(*OUTPUT_LENS),
        }
        for index in range(NUM_REQUESTS)
    ]


def result(requests: list[Request], *, wall_s: float, startup_s: float) -> str:
    """One line of JSON."""
    num_tokens = sum(len(request["prompt"]) + request["out"] for request in requests)
    return json.dumps(
        {"wall_s": wall_s, "startup_s": startup_s, "total_tok_s": num_tokens / wall_s}
    )
