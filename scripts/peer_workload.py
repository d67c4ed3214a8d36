"""The workload that the scripts of other engines and `orca-dist bench offline --workload` run."""

from __future__ import annotations

import json
import random
from pathlib import Path

NUM_REQUESTS, PROMPT_LENS, OUTPUT_LENS, FIRST_ORDINARY_ID = 64, (32, 512), (1, 128), 100

Request = dict[str, object]


def read_workload(path: Path, *, vocab_size: int, seed: int) -> list[Request]:
    """The requests of the file, which is made if there is none."""
    if not path.exists():
        requests = make_requests(vocab_size, random.Random(seed))
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
