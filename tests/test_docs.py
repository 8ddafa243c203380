# SPDX-License-Identifier: Apache-2.0
"""The documentation says what the code does: generated parts are current, and no message is unexplained."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SOURCE = ROOT / "src" / "vllm_tf_sinks"
sys.path.insert(0, str(ROOT / "tools"))

# Carried by a message of another class, or for the eyes of this package alone
INNER = {"AttributeError", "JobError", "ArgumentTypeError"}


def template(node: ast.expr) -> str:
    """A message with … for whatever is put into it."""
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.replace("%s", "…").replace("%d", "…")
    return "…"


def messages() -> list[str]:
    """The errors and warnings of the package, each by its template."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if (name.endswith("Error") and name not in INNER) or name == "warning":
                found.add(template(node.args[0]))
    return sorted(found - {"…", "…: …"})


@pytest.mark.parametrize("message", messages())
def test_message_is_explained(message):
    assert f"`{message}`" in " ".join((DOCS / "troubleshooting.md").read_text().split())


def test_table_of_patches_is_current():
    import docs

    text = (DOCS / "how-it-works.md").read_text()
    assert docs.with_patches(text) == text, "run: make docs"
    assert "`sinks.find`" in text


def test_links_lead_somewhere():
    import re

    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
