# SPDX-License-Identifier: Apache-2.0
"""Tokens a second as vLLM serves by default, compiled: what a native model fuses by hand, this fuses for all."""

from benchmarks.lab import OFF, ON, Lab
from benchmarks.report import Section
from benchmarks.throughput import lines, samples

ROUNDS, REPEATS = 3, 3  # an engine takes more than a minute to start
COMPILED = {"TORCHDYNAMO_DISABLE": "0"}


def measure(lab: Lab) -> Section:
    granite, newer = lab.model("granite"), lab.newer
    on, off = {**ON, **COMPILED}, {**OFF, **COMPILED}
    engine = {"enforce_eager": False, "repeats": min(REPEATS, lab.sizes.rounds)}
    found = samples(
        lab,
        {
            f"vLLM {newer} with plugin": (newer, granite, on, engine),
            "its native Granite": (newer, granite, on, {**engine, "model_impl": "vllm"}),
            "plugin off": (newer, granite, off, engine),
        },
        "Granite, compiled",
        rounds=min(ROUNDS, lab.sizes.rounds),
    )
    return Section(lines("SmolLM2 as Granite", found, how="compiled"))
