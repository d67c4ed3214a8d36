"""Plans and results between the core's dataclasses and control.proto's messages."""

from __future__ import annotations

from orca_dist.core import Admit, Plan, PlanResult
from orca_dist.proto.v1 import control_pb2 as pb


def encode_plan(plan: Plan) -> bytes:
    """The bytes that every stage gets."""
    message = pb.Plan(
        seq=plan.seq,
        drops=plan.drops,
        admits=[_admit(admit) for admit in plan.admits],
        ids=plan.ids,
        starts=plan.starts,
        lengths=plan.lengths,
        samples=plan.samples,
        num_new_tokens=plan.num_new_tokens,
        new_tokens=plan.new_tokens,
        num_new_blocks=plan.num_new_blocks,
        new_blocks=plan.new_blocks,
    )
    return pb.MasterMessage(plan=message).SerializeToString()


def decode_result(message: pb.Result) -> PlanResult:
    """The last stage's answer as the scheduler takes it."""
    tokens, start = [], 0
    for count in message.num_tokens:
        tokens.append(list(message.tokens[start : start + count]))
        start += count
    return PlanResult(
        seq=message.seq,
        ids=list(message.ids),
        tokens=tokens,
        failed={failed.id: failed.message for failed in message.failed},
        logits={logits.id: logits.rows for logits in message.logits},
    )


def _admit(admit: Admit) -> pb.Admit:
    sampling = admit.sampling
    return pb.Admit(
        id=admit.id,
        sampling=pb.Sampling(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
            return_logits=sampling.return_logits,
        ),
        tokens=admit.tokens,
        blocks=admit.blocks,
    )
