# SPDX-License-Identifier: Apache-2.0
"""Figures as Markdown, and where they are kept between runs."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"
KEPT = PAGE.with_suffix(".json")
START, END = "<!-- figures: written by make bench -->", "<!-- end of figures -->"


@dataclass(frozen=True)
class Line:
    """A target, and whether it is met.

    Attributes:
        what: is measured.
        against: which peer.
        target: how close it has to come.
        ours, peer: medians, with quartiles.
        difference: of both, round by round.
        verdict: one of `Sample.verdict`, or "" where there is no target.
    """

    what: str
    against: str
    target: str
    ours: str
    peer: str
    difference: str
    verdict: str = ""

    @property
    def cells(self) -> list[str]:
        """A row of the table."""
        return [self.what, self.against, self.ours, self.peer, self.difference, self.target, self.verdict]


@dataclass(frozen=True)
class Table:
    """How a cost grows."""

    title: str
    head: list[str]
    rows: list[list[str]]


@dataclass
class Section:
    """What came of one subject.

    Attributes:
        machine: what it was measured on, and when.
    """

    lines: list[Line] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    machine: str = ""


def keep(subject: str, section: Section, path: Path = KEPT) -> None:
    """Keep a section for the page, in place of what came of its subject before."""
    sections = {**load(path), subject: section}
    path.write_text(json.dumps({name: asdict(each) for name, each in sections.items()}, indent=1) + "\n")


def load(path: Path = KEPT) -> dict[str, Section]:
    """What `keep` kept, by subject."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    return {
        subject: Section(
            [Line(**line) for line in section["lines"]],
            [Table(**table) for table in section["tables"]],
            section["machine"],
        )
        for subject, section in kept.items()
    }


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def lines_table(sections: Iterable[Section]) -> str:
    """The lines of all sections in one table."""
    head = ["what", "against", "here", "peer", "difference", "target", ""]
    return markdown(head, [line.cells for section in sections for line in section.lines])


def figures(sections: dict[str, Section]) -> str:
    """The generated part of the page."""
    parts = [lines_table(sections.values())]
    for table in [table for section in sections.values() for table in section.tables]:
        parts += [f"### {table.title}", markdown(table.head, table.rows)]
    parts += ["### Measured on", markdown(["subject", "machine"], [[s, each.machine] for s, each in sections.items()])]
    return "\n\n".join(parts)


def write_page(sections: dict[str, Section], page: Path = PAGE) -> None:
    """Put the figures between the marks of the page; what is around them is written by hand."""
    before, _, rest = page.read_text().partition(START)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{START}\n\n{figures(sections)}\n\n{END}{after}")
