# SPDX-License-Identifier: Apache-2.0
"""Jobs about adapters: peft makes them and says what is right, vLLM serves several in one batch."""

import inspect
from pathlib import Path

import numpy as np

from support.jobs import ENGINE, NEW_TOKENS, PROMPTS, rows_of
from support.tp_jobs import two_workers

RANK = 8
LORA = {"enable_lora": True, "max_lora_rank": RANK}


def adapted_rows(
    checkpoint: str, adapters: list[str], targets: list[str], names: tuple[str, ...] = (), merge: bool = True
) -> list:
    """Save a random adapter to each folder of `adapters`, and evaluate Hugging Face's model with it, and without any.

    Args:
        targets: the modules that are adapted.
        names: what each adapter calls the projection, where that is not what the model calls it.
        merge: merge an adapter into the weights; else it runs beside them.

    Returns:
        For each adapter and for none, for each prompt: new tokens [N], decode rows [N, V], prompt rows [T - 1, V].
    """
    import torch
    from transformers import AutoModelForCausalLM

    results = []
    for seed, folder in enumerate([*adapters, None]):
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
        if folder:
            projection = next(name for name, m in model.named_modules() if m is model.get_output_embeddings())
            model = _adapted(model, folder, targets, seed)
            if names:
                _rename(folder, f".{projection}.lora_", f".{names[seed]}.lora_")
            if merge:
                model = model.merge_and_unload()
        results.append([_greedy(model.eval(), prompt) for prompt in PROMPTS])
    return results


def _adapted(model, folder: str, targets: list[str], seed: int):
    import torch
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=targets))
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(0.15 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def _rename(folder: str, old: str, new: str) -> None:
    from safetensors.torch import load_file, save_file

    path = Path(folder) / "adapter_model.safetensors"
    tensors = load_file(path)
    assert any(old in name for name in tensors), f"none of {sorted(tensors)} has {old}"
    save_file({name.replace(old, new): tensor for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def _greedy(model, prompt: list[int]) -> tuple[list[int], np.ndarray, np.ndarray]:
    import torch

    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            rows = torch.log_softmax(model(torch.tensor([tokens]), use_cache=False).logits[0].double(), -1).numpy()
            tokens.append(int(rows[-1].argmax()))
    last = len(prompt) - 1
    return tokens[len(prompt) :], rows[last:], rows[:last]


def served_rows(checkpoint: str, adapters: list[str], **engine) -> list:
    """What `adapted_rows` returns, by one batch of one engine."""
    return _rows(_engine(checkpoint, adapters, **engine), adapters)


def _engine(checkpoint: str, adapters: list[str], **engine):
    from vllm import LLM

    batch = {
        "max_loras": len(adapters),
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,  # the longest prompts are cut, and run beside requests that decode
    }
    return LLM(checkpoint, **{**ENGINE, **LORA, **batch, **engine})


def _rows(llm, adapters: list[str]) -> list:
    from vllm.lora.request import LoRARequest

    choices = [LoRARequest(folder, number, folder) for number, folder in enumerate(adapters, 1)] + [None]
    requests = [(prompt, adapter) for adapter in choices for prompt in PROMPTS]
    rows = rows_of(llm, *map(list, zip(*requests, strict=True)))
    return [rows[i : i + len(PROMPTS)] for i in range(0, len(rows), len(PROMPTS))]


def served_with_drafts(checkpoint: str, adapters: list[str], **engine) -> tuple[list, int]:
    """What `served_rows` returns where n-grams are drafts, and the number of tokens that were drafted."""
    drafts = {"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 1, "num_speculative_tokens": 3}
    options = {"speculative_config": drafts, "max_num_batched_tokens": 64, "disable_log_stats": False}
    llm = _engine(checkpoint, adapters, **options, **engine)
    rows = _rows(llm, adapters)
    counts = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return rows, counts["vllm:spec_decode_num_draft_tokens"]


def served_by_two(checkpoint: str, adapters: list[str], **engine) -> list:
    """What `served_rows` returns with a tensor-parallel size of 2."""
    with two_workers():
        return served_rows(checkpoint, adapters, tensor_parallel_size=2, **engine)


def projection(checkpoint: str, **engine) -> tuple[str, bool]:
    """The class of what projects to logits, and whether each rank can be left its shard of them."""
    from vllm import LLM

    llm = LLM(checkpoint, **{**ENGINE, **engine})
    (answer,) = llm.apply_model(
        lambda model: (type(model.logits_processor).__name__, hasattr(model, "compute_logits_local"))
    )
    return answer


def has_adapters_of_each_row() -> bool:
    """Whether model runner v2 has an adapter for each row of logits, of which a request with drafts has several."""
    from vllm.v1.worker.gpu.lora_utils import LoraState

    return "num_logits" in inspect.signature(LoraState.make_lora_inputs).parameters


def refusals() -> dict[str, str]:
    """Why adapters of a projection are refused where no CPU can serve the model."""
    from types import SimpleNamespace

    from vllm_tf_sinks.compat.lora import refusal_of_output_adapters

    def refusal(**settings) -> str:
        lora = SimpleNamespace(target_modules=None)
        config = {"lora_config": lora, "speculative_config": None, "use_v2_model_runner": True, **settings}
        return refusal_of_output_adapters(SimpleNamespace(vllm_config=SimpleNamespace(**config)), 128)

    multimodal = SimpleNamespace(get_mm_mapping=None)
    return {
        "none": refusal(),
        "multimodal": refusal_of_output_adapters(multimodal, 128),
        "speculative": refusal(speculative_config=SimpleNamespace()),
        "speculative, runner v1": refusal(speculative_config=SimpleNamespace(), use_v2_model_runner=False),
    }
