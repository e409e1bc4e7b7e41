"""The report as Markdown: tables alone; what plots show is in the tables of slopes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trimegatron.bench.report.blocks import Bars, Plot, Section, Shade, Table


def markdown(sections: Sequence[Section], title: str, summary: Sequence[str]) -> str:
    """The whole report."""
    return "\n".join(
        [f"# {title}", "", *summary, *(line for section in sections for line in section_lines(section)), ""]
    )


def section_lines(section: Section) -> Iterator[str]:
    yield from ("", f"## {section.title}", "")
    for line in section.lines:
        yield from (line, "")
    bars = [block for block in section.blocks if isinstance(block, Bars)]
    if bars:
        variants = list(dict.fromkeys(bar.variant for group in bars for bar in group.bars))
        rows: list[list[str | Shade]] = []
        for group in bars:
            texts = {bar.variant: bar.text for bar in group.bars}
            name = f"{group.label} · {group.parameters}" if group.parameters else group.label
            rows.append([name, group.figure, *(texts.get(variant, "") for variant in variants), group.verdict])
        yield from table(Table(["case", "figure", *variants, "ours is"], rows))
    for block in section.blocks:
        if isinstance(block, Table):
            yield from table(block)
        elif isinstance(block, Plot):
            lines = "; ".join(f"{line.name}: {line.text}" for line in block.lines)
            yield f"- {block.title}, {block.y} over {block.x}: {lines}"


def table(block: Table) -> Iterator[str]:
    """One Markdown table."""
    yield ""
    if block.title:
        yield from (f"**{block.title}**", "")
    yield "| " + " | ".join(block.header) + " |"
    yield "|" + "---|" * len(block.header)
    for row in block.rows:
        cells = (cell.text if isinstance(cell, Shade) else cell for cell in row)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""
