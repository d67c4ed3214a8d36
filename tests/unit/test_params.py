"""SamplingParams: every field's limits, and what reaches the stages."""

from __future__ import annotations

import numpy as np
import pytest

from orca_dist.errors import InvalidRequest
from orca_dist.params import SamplingParams

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("temperature", -0.1),
        ("temperature", NAN),
        ("temperature", INFINITY),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", NAN),
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("min_p", NAN),
        ("seed", -1),
        ("seed", 2**64),
        ("top_k", 2**32),
    ],
)
def test_out_of_range_names_field_and_value(field: str, value: float) -> None:
    with pytest.raises(InvalidRequest) as raised:
        SamplingParams(**{field: value}).check()  # type: ignore[arg-type]
    assert raised.value.field == field
    assert str(raised.value).startswith(f"{field}: {value}")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 1),
        ("max_tokens", None),
        ("temperature", 0.0),
        ("temperature", 100.0),
        ("top_k", 0),
        ("top_k", 10**9),
        ("top_p", 1e-9),
        ("top_p", 1.0),
        ("min_p", 0.0),
        ("min_p", 1.0),
        ("seed", 0),
        ("seed", 2**64 - 1),
    ],
)
def test_limits_are_inclusive(field: str, value: float) -> None:
    SamplingParams(**{field: value}).check()  # type: ignore[arg-type]


def test_stops_are_bounded() -> None:
    SamplingParams(stop=("x" * 256,) * 16).check()
    for stop in (("x",) * 17, ("x" * 257,), ("x", "")):
        with pytest.raises(InvalidRequest) as raised:
            SamplingParams(stop=stop).check()
        assert raised.value.field == "stop"


def test_one_text_is_one_stop() -> None:
    assert SamplingParams(stop="MN").stop == ("MN",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["M", "N"]).stop == ("M", "N")  # type: ignore[arg-type]


def test_a_seed_of_zero_is_a_seed() -> None:
    assert SamplingParams(seed=0).settled(seed=77).seed == 0
    assert SamplingParams().settled(seed=77).seed == 77


def test_settled_keeps_every_other_field() -> None:
    sampling = SamplingParams(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1).settled(seed=1)
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (
        0.5,
        3,
        0.9,
        0.1,
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("top_k", 3.0),
        ("seed", 1.5),
        ("temperature", "hot"),
        ("top_p", None),
        ("ignore_eos", "yes"),
        ("return_logits", 1),
        ("stop", (b"bytes",)),
    ],
)
def test_a_wrong_kind_names_field_and_value(field: str, value: object) -> None:
    """What a stage could not take must not get as far as the engine master."""
    with pytest.raises(InvalidRequest) as raised:
        SamplingParams(**{field: value}).check()  # type: ignore[arg-type]
    assert raised.value.field == field


def test_numpy_numbers_are_numbers() -> None:
    SamplingParams(
        max_tokens=np.int64(3),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        seed=np.uint64(2**64 - 1),  # type: ignore[arg-type]
    ).check()
