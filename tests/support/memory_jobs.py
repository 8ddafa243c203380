# SPDX-License-Identifier: Apache-2.0
"""What computing logits allocates."""

from support.jobs import ENGINE


def peaks(checkpoint: str, rows: int, **engine) -> dict[str, int]:
    """The most bytes that are live at once while logits of `rows` hidden states are computed.

    Returns:
        logits: the bytes of the logits themselves; head: the peak; stock_scale, stock_cap: the peak of vLLM's own
        method with a scale in the config, and with a cap; hidden: the bytes of the hidden states.
    """
    import torch
    from vllm import LLM
    from vllm.model_executor.models.transformers.causal import CausalMixin

    def measure(model) -> dict[str, int]:
        hidden = torch.randn(rows, model.text_config.hidden_size, dtype=model.model_config.dtype)
        logits = model.compute_logits(hidden)  # warm: what is made once is no part of a call
        found = {"logits": logits.nbytes, "hidden": hidden.nbytes, "head": _peak(lambda: model.compute_logits(hidden))}
        processor = model.logits_processor
        processor.scale = 0.5
        found["stock_scale"] = _peak(lambda: CausalMixin.compute_logits(model, hidden))
        processor.scale, processor.soft_cap = 1.0, 3.0
        found["stock_cap"] = _peak(lambda: CausalMixin.compute_logits(model, hidden))
        return found

    return LLM(checkpoint, **{**ENGINE, **engine}).apply_model(measure)[0]


def _peak(compute) -> int:
    """The most bytes that torch's CPU allocator has given out at once while `compute` runs."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        compute()
    events = profiler.profiler.kineto_results.events()
    changes = [event.nbytes() for event in sorted(events, key=lambda e: e.start_ns()) if event.name() == "[memory]"]
    return max(sum(changes[: end + 1]) for end in range(len(changes)))
