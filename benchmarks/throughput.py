# SPDX-License-Identifier: Apache-2.0
"""Tokens a second, prefill and decode, against native models, upstream sinks and models without either."""

import statistics
import time
from typing import Any

from benchmarks.lab import ENGINE, OFF, ON, Lab
from benchmarks.measure import Sample, in_turn
from benchmarks.report import Line, Section

SHARE = 0.98
PHASES = ("prefill", "decode")
AGAIN = "plugin off, again: the noise"


def measure(lab: Lab) -> Section:
    newer, older = lab.newer, lab.older
    granite, sinks, llama = (lab.model(name) for name in ("granite", "granite_swa", "llama"))
    native = {"model_impl": "vllm"}
    here = f"vLLM {newer} with plugin"
    scaled = samples(
        lab,
        {
            here: (newer, granite, ON, {}),
            "its native Granite": (newer, granite, ON, native),
            "plugin off": (newer, granite, OFF, {}),
            AGAIN: (newer, granite, OFF, {}),
        },
        "Granite",
    )
    noise = {phase: {"plugin off": each["plugin off"], AGAIN: each.pop(AGAIN)} for phase, each in scaled.items()}
    older_here = f"vLLM {older} with plugin"
    sunk = samples(
        lab,
        {
            older_here: (older, sinks, ON, {}),
            f"vLLM {newer}, its own sinks, plugin off": (newer, sinks, OFF, {}),
            f"vLLM {newer} with plugin": (newer, sinks, ON, {}),
            f"vLLM {older}, a Llama of that size": (older, llama, ON, {}),
        },
        "GraniteSWA",
    )
    return Section(
        [
            *lines("SmolLM2 as Granite", noise, has_target=False),
            *lines("SmolLM2 as Granite", scaled),
            *lines("SmolLM2 as GraniteSWA", sunk),
        ]
    )


def samples(
    lab: Lab, configurations: dict[str, tuple[str, str, dict[str, str], dict[str, Any]]], title: str, rounds: int = 0
) -> dict[str, dict[str, Sample]]:
    """Tokens a second of each phase and configuration: version, folder, variables and arguments of the engine."""
    sizes = {"requests": lab.sizes.requests, "prompt": lab.sizes.prompt, "new_tokens": lab.sizes.new_tokens}
    decoded: dict[str, list[float]] = {name: [] for name in configurations}

    def run(name: str) -> float:
        version, folder, env, engine = configurations[name]
        prefill, decode = lab.vllm(version).run(
            "benchmarks.throughput:serve", env, checkpoint=folder, **sizes, **engine
        )
        decoded[name].append(decode)
        return prefill

    prefill = in_turn({name: lambda name=name: run(name) for name in configurations}, rounds or lab.sizes.rounds, title)
    decode = {name: Sample(tuple(values)) for name, values in decoded.items()}
    return dict(zip(PHASES, (prefill, decode), strict=True))


def lines(model: str, samples: dict[str, dict[str, Sample]], how: str = "eager", has_target: bool = True) -> list[Line]:
    """The first configuration against each other one; a target is set against the first of these."""
    found = []
    for phase, each in samples.items():
        (here, ours), *peers = each.items()
        for number, (peer, theirs) in enumerate(peers):
            share, is_target = ours / theirs, has_target and not number
            found.append(
                Line(
                    f"{model}, {phase}, float32, {how}: {here}",
                    peer,
                    "at least 0.98" if is_target else "",
                    f"{ours.text('.0f')} tokens/s",
                    f"{theirs.text('.0f')} tokens/s",
                    f"x {share.text('.3f')}",
                    (theirs / ours).verdict(1 / SHARE) if is_target else "",
                )
            )
    return found


def serve(
    checkpoint: str, requests: int, prompt: int, new_tokens: int, repeats: int = 1, **engine: Any
) -> tuple[float, float]:
    """A job: tokens a second of prefill, and of decode; medians."""
    from vllm import LLM, SamplingParams

    options = {**ENGINE, "enable_prefix_caching": False, "max_num_batched_tokens": max(64, requests * prompt), **engine}
    llm = LLM(checkpoint, **options)

    def seconds(prompt: int, new_tokens: int, start: int) -> float:
        tokens = [[start + (i * 7 + request) % 200 for i in range(prompt)] for request in range(requests)]
        sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        llm.generate([{"prompt_token_ids": each} for each in tokens], sampling, use_tqdm=False)
        return time.perf_counter() - begin

    seconds(8, 2, 3)  # what is set up by the first request
    prefill, decode = (
        statistics.median(requests * counted / seconds(*tokens, 5 + number) for number in range(repeats))
        for counted, tokens in ((prompt, (prompt, 1)), (new_tokens, (8, new_tokens)))
    )
    return prefill, decode
