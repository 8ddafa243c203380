# SPDX-License-Identifier: Apache-2.0
"""Jobs that build a sink model and look at what became of its sinks."""

import inspect
import json
import logging
from collections import Counter
from pathlib import Path

from support.jobs import ENGINE, call, served_rows
from support.patching import import_backend, logged, messages


def served_and_logged(checkpoint: str, **engine) -> tuple[list, list[str]]:
    """The rows served, and the plugin's warnings."""
    with logged() as records:
        rows = served_rows(checkpoint, **engine)
    return rows, messages(records, logging.WARNING)


def save_config(name: str, folder: str, architecture: str, model_type: str, **fields) -> str:
    """Save the config of a model, as a hub has it, and no weights."""
    config = {"architectures": [architecture], "model_type": model_type, **fields}
    (Path(folder) / "config.json").write_text(json.dumps(config))
    return folder


def rewrite(folder: str, name: str, source: str, rewriter: str) -> str:
    """Copy the checkpoint `source` to `folder`, its tensors changed by a function of this module."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder, dirs_exist_ok=True)
    path = Path(folder) / "model.safetensors"
    save_file(globals()[rewriter](load_file(path)), path, metadata={"format": "pt"})
    return folder


SINK = "model.layers.1.self_attn.sinks"


def without_a_sink(tensors):
    return {name: tensor for name, tensor in tensors.items() if name != SINK}


def with_a_short_sink(tensors):
    return {name: tensor[:3].clone() if name == SINK else tensor for name, tensor in tensors.items()}


def loading(checkpoint: str, fragment: str = "sinks", **engine) -> dict:
    """How often each sink is loaded, and which names load_weights() returns."""
    from vllm import LLM

    import_backend()
    from vllm.model_executor.models.transformers.base import Base

    counts: Counter[str] = Counter()
    returned: list[str] = []
    load_weights = Base.load_weights

    def counting(name, load):
        def load_and_count(param, loaded_weight):
            counts[name] += 1
            load(param, loaded_weight)

        return load_and_count

    def watched(self, weights):
        for name, parameter in self.named_parameters():
            if fragment in name:
                parameter.weight_loader = counting(name, parameter.weight_loader)
        loaded = load_weights(self, weights)
        returned.extend(name for name in loaded if fragment in name)
        return loaded

    Base.load_weights = watched
    LLM(checkpoint, **{**ENGINE, **engine})
    return {"counts": dict(counts), "returned": sorted(returned)}


def built(checkpoint: str, fragment: str = "sinks", **engine) -> list[dict]:
    """Each sink of a model that was loaded, and the attention layer in the module tree that has it."""
    from vllm import LLM

    llm = LLM(checkpoint, **{**ENGINE, **engine})
    (found,) = llm.apply_model(lambda model: _sinks(model, fragment))
    return found


def _sinks(model, fragment: str) -> list[dict]:
    from safetensors.torch import load_file
    from vllm.model_executor.layers.attention import Attention

    saved = load_file(Path(model.model_config.model) / "model.safetensors")
    layers = [
        (name, layer)
        for name, layer in model.named_modules()
        if isinstance(layer, Attention) and layer.impl.sinks is not None
    ]
    parameters = [(name, value) for name, value in model.named_parameters() if fragment in name]
    return [
        {
            "name": name,
            "dtype": str(parameter.dtype),
            "as_saved": bool((parameter.float().cpu() == saved[name].float()).all()),
            "layer": layer_name,
            "has_sink": layer.has_sink,
            "kernel_has_them": layer.impl.sinks.equal(parameter.view(-1)),
            "kernel_shares_them": layer.impl.sinks.data_ptr() == parameter.data_ptr(),
        }
        for (name, parameter), (layer_name, layer) in zip(parameters, layers, strict=True)
    ]


def attention_function(checkpoint: str, tamper: str = "") -> str:
    """Whether the attention function that a model calls is guarded."""
    import_backend()
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from vllm import LLM

    if tamper:
        call(tamper)
    (name,) = LLM(checkpoint, **ENGINE).apply_model(lambda model: model.text_config._attn_implementation)
    upstream = inspect.unwrap(ALL_ATTENTION_FUNCTIONS["vllm"])
    return "upstream" if ALL_ATTENTION_FUNCTIONS[name] is upstream else "guarded"


def mla_function_refuses() -> str:
    """What vLLM's MLA attention function says to a sink, as no kernel of MLA takes one."""
    import torch
    from torch import nn
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from vllm_tf_sinks import register

    register()
    import_backend()
    if "vllm_mla" not in ALL_ATTENTION_FUNCTIONS:
        return "no MLA"
    module = nn.Module()
    module.layer_idx = 0
    module.attn = nn.Module()
    numbers = torch.zeros(1, 2, 3, 4)
    try:
        ALL_ATTENTION_FUNCTIONS["vllm_mla"](
            module,
            numbers,
            numbers,
            numbers,
            None,
            s_aux=torch.zeros(2),
            attention_instances={0: module.attn},
        )
    except ValueError as error:
        return str(error)
    return "served"


def finds(case: str) -> list[tuple[str, int, str]]:
    """The sinks that are found in a module tree."""
    from vllm_tf_sinks.attention.sink_finder import find_sinks

    sinks = find_sinks(_TREES[case]())
    return [(sink.module_name, sink.layer_index, sink.parameter_name) for sink in sinks]


def _gpt_oss(layers: int, implementation: str):
    from transformers import GptOssConfig, GptOssModel
    from vllm.model_executor.models.transformers.utils import init_on_device_without_buffers

    from support.checkpoints import MOE, SIZES, WINDOW

    fields = {**SIZES, **WINDOW, **MOE, "num_hidden_layers": layers, "layer_types": None}
    with init_on_device_without_buffers("meta"):
        model = GptOssModel(GptOssConfig(**fields))
    model.config._attn_implementation = implementation
    return model


def _multimodal():
    """A vision tower with sinks of its own, each layer of which has the number of one of the text's."""
    from torch import nn

    model = nn.Module()
    model.model = nn.Module()
    model.model.vision_tower = _gpt_oss(3, "eager")
    model.model.language_model = _gpt_oss(2, "vllm")
    return model


def _pipeline_rank():
    """The middle of three ranks."""
    from torch import nn
    from vllm.model_executor.models.utils import PPMissingLayer

    model = nn.Module()
    model.model = _gpt_oss(3, "vllm")
    for index in (0, 2):
        model.model.layers[index] = PPMissingLayer()
    return model


def _collision():
    from torch import nn

    model = nn.Module()
    model.one = _gpt_oss(1, "vllm")
    model.other = _gpt_oss(1, "vllm")
    return model


_TREES = {"multimodal": _multimodal, "pipeline": _pipeline_rank, "collision": _collision}
