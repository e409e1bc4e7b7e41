"""The report as one HTML page that loads nothing, for a desk and for a phone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from trimegatron.bench.report.blocks import Bars, Block, Plot, Section, Shade, Table
from trimegatron.bench.report.charts import COLOURS, colours, svg

SHOWN = {Bars: 6, Plot: 4, Table: 99}
"""So many blocks of a kind are seen at once; the others open on demand."""
SHOWN_ROWS = 24
STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.45 system-ui, sans-serif; color: #1c2126; background: #f5f6f8; margin: 0 auto; max-width: 1080px;
  padding: 12px; }
h1 { font-size: 1.5rem; margin: .4rem 0; }
h2 { font-size: 1.08rem; margin: 0 0 .3rem; }
section { background: #fff; border: 1px solid #dfe3e8; border-radius: 8px; padding: 12px 14px; margin: 12px 0; }
section.bad { border-left: 6px solid #b3261e; } section.good { border-left: 6px solid #1e7d34; }
p { margin: .25rem 0 .5rem; color: #4a545e; } header p { color: #1c2126; }
nav { display: flex; overflow-x: auto; gap: 6px; margin: 10px 0; padding-bottom: 4px; }
nav a { background: #e6ebf2; border-radius: 12px; padding: 3px 10px; color: #123f7a; text-decoration: none;
  white-space: nowrap; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 3px 9px; border-bottom: 1px solid #e7eaee; vertical-align: top; }
th { color: #4a545e; font-weight: 600; white-space: nowrap; }
td.shade { text-align: right; white-space: nowrap; }
.group { margin: .55rem 0 .8rem; } .group > b { font-weight: 600; } .group > span { color: #4a545e; font-size: 13.5px; }
.chip { border-radius: 10px; padding: 1px 8px; font-size: 13px; white-space: nowrap; }
.chip.good { background: #d9f0dd; color: #12501f; } .chip.bad { background: #fbdcd9; color: #7d1710; }
.bar { display: grid; grid-template-columns: 14rem 1fr 21rem; gap: 2px 10px; align-items: center; }
.bar svg { width: 100%; height: 13px; display: block; background: #eef1f4; border-radius: 3px; }
.bar .value { font-variant-numeric: tabular-nums; font-size: 13.5px; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 440px), 1fr)); gap: 14px; }
figure { margin: 0; } figure svg { width: 100%; height: auto; } figcaption { font-weight: 600; }
figure svg text { font: 11.5px system-ui, sans-serif; fill: #4a545e; } .grid { stroke: #e1e5ea; stroke-width: 1; }
.key { display: flex; gap: 8px; align-items: baseline; font-size: 13.5px; }
.key i { flex: none; width: 18px; height: 4px; border-radius: 2px; position: relative; top: -3px; }
details > summary { cursor: pointer; color: #123f7a; padding: 5px 0; }
@media (max-width: 640px) {
  body { padding: 6px; } section { padding: 9px 9px; }
  .bar { grid-template-columns: 1fr auto; margin-bottom: 5px; } .bar svg { grid-row: 2; grid-column: 1 / 3; }
  .bar .value { text-align: right; } th, td { padding: 3px 5px; } th { white-space: normal; }
  td:first-child { min-width: 6.5rem; max-width: 42vw; overflow-wrap: anywhere; }
}
"""


def page(sections: Sequence[Section], title: str, summary: Sequence[str]) -> str:
    """The whole report."""
    names = [f"s{number}" for number in range(len(sections))]
    links = "".join(f'<a href="#{n}">{escape(s.title)}</a>' for n, s in zip(names, sections, strict=True) if n != "s")
    body = "\n".join(section_html(section, name) for section, name in zip(sections, names, strict=True))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><header><h1>{escape(title)}</h1>"
        + "".join(f"<p>{escape(line)}</p>" for line in summary)
        + f"</header><nav>{links}</nav>\n{body}\n</body></html>\n"
    )


