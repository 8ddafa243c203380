# SPDX-License-Identifier: Apache-2.0
"""What the guard against dropped sinks costs, on a vLLM that has no such check."""

import inspect
from typing import Any

from benchmarks.lab import ENGINE, Lab
from benchmarks.measure import MET, MISSED, Sample, in_turn, seconds_a_call
from benchmarks.report import Line, Section

HERE, PEER = "guarded", "bare"


def measure(lab: Lab) -> Section:
    return Section([_after_start(lab), _guard(lab)])


def _after_start(lab: Lab) -> Line:
    same = lab.vllm(lab.older).run("benchmarks.attention:is_upstream", checkpoint=lab.empty("GraniteSWA"))
    return Line(
        f"attention of a sink model on vLLM {lab.older}, after start-up",
        "upstream",
        "nothing measurable",
        "the same function" if same else "another function",
        "",
        "",
        MET if same else MISSED,
    )


def _guard(lab: Lab) -> Line:
    sizes = {"blocks": lab.sizes.blocks, "calls": 10 * lab.sizes.calls}
    found = lab.vllm(lab.older).run("benchmarks.attention:samples", **sizes)
    here, peer = found[HERE], found[PEER]
    return Line(
        "a call of attention that stays guarded, because the dry run did not show it; the kernel stubbed out",
        "the same without guard",
        "",
        f"{here.text('.2f', 1e6)} us",
        f"{peer.text('.2f', 1e6)} us",
        f"{(here - peer).text('+.2f', 1e6)} us",
        "",
    )


def is_upstream(checkpoint: str) -> bool:
    """A job: whether the attention function that a model calls is vLLM's own."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from vllm import LLM

    llm = LLM(checkpoint, **{**ENGINE, "load_format": "dummy"})
    (name,) = llm.apply_model(lambda model: model.text_config._attn_implementation)
    return ALL_ATTENTION_FUNCTIONS[name] is inspect.unwrap(ALL_ATTENTION_FUNCTIONS["vllm"])


def samples(blocks: int, calls: int) -> dict[str, Sample]:
    """A job: seconds a call of a function that does nothing, guarded and not, as a sink model calls it."""
    from types import SimpleNamespace

    from torch import nn

    from vllm_tf_sinks.attention.sink_checks import guard_attention

    module = nn.Module()
    module.layer_idx = 0
    layers = {0: SimpleNamespace(has_sink=True)}
    names = {"scaling": 1.0, "sliding_window": None, "s_aux": module, "attention_instances": layers}
    functions = {HERE: guard_attention(_nothing), PEER: _nothing}
    calling = {
        name: lambda f=f: seconds_a_call(f, module, None, None, None, None, calls=calls, **names)
        for name, f in functions.items()
    }
    return in_turn(calling, blocks)


def _nothing(*_: Any, **__: Any) -> None:
    pass
