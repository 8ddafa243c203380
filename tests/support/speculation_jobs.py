# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: drafts, and targets that are served with them."""

import json
from pathlib import Path

from support.checkpoints import GRANITE, REMOTE_CODE, SIZES, randomise
from support.jobs import ENGINE, PROMPTS, rows_of


def eagle_draft(name: str, folder: str) -> str:
    """Save an EAGLE draft of one random layer, which is given the embeddings and the projection of its target."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(**{**SIZES, "num_hidden_layers": 1})
    model = LlamaForCausalLM(config)
    randomise(model)
    size = config.hidden_size
    layer = {f"layers.0.{key}": tensor for key, tensor in model.model.layers[0].state_dict().items()}
    del layer["layers.0.input_layernorm.weight"]
    model.save_pretrained(folder)
    save_file(layer | {"fc.weight": 0.15 * torch.randn(size, 2 * size)}, f"{folder}/model.safetensors")
    return folder


def mtp_checkpoint(name: str, folder: str) -> str:
    """Save a random Granite of remote code, whose last layer predicts one token more."""
    import shutil
    import sys

    import torch
    from safetensors.torch import load_file, save_file

    sys.path.insert(0, str(REMOTE_CODE))
    import mtp_granite

    torch.manual_seed(0)
    layers = SIZES["num_hidden_layers"]
    config = mtp_granite.Config(**{**SIZES, **GRANITE, "num_hidden_layers": layers + 1, "logits_scaling": 7.3})
    config.architectures = ["ForCausalLM"]
    config.auto_map = {
        "AutoConfig": "mtp_granite.Config",
        "AutoModel": "mtp_granite.Model",
        "AutoModelForCausalLM": "mtp_granite.ForCausalLM",
    }
    model = mtp_granite.ForCausalLM(config)
    randomise(model)
    model.save_pretrained(folder)
    shutil.copy(REMOTE_CODE / "mtp_granite.py", folder)
    weights, size = f"{folder}/model.safetensors", config.hidden_size
    tensors = load_file(weights)
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"model.layers.{layers}.{norm}.weight"] = 1 + 0.2 * torch.randn(size)
    tensors[f"model.layers.{layers}.eh_proj.weight"] = 0.15 * torch.randn(size, 2 * size)
    save_file(tensors, weights, metadata={"format": "pt"})
    path = Path(folder) / "config.json"
    fields = json.loads(path.read_text()) | {"num_hidden_layers": layers, "num_mtp_layers": 1}
    path.write_text(json.dumps(fields))
    return folder


def looping_prompt(checkpoint: str) -> list[int]:
    """A prompt of one token that the model goes on with, so that its own n-grams are right drafts."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = torch.arange(model.config.vocab_size)
    prompts = tokens[:, None].repeat(1, 12)
    with torch.no_grad():
        loops = model(prompts, use_cache=False).logits[:, -1].argmax(-1) == tokens
    return prompts[loops][0].tolist()


def speculated(checkpoint: str, speculative_config: dict, prompts=PROMPTS, **engine) -> dict:
    """What comes of serving `checkpoint` with drafts.

    Returns:
        rows: what `rows_of` returns; drafted, accepted: numbers of tokens; and what `_heads` returns.
    """
    from vllm import LLM

    config = {"num_speculative_tokens": 3, **speculative_config}
    llm = LLM(checkpoint, **{**ENGINE, "speculative_config": config, "disable_log_stats": False, **engine})
    rows = rows_of(llm, prompts)
    for new_tokens, decode_rows, _ in rows:
        assert new_tokens == decode_rows.argmax(-1).tolist(), "not greedy"
    counts = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    (heads,) = llm.collective_rpc(_heads)
    return {
        "rows": rows,
        "drafted": counts["vllm:spec_decode_num_draft_tokens"],
        "accepted": counts["vllm:spec_decode_num_accepted_tokens"],
        **heads,
    }


def _heads(worker) -> dict:
    """Of target and draft: whether one projection serves both, whether the target computes with whatever it is now."""
    import torch

    from vllm_tf_sinks.model_state import state_of

    runner = worker.model_runner
    drafter = runner.drafter if hasattr(runner, "drafter") else runner.speculator  # of model runner v1, v2
    target, draft = runner.model, getattr(drafter, "model", None)
    own = target.lm_head
    hidden = torch.randn(3, target.text_config.hidden_size)
    with torch.no_grad():
        before = target.compute_logits(hidden.clone())
        target.lm_head = _negated(own)
        negated = target.compute_logits(hidden.clone())
        target.lm_head = own
        after = target.compute_logits(hidden.clone())
    return {
        "draft": type(draft).__name__,
        "shares_projection": getattr(draft, "lm_head", None) is own,
        "draft_has_own_head": draft is not None and state_of(draft).head is not None,
        "follows_projection": not torch.allclose(negated, before) and torch.equal(before, after),
    }


def _negated(lm_head):
    """A projection that gives the negative of what `lm_head` does, as LoRA gives one that adds to it."""
    from copy import copy

    class Negative:
        def apply(self, layer, x, bias=None):
            return -lm_head.quant_method.apply(lm_head, x, bias)

    other = copy(lm_head)
    other.quant_method = Negative()
    return other


def no_multi_token_prediction() -> str:
    """Why the Transformers backend builds no draft out of a model's own layers here, or ""."""
    import transformers
    from packaging.version import Version
    from vllm.model_executor.models import transformers as backend

    if not hasattr(backend, "TransformersForMTP"):
        return "this vLLM has no TransformersForMTP"
    if Version(transformers.__version__) < Version("5.20"):
        return "Transformers has no MtpModel before 5.20"
    return ""
