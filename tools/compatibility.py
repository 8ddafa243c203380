# SPDX-License-Identifier: Apache-2.0
"""The table of compatibility, from what `make census` measured."""

import json
from collections.abc import Iterable
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
RESULTS, TABLE = DOCS / "compatibility.json", DOCS / "compatibility.md"

INTRODUCTION = """<!-- written by tools/census.py; do not edit -->
# Compatibility

Each causal LM type of Transformers was built tiny and random, served in float32 with
`model_impl="transformers"`, and compared with Hugging Face eager: whole log-softmax rows, prompt
and decode, untied and tied. vLLM 0.33.0 and 0.34.0 are their Python code on the kernels of 0.32.0.
0.34.0 runs model runner v2, whose Triton kernels run in Triton's interpreter. `make census`
measures this again. The reasons are quoted as they were when a version was measured.

- **right**: all log-softmax rows agree within 1e-4.
- **wrong**: they do not agree, and no error said so.
- **crashed**: an error that neither vLLM nor the plugin raises on purpose.
- **refused**: an error at load that names the reason.
- **not built**: no tiny checkpoint could be made or read.
"""

OUTCOMES = ("right", "wrong", "crashed", "refused", "not built")


def load() -> dict:
    """What was measured: model type -> what it is, and its verdicts on each pair of vLLM and Transformers."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def save(models: dict) -> None:
    """Write the results, and the table that they give."""
    DOCS.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(models, indent=1, sort_keys=True) + "\n")
    TABLE.write_text(table(models))


def table(models: dict) -> str:
    """The documentation page: each vLLM with the newest Transformers that it was measured with."""
    pairs = sorted({pair for model in models.values() for pair in model["vllm"]}, key=_key)
    newest = {pair.partition("/")[0]: pair for pair in pairs}.values()
    return "\n".join([INTRODUCTION, _counts(models, newest), *(_section(models, pair) for pair in reversed(newest))])


def counts(models: dict, pair: str, which: str) -> dict[str, int]:
    """Outcome -> how many types have it; `which` is `upstream` or `plugin`."""
    outcomes = [v[which] for model in models.values() if which in (v := model["vllm"].get(pair, {}))]
    return {outcome: outcomes.count(outcome) for outcome in OUTCOMES}


def _counts(models: dict, pairs: Iterable[str]) -> str:
    lines = [_row("vLLM", "Transformers", "", *OUTCOMES), _row(*["---"] * (3 + len(OUTCOMES)))]
    for pair in pairs:
        for which, name in (("upstream", "alone"), ("plugin", "with the plugin")):
            found = counts(models, pair, which)
            if any(found.values()):
                lines.append(_row(*pair.split("/"), name, *map(str, found.values())))
    return "\n".join([*lines, ""])


def _section(models: dict, pair: str) -> str:
    vllm, _, transformers = pair.partition("/")
    lines = [f"## vLLM {vllm} with Transformers {transformers}", ""]
    lines.append(_row("model type", "head", "sink layers", "alone", "with the plugin", "reason"))
    lines.append(_row(*["---"] * 6))
    for name, model in sorted(models.items()):
        if found := model["vllm"].get(pair):
            sinks = str(model["sinks"] or "")
            reason = found.get("reason", "").replace("|", "\\|")
            lines.append(_row(f"`{name}`", model["head"], sinks, found.get("upstream", ""), found["plugin"], reason))
    return "\n".join([*lines, ""])


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _key(pair: str) -> list[list[int]]:
    return [[int(part) for part in version.split(".")] for version in pair.split("/")]
