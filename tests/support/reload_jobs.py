# SPDX-License-Identifier: Apache-2.0
"""Weights put into an engine that runs."""

import gc

from support.jobs import ENGINE, rows_of


def reloaded_rows(checkpoint: str, others: list[str], **engine) -> list:
    """What `served_rows` gives for the last of `others`, each loaded into an engine that runs `checkpoint`."""
    from vllm import LLM

    llm = LLM(checkpoint, **{**ENGINE, **engine})
    rows_of(llm)
    for other in others:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": other})
    llm.reset_prefix_cache()
    return rows_of(llm)


def reloaded_with(checkpoint: str, other: str, **aliases: str) -> list:
    """The same, from tensors in memory, as a trainer has them, some of them under a second name.

    Args:
        checkpoint: folder of the model.
        other: folder of the weights.
        aliases: a name, with __ for each dot, and the name of the tensor that it stands for.
    """
    from safetensors.torch import load_file
    from vllm import LLM

    weights = load_file(f"{other}/model.safetensors")
    weights |= {alias.replace("__", "."): weights[name].clone() for alias, name in aliases.items()}
    llm = LLM(checkpoint, **ENGINE)
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": list(weights.items())})
    llm.reset_prefix_cache()
    return rows_of(llm)


def reloaded_in_place(checkpoint: str, other: str, fragment: str, **engine) -> dict:
    """What an engine that runs `checkpoint` gives once it has the parameters of one that runs `other`.

    The layers of the CPU pack their weights for oneDNN. Those of other platforms, and of this job, read
    the parameters.

    Args:
        checkpoint: folder of the model.
        other: folder of the weights.
        fragment: part of the names of parameters whose memory is watched.
        engine: arguments of `LLM`.

    Returns:
        the rows of either, and whether the watched parameters and sinks of the kernels kept their memory.
    """
    from vllm import LLM
    from vllm.model_executor.layers import utils

    operations = utils.cpu_ops if hasattr(utils, "cpu_ops") else utils.ops  # from vLLM 0.34, before
    operations._supports_onednn = False
    source = LLM(other, **{**ENGINE, **engine})
    cold = rows_of(source)
    (weights,) = source.apply_model(
        lambda model: [(name, parameter.detach().clone()) for name, parameter in model.named_parameters()]
    )
    del source
    gc.collect()
    llm = LLM(checkpoint, **{**ENGINE, **engine})
    rows_of(llm)
    before = llm.apply_model(lambda model: _addresses(model, fragment))
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights, "is_checkpoint_format": False})
    llm.reset_prefix_cache()
    warm = rows_of(llm)
    return {"cold": cold, "warm": warm, "same_memory": before == llm.apply_model(lambda m: _addresses(m, fragment))}


def _addresses(model, fragment: str) -> list[int]:
    watched = [parameter for name, parameter in model.named_parameters() if fragment in name]
    kernels = [layer.impl.sinks for layer in model.modules() if getattr(layer, "has_sink", False)]
    assert watched
    return [tensor.data_ptr() for tensor in watched + kernels]


def woken_rows(checkpoint: str, other: str, level: int, **engine) -> list:
    """What `served_rows` gives for `other`, loaded into an engine that slept.

    The CPU has no sleep. What it does on a GPU is done to every tensor that loading the model made: at
    level 1 they come back as they were, at level 2 those that are buffers; the rest comes back as noise.
    """
    import torch
    from vllm import LLM
    from vllm.v1.worker.cpu_worker import CPUModelRunner

    made: list[torch.Tensor] = []
    load_model = CPUModelRunner.load_model

    def noting(self, *args, **kwargs):
        before = {id(tensor) for tensor in _tensors()}
        load_model(self, *args, **kwargs)
        made.extend(tensor for tensor in _tensors() if id(tensor) not in before and not tensor.is_meta)

    CPUModelRunner.load_model = noting
    llm = LLM(checkpoint, **{**ENGINE, **engine})
    rows_of(llm)
    (buffers,) = llm.apply_model(lambda model: list(model.buffers()))
    saved = [(tensor, tensor.clone()) for tensor in (made if level == 1 else buffers)]
    for tensor in made:
        if tensor.is_floating_point():
            tensor.data.fill_(float("nan"))
    for tensor, value in saved:
        tensor.data.copy_(value)
    llm.collective_rpc("reload_weights", kwargs={"weights_path": other})
    llm.reset_prefix_cache()
    return rows_of(llm)


def _tensors() -> list:
    import torch

    gc.collect()
    return [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
