# SPDX-License-Identifier: Apache-2.0
"""A sink model built for FlashInfer, whose classes can be made on a CPU, and stopped before it would run."""

import ast
import contextlib
import inspect
import sys
from types import SimpleNamespace

from support.jobs import ENGINE

# Takes FlashInfer's kernels for installed, so that building a layer asks no host of NVIDIA's for them
ENV = {"VLLM_HAS_FLASHINFER_CUBIN": "1"}


class Loaded(Exception):
    """The model is loaded; nothing more is wanted of the engine."""


def post_load(checkpoint: str, path: str, fragment: str = "sinks", **engine) -> list[dict]:
    """The life of each layer's sink through vLLM's post-load step, a change, and another post-load step.

    Args:
        checkpoint: folder of the model.
        path: the folder that FlashInfer is in.
        fragment: part of a sink's name.
        engine: arguments of `LLM`.

    Returns:
        a dict a layer.
    """
    sys.path.append(path)
    import vllm.model_executor.layers.attention.attention as attention
    from vllm import LLM
    from vllm.v1.attention.backends.flashinfer import FlashInferBackend
    from vllm.v1.worker.cpu_worker import CPUModelRunner

    found: list[dict] = []
    load_model = CPUModelRunner.load_model

    def load_and_stop(self, *args, **kwargs):
        load_model(self, *args, **kwargs)
        found.extend(_look(self.model, fragment))
        raise Loaded

    _play_gpu()
    attention.get_attn_backend = lambda *args, **kwargs: FlashInferBackend
    CPUModelRunner.load_model = load_and_stop
    with contextlib.suppress(Loaded):
        LLM(checkpoint, **{**ENGINE, **engine})
    return found


def _play_gpu() -> None:
    """What a layer takes of a GPU when it is built, since vLLM 0.34: the number of processors, memory for counters."""
    import torch
    from vllm.v1.attention.backends import flashinfer as backend

    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=1)
    backend._get_multi_ctas_kv_counter_buffer = lambda size, device: torch.zeros(size, dtype=torch.uint8)


def _look(model, fragment: str) -> list[dict]:
    from vllm.model_executor.layers.attention import Attention

    parameters = [value for name, value in model.named_parameters() if fragment in name]
    layers = [layer for layer in model.modules() if isinstance(layer, Attention)]
    found = []
    for parameter, layer in zip(parameters, layers, strict=True):
        after_load = layer.impl.sinks
        right = after_load.equal(parameter.flatten().float())
        address = after_load.data_ptr()
        parameter.data.add_(1)
        live = layer.impl.sinks.equal(parameter.flatten().float())
        step = layer.process_weights_after_loading
        step(*[parameter.dtype] * len(inspect.signature(step).parameters))  # none from vLLM 0.34
        found.append(
            {
                "impl": type(layer.impl).__name__,
                "kernel": str(after_load.dtype),
                "right": right,
                "live": live,
                "renewed": layer.impl.sinks.equal(parameter.flatten().float()),
                "same_address": layer.impl.sinks.data_ptr() == address,
                "flashinfer": _answer(layer.impl.sinks, layer.num_heads),
            }
        )
    return found


def _answer(sinks, heads: int) -> str:
    """What FlashInfer's own code says to sinks, before it needs a GPU: it checks their dtype, shape and device.

    Its function for cuDNN is the one that does so without a GPU; the others read sinks of the same form.
    """
    import torch
    from flashinfer.cudnn import cudnn_batch_decode_with_kv_cache

    requests, blocks, block_size, head_size = 2, 8, 16, 64
    cache = torch.zeros(blocks, heads, block_size, head_size, dtype=torch.bfloat16)
    try:
        cudnn_batch_decode_with_kv_cache(
            torch.zeros(requests, heads, head_size, dtype=torch.bfloat16),
            cache,
            cache,
            scale=0.1,
            workspace_buffer=torch.zeros(1, dtype=torch.uint8),
            max_sequence_kv=block_size,
            actual_seq_lens_kv=torch.ones(requests, dtype=torch.int32),
            block_tables=torch.zeros(requests, 1, dtype=torch.int32),
            sinks=sinks,
        )
    except (NotImplementedError, ValueError) as error:
        return str(error)
    raise AssertionError("FlashInfer ran without cuDNN")


def answers(path: str, heads: int, **sinks) -> dict[str, str]:
    """What FlashInfer says to sinks of some shapes and dtypes.

    Args:
        path: the folder that FlashInfer is in.
        heads: of the query.
        sinks: shape and dtype of each.
    """
    sys.path.append(path)
    import torch

    return {
        name: _answer(torch.zeros(shape, dtype=getattr(torch, dtype)), heads) for name, (shape, dtype) in sinks.items()
    }


def calls_with_sinks(path: str) -> dict[str, str]:
    """Each function of FlashInfer that vLLM's backend hands sinks to, and how the call does not fit it, or "".

    Args:
        path: the folder that FlashInfer is in.
    """
    sys.path.append(path)
    import flashinfer
    from vllm.v1.attention.backends import flashinfer as backend

    functions = {
        "trtllm_batch_context_with_kv_cache": backend.trtllm_batch_context_with_kv_cache,
        "trtllm_batch_decode_with_kv_cache": backend.trtllm_batch_decode_with_kv_cache,
        "flashinfer_xqa_batch_decode_with_kv_cache": flashinfer.decode.xqa_batch_decode_with_kv_cache,
        "decode_wrapper.run": flashinfer.BatchDecodeWithPagedKVCacheWrapper.run,
        "prefill_wrapper.run": flashinfer.BatchAttentionWithAttentionSinkWrapper.run,
    }
    found = {}
    for node in ast.walk(ast.parse(inspect.getsource(backend))):
        if isinstance(node, ast.Call) and _hands_on_sinks(node):
            name = ast.unparse(node.func)
            assert functions[name].__module__.partition(".")[0] == "flashinfer"
            found[name] = found.get(name) or _misfit(node, functions[name])
    return found


def _hands_on_sinks(call: ast.Call) -> bool:
    values = [*call.args, *(keyword.value for keyword in call.keywords)]
    return "self.sinks" in map(ast.unparse, values)


def _misfit(call: ast.Call, function) -> str:
    """Why a call raises a TypeError, or ""."""
    is_method = isinstance(call.func, ast.Attribute)
    names = [keyword.arg for keyword in call.keywords]
    try:
        inspect.signature(function).bind(*[None] * (len(call.args) + is_method), **dict.fromkeys(names))
    except TypeError as error:
        return str(error)
    return ""
