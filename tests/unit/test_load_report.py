"""The arithmetic of a load's report, from made-up times; its pictures and tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from orca_dist.bench.attempt import Attempt
from orca_dist.bench.load_plot import (
    CurvePoint,
    check_target,
    curve_points,
    draw_curves,
    draw_timeline,
    read_points,
)
from orca_dist.bench.load_report import Slo, make_report
from orca_dist.cli.load_tables import points_lines, report_lines
from orca_dist.errors import ConfigError
from orca_dist.sim.report import Percentiles

PNG = b"\x89PNG"


def attempts() -> list[Attempt]:
    """Two that are answered, one of a single token, one refused, one failed halfway, one out."""
    return [
        Attempt(
            prompt_len=10,
            out=3,
            due_s=1.0,
            sent_s=1.125,
            token_s=[1.5, 2.0, 3.0],
            cached_tokens=4,
            ended_s=3.25,
        ),
        Attempt(prompt_len=20, out=2, due_s=2.0, sent_s=2.0, token_s=[4.0, 4.0], ended_s=4.0),
        Attempt(prompt_len=30, out=1, due_s=3.0, sent_s=3.0, token_s=[5.0], ended_s=5.0),
        Attempt(
            prompt_len=1, out=9, due_s=3.5, sent_s=3.5, ended_s=3.625, error="RESOURCE_EXHAUSTED"
        ),
        Attempt(
            prompt_len=1,
            out=9,
            due_s=3.5,
            sent_s=3.5,
            token_s=[3.6, 3.7],
            ended_s=9.0,
            error="UNAVAILABLE",
        ),
        Attempt(prompt_len=1, out=9, due_s=4.0, sent_s=4.25, token_s=[4.5]),
    ]


def test_every_figure_of_the_report() -> None:
    report = make_report(attempts(), Slo(ttft_s=2.0, tpot_s=0.5))
    assert (report.requests, report.completed, report.unfinished) == (6, 3, 1)
    assert report.errors == {"RESOURCE_EXHAUSTED": 1, "UNAVAILABLE": 1}
    assert report.duration_s == 4.0, "from 1, when the first was due, to 5, the last answer's end"
    assert report.throughput_req_s == 0.75
    assert (report.prompt_tokens, report.output_tokens, report.cached_tokens) == (60, 6, 4)
    assert report.output_tok_s == 1.5
    assert report.total_tok_s == 16.5
    assert report.ttft_s == exactly(0.5, 2.0, 2.0)
    assert report.latency_s == exactly(2.0, 2.0, 2.0)
    assert report.normalized_latency_s == exactly(2 / 3, 1.0, 2.0)
    assert report.tpot_s == exactly(0.0, 0.75), "an answer of one token has none"
    assert report.inter_token_s == exactly(0.0, 0.5, 1.0)
    assert report.max_lag_s == 0.25
    assert report.goodput is not None
    assert report.goodput.share == 0.4, "the second and the third, of five that ended"
    assert report.goodput.req_s == 0.5


def exactly(*values: float) -> Percentiles:
    """Of values in order, by the definition: interpolated at share * (n - 1)."""
    last = len(values) - 1

    def at(share: float) -> float:
        low = min(int(share * last), last - 1)
        return values[low] + (values[low + 1] - values[low]) * (share * last - low)

    return Percentiles(p50=at(0.5), p90=at(0.9), p99=at(0.99))


@pytest.mark.parametrize(
    ("slo", "share"),
    [
        (Slo(), 0.6),
        (Slo(ttft_s=0.5), 0.2),
        (Slo(ttft_s=0.4999), 0.0),
        (Slo(tpot_s=0.75), 0.6),
        (Slo(tpot_s=0.7499), 0.4),
    ],
)
def test_goodput_counts_all_that_ended_and_bounds_are_included(slo: Slo, share: float) -> None:
    goodput = make_report(attempts(), slo).goodput
    assert goodput is not None
    assert goodput.share == share


def test_without_an_answer_there_is_nothing_to_measure() -> None:
    report = make_report(attempts()[3:], Slo(ttft_s=1.0))
    assert (report.completed, report.throughput_req_s, report.duration_s) == (0, 0.0, 0.0)
    assert report.ttft_s == Percentiles(p50=None, p90=None, p99=None)
    assert report.goodput is not None
    assert report.goodput.share == 0.0
    assert make_report(attempts()[5:], Slo(ttft_s=1.0)).completed == 0
    assert make_report(attempts()).goodput is None


def test_tables_name_what_failed() -> None:
    report = make_report(attempts(), Slo(ttft_s=2.0))
    lines = report_lines("all at once", report)
    assert lines[0] == (
        "3 of 6 requests answered, all at once, in 4.00 s; not answered: 1 RESOURCE_EXHAUSTED, "
        "1 UNAVAILABLE, 1 cut off"
    )
    assert lines[4].split() == ["first", "token", "2000.0", "2000.0", "2000.0"]
    assert lines[-2] == (
        "goodput 0.75 requests/s: 60.0 % of 5 had the first token within 2000.0 ms"
    )
    assert lines[-1] == "sent at most 250.0 ms late"
    _, row, goodput = points_lines([("4 requests/s", report)])
    assert row.split()[:6] == ["4", "requests/s", "3", "3", "0.75", "1.5"]
    assert goodput.startswith("4 requests/s: goodput 0.75")


def test_pictures_are_drawn(tmp_path: Path) -> None:
    curve = [CurvePoint(rate=r, throughput_req_s=r, p50_s=0.1, p90_s=0.2) for r in (1.0, 2.0)]
    draw_curves(tmp_path / "curves.png", {"one": curve, "two": curve})
    draw_curves(tmp_path / "empty.svg", {"nothing was answered": []})
    draw_timeline(tmp_path / "times.png", attempts())
    draw_timeline(tmp_path / "times.svg", attempts()[:1])
    assert (tmp_path / "curves.png").read_bytes().startswith(PNG)
    assert (tmp_path / "times.png").read_bytes().startswith(PNG)
    assert "<svg" in (tmp_path / "times.svg").read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match=r"x\.png: can't be written: "):
        draw_timeline(tmp_path / "nowhere" / "x.png", attempts())


def test_no_picture_is_named_before_anything_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"out\.gif: the name has to end in \.png or \.svg"):
        check_target(tmp_path / "out.gif")
    with pytest.raises(ConfigError, match="there is no folder"):
        check_target(tmp_path / "nowhere" / "out.png")
    monkeypatch.setattr("orca_dist.bench.load_plot.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs matplotlib; pip install 'orca-dist\[plot\]'"):
        check_target(tmp_path / "out.png")


def test_curves_of_earlier_documents(tmp_path: Path) -> None:
    good, none = make_report(attempts()), make_report(attempts()[3:])
    points = [{"rate": rate, **each.document()} for rate, each in ((2.0, good), (4.0, none))]
    path = tmp_path / "before.json"
    path.write_text(json.dumps({"schema": 1, "points": points}), encoding="utf-8")
    (point,) = read_points(path)
    assert point == CurvePoint(rate=2.0, throughput_req_s=0.75, p50_s=1.0, p90_s=1.8)
    assert curve_points({"points": points}) == [replace(point)]
    for text in ("{", "{}", '{"points": [1]}', "[]"):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match="is not what bench serve --rates --json prints"):
            read_points(path)
    with pytest.raises(ConfigError, match="can't be read"):
        read_points(tmp_path / "nowhere.json")
