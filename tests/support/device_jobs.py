# SPDX-License-Identifier: Apache-2.0
"""Jobs that build a model with another device than the CPU for all that says no device, as vLLM does on GPUs."""

import sys

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import vllm_tf_sinks
from vllm_tf_sinks import compat

(PACKAGE,) = vllm_tf_sinks.__path__
MEANT = f"{PACKAGE}/attention/dry_run.py"  # works on the meta device itself


class Strays(TorchFunctionMode):
    """Notes each tensor that the package makes where it happens to be, and not on a device that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.places: set[str] = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        frame = sys._getframe(1)
        file = frame.f_code.co_filename
        is_new = not any(isinstance(value, torch.Tensor) for value in tree_leaves((args, kwargs)))
        if is_new and getattr(result, "is_meta", False) and "device" not in (kwargs or {}) and _is_ours(file):
            self.places.add(f"{file.removeprefix(PACKAGE)}:{frame.f_lineno}")
        return result


def _is_ours(file: str) -> bool:
    return file.startswith(PACKAGE) and file != MEANT


def built_elsewhere(checkpoint: str) -> dict:
    """Build a model on the meta device, where nothing can be computed with a tensor on the CPU, and call its head."""
    config = compat.engine.configuration(checkpoint, max_model_len=128)
    with Strays() as strays, compat.engine.built_on_meta(config) as model:
        for module in model.modules():
            module.cpu_linear = F.linear  # the CPU's own is made when weights have been loaded
        size, dtype = model.text_config.hidden_size, model.model_config.dtype
        logits = model.compute_logits(torch.empty(3, size, dtype=dtype, device="meta"))
        tensors = [*model.named_parameters(), *model.named_buffers()]
        return {
            "strays": sorted(strays.places),
            "logits": (str(logits.device), tuple(logits.shape)),
            "vocabulary": model.text_config.vocab_size,
            "elsewhere": [name for name, tensor in tensors if not tensor.is_meta],
        }
