# SPDX-License-Identifier: Apache-2.0
"""The table of compatibility, from what `make census` measured."""

import json
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
RESULTS, TABLE = DOCS / "compatibility.json", DOCS / "compatibility.md"

INTRODUCTION = """<!-- written by tools/census.py; do not edit -->
# Compatibility

Every causal LM type of Transformers {transformers}, tiny and random, served in float32 with
`model_impl="transformers"` and compared with Hugging Face eager: whole log-softmax rows, prompt and decode, untied
and tied. `make census` measures this anew.

- **right**: all log-softmax rows agree within 1e-4.
- **wrong**: they do not, and nothing said so.
- **crashed**: an error that nobody raised on purpose.
- **refused**: an error at load that names the reason.
- **not built**: no tiny checkpoint could be made or read.
"""

OUTCOMES = ("right", "wrong", "crashed", "refused", "not built")


def load() -> dict:
    """What was measured: model type -> what it is, and its verdicts on each vLLM version."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {"transformers": "", "models": {}}


def save(results: dict) -> None:
    """Write the results, and the table that they give."""
    DOCS.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    TABLE.write_text(table(results))


def table(results: dict) -> str:
    """The documentation page of `results`."""
    models = results["models"]
    versions = sorted({version for model in models.values() for version in model["vllm"]}, key=_key)
    parts = [INTRODUCTION.format(transformers=results["transformers"]), _counts(models, versions)]
    parts += [_section(models, version) for version in reversed(versions)]
    return "\n".join(parts)


def counts(models: dict, version: str, which: str) -> dict[str, int]:
    """Outcome -> how many types have it; `which` is `stock` or `plugin`."""
    outcomes = [v[which] for model in models.values() if which in (v := model["vllm"].get(version, {}))]
    return {outcome: outcomes.count(outcome) for outcome in OUTCOMES}


def _counts(models: dict, versions: list[str]) -> str:
    lines = [_row("vLLM", "", *OUTCOMES), _row(*["---"] * (2 + len(OUTCOMES)))]
    for version in versions:
        for which, name in (("stock", "alone"), ("plugin", "with the plugin")):
            found = counts(models, version, which)
            if any(found.values()):
                lines.append(_row(version, name, *map(str, found.values())))
    return "\n".join([*lines, ""])


def _section(models: dict, version: str) -> str:
    lines = [f"## vLLM {version}", "", _row("model type", "head", "sink layers", "alone", "with the plugin", "reason")]
    lines.append(_row(*["---"] * 6))
    for name, model in sorted(models.items()):
        if found := model["vllm"].get(version):
            sinks = str(model["sinks"] or "")
            reason = found.get("reason", "").replace("|", "\\|")
            lines.append(_row(f"`{name}`", model["head"], sinks, found.get("stock", ""), found["plugin"], reason))
    return "\n".join([*lines, ""])


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
