# SPDX-License-Identifier: Apache-2.0
"""Jobs that place the sink of a real attention module on one of several ranks."""

from vllm_tf_sinks.attention.sink_finder import Sink
from vllm_tf_sinks.attention.sink_loader import check_divisible, heads_of_rank, sink_parameter

HEADS = 8


def place(
    rank: int,
    ranks: int,
    key_value_heads: int = 4,
    projection: str = "fused",
    shape: tuple[int, ...] = (HEADS,),
    loaded: tuple[int, ...] | None = None,
    dtype: str = "float32",
) -> dict:
    """Load the sink 0, 1, ... 7 of a GPT-OSS attention module on one rank.

    Args:
        projection: what vLLM has made of the query projection: `fused`, `sharded`, `gathered`, or
            `replicated`.
        shape: the parameter's.
        loaded: the shape of the checkpoint's tensor, the parameter's if None.
    """
    import torch
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention

    config = GptOssConfig(hidden_size=64, num_attention_heads=HEADS, num_key_value_heads=key_value_heads, head_dim=32)
    with torch.device("meta"):
        module = GptOssAttention(config, 0)
    sink = Sink("model.layers.0.self_attn", 0, "model.layers.0.self_attn", "sinks", shape)
    check_divisible(sink, ranks)
    _project(module, projection, rank, ranks, key_value_heads)
    heads = heads_of_rank(sink.module_name, module, HEADS, rank, ranks)
    parameter = sink_parameter(sink, heads, getattr(torch, dtype), torch.device("cpu"))
    parameter.weight_loader(parameter, torch.arange(HEADS if loaded is None else torch.Size(loaded).numel()))
    return {
        "heads": (heads.first, heads.query, heads.key_value),
        "numbers": parameter.flatten().tolist(),
        "shape": tuple(parameter.shape),
        "dtype": str(parameter.dtype),
        "trained": parameter.requires_grad,
        "loader": parameter.weight_loader.__name__,
    }


def _project(module, projection: str, rank: int, ranks: int, key_value_heads: int) -> None:
    """Replace projections as vLLM does; the classes are vLLM's, the ranks are not there."""
    import vllm.model_executor.layers.linear as linear
    import vllm.model_executor.parameter as parameter

    for place in (linear, parameter):
        for name, value in (("rank", rank), ("world_size", ranks)):
            if hasattr(place, f"get_tensor_model_parallel_{name}"):
                setattr(place, f"get_tensor_model_parallel_{name}", lambda value=value: value)
    size = HEADS * 32
    if projection == "fused":
        module.qkv_proj = linear.QKVParallelLinear(64, 32, HEADS, key_value_heads)
        del module.q_proj, module.k_proj, module.v_proj
    elif projection in ("sharded", "gathered"):
        module.q_proj = linear.ColumnParallelLinear(64, size, gather_output=projection == "gathered")
    else:
        module.q_proj = linear.ReplicatedLinear(64, size)
