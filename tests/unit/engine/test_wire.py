"""Plans and results survive the wire to the last bit."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from orca_dist.core import Admit, Plan, PlanResult, Sampling
from orca_dist.engine.wire import decode_result, encode_plan
from orca_dist.proto.v1 import control_pb2 as pb

MAX_U32 = 2**32 - 1
MAX_U64 = 2**64 - 1

u32 = st.integers(0, MAX_U32)
u64 = st.integers(0, MAX_U64)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)

samplings = st.builds(
    Sampling,
    temperature=st.floats(0, 1e300),
    top_k=u32,
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    seed=u64,
    return_logits=st.booleans(),
)
admits = st.builds(
    Admit,
    id=u64,
    sampling=samplings,
    tokens=st.lists(u32, min_size=1, max_size=9).map(tuple),
    blocks=st.lists(u32, min_size=1, max_size=5).map(tuple),
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    num = draw(st.integers(0, 6))
    column = st.lists(u32, min_size=num, max_size=num)
    counts = st.lists(st.integers(0, 3), min_size=num, max_size=num)
    num_new_tokens, num_new_blocks = draw(counts), draw(counts)
    return Plan(
        seq=draw(u64),
        drops=draw(st.lists(u64, max_size=4)),
        admits=draw(st.lists(admits, max_size=3)),
        ids=draw(st.lists(u64, min_size=num, max_size=num)),
        starts=draw(column),
        lengths=draw(column),
        samples=draw(st.lists(st.booleans(), min_size=num, max_size=num)),
        num_new_tokens=num_new_tokens,
        new_tokens=[draw(u32) for _ in range(sum(num_new_tokens))],
        num_new_blocks=num_new_blocks,
        new_blocks=[draw(u32) for _ in range(sum(num_new_blocks))],
    )


def as_stage_reads(payload: bytes) -> Plan:
    """The plan in the master's message, as the core's own dataclass."""
    message = pb.MasterMessage.FromString(payload)
    assert message.WhichOneof("kind") == "plan"
    plan = message.plan
    return Plan(
        seq=plan.seq,
        drops=list(plan.drops),
        admits=[_admit(admit) for admit in plan.admits],
        ids=list(plan.ids),
        starts=list(plan.starts),
        lengths=list(plan.lengths),
        samples=list(plan.samples),
        num_new_tokens=list(plan.num_new_tokens),
        new_tokens=list(plan.new_tokens),
        num_new_blocks=list(plan.num_new_blocks),
        new_blocks=list(plan.new_blocks),
    )


def _admit(admit: pb.Admit) -> Admit:
    sampling = admit.sampling
    return Admit(
        id=admit.id,
        sampling=Sampling(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
            return_logits=sampling.return_logits,
        ),
        tokens=tuple(admit.tokens),
        blocks=tuple(admit.blocks),
    )


@settings(max_examples=60)
@given(plans())
def test_stages_read_the_plan_that_was_made(plan: Plan) -> None:
    assert as_stage_reads(encode_plan(plan)) == plan


def test_the_same_plan_is_the_same_bytes() -> None:
    plan = Plan(seq=3, drops=[1], ids=[2], starts=[0], lengths=[1], samples=[True])
    assert encode_plan(plan) == encode_plan(plan)


@settings(max_examples=60)
@given(
    seq=u64,
    tokens=st.dictionaries(u64, st.lists(u32, max_size=4), max_size=6),
    failed=st.dictionaries(u64, text, max_size=3),
    logits=st.dictionaries(u64, st.binary(max_size=16), max_size=3),
)
def test_the_master_reads_what_the_last_stage_sampled(
    seq: int, tokens: dict[int, list[int]], failed: dict[int, str], logits: dict[int, bytes]
) -> None:
    """0 to k tokens a request, in the order of the entries."""
    message = pb.Result(
        seq=seq,
        ids=list(tokens),
        num_tokens=[len(own) for own in tokens.values()],
        tokens=[token for own in tokens.values() for token in own],
        failed=[pb.FailedRequest(id=i, message=why) for i, why in failed.items()],
        logits=[pb.Logits(id=i, rows=rows) for i, rows in logits.items()],
    )
    assert decode_result(pb.Result.FromString(message.SerializeToString())) == PlanResult(
        seq=seq,
        ids=list(tokens),
        tokens=list(tokens.values()),
        failed=failed,
        logits=logits,
    )
