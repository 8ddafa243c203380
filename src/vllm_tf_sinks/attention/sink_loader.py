# SPDX-License-Identifier: Apache-2.0
"""The slice of a sink that this rank computes, and the weight loader that fills it from a checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from vllm_tf_sinks import compat
from vllm_tf_sinks.attention.sink_finder import Sink
from vllm_tf_sinks.errors import SinkError


@dataclass(frozen=True)
class Heads:
    """The attention heads of one layer that this rank computes.

    Attributes:
        first: index of the first query head, counted over all ranks.
        query: number of query heads, which is also the number of elements of the rank's sink.
        key_value: number of key-value heads.
    """

    first: int
    query: int
    key_value: int


def check_divisible(sink: Sink, ranks: int) -> None:
    """Check that the number of tensor-parallel ranks divides the number of heads of `sink`.

    Raises:
        SinkError: if it does not, naming the sizes that work.
    """
    if sink.num_heads % ranks:
        sizes = ", ".join(str(n) for n in range(1, sink.num_heads + 1) if sink.num_heads % n == 0)
        raise SinkError(
            f"{sink.parameter_name} has {sink.num_heads} heads, which tensor_parallel_size={ranks} "
            f"does not divide. Sizes that work: {sizes}."
        )


def heads_of_rank(name: str, module: nn.Module, num_heads: int, rank: int, ranks: int) -> Heads:
    """Return the heads of an attention module that this rank computes, after vLLM replaced its projections.

    Heads are sharded if a projection of the module is. Every rank computes all heads of a model that has no
    tensor-parallel plan and whose projections vLLM could not fuse.

    Args:
        name: the name of the module.
        module: the module.
        num_heads: the number of its query heads, over all ranks.
        rank: this rank's index in its tensor-parallel group.
        ranks: the size of that group.

    Raises:
        SinkError: if the ranks do not divide the key-value heads, and no fused projection copies them.
    """
    groups = getattr(module, "num_key_value_groups", 1)  # query heads per key-value head, over all ranks
    key_value = num_heads // groups
    if ranks == 1 or not compat.weights.shards_columns(module):
        return Heads(0, num_heads, key_value)
    if key_value % ranks and not compat.weights.copies_key_value_heads(module):
        raise SinkError(
            f"{name} has {key_value} key-value heads, which tensor_parallel_size={ranks} does not divide, and vLLM "
            "could not fuse its projections to give each rank a copy of one. Use a size that divides them."
        )
    query = num_heads // ranks
    return Heads(rank * query, query, max(1, key_value // ranks))


def sink_parameter(
    sink: Sink, heads: Heads, dtype: torch.dtype, device: torch.device, copies: dict[str, torch.Tensor] | None = None
) -> nn.Parameter:
    """Make an uninitialised parameter for this rank's slice of a sink, with its weight loader.

    Args:
        sink: the sink. The parameter has its shape, with `heads.query` in place of the number of all heads.
        heads: the heads of this rank.
        dtype: the dtype of the parameter.
        device: the device of the parameter.
        copies: a dict to which the loader adds a CPU copy of the checkpoint's tensor, by parameter name.

    Returns:
        The parameter, with `heads.query` elements.
    """
    shape = [heads.query if size == sink.num_heads else size for size in sink.shape]
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
    parameter.weight_loader = sink_loader(sink, heads, copies)  # type: ignore[attr-defined]
    return parameter


def sink_loader(
    sink: Sink, heads: Heads, copies: dict[str, torch.Tensor] | None = None
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Make a weight loader that copies this rank's heads of a checkpoint's sink, and all heads to `copies`.

    The loader raises SinkError if the checkpoint's tensor does not have `sink.num_heads` elements.
    """

    def load_sink(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        if loaded_weight.numel() != sink.num_heads:
            raise SinkError(
                f"The checkpoint's {sink.parameter_name} has the shape {tuple(loaded_weight.shape)}, "
                f"but the model has {sink.num_heads} heads. Use the config that belongs to the checkpoint."
            )
        shard = loaded_weight.reshape(-1).narrow(0, heads.first, heads.query)
        param.data.copy_(shard.view_as(param))
        if copies is not None:
            copies[sink.parameter_name] = loaded_weight.detach().to("cpu", copy=True)

    return load_sink
