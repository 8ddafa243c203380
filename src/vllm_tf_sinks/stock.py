# SPDX-License-Identifier: Apache-2.0
"""What vLLM alone would make of a model: where it is right, wrong, or refuses to load."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from vllm_tf_sinks import vllm_api
from vllm_tf_sinks.head.build import Head, tied_to
from vllm_tf_sinks.head.classify import in_float64, random_numbers
from vllm_tf_sinks.sinks.find import Sink


def faults_with_sinks(model: nn.Module, sinks: list[Sink]) -> list[str]:
    """What is wrong with the sinks of `model`, the holder of a base model, in stock vLLM; one line a fault."""
    if sinks and not vllm_api.attention.layers_take_sinks():
        return ["drops the sinks: every softmax is off, and the text degenerates"]
    faults: dict[str, None] = {}
    for sink in sinks:
        module = model.get_submodule(sink.module_name)
        parameter = model.get_parameter(sink.parameter_name)
        try:
            found = vllm_api.attention.sink_by_itself(module)
        except ValueError as error:
            faults[f"refuses to load: {error}"] = None
            continue
        if found is not parameter or len(sink.shape) != 1:
            faults[f"refuses at the first request: it does not find the sink of {type(module).__name__}"] = None
        elif vllm_api.weights.is_kept_in_float32(model.model, sink.parameter_name):
            faults["rounds the sinks to the model's dtype, where Transformers keeps them in float32"] = None
    return list(faults)


def faults_with_head(head: Head, base: nn.Module, config: Any) -> list[str]:
    """What is wrong with `head` in stock vLLM, which takes it for a plain `lm_head`; one line a fault."""
    text_config = config.get_text_config()
    projection, size = head.projection, text_config.hidden_size
    unknown = _unknown(head, base, config)
    if unknown:
        return [f"refuses to load: it has no place for {', '.join(unknown)}"]
    if (projection.out_features, projection.in_features) != (text_config.vocab_size, size):
        return [f"refuses to load: the projection is {projection.in_features} to {projection.out_features}"]
    faults = []
    if _is_tied(config) and tied_to(head.model, f"{projection.name}.weight") is None:
        faults.append(f"ties {projection.name} to the input embeddings, which Transformers does not")
    scale = getattr(text_config, "logit_scale", 1.0)
    if scale is None:
        return [*faults, "fails at the first request: it multiplies by logit_scale, which is None"]
    cap = getattr(text_config, "final_logit_softcapping", None)
    with in_float64(head, size):
        hidden = random_numbers(3, size)
        true = head.as_written(hidden.clone()).double()
        taken = _taken(projection.project(hidden), scale, cap)
        if true.shape != taken.shape:
            faults.append(f"gives {taken.shape[-1]} logits a token, where Transformers gives {true.shape[-1]}")
        elif not torch.allclose(true.log_softmax(-1), taken.log_softmax(-1), rtol=0, atol=1e-6):
            faults.append("gives wrong logprobs: it computes the projection alone" + _adjusted(scale, cap))
    return faults


def _taken(logits: Tensor, scale: float, cap: float | None) -> Tensor:
    """Logits [1, N, V] as vLLM's logits processor leaves them."""
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits * scale


def _adjusted(scale: float, cap: float | None) -> str:
    adjustments = [f"a soft cap of {cap:g}"] if cap is not None else []
    adjustments += [f"a scale of {scale:g}"] if scale != 1.0 else []
    return f", with {' and '.join(adjustments)}" if adjustments else ""


def _unknown(head: Head, base: nn.Module, config: Any) -> list[str]:
    """Names of the head's tensors in a checkpoint that stock vLLM has no place for."""
    names = [weight.in_checkpoint for weight in weights_of(head, config) if not weight.tied_to]
    names = [name for name in names if not name.endswith("lm_head.bias")]
    places = vllm_api.weights.names_by_itself(base, config, names)
    return [name for name, place in places.items() if place not in ("lm_head.weight", None)]


@dataclass(frozen=True)
class Weight:
    """A parameter of a head.

    Attributes:
        name: as Transformers has it in a model.
        in_checkpoint: as it saves it.
        tied_to: the parameter that it shares, and under whose name it is saved; or None.
    """

    name: str
    in_checkpoint: str
    tied_to: str | None


def weights_of(head: Head, config: Any) -> list[Weight]:
    """The parameters of `head`, its projection's among them."""
    names = [name for name, _ in head.model.named_parameters()]
    names.append(f"{head.projection.name}.weight")
    if head.projection.has_bias:
        names.append(f"{head.projection.name}.bias")
    is_tied = _is_tied(config)
    return [Weight(name, _saved_as(head, name), tied_to(head.model, name) if is_tied else None) for name in names]


def _saved_as(head: Head, name: str) -> str:
    return str(next(iter(revert_weight_conversion(head.model, {name: torch.empty(0)}))))


def _is_tied(config: Any) -> bool:
    return any(getattr(each, "tie_word_embeddings", False) for each in (config, config.get_text_config()))
