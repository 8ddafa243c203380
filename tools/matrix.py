# SPDX-License-Identifier: Apache-2.0
"""Serve sink models, every kind of head and plain models on each supported version of vLLM.

    python tools/matrix.py               # all versions
    python tools/matrix.py 0.27.1 0.34.0
    python tools/matrix.py 0.32.0/5.25.0  # with another version of Transformers

Prints a table and writes it to docs/versions.md.
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from overlay import overlay
from support.fork_server import ForkServer, JobError
from support.jobs import PROMPTS
from support.parity import Verdict, check, differences
from support.tp_jobs import ENV
from tqdm import tqdm

PAGE = Path(__file__).resolve().parent.parent / "docs" / "versions.md"
INTRODUCTION = """# Versions

The table shows the largest difference of log-softmax rows from Hugging Face's, over a prompt and
the tokens generated after it. Checkpoints are tiny and random, in float32 on a CPU. 0.33.0 and
0.34.0 are their Python code on the kernels of 0.32.0. 0.34.0 runs model runner v2, whose Triton
kernels run in Triton's interpreter. A patch is not applied where vLLM does its work itself, or
where the patch is for untested versions only. `make matrix` writes this page.
"""
VERSIONS = ["0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0", "0.34.0"]
TYPES = {
    "sinks": ["gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash", "deepseek_v4", "hy_v4"],
    "head scales": ["granite", "hyperclovax", "minicpm3"],
    "head caps": ["gemma2"],
    "head transforms": ["modernbert-decoder", "bert"],
    "head by another name": ["gpt_neox"],
    "plain": ["llama", "mistral", "qwen2", "qwen3", "olmo2", "phi3"],
    "two ranks": ["gpt_oss", "mimo_v2_flash", "granite"],
}
RANKS = "two ranks"


def main() -> None:
    versions = sys.argv[1:] or VERSIONS
    columns = {version: _column(version) for version in versions}
    table = f"{_table(columns)}\n\n{_refusals(columns)}".strip()
    print(table)
    PAGE.write_text(f"{INTRODUCTION}\n{table}\n")
    outcomes = {verdict.outcome for column in columns.values() for verdict in column.verdicts.values()}
    if faults := outcomes - {"right", "refused"}:
        raise SystemExit(f"some are {' and '.join(faults)}")


@dataclass(frozen=True)
class _Column:
    """One version: its Transformers, how many patches are applied, and the verdict on each entry of TYPES."""

    transformers: str
    patches: str
    verdicts: dict[tuple[str, str], Verdict]


def _column(version: str) -> _Column:
    fork_server = ForkServer(version.partition("/")[0], overlay(version))
    try:
        transformers = fork_server.run("importlib.metadata:version", distribution_name="transformers")
        states = list(fork_server.run("support.patching:states_after_import").values())
        if misfits := {"pending", "off", "does not fit"} & set(states):
            raise SystemExit(f"{version}: some patches are {' and '.join(misfits)}")
        entries = [(what, name) for what, types in TYPES.items() for name in types]
        verdicts = {
            (what, name): _of_two_ranks(fork_server, name) if what == RANKS else _of_one(fork_server, name)
            for what, name in tqdm(entries, desc=version)
        }
        return _Column(transformers, f"{states.count('applied')} of {len(states)}", verdicts)
    finally:
        fork_server.close()


def _table(columns: dict[str, _Column]) -> str:
    rows = [["", "model type", *columns], ["---", "---", *["---:"] * len(columns)]]
    rows.append(["Transformers", "", *(column.transformers for column in columns.values())])
    rows.append(["patches applied", "", *(column.patches for column in columns.values())])
    for what, types in TYPES.items():
        rows += [[what, name, *(_cell(column.verdicts[what, name]) for column in columns.values())] for name in types]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _refusals(columns: dict[str, _Column]) -> str:
    """Each reason of a refusal once, with the versions."""
    versions: dict[tuple[str, str], list[str]] = {}
    for version, column in columns.items():
        for (_, name), verdict in column.verdicts.items():
            if verdict.outcome == "refused":
                versions.setdefault((name, verdict.reason), []).append(version)
    return "\n".join(f"- {name} on {', '.join(of)}: {reason}" for (name, reason), of in versions.items())


def _cell(verdict: Verdict) -> str:
    return f"{max(verdict.prompt, verdict.decode):.0e}" if verdict.outcome == "right" else verdict.outcome


def _of_one(fork_server: ForkServer, name: str) -> Verdict:
    return Verdict(**check(fork_server, name, tied=False, settings=["1"])["1"])


def _of_two_ranks(fork_server: ForkServer, name: str) -> Verdict:
    with tempfile.TemporaryDirectory() as folder:
        fork_server.run("support.small:build", model_type=name, folder=folder, tied=False)
        try:
            served = fork_server.run("support.tp_jobs:served_by_two", env=ENV, checkpoint=folder)
        except JobError as error:
            return Verdict("crashed", str(error))
        sequences = [[*prompt, *new] for prompt, (new, _, _) in zip(PROMPTS, served, strict=True)]
        expected = fork_server.run("support.jobs:reference_rows", checkpoint=folder, sequences=sequences)
        prompt, decode = differences(served, expected)
        return Verdict("right" if max(prompt, decode) < 1e-4 else "wrong", "", prompt, decode)


if __name__ == "__main__":
    main()
