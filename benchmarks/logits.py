# SPDX-License-Identifier: Apache-2.0
"""What `compute_logits` costs beyond the projection, by kind of head."""

from collections.abc import Callable
from typing import Any

from benchmarks.lab import ENGINE, Lab
from benchmarks.measure import MET, MISSED, Sample, in_turn, seconds_a_call, use_one_core
from benchmarks.report import Line, Section, Table

LIMIT = 30e-6
Samples = dict[int, dict[str, Sample]]  # number of rows -> what is timed -> seconds

HERE, PEER, BARE, EAGER = "here", "peer", "bare", "eager"
DUMMY = {
    "max_num_batched_tokens": 64,
    "load_format": "dummy",
    "dtype": "bfloat16",
    "kv_cache_memory_bytes": 2**26,
    "max_model_len": 64,
    "max_num_seqs": 8,
}
NARROW = {"num_hidden_layers": 1, "intermediate_size": 128}


def measure(lab: Lab) -> Section:
    sizes = lab.sizes
    scaled = {
        vocabulary: _run(lab, "Granite", sizes.rows, hidden_size=sizes.hidden, vocab_size=vocabulary)
        for vocabulary in sizes.vocabularies
    }
    section = Section([_projection_only(lab)])
    for vocabulary in sizes.vocabularies[-2:]:
        section.lines += _elementwise(lab, vocabulary, scaled[vocabulary])
    transformed = _run(lab, "ModernBertDecoder", sizes.rows, hidden_size=min(768, sizes.hidden))
    section.lines += _full(transformed)
    section.tables += [
        _growth(scaled),
        _calls_in_full(lab),
        _against_eager(scaled[sizes.vocabularies[0]], transformed),
    ]
    return section


def _projection_only(lab: Lab) -> Line:
    same = lab.vllm(lab.newer).run("benchmarks.logits:is_upstream", checkpoint=lab.empty("Llama"))
    return Line(
        "`compute_logits`, a head that is a projection only (Llama)",
        "upstream",
        "the same function",
        "the same function" if same else "another function",
        "",
        "",
        MET if same else MISSED,
    )


def _elementwise(lab: Lab, vocabulary: int, samples: Samples) -> list[Line]:
    return [
        _line(
            f"`compute_logits`, elementwise head (Granite), {rows} x {lab.sizes.hidden} to {vocabulary}, bfloat16; "
            "projection stubbed out",
            "vLLM's logits processor, and one pass in place",
            each[HERE],
            each[PEER],
        )
        for rows, each in samples.items()
    ]


def _full(samples: Samples) -> list[Line]:
    return [
        _line(
            f"`compute_logits`, full head (ModernBERT decoder), {rows} rows, bfloat16; projection stubbed out",
            "the same operations by hand",
            each[HERE],
            each[PEER],
        )
        for rows, each in samples.items()
    ]


def _line(what: str, against: str, here: Sample, peer: Sample) -> Line:
    more = here - peer
    ours, theirs, difference = (f"{each.text(pattern, 1e6)} us" for each, pattern in
                                ((here, ".0f"), (peer, ".0f"), (more, "+.0f")))  # fmt: skip
    return Line(what, against, "+30 us", ours, theirs, difference, more.verdict(LIMIT))


def _growth(scaled: dict[int, Samples]) -> Table:
    """What the head adds to its projection, alone."""
    rows = [
        [f"{vocabulary:,}", str(number), *((of[name] - of[BARE]).text(".0f", 1e6) for name in (HERE, PEER))]
        for vocabulary, samples in scaled.items()
        for number, of in samples.items()
    ]
    head = ["vocabulary", "rows", "what the head adds, us", "one pass in place, us"]
    return Table("An elementwise head by rows and vocabulary, bfloat16, one core, projection stubbed out", head, rows)


