"""The report on a data source for people: lines for the console, and a page with pictures."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:  # its pictures need torch, a page of problems does not
    from multimodal.data.check import DataReport

_BROKEN_SHOWN = 10
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 }
td, th { border-bottom: 1px solid #ddd; padding: .2rem .8rem; text-align: right }
td:first-child, th:first-child { text-align: left }
.pictures { display: flex; flex-wrap: wrap; gap: 1rem }
figure { margin: 0; width: 160px; font-size: 12px; overflow-wrap: anywhere }
"""


def summary(report: DataReport) -> list[tuple[str, str]]:
    """Name and value of each fact."""
    lines = [
        ("source", report.description),
        ("samples", f"{report.samples}, {report.looked_at} looked at"),
        ("read and decoded", f"{report.per_second:.0f} a second"),
        ("left out", _counts(report.left_out)),
        ("broken", _counts(report.broken)),
        ("keys in several shards", str(report.repeated_keys)),
        ("formats", _counts(report.formats)),
        ("repeated pictures", str(report.repeated_images)),
        ("repeated captions", str(report.repeated_captions)),
        ("scripts", _counts(report.scripts)),
    ]
    if report.cut is not None:
        lines.append(("cut captions", f"{report.cut}, longer than {report.context_length} tokens"))
    return lines


def spread_rows(report: DataReport) -> list[list[str]]:
    """A header and one row for each number that is spread."""
    rows = [["", *next(iter(report.spreads.values()), {})]]
    rows += [[name, *(f"{x:g}" for x in s.values())] for name, s in report.spreads.items()]
    return rows


def broken_lines(report: DataReport) -> list[str]:
    """Place, name and reason of what is left out or broken, as far as it is named."""
    left_out = [
        f"{name}: {reason}" for reason, names in report.left_out_named.items() for name in names
    ]
    return left_out + [
        f"{skip['place']}: {skip['key']}: {skip['reason']}"
        + (f" ({skip['detail']})" if skip["detail"] else "")
        for skip in report.broken_samples
    ]


def print_report(
    report: DataReport | None,
    run: Mapping[str, object],
    problems: Sequence[str],
    warnings: Sequence[str],
) -> None:
    """Show all on the console.

    Args:
        run: facts about a run on these data.
        problems: what would stop it.
        warnings: what could be better.
    """
    console = Console()
    if report is not None:
        facts = Table("fact", "value")
        plain = [(name, str(x)) for name, x in run.items() if not isinstance(x, Mapping | list)]
        for name, value in [*summary(report), *plain]:
            facts.add_row(name, value)
        head, *rows = spread_rows(report)
        spreads = Table(*head)
        for row in rows:
            spreads.add_row(*row)
        console.print(facts, spreads)
        if isinstance(memory := run.get("memory"), Mapping):
            console.print(_memory_table(memory))
        if isinstance(groups := run.get("groups"), list):
            console.print(*groups, sep="\n", markup=False, highlight=False, soft_wrap=True)
        for line in broken_lines(report)[:_BROKEN_SHOWN]:
            console.print(f"broken: {line}", markup=False, highlight=False, soft_wrap=True)
    lines = [f"problem: {x}" for x in problems] + [f"warning: {x}" for x in warnings]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _memory_table(memory: Mapping[str, Mapping[str, float | None]]) -> Table:
    table = Table("memory of a process", "run, MB", "dry step, MB", "measured, MB")
    for part, row in memory.items():
        table.add_row(part, *("" if x is None else f"{x:,.1f}" for x in row.values()))
    return table


def html_page(report: DataReport | None, problems: Sequence[str] = (), title: str = "") -> str:
    """One file that needs nothing else.

    Args:
        problems: what would stop a run on these data, or why they could not be looked at.
        title: heading where there is no report.
    """
    title = escape(report.description if report is not None else title)
    return (
        f'<!doctype html><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style><h1>{title}</h1>"
        + _html_list("Problems", problems)
        + (_html_report(report) if report is not None else "")
    )


def _html_report(report: DataReport) -> str:
    facts = "".join(f"<tr><td>{escape(n)}<td>{escape(v)}" for n, v in summary(report))
    head, *rows = spread_rows(report)
    spreads = "<tr>" + "".join(f"<th>{escape(name)}" for name in head)
    spreads += "".join("<tr>" + "".join(f"<td>{escape(x)}" for x in row) for row in rows)
    pictures = "".join(
        f'<figure><img src="data:image/jpeg;base64,{base64.b64encode(shown.jpeg).decode()}">'
        f"<figcaption><b>{escape(shown.key)}</b><br>{escape(' / '.join(shown.captions))}"
        "</figcaption></figure>"
        for shown in report.shown
    )
    return (
        f"<table>{facts}</table><table>{spreads}</table>"
        + _html_list("Left out or broken", broken_lines(report))
        + f'<h2>Samples</h2><div class="pictures">{pictures}</div>\n'
    )


def _html_list(name: str, lines: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(line)}" for line in lines)
    return f"<h2>{name}</h2><ul>{items}</ul>" if lines else ""


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in counts.items()) or "none"