def section_html(section: Section, name: str) -> str:
    """One section."""
    text = "".join(f"<p>{escape(line)}</p>" for line in section.lines)
    blocks = "".join(blocks_html(section.blocks))
    mood = {True: ' class="good"', False: ' class="bad"', None: ""}[section.is_good]
    return f'<section id="{name}"{mood}><h2>{escape(section.title)}</h2>{text}{blocks}</section>'


def blocks_html(blocks: Sequence[Block]) -> Iterator[str]:
    """The first of each kind, and the others behind a line that says how many."""
    for kind, wrap in ((Bars, "div"), (Plot, 'div class="plots"'), (Table, "div")):
        mine = [block_html(block) for block in blocks if isinstance(block, kind)]
        shown, more = mine[: SHOWN[kind]], mine[SHOWN[kind] :]
        if shown:
            yield f"<{wrap}>{''.join(shown)}</div>"
        if more:
            yield f"<details><summary>{len(more)} more</summary><{wrap}>{''.join(more)}</div></details>"


def block_html(block: Block) -> str:
    if isinstance(block, Table):
        return table_html(block)
    return bars_html(block) if isinstance(block, Bars) else plot_html(block)


def table_html(block: Table) -> str:
    """A table that scrolls sideways within its section; long ones are cut behind a line that opens the rest."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in block.header)
    rows = ["<tr>" + "".join(map(cell_html, row)) + "</tr>" for row in block.rows]
    if block.title:
        whole = f'<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'
        return f"<details><summary>{escape(block.title)}</summary>{whole}</details>"
    made = f'<div class="scroll"><table><tr>{head}</tr>{"".join(rows[:SHOWN_ROWS])}</table></div>'
    if len(rows) <= SHOWN_ROWS:
        return made
    rest = f'<div class="scroll"><table><tr>{head}</tr>{"".join(rows[SHOWN_ROWS:])}</table></div>'
    return f"{made}<details><summary>{len(rows) - SHOWN_ROWS} more rows</summary>{rest}</details>"


def cell_html(cell: str | Shade) -> str:
    if isinstance(cell, str):
        return f"<td>{escape(cell)}</td>"
    hue = 130 * max(0.0, min(1.0, (cell.share - 0.4) / 0.6))  # green from 100 %, red from 40 % on
    return f'<td class="shade" style="background:hsl({hue:.0f} 62% 87%)">{escape(cell.text)}</td>'


def bars_html(block: Bars) -> str:
    """A bar for each variant; the longest is the largest value, and the chip tells who is better."""
    longest = max(abs(bar.value) for bar in block.bars) or 1.0
    rows = []
    for bar in block.bars:
        colour = COLOURS[0] if bar.is_ours else "#a9b2bc"
        width = 100 * max(0.0, bar.value) / longest
        rows.append(
            f'<div class="bar"><span>{escape(bar.variant)}</span>'
            f'<svg aria-hidden="true"><rect width="{width:.1f}%" height="13" rx="3" fill="{colour}"/></svg>'
            f'<span class="value">{escape(bar.text)}{escape(" · " + bar.ratio if bar.ratio else "")}</span></div>'
        )
    mood = "bad" if block.verdict.endswith("worse") else "good"
    about = f"<span>{escape(block.parameters)}</span>" if block.parameters else ""
    return (
        f'<div class="group"><b>{escape(block.label)}, {escape(block.figure)}</b> '
        f'<span class="chip {mood}">{escape(block.verdict)}</span> {about}{"".join(rows)}</div>'
    )


def plot_html(block: Plot) -> str:
    keys = "".join(
        f'<div class="key"><i style="background:{colour}"></i>'
        f"<span>{escape(line.name)}: {escape(line.text)}</span></div>"
        for line, colour in zip(block.lines, colours(block.lines), strict=True)
    )
    return f"<figure><figcaption>{escape(block.title)}</figcaption>{svg(block)}{keys}</figure>"
