"""make demo: a small model, served by two stages on this machine, answers six questions at once.

Nothing here is for show: real Ray actors, a real gRPC server, a real client. At
the end come what each request and each stage did, and a picture of the pipeline.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence

from rich.console import Console

from orca_dist.cli.answers import Answer, AnswerView, answer_view, results_console
from orca_dist.cli.interrupts import interruptible
from orca_dist.cli.main import ended
from orca_dist.cli.output import results_only
from orca_dist.cli.serving import ServedModel, make_server, running_engine
from orca_dist.client import AsyncClient, Chunk, Completion, joined
from orca_dist.config import EngineConfig, ServerConfig
from orca_dist.engine.engine import Engine
from orca_dist.errors import PipelineLost
from orca_dist.metrics.pipeline_view import letter, pipeline_view
from orca_dist.metrics.summary import RequestRow, request_table, stage_table, totals
from orca_dist.metrics.trace import summarize
from orca_dist.params import SamplingParams
from orca_dist.weights.fetch import fetch_default_model

PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Why is the sky blue?",
    "Explain to a child how an assembly line in a factory works.",
    "Name three animals that live in the ocean.",
    "Tell me a short story about an orca and a lighthouse keeper.",
)
PARAMS = SamplingParams(max_tokens=48)
MAX_WIDTH = 160
KV_TOKENS = 4096


def main() -> int:
    """The exit codes of orca-dist."""
    parser = argparse.ArgumentParser(prog="demo.py", description=__doc__)
    parser.add_argument("--stages", type=int, default=2, help="pipeline stages (default: 2)")
    stages = parser.parse_args().stages
    return ended(lambda: demo(EngineConfig(stages=stages, kv_tokens=KV_TOKENS)))


def demo(config: EngineConfig) -> int:
    config.check()
    with results_only() as results:
        console = results_console(results)
        model = ServedModel.load(fetch_default_model())
        say(f"starting Ray for {model.folder.name}")
        with running_engine(model, config, on_progress=say) as engine:
            rows = asyncio.run(interruptible(talk(engine, model, console)))
            report(engine, rows, console)
    return 0


async def talk(engine: Engine, model: ServedModel, console: Console) -> list[RequestRow]:
    """Serve, and ask everything at once."""
    answers = [Answer(prompt=prompt) for prompt in PROMPTS]
    server = make_server(
        engine,
        model,
        ServerConfig(port=0),
        max_queue=len(PROMPTS),
        max_queue_tokens=engine.config.max_queue_tokens,
    )
    async with server, AsyncClient(server.address) as client:
        place = f"{model.folder.name} at {server.address}"
        say(f"serving {place}; asking {len(PROMPTS)} questions at once\n")
        await client.health()  # connected: what is timed is the questions
        with answer_view(console, answers) as view:
            return await asyncio.gather(*(ask(client, answer, view) for answer in answers))


async def ask(client: AsyncClient, answer: Answer, view: AnswerView) -> RequestRow:
    """One answer to its view, piece by piece."""
    chunks: list[Chunk] = []
    times_s: list[float] = []
    sent_s = time.perf_counter()
    async for chunk in client.stream([{"role": "user", "content": answer.prompt}], PARAMS):
        chunks.append(chunk)
        times_s.append(time.perf_counter() - sent_s)
        answer.letter = letter(int(chunk.request_id.removeprefix("r")) - 1)  # r1 came first
        answer.text += chunk.text
        if chunk.usage:
            answer.ending = f"{chunk.usage.completion_tokens} tokens, {chunk.finish_reason}"
        view.show(answer)
    return row(answer.letter, joined(chunks), times_s)


def row(name: str, completion: Completion, times_s: Sequence[float]) -> RequestRow:
    return RequestRow(
        letter=name,
        prompt_tokens=completion.usage.prompt_tokens,
        tokens=completion.usage.completion_tokens,
        first_token_s=times_s[0],
        total_s=times_s[-1],
        finish_reason=completion.finish_reason,
    )


def report(engine: Engine, rows: Sequence[RequestRow], console: Console) -> None:
    """What happened, from the stages' own records."""
    if not engine.flush_trace():
        raise PipelineLost("a stage did not report what it did")
    num_stages = engine.config.stages
    plans = [plan for plan in engine.trace() if 0 not in plan.ids]  # 0 is the warm-up
    summary = summarize(plans, num_stages)
    console.print(request_table(sorted(rows, key=lambda each: each.letter)))
    console.print(stage_table(engine.info().stages, summary))
    console.print(totals(rows, summary) + "\n", highlight=False)
    width = min(console.width, MAX_WIDTH)
    console.print(pipeline_view(plans, num_stages=num_stages, width=width))


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
