"""A picture of the pipeline over time, like the paper's figure 8: stages down, time across.

Every block is one batch computing at one stage, as wide as it took, named by the
letters of its requests in order of arrival; dots are idle time. The start of the
run is shown, and, where it does not fit, a stretch from its middle on the same
scale. Readable without colours. Pure: traces in, text out; knows no terminal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_lowercase, ascii_uppercase

from rich.text import Text

from orca_dist.metrics.trace import PlanTrace

COLORS = ("cyan", "yellow", "green", "magenta", "bright_blue", "bright_red", "white")
LETTERS = ascii_uppercase + ascii_lowercase
OTHER = "?"  # requests beyond the alphabet
IDLE = "·"
LEFT_LEN = 9  # the stages' names
RIGHT_LEN = 6  # their busy shares
MIN_COLUMNS = 40
MAX_LABEL_LEN = 8  # longer ones may be cut
TICK_COLUMNS = 12  # at least, between two ticks
TICKS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One batch at one stage."""

    start_s: float
    end_s: float
    letters: str
    num_tokens: int
    has_prompt: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Columns of a strip that starts at `since_s`."""

    since_s: float
    column_s: float
    num_columns: int

    @property
    def until_s(self) -> float:
        return self.since_s + self.column_s * self.num_columns

    def column(self, time_s: float) -> int:
        """The column boundary nearest to a time, within the strip."""
        column = round((time_s - self.since_s) / self.column_s)
        return min(max(column, 0), self.num_columns)


def letters(plans: Sequence[PlanTrace]) -> dict[int, str]:
    """The letter of each request: ids are given in order of arrival."""
    ids = sorted({each for plan in plans for each in plan.ids})
    return {each: letter(index) for index, each in enumerate(ids)}


def letter(index: int) -> str:
    """A to Z, then a to z, of the index-th request to arrive."""
    return LETTERS[index] if index < len(LETTERS) else OTHER


def color(letter: str) -> str:
    """A request's colour; a block has its first request's."""
    return COLORS[(ord(letter) - ord("A")) % len(COLORS)]


def pipeline_view(plans: Sequence[PlanTrace], *, num_stages: int, width: int) -> Text:
    """The picture, lines of at most `width` columns; of no plans, a line that says so."""
    if not plans:
        return Text("no batch has run yet")
    rows = [_blocks(plans, stage, letters(plans)) for stage in range(num_stages)]
    scales = _scales(plans, rows, max(MIN_COLUMNS, width - LEFT_LEN - RIGHT_LEN))
    lines = [line for scale in scales for line in (*_strip(rows, scale, plans[0].sent_s), Text())]
    return Text("\n").join([*lines, _legend(scales[0])])


def _blocks(plans: Sequence[PlanTrace], stage: int, names: Mapping[int, str]) -> list[Block]:
    blocks = [
        Block(
            start_s=plan.spans[stage].compute_start_s,
            end_s=plan.spans[stage].compute_end_s,
            letters="".join(names[each] for each in sorted(plan.ids)),
            num_tokens=sum(plan.lengths),
            has_prompt=max(plan.lengths) > 1,
        )
        for plan in plans
        if stage in plan.spans
    ]
    return sorted(blocks, key=lambda block: block.start_s)


# ---- which stretches of time, how wide -----------------------------------


def _scales(
    plans: Sequence[PlanTrace], rows: Sequence[Sequence[Block]], num_columns: int
) -> list[Scale]:
    """One strip where the whole run fits, else its start and a part of its middle."""
    first_s = plans[0].sent_s
    last_s = max(plan.returned_s or plan.sent_s for plan in plans)
    column_s = min((last_s - first_s) / num_columns, _readable_column_s(rows))
    start = Scale(since_s=first_s, column_s=column_s, num_columns=num_columns)
    if last_s - start.until_s < column_s:
        return [start]
    middle_s = plans[len(plans) // 2].sent_s
    since_s = max(start.until_s, min(middle_s, last_s - column_s * num_columns))
    return [start, Scale(since_s=since_s, column_s=column_s, num_columns=num_columns)]


def _readable_column_s(rows: Sequence[Sequence[Block]]) -> float:
    """So that nine in ten blocks of generation have room for their letters."""
    each_s = sorted(
        (block.end_s - block.start_s) / (min(len(block.letters), MAX_LABEL_LEN) + 2)
        for row in rows
        for block in row
        if not block.has_prompt
    )
    return each_s[len(each_s) // 10] if each_s else float("inf")


# ---- drawing --------------------------------------------------------------


def _strip(rows: Sequence[Sequence[Block]], scale: Scale, zero_s: float) -> Iterator[Text]:
    title = "start" if scale.since_s == zero_s else "later"
    yield Text(title.ljust(LEFT_LEN) + _axis(scale, zero_s), style="dim")
    for stage, row in enumerate(rows):
        line = Text(f"stage {stage}".ljust(LEFT_LEN), style="bold")
        line.append_text(_row(row, scale))
        yield line.append(f"{_busy(row, scale):5.0%}".replace("%", " %"), style="dim")


def _row(blocks: Sequence[Block], scale: Scale) -> Text:
    line = Text(style="not bold")
    for block in blocks:
        start = max(scale.column(block.start_s), len(line))
        end = min(max(scale.column(block.end_s), start + 1), scale.num_columns)
        if start < end and block.end_s > scale.since_s + scale.column_s / 2:
            line.append(IDLE * (start - len(line)), style="dim")
            box = _box(block, end - start, begins=block.start_s >= scale.since_s)
            line.append(box, style=f"black on {color(block.letters[0])}")
    return line.append(IDLE * (scale.num_columns - len(line)), style="dim")


def _box(block: Block, width: int, *, begins: bool) -> str:
    """[ABC], or [== ABC ==] where prompts are computed; open or cut where there is no room."""
    left = "[" if begins else ""
    room = width - len(left) - 1
    if len(block.letters) > room:
        return left + _cut(block.letters, room + 1)
    return f"{left}{_label(block, room)}]"


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else (text[: room - 1] + "…")[:room]


def _label(block: Block, room: int) -> str:
    """The longest that fits, filled up."""
    if not block.has_prompt:
        return block.letters.center(room)
    choices = (f" {block.letters} {block.num_tokens} tokens ", f" {block.letters} ")
    fitting = [text for text in choices if len(text) + 2 <= room]
    return (fitting or [block.letters])[0].center(room, "=")


def _axis(scale: Scale, zero_s: float) -> str:
    """Ticks at round numbers of milliseconds since `zero_s`."""
    column_ms = scale.column_s * 1e3
    step_ms = next((t for t in TICKS_MS if t >= TICK_COLUMNS * column_ms), TICKS_MS[-1])
    since_ms = (scale.since_s - zero_s) * 1e3
    line = ""
    tick_ms = -(-since_ms // step_ms) * step_ms
    while (column := round((tick_ms - since_ms) / column_ms)) < scale.num_columns:
        label = f"|{tick_ms:.0f} ms"
        if column + len(label) <= scale.num_columns:
            line = line.ljust(column) + label
        tick_ms += step_ms
    return line


def _busy(blocks: Sequence[Block], scale: Scale) -> float:
    """Share of the strip in which the stage computed."""
    inside = (
        min(block.end_s, scale.until_s) - max(block.start_s, scale.since_s) for block in blocks
    )
    return sum(max(0.0, each) for each in inside) / (scale.until_s - scale.since_s)


def _legend(scale: Scale) -> Text:
    return Text(
        f"[AB] one token each for requests A and B   [== AB ==] with prompts   {IDLE} idle\n"
        f"one column is {scale.column_s * 1e3:.2g} ms; at the right: how busy the stage was",
        style="dim",
    )
