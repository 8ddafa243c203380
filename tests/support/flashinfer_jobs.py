# SPDX-License-Identifier: Apache-2.0
"""A sink model built for FlashInfer, whose classes can be made on a CPU, and stopped before it would run."""

import contextlib
import sys

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
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    found: list[dict] = []
    load_model = CPUModelRunner.load_model

    def load_and_stop(self, *args, **kwargs):
        load_model(self, *args, **kwargs)
        found.extend(_look(self.model, fragment))
        raise Loaded

    attention.get_attn_backend = lambda *args, **kwargs: FlashInferBackend
    CPUModelRunner.load_model = load_and_stop
    with contextlib.suppress(Loaded):
        LLM(checkpoint, **{**ENGINE, **engine})
    return found


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
        layer.process_weights_after_loading(parameter.dtype)
        found.append(
            {
                "impl": type(layer.impl).__name__,
                "kernel": str(after_load.dtype),
                "right": right,
                "live": live,
                "renewed": layer.impl.sinks.equal(parameter.flatten().float()),
                "same_address": layer.impl.sinks.data_ptr() == address,
            }
        )
    return found
