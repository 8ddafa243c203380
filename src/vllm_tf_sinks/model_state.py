# SPDX-License-Identifier: Apache-2.0
"""What the patches tell each other about one model of vLLM's Transformers backend."""

from dataclasses import dataclass, field
from enum import IntEnum, auto
from typing import TYPE_CHECKING, Any

from vllm_tf_sinks import compat
from vllm_tf_sinks.errors import LoadError

if TYPE_CHECKING:
    import torch

    from vllm_tf_sinks.attention.dry_run import DryRun
    from vllm_tf_sinks.attention.sink_finder import Sink
    from vllm_tf_sinks.lm_head.build import Head
    from vllm_tf_sinks.lm_head.weights import Names

_ATTRIBUTE = "tf_sinks_state"  # of vLLM's model


class BuildStep(IntEnum):
    """The steps of building a model at which patches run, in the order in which vLLM takes them.

    Each patch relies on what the patches of earlier steps found out.
    """

    CONFIG = auto()  # Base._patch_config: refuse what the config alone shows
    BEFORE_MODEL = auto()  # Base._decorate_for_torch_compile: check the KV cache
    DRY_RUN = auto()  # Base._create_hf_to_vllm_mapper: run the whole model without weights
    FIND_SINKS = auto()  # Base.pipeline_parallel: find the sinks of this pipeline rank
    EXPERTS = auto()  # MoEMixin.recursive_replace: compare routing and experts with vLLM's
    LAYERS = auto()  # Base._create_attention_instances: build attention layers with their sinks
    PARAMETERS = auto()  # Base.init_parameters: compare the attention layers with the dry run
    HEAD = auto()  # CausalMixin.__init__, after Base.__init__: build the output head


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
        dry_run: what the model does in its dry run, until its attention layers are checked.
        layers_checked: whether the attention layers were compared with the dry run.
        sinks: the sinks of this pipeline rank; None until they are looked for, and for a draft model.
        head: the output head, once it is built.
        is_tied: whether the output projection shares its weight with the input embeddings.
        names: the names in vLLM's model of the head's tensors; None where vLLM's own loader is right.
        checkpoint: what the check after loading needs; None on a tested vLLM, and once the check was made.
        step: the last step of building that was taken.
    """

    dry_run: "DryRun | None" = None
    layers_checked: bool = False
    sinks: "list[Sink] | None" = None
    head: "Head | None" = None
    is_tied: bool = False
    names: "Names | None" = None
    checkpoint: CheckpointTensors | None = None
    step: BuildStep = BuildStep.CONFIG

    def enter(self, step: BuildStep) -> None:
        """Note that vLLM takes `step`.

        Raises:
            LoadError: if a later step was taken before.
        """
        if step < self.step:
            raise LoadError(f"vLLM takes the step {step.name} of building a model after {self.step.name}.")
        self.step = step


def state_of(model: Any) -> ModelState:
    """The state of `model`, which is vLLM's model around a Transformers model; made when it is first asked for."""
    attributes: dict[str, Any] = vars(model)
    if _ATTRIBUTE not in attributes:
        checkpoint = None if compat.engine.is_tested() else CheckpointTensors()
        attributes[_ATTRIBUTE] = ModelState(checkpoint=checkpoint)
    state: ModelState = attributes[_ATTRIBUTE]
    return state
