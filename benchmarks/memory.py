# SPDX-License-Identifier: Apache-2.0
"""What a head allocates: in one call, and for the logprobs of a long prompt."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.lab import ENGINE, OFF, ON, Lab
from benchmarks.logits import DUMMY, NARROW
from benchmarks.measure import MET, MISSED, in_turn
from benchmarks.report import Line, Section

MIB = 2**20
SHARE = 0.05
NUMBER = 64  # bytes: torch makes a tensor of the number that logits are scaled by


def measure(lab: Lab) -> Section:
    return Section([*(_call(lab, rows) for rows in lab.sizes.rows), _prompt_logprobs(lab)])


def _call(lab: Lab, rows: int) -> Line:
    vocabulary, hidden = lab.sizes.vocabularies[-1], lab.sizes.hidden
    folder = lab.empty("Granite", **NARROW, hidden_size=hidden, vocab_size=vocabulary)
    here, peer = lab.vllm(lab.newer).run("benchmarks.memory:peaks", checkpoint=folder, rows=rows)
    return Line(
        f"peak memory of `compute_logits`, elementwise head (Granite), {rows} x {hidden} to {vocabulary}, bfloat16",
        "the bare projection",
        "the same, but for the number to scale by",
        f"{here:,} bytes",
        f"{peer:,} bytes",
        f"{here - peer:+,} bytes",
        MET if here <= peer + NUMBER else MISSED,
    )


def peaks(checkpoint: str, rows: int) -> tuple[int, int]:
    """A job: the most bytes that a head and its bare projection hold at once."""
    import torch
    from vllm import LLM

    def measure(model: Any) -> tuple[int, int]:
        hidden = torch.randn(rows, model.text_config.hidden_size, dtype=torch.bfloat16)
        processor, lm_head = model.logits_processor, model.lm_head
        model.compute_logits(hidden)  # what is made once is no part of a call
        return (
            _peak(lambda: model.compute_logits(hidden)),
            _peak(lambda: processor(lm_head, hidden, lm_head.bias)),
        )

    return LLM(checkpoint, **{**ENGINE, **DUMMY}).apply_model(measure)[0]


def _peak(function: Callable[[], Any]) -> int:
    """The most bytes that torch's allocator has given out at once."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    held = most = 0
    for event in events:
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def _prompt_logprobs(lab: Lab) -> Line:
    tokens, vocabulary = lab.sizes.long_prompt, lab.sizes.vocabularies[len(lab.sizes.vocabularies) // 2]
    folder = lab.empty("Granite", num_hidden_layers=2, vocab_size=vocabulary, max_position_embeddings=2 * tokens)

    def run(env: dict[str, str]) -> float:
        return lab.vllm(lab.newer).run("benchmarks.memory:prompt_peak", env, checkpoint=folder, tokens=tokens) / MIB

    runs = {"on": lambda: run(ON), "off": lambda: run(OFF)}
    on, off = in_turn(runs, max(1, lab.sizes.rounds // 2), "prompt logprobs").values()
    return Line(
        f"peak memory of prompt logprobs, {tokens:,} tokens, vocabulary {vocabulary:,}, 2 layers, in one step",
        "plugin off",
        "+5 %",
        f"{on.text('.0f')} MiB",
        f"{off.text('.0f')} MiB",
        f"{100 * ((on / off).median - 1):+.1f} %",
        (on / off).verdict(1 + SHARE),
    )


def prompt_peak(checkpoint: str, tokens: int) -> int:
    """A job: by how many bytes the process grows at most while it answers a prompt with the logprobs of its tokens."""
    from vllm import LLM, SamplingParams

    options = {
        **ENGINE,
        "load_format": "dummy",
        "max_model_len": tokens + 8,
        "max_num_batched_tokens": max(64, tokens + 8),
    }
    llm = LLM(checkpoint, **options)
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=1, detokenize=False)
    before = _forget_peak()
    llm.generate([{"prompt_token_ids": [1 + i % 100 for i in range(tokens)]}], sampling, use_tqdm=False)
    return _status("VmHWM") - before


def _forget_peak() -> int:
    """The bytes that this process holds; from here on its peak is counted anew."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(field: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024
