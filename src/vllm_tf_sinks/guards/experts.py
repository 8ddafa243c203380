# SPDX-License-Identifier: Apache-2.0
"""Let vLLM route tokens to experts only where it does so as the model; refuse experts it computes otherwise.

vLLM reads from the config how experts are chosen and weighted. A block of experts is run once on
random tokens, with stand-ins for its experts, to see how the model does it.
"""

import inspect
import logging
import re
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from vllm_tf_sinks import vllm_api
from vllm_tf_sinks.guards.errors import GuardError
from vllm_tf_sinks.swap import swapped

logger = logging.getLogger("vllm.tf_sinks")

TOKENS = 16
EXPERTS = "experts"  # the child of a block that vLLM replaces

# Fields that say how many experts a token has: those that each vLLM reads, and those that not each does
TOP_K, OTHER_TOP_K = (
    ("num_experts_per_tok", "top_k"),
    ("moe_topk", "moe_top_k", "moe_k", "top_k_experts", "num_experts_per_token"),
)


def replace_experts(original: Callable[..., Any]) -> Callable[..., Any]:
    """`MoEMixin.recursive_replace`, which leaves routing to Transformers where vLLM's is another.

    Raises:
        GuardError: naming the experts, if vLLM computes them otherwise.
    """

    @wraps(original)
    def recursive_replace(self: Any) -> None:
        _name_top_k(self)
        reads_layout = "is_transposed" in inspect.getsource(original)  # from vLLM 0.33
        blocks = {name: block for name, block in self.model.named_modules() if hasattr(block, EXPERTS)}
        for block in blocks.values():
            _check_experts(self, getattr(block, EXPERTS), reads_layout)
        module = sys.modules[original.__globals__["__name__"]]
        names = {id(block): name for name, block in blocks.items()}

        class OwnRouting:
            @staticmethod
            def match(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
                fuser = fuser_class.match(block, *args, **kwargs)
                if fuser is None or _routes_as_vllm(block, fuser, self.text_config, names[id(block)]):
                    return fuser
                logger.info("%s is routed by Transformers: vLLM would route it otherwise", type(block).__name__)
                return None

        fuser_class = module.MoEBlockFuser
        with swapped(vars(module), {"MoEBlockFuser": OwnRouting}):
            original(self)

    return recursive_replace


def _name_top_k(model: Any) -> None:
    """Let vLLM find the number of experts a token has under the name that it reads."""
    config = model.text_config
    if all(getattr(config, name, None) is None for name in TOP_K):
        given = [value for name in OTHER_TOP_K if (value := getattr(config, name, None)) is not None]
        if not given:
            raise GuardError(
                f"{type(model.model).__name__} has experts, but its config says under none of "
                f"{', '.join((*TOP_K, *OTHER_TOP_K))} how many of them a token has."
            )
        config.num_experts_per_tok = given[0]


def _check_experts(model: Any, experts: Any, reads_layout: bool) -> None:
    name = f"{type(experts).__name__} of {type(model.model).__name__}"
    each = experts[0] if isinstance(experts, nn.ModuleList) and len(experts) else experts
    if getattr(each, "has_gate", True) is False:
        raise GuardError(f"{name} has no gate, which vLLM's experts have.")
    is_gpt_oss = "gptoss" in "".join(model.config.architectures or []).lower()  # as vLLM tells it
    if not is_gpt_oss and not _is_silu(each):
        raise GuardError(f"{name} has another activation than silu(gate) * up, which vLLM computes.")
    up, down = (getattr(experts, weight, None) for weight in ("gate_up_proj", "down_proj"))
    if not isinstance(up, Tensor) or not isinstance(down, Tensor) or up.dim() != 3 or down.dim() != 3:
        return
    if len(up) != len(down):
        raise GuardError(f"{name} has {len(up)} experts, of which {len(down)} compute something: vLLM has all do so.")
    hidden = model.text_config.hidden_size
    knows = is_gpt_oss or (reads_layout and getattr(experts, "is_transposed", False))
    if not knows and (up.shape[-1] != hidden or down.shape[1] != hidden):
        raise GuardError(f"{name} keeps its weights transposed, which this vLLM does not expect.")


def _is_silu(experts: Any) -> bool:
    """Whether an expert's activation is silu(gate) * up, as far as it shows."""
    with torch.device("cpu"):
        x = torch.linspace(-30, 30, 64)
        gate, up = x.chunk(2)
        try:
            if hasattr(experts, "_apply_gate"):
                return torch.allclose(experts._apply_gate(x[None])[0], F.silu(gate) * up)
            return not hasattr(experts, "act_fn") or torch.allclose(experts.act_fn(x), F.silu(x))
        except Exception:  # code of any class
            return True


class _StandIn(nn.Module):
    """In place of experts: answers always the same, and notes the routing."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.output = _random(TOKENS, size)
        self.routing: Tensor | None = None
        self.number = 0

    def forward(self, hidden_states: Tensor, ids: Tensor, weights: Tensor, *_: Any, **__: Any) -> Tensor:
        self.routing = torch.zeros(TOKENS, self.number).scatter(1, ids.long(), weights.float())
        return self.output.view_as(hidden_states)


class _Nothing(nn.Module):
    """In place of shared experts."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return torch.zeros_like(hidden_states)


def _routes_as_vllm(block: nn.Module, fuser: Any, config: Any, name: str) -> bool:
    """Whether a block of experts weights them as vLLM would: the same ones, by the same numbers."""
    if fuser.scoring_func is None:  # vLLM 0.33 calls the model's own router
        return True
    number, size = getattr(block, fuser.gate_name).weight.shape
    stand_in, hidden = _StandIn(size), _random(1, TOKENS, size)
    stand_in.number = number
    stands_for = {EXPERTS: stand_in} | ({fuser.shared_name: _Nothing()} if fuser.shared_name else {})
    was_training = block.training
    block.eval()
    try:
        with swapped(block._modules, stands_for), torch.device("cpu"), torch.no_grad():
            weights = {key: _filled(value) for key, value in (*block.named_parameters(), *block.named_buffers())}
            output = functional_call(block, weights, (hidden,)).view(TOKENS, size)
    except Exception:  # forward of any class: it is left as it is
        return False
    finally:
        block.train(was_training)
    factor = (output * stand_in.output).sum() / stand_in.output.square().sum()
    if stand_in.routing is None or not torch.allclose(output, factor * stand_in.output, atol=1e-5):
        return False
    gate = {key.removeprefix(f"{fuser.gate_name}."): value for key, value in weights.items()}
    expected = _routing_of_vllm(hidden[0], gate, fuser, config, name)
    return expected is not None and torch.allclose(factor * stand_in.routing, expected, atol=1e-5)


def _routing_of_vllm(hidden: Tensor, gate: dict[str, Tensor], fuser: Any, config: Any, name: str) -> Tensor | None:
    """The weights [N, experts] that vLLM gives, from what it reads of the config; None where it can not."""

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
    elif vllm_api.engine.routes_by_softmax_only() and (bias is not None or fuser.scoring_func != "softmax"):
        return None
    ids = choice.topk(top_k).indices
    weights = scores.gather(1, ids)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights * getattr(config, "routed_scaling_factor", 1.0)
    return torch.zeros_like(scores).scatter(1, ids, weights)


def _filled(value: Tensor) -> Tensor:
    return 0.3 * _random(*value.shape) if value.is_floating_point() else torch.zeros_like(value, device="cpu")


def _random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device="cpu")
