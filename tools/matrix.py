# SPDX-License-Identifier: Apache-2.0
"""Serve sink models, every kind of head and plain models on each supported version of vLLM.

    python tools/matrix.py               # all versions
    python tools/matrix.py 0.27.1 0.33.0

Prints a table and writes it to docs/versions.md. 0.33.0 is its Python on the kernels of 0.32.0.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from overlay import overlay
from support.jobs import PROMPTS
from support.parity import Verdict, check, differences
from support.tp_jobs import ENV
from support.zygote import JobError, Zygote
from tqdm import tqdm

PAGE = Path(__file__).resolve().parent.parent / "docs" / "versions.md"
VERSIONS = ["0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"]
TYPES = {
    "sinks": ["gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash"],
    "head scales": ["granite", "hyperclovax", "minicpm3"],
    "head caps": ["gemma2"],
    "head transforms": ["modernbert-decoder", "bert"],
    "head by another name": ["gpt_neox"],
    "plain": ["llama", "mistral", "qwen2", "qwen3", "olmo2", "phi3"],
    "two ranks": ["gpt_oss", "granite"],
}
RANKS = "two ranks"


def main() -> None:
    versions = sys.argv[1:] or VERSIONS
    columns = {version: _column(version) for version in versions}
    rows = [["", "model type", *versions], ["---", "---", *["---:"] * len(versions)]]
    rows.append(["patches applied", "", *(columns[version]["patches"] for version in versions)])
    for what, types in TYPES.items():
        rows += [[what, name, *(columns[version][what, name] for version in versions)] for name in types]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    reasons = "".join(
        f"\n- {name} on {version}: {reason}"
        for version in versions
        for name, reason in columns[version]["refused"].items()
    )
    table += f"\n\nRefused at load:\n{reasons}" if reasons else ""
    print(table)
    PAGE.write_text(
        "# Versions\n\nThe largest difference of log-softmax rows from Hugging Face's, over a prompt and what was "
        "generated after it; tiny random\ncheckpoints, float32, CPU. 0.33.0 is its Python on the kernels of 0.32.0. "
        f"Written by `make matrix`.\n\n{table}\n"
    )
    if faults := {"wrong", "crashed"} & {cell for row in rows for cell in row}:
        raise SystemExit(f"some are {' and '.join(faults)}")


def _column(version: str) -> dict:
    zygote = Zygote(version, overlay(version))
    try:
        states = zygote.run("support.patching:states_after_import")
        if misfits := {"pending", "off", "does not fit"} & set(states.values()):
            raise SystemExit(f"{version}: patches {' and '.join(misfits)}: {states}")
        column: dict = {"patches": f"{list(states.values()).count('applied')} of {len(states)}", "refused": {}}
        for what, types in TYPES.items():
            for name in tqdm(types, desc=f"{version} {what}", leave=False):
                verdict = _of_two_ranks(zygote, name) if what == RANKS else _of_one(zygote, name)
                column[what, name] = _cell(verdict)
                if verdict.outcome == "refused":
                    column["refused"][name] = verdict.reason
        return column
    finally:
        zygote.close()


def _cell(verdict: Verdict) -> str:
    return f"{max(verdict.prompt, verdict.decode):.0e}" if verdict.outcome == "right" else verdict.outcome


def _of_one(zygote: Zygote, name: str) -> Verdict:
    return Verdict(**check(zygote, name, tied=False, settings=["1"])["1"])


def _of_two_ranks(zygote: Zygote, name: str) -> Verdict:
    with tempfile.TemporaryDirectory() as folder:
        zygote.run("support.small:build", model_type=name, folder=folder, tied=False)
        try:
            served = zygote.run("support.tp_jobs:served_by_two", env=ENV, checkpoint=folder)
        except JobError as error:
            return Verdict("crashed", str(error))
        sequences = [[*prompt, *new] for prompt, (new, _, _) in zip(PROMPTS, served, strict=True)]
        expected = zygote.run("support.jobs:reference_rows", checkpoint=folder, sequences=sequences)
        prompt, decode = differences(served, expected)
        return Verdict("right" if max(prompt, decode) < 1e-4 else "wrong", "", prompt, decode)


if __name__ == "__main__":
    main()
