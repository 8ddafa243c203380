# SPDX-License-Identifier: Apache-2.0
"""Text for a terminal: wrapped columns and colours."""

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence

_COLOURS = {"bold": 1, "red": 31, "green": 32, "yellow": 33}
_INDENT = "  "


def width() -> int:
    """The number of columns to fill: those of the terminal, between 60 and 120."""
    return max(60, min(120, shutil.get_terminal_size().columns))


def coloured(text: str, colour: str) -> str:
    """`text` in a colour or in bold on a terminal; unchanged elsewhere, and if NO_COLOR is set."""
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        return text
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"


def heading(text: str) -> str:
    """A heading: an empty line, and `text` in bold."""
    return "\n" + coloured(text, "bold")


def columns(rows: Sequence[Sequence[str]]) -> str:
    """`rows` in aligned columns. The last column wraps."""
    sizes = [max(map(len, column)) for column in zip(*(row[:-1] for row in rows), strict=True)]
    lines = []
    for row in rows:
        start = _INDENT + "".join(f"{cell:<{size}}  " for cell, size in zip(row, sizes, strict=False))
        lines.append(paragraph(row[-1], start))
    return "\n".join(lines)


def paragraph(text: str, start: str = "") -> str:
    """`text` after `start`, wrapped, with further lines indented to the end of `start`."""
    wrapped = textwrap.wrap(
        text,
        width(),
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(wrapped) or start.rstrip()
