# SPDX-License-Identifier: Apache-2.0
"""Compare vLLM's routing of tokens to experts with the model's, and refuse experts that vLLM computes otherwise.

vLLM reads from the config how a model chooses and weights experts. So each block of experts runs once on
random tokens, with a stub for its experts that records the model's routing. Where the two differ, Transformers
routes the tokens.
"""

import logging
import re
from collections.abc import Callable
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from vllm_tf_sinks import compat
from vllm_tf_sinks.errors import UnsupportedModelError
from vllm_tf_sinks.model_state import BuildStep, state_of

logger = logging.getLogger("vllm.tf_sinks")

TOKENS = 16
EXPERTS = "experts"  # the child of a block that vLLM replaces

# Fields of a config with the number of experts per token: those that every vLLM reads, and others
TOP_K, OTHER_TOP_K = (
    ("num_experts_per_tok", "top_k"),
    ("moe_topk", "moe_top_k", "moe_k", "top_k_experts", "num_experts_per_token"),
)


def replace_experts(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `MoEMixin.recursive_replace`, to let Transformers route a block if vLLM's routing differs.

    Raises:
        UnsupportedModelError: naming the experts, if vLLM's experts compute something else.
    """

    @wraps(original)
    def recursive_replace(self: Any) -> None:
        state_of(self).enter(BuildStep.EXPERTS)
        _set_top_k(self)
        reads_layout = compat.experts.reads_transposed_weights()
        blocks = {name: block for name, block in self.model.named_modules() if hasattr(block, EXPERTS)}
        for block in blocks.values():
            _check_experts(self, getattr(block, EXPERTS), reads_layout)
        names = {id(block): name for name, block in blocks.items()}

        def routes_as_vllm(block: nn.Module, fuser: Any) -> bool:
            same = _routes_as_vllm(block, fuser, self.text_config, names[id(block)])
            if not same:
                logger.info("%s: Transformers routes its tokens, since vLLM's routing differs", type(block).__name__)
            return same

        with compat.experts.routed_by_vllm_where(routes_as_vllm):
            original(self)

    return recursive_replace


def _set_top_k(model: Any) -> None:
    """Set the field of the config in which vLLM reads the number of experts per token."""
    config = model.text_config
    if all(getattr(config, name, None) is None for name in TOP_K):
        given = [value for name in OTHER_TOP_K if (value := getattr(config, name, None)) is not None]
        if not given:
            raise UnsupportedModelError(
                f"{type(model.model).__name__} has experts, but its config has no field for the number of experts per "
                f"token: none of {', '.join((*TOP_K, *OTHER_TOP_K))}."
            )
        config.num_experts_per_tok = given[0]


def _check_experts(model: Any, experts: Any, reads_layout: bool) -> None:
    name = f"{type(experts).__name__} of {type(model.model).__name__}"
    each = experts[0] if isinstance(experts, nn.ModuleList) and len(experts) else experts
    if getattr(each, "has_gate", True) is False:
        raise UnsupportedModelError(f"{name} has no gate, which vLLM's experts have.")
    is_gpt_oss = "gptoss" in "".join(model.config.architectures or []).lower()  # vLLM's own test for GPT-OSS
    if not is_gpt_oss and not _is_silu(each):
        raise UnsupportedModelError(f"{name} has another activation than silu(gate) * up, which vLLM computes.")
    up, down = (getattr(experts, weight, None) for weight in ("gate_up_proj", "down_proj"))
    if not isinstance(up, Tensor) or not isinstance(down, Tensor) or up.dim() != 3 or down.dim() != 3:
        return
    if len(up) != len(down):
        raise UnsupportedModelError(
            f"{name} has {len(up)} experts, of which only {len(down)} have weights, but vLLM computes all of them."
        )
    hidden = model.text_config.hidden_size
    is_known_layout = is_gpt_oss or (reads_layout and getattr(experts, "is_transposed", False))
    if not is_known_layout and (up.shape[-1] != hidden or down.shape[1] != hidden):
        raise UnsupportedModelError(f"{name} keeps its weights transposed, which this vLLM does not expect.")


def _is_silu(experts: Any) -> bool:
    """Whether an expert's activation is silu(gate) * up; True if its class has no function that tells."""
    with torch.device("cpu"):
        x = torch.linspace(-30, 30, 64)
        gate, up = x.chunk(2)
        try:
            if hasattr(experts, "_apply_gate"):
                return torch.allclose(experts._apply_gate(x[None])[0], F.silu(gate) * up)
            return not hasattr(experts, "act_fn") or torch.allclose(experts.act_fn(x), F.silu(x))
        except Exception:  # code of any class
            return True


class _ExpertsStub(nn.Module):
    """A stub for the experts of a block: returns the same output for each input, and records the routing.

    Attributes:
        output: [TOKENS, H].
        routing: the weight of each expert for each token [TOKENS, experts]; None before the first call.
    """

    def __init__(self, num_experts: int, size: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.output = _random(TOKENS, size)
        self.routing: Tensor | None = None

    def forward(self, hidden_states: Tensor, ids: Tensor, weights: Tensor, *_: Any, **__: Any) -> Tensor:
        self.routing = torch.zeros(TOKENS, self.num_experts).scatter(1, ids.long(), weights.float())
        return self.output.view_as(hidden_states)


class _ZeroExperts(nn.Module):
    """A stub for the shared experts of a block: returns zeros."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return torch.zeros_like(hidden_states)


def _routes_as_vllm(block: nn.Module, fuser: Any, config: Any, name: str) -> bool:
    """Whether a block gives the experts of each token the same weights as vLLM would."""
    if fuser.scoring_func is None:  # vLLM 0.33 calls the model's own router
        return True
    num_experts, size = getattr(block, fuser.gate_name).weight.shape
    stub, hidden = _ExpertsStub(num_experts, size), _random(1, TOKENS, size)
    stubs = {EXPERTS: stub} | ({fuser.shared_name: _ZeroExperts()} if fuser.shared_name else {})
    was_training = block.training
    block.eval()
    try:
        with patch.dict(block._modules, stubs), torch.device("cpu"), torch.no_grad():
            weights = {key: _random_like(value) for key, value in (*block.named_parameters(), *block.named_buffers())}
            output = functional_call(block, weights, (hidden,)).view(TOKENS, size)
    except Exception:  # forward of any class: Transformers routes it
        return False
    finally:
        block.train(was_training)
    factor = (output * stub.output).sum() / stub.output.square().sum()
    if stub.routing is None or not torch.allclose(output, factor * stub.output, atol=1e-5):
        return False
    gate = {key.removeprefix(f"{fuser.gate_name}."): value for key, value in weights.items()}
    expected = _routing_of_vllm(hidden[0], gate, fuser, config, name)
    return expected is not None and torch.allclose(factor * stub.routing, expected, atol=1e-5)


def _routing_of_vllm(hidden: Tensor, gate: dict[str, Tensor], fuser: Any, config: Any, name: str) -> Tensor | None:
    """Compute the weights [N, experts] as vLLM's `FusedMoE` does, from the config; None if this platform cannot.

    Args:
        hidden: hidden states [N, H].
        gate: the parameters and buffers of the gate, by name.
        fuser: vLLM's fuser of the block.
        config: the text config.
        name: the name of the block, which has the index of its layer.
    """

    def of_layer(value: Any) -> Any:
        return value[int(re.findall(r"\d+", name)[-1])] if isinstance(value, list) else value

    top_k = of_layer(next(value for key in TOP_K if (value := getattr(config, key, None)) is not None))
    renormalise = getattr(fuser, "renormalize", None)
    if renormalise is None:
        renormalise = of_layer(getattr(config, "norm_topk_prob", None))
    if renormalise is None:
        renormalise = top_k > 1
    groups, top_groups = getattr(config, "n_group", None), getattr(config, "topk_group", None)
    logits = F.linear(hidden, gate["weight"])
    scores = logits.sigmoid() if fuser.scoring_func == "sigmoid" else logits.softmax(-1)
    bias = gate.get("e_score_correction_bias")
    choice = scores if bias is None else scores + bias
    if groups is not None and top_groups is not None:
        grouped = choice.view(TOKENS, groups, -1)
        best = grouped.amax(-1) if bias is None else grouped.topk(2).values.sum(-1)
        kept = torch.zeros_like(best).scatter(1, best.topk(top_groups).indices, 1.0)
        choice = grouped.masked_fill(kept[..., None] == 0, float("-inf")).view_as(scores)
    elif compat.engine.routes_by_softmax_only() and (bias is not None or fuser.scoring_func != "softmax"):
        return None
    ids = choice.topk(top_k).indices
    weights = scores.gather(1, ids)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights * getattr(config, "routed_scaling_factor", 1.0)
    return torch.zeros_like(scores).scatter(1, ids, weights)


def _random_like(value: Tensor) -> Tensor:
    return 0.3 * _random(*value.shape) if value.is_floating_point() else torch.zeros_like(value, device="cpu")


def _random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device="cpu")
