# SPDX-License-Identifier: Apache-2.0
"""A rank's slice of a sink, and the loader that fills it from a checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from vllm_tf_sinks.sinks.find import Sink, SinkError


@dataclass(frozen=True)
class Heads:
    """The attention heads of one layer that this rank computes.

    Attributes:
        first: the first query head, counted over all ranks.
        query: how many query heads, and so numbers of the sink.
        key_value: how many key-value heads.
    """

    first: int
    query: int
    key_value: int


def check_divisible(sink: Sink, ranks: int) -> None:
    """Check that the heads of `sink` divide over `ranks` tensor-parallel ranks.

    Raises:
        SinkError: if they do not, naming the sizes that work.
    """
    if sink.num_heads % ranks:
        sizes = ", ".join(str(n) for n in range(1, sink.num_heads + 1) if sink.num_heads % n == 0)
        raise SinkError(
            f"{sink.parameter_name} has {sink.num_heads} heads, which tensor_parallel_size={ranks} "
            f"does not divide. Sizes that work: {sizes}."
        )


def heads_of_rank(name: str, module: nn.Module, num_heads: int, rank: int, ranks: int) -> Heads:
    """The heads of an attention module that this rank computes, once vLLM has replaced its projections.

    They are sharded if a projection of the module is: a model without a tensor-parallel plan whose
    projections vLLM could not fuse is computed whole by every rank.

    Args:
        name: the module's.
        module: the module.
        num_heads: its query heads, over all ranks.
        rank: this rank in its tensor-parallel group.
        ranks: the size of that.

    Raises:
        SinkError: if the key-value heads do not divide over the ranks, and no fused projection copies them.
    """
    from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear

    groups = getattr(module, "num_key_value_groups", 1)  # query heads a key-value head, over all ranks
    key_value = num_heads // groups
    columns = [m for m in module.modules() if isinstance(m, ColumnParallelLinear) and not m.gather_output]
    if ranks == 1 or not columns:
        return Heads(0, num_heads, key_value)
    if key_value % ranks and not any(isinstance(m, QKVParallelLinear) for m in columns):
        raise SinkError(
            f"{name} has {key_value} key-value heads, which tensor_parallel_size={ranks} does "
            "not divide, and vLLM could not fuse its projections to give each rank a copy of one."
        )
    query = num_heads // ranks
    return Heads(rank * query, query, max(1, key_value // ranks))


def sink_parameter(
    sink: Sink, heads: Heads, dtype: torch.dtype, device: torch.device, kept: dict[str, torch.Tensor] | None = None
) -> nn.Parameter:
    """An uninitialised parameter for this rank's slice of a sink, with its weight loader.

    Args:
        sink: where the sink is; every dimension of its shape is kept but the one that counts heads.
        heads: the heads of this rank.
        dtype: what the parameter is kept in.
        device: where it is.
        kept: where its loader leaves a copy of the checkpoint's tensor.

    Returns:
        The parameter, `heads.query` numbers in `dtype` on `device`.
    """
    shape = [heads.query if size == sink.num_heads else size for size in sink.shape]
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
    parameter.weight_loader = sink_loader(sink, heads, kept)  # type: ignore[attr-defined]
    return parameter


def sink_loader(
    sink: Sink, heads: Heads, kept: dict[str, torch.Tensor] | None = None
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """A weight loader that copies this rank's heads of a checkpoint's sink, and the whole sink to `kept`.

    The loader raises SinkError if the checkpoint's tensor does not have `sink.num_heads` numbers.
    """

    def load_sink(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        if loaded_weight.numel() != sink.num_heads:
            raise SinkError(
                f"The checkpoint's {sink.parameter_name} has the shape {tuple(loaded_weight.shape)}, "
                f"but the model has {sink.num_heads} heads."
            )
        shard = loaded_weight.reshape(-1).narrow(0, heads.first, heads.query)
        param.data.copy_(shard.view_as(param))
        if kept is not None:
            kept[sink.parameter_name] = loaded_weight.detach().to("cpu", copy=True)

    return load_sink
