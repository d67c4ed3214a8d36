"""Requests from distributions and from files."""

from __future__ import annotations

import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from orca_dist.errors import ConfigError
from orca_dist.sim.lengths import Lengths, parse_lengths
from orca_dist.sim.trace import read_workload
from orca_dist.sim.workload import Arrivals, Workload, WorkloadRequest, make_workload

NUM = 20_000


def made(arrivals: Arrivals, num_requests: int = NUM, seed: int = 1) -> Workload:
    return make_workload(
        num_requests=num_requests,
        prompt_lens=parse_lengths("prompt_len", "32-512"),
        output_lens=parse_lengths("output_lens", "1-128"),
        arrivals=arrivals,
        seed=seed,
    )


def gaps_s(workload: Workload) -> list[float]:
    times_s = [0.0] + [request.at_s for request in workload.requests]
    return [until - since for since, until in pairwise(times_s)]


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 3.0])
def test_gaps_have_the_mean_and_the_variation_asked_for(cv: float) -> None:
    gaps = gaps_s(made(Arrivals(rate=4.0, cv=cv)))
    mean = statistics.fmean(gaps)
    assert mean == pytest.approx(0.25, rel=0.05)
    assert statistics.pstdev(gaps) / mean == pytest.approx(cv, rel=0.1, abs=1e-9)


def test_lengths_are_uniform_with_both_ends() -> None:
    requests = made(Arrivals()).requests
    prompts, outs = [r.prompt for r in requests], [r.out for r in requests]
    assert (min(prompts), max(prompts)) == (32, 512)
    assert (min(outs), max(outs)) == (1, 128)
    assert statistics.fmean(prompts) == pytest.approx(272, rel=0.02)
    assert statistics.fmean(outs) == pytest.approx(64.5, rel=0.02)


def test_same_seed_same_workload_and_a_longer_one_begins_with_it() -> None:
    short, long = made(Arrivals(rate=1.0), 100), made(Arrivals(rate=1.0), 200)
    assert long.requests[:100] == short.requests
    assert made(Arrivals(rate=1.0), 100) == short
    assert made(Arrivals(rate=1.0), 100, seed=2) != short


def test_another_rate_only_stretches_the_arrivals() -> None:
    slow, fast = made(Arrivals(rate=1.0), 50), made(Arrivals(rate=2.0), 50)
    for one, other in zip(slow.requests, fast.requests, strict=True):
        assert (one.prompt, one.out) == (other.prompt, other.out)
        assert one.at_s == pytest.approx(2 * other.at_s)


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("8", Lengths(listed=(8,))),
        ("32-512", Lengths(low=32, high=512)),
        ("5,50,8", Lengths(listed=(5, 50, 8))),
    ],
)
def test_lengths_are_read(text: str, lengths: Lengths) -> None:
    assert parse_lengths("x", text) == lengths


@pytest.mark.parametrize(
    "text", ["", "0", "-3", "5,", "5,x", "9-3", "1-", "1.5", "5,-1", "99999999"]
)
def test_impossible_lengths_are_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=f"^output_lens = {text}"):
        parse_lengths("output_lens", text)


@pytest.mark.parametrize(
    ("arrivals", "message"),
    [
        (Arrivals(rate=-1.0), "rate = -1.0"),
        (Arrivals(rate=0.0), "rate = 0.0"),
        (Arrivals(rate=float("nan")), "rate = nan"),
        (Arrivals(cv=-0.5), "cv = -0.5"),
        (Arrivals(clients=0), "clients = 0"),
    ],
)
def test_impossible_arrivals_are_refused(arrivals: Arrivals, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(arrivals, 10)


# ---- files -------------------------------------------------------------

WANTED = (
    WorkloadRequest(id=0, prompt=(5, 6), out=3, at_s=0.0),
    WorkloadRequest(id="b", prompt=7, out=1, at_s=0.25),
    WorkloadRequest(id=1, prompt="hello, you", out=2, at_s=0.5),
)
FILES = {
    "w.json": '{"requests": [{"id": 0, "prompt": [5, 6], "out": 3}, '
    '{"prompt": "hello, you", "out": 2, "at_s": 0.5}, '
    '{"id": "b", "prompt": 7, "out": 1, "at_s": 0.25}]}',
    "w.jsonl": '{"id": 0, "prompt": [5, 6], "out": 3}\n\n'
    '{"prompt": "hello, you", "out": 2, "at_s": 0.5}\n'
    '{"id": "b", "prompt": 7, "out": 1, "at_s": 0.25}\n',
    "w.csv": 'id,prompt,out,at_s\n0,"[5, 6]",3,\n,"hello, you",2,0.5\nb,7,1,0.25\n',
}


@pytest.mark.parametrize("name", FILES)
def test_each_kind_of_file_says_the_same(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(FILES[name])
    assert read_workload(path, clients=2) == Workload(requests=WANTED, clients=2)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("w.jsonl", '{"prompt": 1, "out": 1}\n{"prompt": 1\n', "line 2: is not JSON"),
        ("w.jsonl", '{"prompt": 1, "out": 1}\n[1]\n', "line 2: needs an object"),
        ("w.jsonl", '{"prompt": 1, "out": 0}\n', "line 1: out = 0"),
        ("w.jsonl", '{"prompt": 1}\n', "line 1: out = None"),
        ("w.jsonl", '{"prompt": [], "out": 1}\n', r"line 1: prompt = \[\]"),
        ("w.jsonl", '{"prompt": -4, "out": 1}\n', "line 1: prompt = -4"),
        ("w.jsonl", '{"prompt": true, "out": 1}\n', "line 1: prompt = True"),
        ("w.jsonl", '{"prompt": 1, "out": 1, "at_s": -1}\n', "line 1: at_s = -1"),
        ("w.jsonl", '{"prompt": 1, "out": 1, "at_s": NaN}\n', "line 1: at_s = nan"),
        ("w.jsonl", '{"prompt": 1, "out": 1, "at": 1}\n', "line 1: at: no such name"),
        ("w.jsonl", "\n", "has no requests"),
        ("w.csv", "prompt,out\n1,2\n3\n", "line 3: needs 2 values"),
        ("w.csv", "prompt,out\n1,2,3\n", "line 2: needs 2 values"),
        ("w.csv", "prompt,out\n1,2\n4,many\n", "line 3: out = 'many'"),
        ("w.json", "{", "is not JSON"),
        ("w.json", "[]", "a list of requests"),
        ("w.json", '{"requests": [{"prompt": 1, "out": 1}, 2]}', r"requests\[1\]: needs an object"),
        ("w.txt", "1", "ends in .json, .jsonl, .csv"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_by_its_line(
    name: str, text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_workload(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"no/such\.csv can't be read"):
        read_workload(Path("no/such.csv"))
