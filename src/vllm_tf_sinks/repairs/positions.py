# SPDX-License-Identifier: Apache-2.0
"""Positions of decoders like RoBERTa, which start after the padding index."""

from typing import Any

from torch import Tensor, nn


def shift_positions(model: Any) -> None:
    """Let the embeddings of a model like RoBERTa add `padding_idx + 1` to vLLM's positions, which start at 0.

    Transformers adds it in `create_position_ids_from_input_ids`, and vLLM in its pooling classes only.

    Raises:
        ValueError: naming the model, if `max_model_len` tokens need more positions than the model has.
    """
    for embeddings in model.model.modules():
        if not hasattr(embeddings, "create_position_ids_from_input_ids"):
            continue
        offset = embeddings.padding_idx + 1
        positions = model.text_config.max_position_embeddings - offset
        if model.model_config.max_model_len > positions:
            raise ValueError(
                f"{type(model.model).__name__} has {positions} positions after its padding index, fewer than "
                f"max_model_len={model.model_config.max_model_len}. Set --max-model-len {positions}."
            )
        _shift(embeddings, offset)


def _shift(embeddings: nn.Module, offset: int) -> None:
    forward = embeddings.forward

    def forward_shifted(*args: Any, position_ids: Tensor, **kwargs: Any) -> Tensor:
        embedded: Tensor = forward(*args, position_ids=position_ids + offset, **kwargs)
        return embedded

    embeddings.forward = forward_shifted