def _calls_in_full(lab: Lab) -> Table:
    """With the true projection, whose noise is far larger than what the head adds."""
    vocabulary = lab.sizes.vocabularies[len(lab.sizes.vocabularies) // 2]
    samples = _run(lab, "Granite", lab.sizes.rows, stubbed=False, hidden_size=lab.sizes.hidden, vocab_size=vocabulary)
    rows = [
        [str(n), *(each[name].text(".2f", 1e3) for name in (HERE, BARE)), (each[HERE] / each[BARE]).text(".3f")]
        for n, each in samples.items()
    ]
    head = ["rows", "elementwise head, ms", "bare projection, ms", "ratio"]
    return Table(f"Whole calls, {lab.sizes.hidden} to {vocabulary:,}, bfloat16, all cores", head, rows)


def _against_eager(scaled: Samples, transformed: Samples) -> Table:
    rows = [
        [kind, str(number), *(each[name].text(".0f", 1e6) for name in (PEER, HERE, EAGER))]
        for kind, samples in (("Granite", scaled), ("ModernBERT decoder", transformed))
        for number, each in samples.items()
    ]
    head = ["head", "rows", "peer, us", "here, us", "the ForCausalLM class run eagerly, us"]
    return Table("What flattening spares, projection stubbed out", head, rows)


def _run(lab: Lab, kind: str, rows: tuple[int, ...], stubbed: bool = True, **config: int) -> Samples:
    blocks = lab.sizes.blocks if stubbed else max(1, lab.sizes.blocks // 3)
    sizes = {"blocks": blocks, "calls": lab.sizes.calls if stubbed else 1}
    folder = lab.empty(kind, **NARROW, **config)
    return lab.vllm(lab.newer).run("benchmarks.logits:samples", checkpoint=folder, rows=rows, stubbed=stubbed, **sizes)


def is_upstream(checkpoint: str) -> bool:
    """A job: whether a model's `compute_logits` is the function of vLLM's class."""
    from vllm import LLM
    from vllm.model_executor.models.transformers.causal import CausalMixin

    def same(model: Any) -> bool:
        return model.compute_logits.__func__ is CausalMixin.__dict__["compute_logits"]

    return LLM(checkpoint, **{**ENGINE, **DUMMY}).apply_model(same)[0]


def samples(checkpoint: str, rows: tuple[int, ...], stubbed: bool, blocks: int, calls: int) -> Samples:
    """A job: seconds a call, for each number of rows.

    Args:
        stubbed: put a function that only returns logits in place of the matrix product, whose noise hides
            microseconds; then on one core.
    """
    from vllm import LLM

    def measure(model: Any) -> Samples:
        return {number: _samples_of(model, number, stubbed, blocks, calls) for number in rows}

    return LLM(checkpoint, **{**ENGINE, **DUMMY}).apply_model(measure)[0]


def _samples_of(model: Any, rows: int, stubbed: bool, blocks: int, calls: int) -> dict[str, Sample]:
    import torch

    from vllm_tf_sinks.lm_head.classify import eager_spec
    from vllm_tf_sinks.lm_head.run import logits_function
    from vllm_tf_sinks.model_state import state_of

    hidden = torch.randn(rows, model.text_config.hidden_size, dtype=torch.bfloat16)
    logits = torch.zeros(rows, model.lm_head.weight.shape[0], dtype=torch.bfloat16)  # stays zero under any scale
    functions = {HERE: model.compute_logits, **_peers(model)}
    if stubbed:
        model.lm_head.quant_method = Stub(logits)
        head = state_of(model).head
        functions[EAGER] = logits_function(model, head, eager_spec(head))
        use_one_core()
    runs = {name: lambda f=f: seconds_a_call(f, hidden, calls=calls) for name, f in functions.items()}
    with torch.inference_mode():
        return in_turn(runs, blocks)


class Stub:
    """In place of vLLM's way to apply the projection: the answer is there already."""

    def __init__(self, logits: Any) -> None:
        self.logits = logits

    def apply(self, *_: Any, **__: Any) -> Any:
        """Answers as vLLM's own would."""
        return self.logits


def _peers(model: Any) -> dict[str, Callable[[Any], Any]]:
    """What a head is held against, written by hand."""
    from torch.nn import functional

    processor, lm_head = model.logits_processor, model.lm_head
    if not hasattr(model, "output_head"):
        return {
            BARE: lambda hidden: processor(lm_head, hidden, lm_head.bias),
            PEER: lambda hidden: processor(lm_head, hidden, lm_head.bias).div_(8.0),
        }
    head = model.output_head.lm_head

    def by_hand(hidden: Any) -> Any:
        x = functional.gelu(functional.linear(hidden, head.dense.weight, head.dense.bias))
        x = functional.layer_norm(x, head.norm.normalized_shape, head.norm.weight, head.norm.bias, head.norm.eps)
        return processor(lm_head, x, lm_head.bias)

    return {PEER: by_hand}
