# SPDX-License-Identifier: Apache-2.0
"""What the patches tell each other about one model of vLLM's Transformers backend."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_tf_sinks import vllm_api

if TYPE_CHECKING:
    import torch

    from vllm_tf_sinks.guards.rehearsal import Rehearsal
    from vllm_tf_sinks.head.build import Head
    from vllm_tf_sinks.head.weights import Names
    from vllm_tf_sinks.sinks.find import Sink

_ATTRIBUTE = "tf_sinks_state"  # of vLLM's model


@dataclass
class CheckpointTensors:
    """Copies of tensors of a checkpoint, kept on the CPU until the loaded model is checked against them.

    Attributes:
        projection: the weight [V, P] of the output projection, or of the embeddings that it is tied to.
        bias: the bias [V] of the output projection.
        sinks: the sinks by the name of their parameter, over all ranks.
    """

    projection: "torch.Tensor | None" = None
    bias: "torch.Tensor | None" = None
    sinks: "dict[str, torch.Tensor]" = field(default_factory=dict)


@dataclass
class ModelState:
    """What is known of one model. Each field is set by the patch that finds it out, and read by later ones.

    Attributes:
        rehearsal: what the model does in its dry run, until its attention layers are checked.
        layers_checked: whether the attention layers were compared with the dry run.
        sinks: the sinks of this pipeline rank; None until they are looked for, and for a draft model.
        head: the output head, once it is built.
        is_tied: whether the output projection shares its weight with the input embeddings.
        names: the names in vLLM's model of the head's tensors; None where vLLM's own loader is right.
        checkpoint: what the check after loading needs; None on a tested vLLM, and once the check was made.
    """

    rehearsal: "Rehearsal | None" = None
    layers_checked: bool = False
    sinks: "list[Sink] | None" = None
    head: "Head | None" = None
    is_tied: bool = False
    names: "Names | None" = None
    checkpoint: CheckpointTensors | None = None


def state_of(model: Any) -> ModelState:
    """The state of `model`, which is vLLM's model around a Transformers model; made when it is first asked for."""
    attributes: dict[str, Any] = vars(model)
    if _ATTRIBUTE not in attributes:
        checkpoint = None if vllm_api.engine.is_tested() else CheckpointTensors()
        attributes[_ATTRIBUTE] = ModelState(checkpoint=checkpoint)
    state: ModelState = attributes[_ATTRIBUTE]
    return state
