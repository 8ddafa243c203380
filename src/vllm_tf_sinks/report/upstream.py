# SPDX-License-Identifier: Apache-2.0
"""The faults of upstream vLLM with a model: what it computes wrongly, and what it refuses to load."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from vllm_tf_sinks import compat
from vllm_tf_sinks.attention.sink_finder import Sink
from vllm_tf_sinks.lm_head.build import Head, tied_to
from vllm_tf_sinks.lm_head.classify import in_float64, random_numbers


def faults_with_sinks(model: nn.Module, sinks: list[Sink]) -> list[str]:
    """The faults of upstream vLLM with the sinks of a model, one line for each.

    Args:
        model: a module whose `model` is the base model, on the meta device.
        sinks: its sinks.
    """
    if sinks and not compat.attention.layers_take_sinks():
        return ["drops the sinks: every softmax is wrong, and the text degenerates"]
    faults: dict[str, None] = {}
    for sink in sinks:
        module = model.get_submodule(sink.module_name)
        parameter = model.get_parameter(sink.parameter_name)
        try:
            found = compat.attention.sink_without_plugin(module)
        except ValueError as error:
            faults[f"refuses to load: {error}"] = None
            continue
        if found is not parameter or len(sink.shape) != 1:
            faults[f"refuses at the first request: it does not find the sink of {type(module).__name__}"] = None
        elif compat.weights.is_kept_in_float32(model.model, sink.parameter_name):
            faults["rounds the sinks to the model's dtype, but Transformers keeps them in float32"] = None
    return list(faults)


def faults_with_head(head: Head, base: nn.Module, config: Any) -> list[str]:
    """The faults of upstream vLLM with `head`, which it runs as a plain `lm_head`; one line for each.

    Args:
        head: the head.
        base: its base model, as Transformers builds it.
        config: the config of the checkpoint.
    """
    text_config = config.get_text_config()
    projection, size = head.projection, text_config.hidden_size
    unexpected = _unexpected_weights(head, base, config)
    if unexpected:
        return [f"refuses to load: it has no parameter for {', '.join(unexpected)}"]
    if (projection.out_features, projection.in_features) != (text_config.vocab_size, size):
        return [f"refuses to load: the projection is {projection.in_features} to {projection.out_features}"]
    faults = []
    if _is_tied(config) and tied_to(head.model, f"{projection.name}.weight") is None:
        faults.append(f"ties {projection.name} to the input embeddings, but Transformers does not")
    scale = getattr(text_config, "logit_scale", 1.0)
    if scale is None:
        return [*faults, "fails at the first request: it multiplies by logit_scale, which is None"]
    cap = getattr(text_config, "final_logit_softcapping", None)
    with in_float64(head, size):
        hidden = random_numbers(3, size)
        expected = head.run_eagerly(hidden.clone()).double()
        upstream = _process_logits(projection.project(hidden), scale, cap)
        if expected.shape != upstream.shape:
            faults.append(f"gives {upstream.shape[-1]} logits per token, but Transformers gives {expected.shape[-1]}")
        elif not torch.allclose(expected.log_softmax(-1), upstream.log_softmax(-1), rtol=0, atol=1e-6):
            faults.append("gives wrong logprobs: it computes only the projection" + _scale_and_cap(scale, cap))
    return faults


def _process_logits(logits: Tensor, scale: float, cap: float | None) -> Tensor:
    """Apply soft cap and scale to logits [1, N, V], as vLLM's `LogitsProcessor` does."""
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits * scale


def _scale_and_cap(scale: float, cap: float | None) -> str:
    adjustments = [f"a soft cap of {cap:g}"] if cap is not None else []
    adjustments += [f"a scale of {scale:g}"] if scale != 1.0 else []
    return f", with {' and '.join(adjustments)}" if adjustments else ""


def _unexpected_weights(head: Head, base: nn.Module, config: Any) -> list[str]:
    """Names of the head's tensors in a checkpoint for which upstream vLLM has no parameter."""
    names = [weight.in_checkpoint for weight in weights_of(head, config) if not weight.tied_to]
    names = [name for name in names if not name.endswith("lm_head.bias")]
    places = compat.weights.names_without_plugin(base, config, names)
    return [name for name, place in places.items() if place not in ("lm_head.weight", None)]


@dataclass(frozen=True)
class WeightReport:
    """A parameter of a head.

    Attributes:
        name: its name in the ForCausalLM.
        in_checkpoint: its name in a checkpoint that Transformers saves.
        tied_to: the name of the parameter to which it is tied, and as which it is saved; or None.
    """

    name: str
    in_checkpoint: str
    tied_to: str | None


def weights_of(head: Head, config: Any) -> list[WeightReport]:
    """The parameters of `head`, with those of its projection."""
    names = [name for name, _ in head.model.named_parameters()]
    names.append(f"{head.projection.name}.weight")
    if head.projection.has_bias:
        names.append(f"{head.projection.name}.bias")
    is_tied = _is_tied(config)
    return [WeightReport(name, _saved_as(head, name), tied_to(head.model, name) if is_tied else None) for name in names]


def _saved_as(head: Head, name: str) -> str:
    return str(next(iter(revert_weight_conversion(head.model, {name: torch.empty(0)}))))


def _is_tied(config: Any) -> bool:
    return any(getattr(each, "tie_word_embeddings", False) for each in (config, config.get_text_config()))
