# SPDX-License-Identifier: Apache-2.0
"""What the guard against dropped sinks costs each call of attention, on a vLLM that has no such check."""

from typing import Any

from benchmarks.lab import ENGINE, Lab
from benchmarks.measure import Sample, in_turn, seconds_a_call
from benchmarks.report import Line, Section

LIMIT = 1e-6  # a thousandth of a decode step, at 30 layers
HERE, PEER = "guarded", "bare"


def measure(lab: Lab) -> Section:
    section = Section()
    folder = lab.empty("GraniteSWA")
    for what, through in (("one decode token", True), ("the kernel stubbed out", False)):
        here, peer = _samples(lab, folder, through)
        more = here - peer
        section.lines.append(
            Line(
                f"attention of a sink model on vLLM {lab.older}, a call, {what}",
                "the same without guard",
                "nothing measurable" if through else "",
                f"{here.text('.2f', 1e6)} us",
                f"{peer.text('.2f', 1e6)} us",
                f"{more.text('+.2f', 1e6)} us",
                more.verdict(LIMIT) if through else "",
            )
        )
    return section


def _samples(lab: Lab, folder: str, through: bool) -> tuple[Sample, Sample]:
    sizes = {"blocks": lab.sizes.blocks, "calls": 10 * lab.sizes.calls}
    found = lab.vllm(lab.older).run("benchmarks.attention:samples", checkpoint=folder, through=through, **sizes)
    return found[HERE], found[PEER]


def samples(checkpoint: str, through: bool, blocks: int, calls: int) -> dict[str, Sample]:
    """A job: seconds a call of vLLM's attention function, guarded and not, within a decode step.

    Args:
        through: to the kernel; else what the guard calls does nothing.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from vllm import LLM, SamplingParams

    from vllm_tf_sinks.sinks.guards import guard_attention

    llm = LLM(checkpoint, **{**ENGINE, "load_format": "dummy"})
    guarded = ALL_ATTENTION_FUNCTIONS["vllm"]
    found: dict[str, Sample] = {}

    def probe(*args: Any, **kwargs: Any) -> Any:
        functions = {HERE: guarded, PEER: guarded.__wrapped__}
        if not through:
            functions = {HERE: guard_attention(_nothing), PEER: _nothing}

        if args[1].shape[-2] == 1 and not found:  # a decode step
            calling = {
                name: lambda f=f: seconds_a_call(f, *args, calls=calls, **kwargs) for name, f in functions.items()
            }
            found.update(in_turn(calling, blocks))
        return guarded(*args, **kwargs)

    ALL_ATTENTION_FUNCTIONS["vllm"] = probe
    sampling = SamplingParams(max_tokens=3, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": [5, 6, 7]}], sampling, use_tqdm=False)
    return found


def _nothing(*_: Any, **__: Any) -> None:
    pass
