# SPDX-License-Identifier: Apache-2.0
"""Jobs that classify heads written for one property of the trace each."""

SIZE, VOCABULARY = 16, 32


def _forms() -> dict:
    """Logits of hidden states by the model `m`, whose projection is `m.lm_head`."""
    import numpy as np
    import torch

    def in_place(m, hidden):
        logits = m.lm_head(hidden)
        logits.mul_(2)  # the result is not used
        return logits

    def in_place_of_a_view(m, hidden):
        logits = m.lm_head(hidden)
        logits.view(-1).mul_(2)
        return logits

    def not_used(m, hidden):
        torch.rand_like(hidden)
        return m.lm_head(hidden * 2)

    def rms_norm(m, hidden):
        x = hidden.float()
        x = x * torch.rsqrt(x**2 + 1e-6)
        return m.lm_head(m.scale * x.to(hidden.dtype))

    def set_item(m, hidden):
        logits = m.lm_head(hidden)
        logits[..., 0] = 1.0
        return logits

    return {
        "plain": lambda m, hidden: m.lm_head(hidden),
        "nothing_done": lambda m, hidden: (m.lm_head(hidden[..., :].to(hidden.dtype)) * 1).float(),
        "soft_cap": lambda m, hidden: torch.tanh(m.lm_head(hidden) / 3.0) * 3.0,
        "last_cast": lambda m, hidden: (m.lm_head(hidden) * np.float32(0.5)).float(),
        "infinity": lambda m, hidden: m.lm_head(hidden).clamp(min=-float("inf"), max=0.5),
        "cast_between": lambda m, hidden: m.lm_head(hidden).float() * 2,
        "in_place": in_place,
        "in_place_of_a_view": in_place_of_a_view,
        "not_used": not_used,
        "rms_norm": rms_norm,
        "power_in_place": lambda m, hidden: m.lm_head((hidden * 2).__ipow__(2)),
        "property": lambda m, hidden: m.lm_head((hidden.mT * 2).mT),
        "slice": lambda m, hidden: m.lm_head(hidden)[..., : VOCABULARY - 8],
        "bias": lambda m, hidden: m.lm_head(hidden) + m.bias,
        "both_sides": lambda m, hidden: m.lm_head(hidden) * hidden.norm(dim=-1, keepdim=True),
        "rows": lambda m, hidden: m.lm_head(hidden * hidden.shape[1]),
        "constant": lambda m, hidden: m.lm_head(hidden + torch.ones(SIZE)),
        "set_item": set_item,
        "reads": lambda m, hidden: m.lm_head(hidden * hidden.sum().item()),
        "splits": lambda m, hidden: m.lm_head(torch.cat(hidden.split(8, dim=-1), -1)),
    }


def _head(form: str):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_outputs import CausalLMOutputWithPast

    from vllm_tf_sinks.lm_head.build import build_head

    logits_of = _forms()[form]

    class Own(LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.scale = torch.nn.Parameter(torch.ones(SIZE))
            self.bias = torch.nn.Parameter(torch.ones(VOCABULARY))

        def forward(self, input_ids=None, inputs_embeds=None, **kwargs):
            hidden = self.model(inputs_embeds=inputs_embeds).last_hidden_state
            return CausalLMOutputWithPast(logits=logits_of(self, hidden))

    config = LlamaConfig(hidden_size=SIZE, vocab_size=VOCABULARY, num_hidden_layers=1, num_attention_heads=2)
    return build_head(Own, config, None)


def classified() -> dict[str, tuple[str, list[str], list[str]]]:
    """The kind, the weights and the description of each form."""
    from vllm_tf_sinks.lm_head.classify import classify
    from vllm_tf_sinks.lm_head.describe import describe

    found = {}
    for form in _forms():
        head = _head(form)
        spec = classify(head, SIZE)
        found[form] = spec.describe(), sorted(spec.weights) if spec.is_traced else [], describe(head, SIZE)
    return found


def replaced_weight() -> tuple[bool, bool]:
    """Whether logits follow a weight that is replaced, and whether they are in the dtype of the input."""
    import torch

    from vllm_tf_sinks.lm_head.classify import classify

    head = _head("rms_norm")
    before = classify(head, SIZE).before
    hidden = torch.randn(1, 3, SIZE, dtype=torch.bfloat16)
    given = []
    for factor in (1, 2):
        head.model.scale = torch.nn.Parameter(torch.full((SIZE,), factor, dtype=torch.bfloat16), requires_grad=False)
        given.append(before(hidden))
    return torch.equal(given[0] * 2, given[1]), given[0].dtype == torch.bfloat16
