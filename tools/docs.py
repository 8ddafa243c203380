# SPDX-License-Identifier: Apache-2.0
"""Write the parts of the documentation that are made from code: python tools/docs.py."""

from pathlib import Path

from vllm_tf_sinks.patches.table import PATCHES

DOCS = Path(__file__).resolve().parent.parent / "docs"
START, END = "<!-- patches: written by tools/docs.py from patches/table.py -->", "<!-- end of patches -->"


def patches() -> str:
    """The table of patches, in Markdown."""
    rows = ["patch | replaces | why | goes when", "--- | --- | --- | ---"]
    for patch in PATCHES:
        targets = ", ".join(f"`{target.rpartition(':')[2]}`" for target in patch.targets)
        rows.append(f"`{patch.name}` | {targets} | {patch.why} | {patch.until}")
    return "\n".join(rows)


def with_patches(text: str) -> str:
    """`text` with the table between its two marks."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{patches()}\n{END}{after}"


if __name__ == "__main__":
    path = DOCS / "how-it-works.md"
    path.write_text(with_patches(path.read_text()))
