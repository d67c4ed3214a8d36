"""OpenVINO GenAI on the workload of `orca-dist bench offline`: one line, as its --json says it.

For an environment of its own (openvino-genai, numpy), and a model made by `optimum-cli export
openvino --task text-generation-with-past --weight-format fp32`. Makes the workload file if there
is none: `orca-dist bench offline --workload` reads it.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai
from peer_workload import NUM_REQUESTS, WARM_UP, Request, arguments, read_workload, result


def make_pipeline(model: Path, precision: str, threads: int) -> genai.ContinuousBatchingPipeline:
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = 2048
    scheduler.max_num_seqs = NUM_REQUESTS
    scheduler.cache_size = 2
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = False
    properties = {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
    }
    return genai.ContinuousBatchingPipeline(
        str(model), scheduler_config=scheduler, device="CPU", properties=properties
    )


def run(pipeline: genai.ContinuousBatchingPipeline, requests: list[Request]) -> float:
    """Seconds until the last answer; each has exactly its `out` tokens."""
    start_s = time.perf_counter()
    handles = [
        pipeline.add_request(index, tensor(request["prompt"]), exactly(request["out"]))
        for index, request in enumerate(requests)
    ]
    while pipeline.has_non_finished_requests():
        pipeline.step()
    took_s = time.perf_counter() - start_s
    for handle, request in zip(handles, requests, strict=True):
        assert len(handle.read_all()[0].generated_ids) == request["out"]
    return took_s


def tensor(prompt: object) -> ov.Tensor:
    return ov.Tensor(np.array([prompt], dtype=np.int64))


def exactly(num_tokens: object) -> genai.GenerationConfig:
    config = genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = num_tokens
    config.ignore_eos, config.do_sample, config.apply_chat_template = True, False, False
    return config


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--precision", default="f32", help="f32 or bf16")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    requests = read_workload(options)
    start_s = time.perf_counter()
    pipeline = make_pipeline(options.model, options.precision, options.threads)
    startup_s = time.perf_counter() - start_s
    run(pipeline, WARM_UP)
    print(result(requests, wall_s=run(pipeline, requests), startup_s=startup_s))


if __name__ == "__main__":
    main()
