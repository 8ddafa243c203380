# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with layers in 8-bit integers, as compressed-tensors stores them, and what they should give."""

import json
import re
import shutil
import tempfile
from pathlib import Path

import numpy as np

SCALE = "_scale"
# The CPU kernel adds pairs of products in 16 bits where the processor has no VNNI: 7-bit weights never overflow that
LARGEST = 63

CHANNELS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
# vLLM's kernel for symmetric inputs on a CPU with AMX takes no batch axis, which this backend's models always have
TOKENS = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "token", "dynamic": True}


def quantise(name: str, folder: str, source: str, layers: str, targets: list[str], ignore: list[str]) -> str:
    """Copy the checkpoint `source` to `folder` with the layers that match `layers` quantised.

    Args:
        targets: what the config says is quantised, layers or classes.
        ignore: what it says is not.
    """
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder, dirs_exist_ok=True)
    path = Path(folder) / "model.safetensors"
    tensors = load_file(path)
    for key, weight in list(tensors.items()):
        if key.endswith(".weight") and weight.dim() == 2 and re.search(layers, key.removesuffix(".weight")):
            scale = weight.abs().amax(1, keepdim=True) / LARGEST
            tensors |= {key: (weight / scale).round().to(torch.int8), key + SCALE: scale}
    save_file(tensors, path, metadata={"format": "pt"})
    groups = {"group_0": {"targets": targets, "weights": CHANNELS, "input_activations": TOKENS}}
    return tag(folder, config_groups=groups, ignore=ignore, format="int-quantized")


def tag(folder: str, **fields) -> str:
    """Let the config of the checkpoint in `folder` say that compressed-tensors quantised it."""
    path = Path(folder) / "config.json"
    quantization = {"quant_method": "compressed-tensors", "quantization_status": "compressed", **fields}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantization}))
    return folder


def with_embeddings_in_four_bits(name: str, folder: str, source: str) -> str:
    """Copy the checkpoint `source` to `folder`, and let the config say that its embeddings have 4 bits."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    groups = {"group_0": {"targets": ["Embedding"], "weights": CHANNELS | {"num_bits": 4}, "input_activations": None}}
    return tag(folder, config_groups=groups, ignore=[], format="pack-quantized")


def reference_rows(checkpoint: str, sequences: list[list[int]]) -> list[np.ndarray]:
    """Hugging Face eager's log-softmax rows [T, V] of each sequence, in the arithmetic of 8-bit layers.

    Their weights are the stored integers times scales, their inputs are rounded to 256 levels a token.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    tensors = load_file(Path(checkpoint) / "model.safetensors")
    quantised = [key.removesuffix(SCALE) for key in tensors if key.endswith(SCALE)]
    for key in quantised:
        tensors[key] = tensors[key] * tensors.pop(key + SCALE)
    config = json.loads((Path(checkpoint) / "config.json").read_text())
    del config["quantization_config"]
    with tempfile.TemporaryDirectory() as folder:
        save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        (Path(folder) / "config.json").write_text(json.dumps(config))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    for key in quantised:
        model.get_submodule(key.removesuffix(".weight")).register_forward_pre_hook(_round_input)
    with torch.no_grad():
        return [
            torch.log_softmax(model(torch.tensor([tokens]), use_cache=False).logits[0].double(), -1).numpy()
            for tokens in sequences
        ]


def _round_input(_, inputs):
    (x,) = inputs
    lowest, highest = x.aminmax(dim=-1, keepdim=True)
    step = (highest - lowest) / 255
    zero = (-128 - lowest / step).round()
    return (((x / step + zero).round().clamp(-128, 127) - zero) * step,)
