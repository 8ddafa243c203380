# SPDX-License-Identifier: Apache-2.0
"""Report how vLLM would serve a model, from its config and code, without weights or a GPU.

The exit status is 0 if the model would have Hugging Face's logprobs, 3 if vLLM or the plugin would refuse it, and 1 if
its logprobs would be wrong (the plugin is off, and needed) or it cannot be inspected.
"""

import argparse
import json
import re
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from vllm_tf_sinks.cli import text
from vllm_tf_sinks.settings import read_settings

if TYPE_CHECKING:
    from vllm_tf_sinks.report.inspect_model import HeadReport, Inspection, SinkReport
    from vllm_tf_sinks.report.upstream import WeightReport

STATUS = {"right": 0, "wrong": 1, "refused": 3}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `inspect` to `parser`."""
    parser.add_argument("model", metavar="MODEL", help="a folder or a hub id")
    add = parser.add_argument
    add("--revision", help="branch, tag or commit on the hub")
    add("--trust-remote-code", action="store_true", help="run the code of the checkpoint")
    add("--tensor-parallel-size", type=int, default=1, metavar="N", help="number of ranks (default: 1)")
    add("--max-model-len", type=int, metavar="N", help="largest number of tokens of a sequence (default: the config's)")


def run(options: argparse.Namespace) -> int:
    """Inspect the model, print the report, and return the exit status."""
    try:
        from vllm_tf_sinks.report.inspect_model import inspect_model

        report = inspect_model(
            options.model,
            read_settings(),
            options.revision,
            options.trust_remote_code,
            options.tensor_parallel_size,
            options.max_model_len,
        )
    except (OSError, ValueError, ImportError) as error:
        if options.json:
            print(json.dumps({"model": options.model, "outcome": "error", "reasons": [str(error)]}, indent=2))
        else:
            print(text.paragraph(f"{options.model} cannot be inspected: {error}"), file=sys.stderr)
        return 1
    print(json.dumps(asdict(report), indent=2) if options.json else as_text(report))
    return STATUS[report.outcome]


def as_text(report: "Inspection") -> str:
    """The report as text for a terminal."""
    served = f"in {report.dtype} " * bool(report.dtype) + f"on vLLM {report.vllm}"
    ranks = f", {report.tensor_parallel_size} tensor-parallel ranks" if report.tensor_parallel_size > 1 else ""
    parts = [text.coloured(f"{report.architecture} {served}{ranks}", "bold")]
    if report.sinks:
        parts += [text.heading("Attention sinks"), _sinks(report.sinks, report.tensor_parallel_size)]
    if report.head:
        parts += [text.heading(f"Output head: {report.head.kind}"), _head(report.head)]
    if report.alone or report.outcome == "right":
        alone = report.alone or ["computes Hugging Face's logprobs"]
        parts += [text.heading("Upstream vLLM"), _list(alone, "✗" if report.alone else "✓")]
    if report.plugin and report.outcome == "right":
        parts += [text.heading("The plugin"), _list(report.plugin, "✓")]
    if report.features and report.outcome == "right":
        parts += [text.heading("Features"), text.columns(list(report.features.items()))]
    return "\n".join([*parts, "", _verdict(report)])


def _sinks(sinks: "SinkReport", ranks: int) -> str:
    names = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in sinks.parameters))
    size = ", ".join(f"{heads} numbers" for heads in sinks.heads)
    if ranks > 1:
        size += ", " + ", ".join(map(str, sinks.heads_a_rank)) + " per rank"
    layers = f"{len(sinks.layers)} of {sinks.of_layers}"
    if len(sinks.layers) < sinks.of_layers:
        layers += ": " + ", ".join(map(str, sinks.layers))
    rows = [("layers", layers), ("parameter", ", ".join(names)), ("each", f"{size}, in {sinks.dtype}")]
    return text.columns(rows)


def _head(head: "HeadReport") -> str:
    rows = [("class", head.model), *_labelled("steps", head.steps)]
    return text.columns([*rows, *_labelled("weights", [_weight(weight) for weight in head.weights])])


def _weight(weight: "WeightReport") -> str:
    if weight.tied_to:
        return f"{weight.name}, tied to {weight.tied_to}"
    renamed = weight.in_checkpoint != weight.name
    return weight.name + (f", in checkpoints {weight.in_checkpoint}" if renamed else "")


def _labelled(label: str, lines: list[str]) -> list[tuple[str, str]]:
    return [(label if index == 0 else "", line) for index, line in enumerate(lines)]


def _list(lines: list[str], mark: str) -> str:
    colour = "green" if mark == "✓" else "red"
    return "\n".join(text.paragraph(line, f"  {mark} ").replace(mark, text.coloured(mark, colour), 1) for line in lines)


def _verdict(report: "Inspection") -> str:
    if report.outcome == "right":
        return text.coloured("vLLM serves it with Hugging Face's logprobs.", "green")
    word = "Refused" if report.outcome == "refused" else "Wrong"
    return "\n".join(
        text.paragraph(reason, f"{word}: ").replace(word, text.coloured(word, "red"), 1) for reason in report.reasons
    )
