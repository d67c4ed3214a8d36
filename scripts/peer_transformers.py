"""transformers' generate on the workload of `orca-dist bench offline`: one line, as its --json
says it.

Batches are static: the next one starts when the longest answer of the one before has ended, and
short prompts are padded to the longest. Makes the workload file if there is none.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from peer_workload import WARM_UP, Request, arguments, read_workload, result
from transformers import AutoModelForCausalLM, PreTrainedModel

PADDING_ID = 0  # hidden by the attention mask


def load(model: Path, dtype: str, threads: int) -> PreTrainedModel:
    torch.set_num_threads(threads)
    return AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()


def run(model: PreTrainedModel, requests: list[Request], batch_size: int) -> float:
    """Seconds until the last answer; each has its `out` tokens at least."""
    start_s = time.perf_counter()
    for first in range(0, len(requests), batch_size):
        run_batch(model, requests[first : first + batch_size])
    return time.perf_counter() - start_s


@torch.inference_mode()
def run_batch(model: PreTrainedModel, requests: list[Request]) -> None:
    ids, mask = padded([request["prompt"] for request in requests])
    out = max(request["out"] for request in requests)
    answers = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=out,
        min_new_tokens=out,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=PADDING_ID,
    )
    assert answers.shape[1] == ids.shape[1] + out


def padded(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts that end alike, and where they are."""
    longest = max(map(len, prompts))
    ids = [[PADDING_ID] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids), torch.tensor(mask)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--dtype", default="float32", help="float32 or bfloat16")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    requests = read_workload(options)
    start_s = time.perf_counter()
    model = load(options.model, options.dtype, options.threads)
    startup_s = time.perf_counter() - start_s
    run(model, WARM_UP, 1)
    wall_s = run(model, requests, options.batch_size)
    print(result(requests, wall_s=wall_s, startup_s=startup_s))


if __name__ == "__main__":
    main()
