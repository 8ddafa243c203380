# SPDX-License-Identifier: Apache-2.0
"""The demo's models: SmolLM2's weights as a Granite and as a GraniteSWA, and a small random GPT-OSS."""

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteSWAConfig,
    GraniteSWAForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
LOGITS_SCALING = 8

TALK = [
    {"role": "user", "content": "Tell me about the town where you grew up."},
    {
        "role": "assistant",
        "content": "It was a small town by a river. The library opened in 1923 and holds forty thousand "
        "books. Every Saturday, volunteers read stories to children, and in the evening the choir sings in "
        "the hall. Last year the roof was repaired, which cost more than expected, so the bakers sold cakes "
        "to pay for it. There are two schools, a market with fruit and fish, and a bridge that was built of "
        "stone from the hills.",
    },
]

Made = tuple[PreTrainedModel, PreTrainedTokenizerBase]


def smollm2(gguf: Path) -> Made:
    """SmolLM2 itself, an ordinary Llama, out of the folder with its GGUF file."""
    quantized = LlamaForCausalLM.from_pretrained(gguf, gguf_file=GGUF, dtype=torch.float32)
    config = quantized.config.to_dict()
    del config["quantization_config"]  # with it a model can't be saved
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(quantized.state_dict())
    return model, AutoTokenizer.from_pretrained(gguf, gguf_file=GGUF)


def granite(llama: Path) -> Made:
    """SmolLM2 as a Granite: the same function, with logits that have to be divided by 8."""
    source, tokenizer = _load(llama)
    return _recast(source, GraniteForCausalLM(GraniteConfig(**_as_granite(source)))), tokenizer


def granite_swa(llama: Path) -> Made:
    """SmolLM2 as a GraniteSWA that depends on its sinks, as one that was trained with them does."""
    source, tokenizer = _load(llama)
    config = GraniteSWAConfig(**_as_granite(source), sliding_window=32)
    model = _recast(source, GraniteSWAForCausalLM(config))
    _set_sinks(model)
    text = tokenizer.apply_chat_template(TALK, tokenize=False)
    _lean_on_sinks(model, source, tokenizer(text, return_tensors="pt").input_ids)
    return model, tokenizer


def gpt_oss(llama: Path) -> Made:
    """A small GPT-OSS with random weights, which shares only the tokenizer with SmolLM2."""
    tokenizer = AutoTokenizer.from_pretrained(llama)
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=16,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = GptOssForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too, which start as ones and zeros
            parameter.add_(torch.randn_like(parameter) * 0.2)
    _set_sinks(model)
    return model, tokenizer


def checkpoint(make: Callable[[Path], Made], source: Path, cache: Path) -> Path:
    """The folder of the model that `make` builds from `source`, made once for each version of this file."""
    version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]
    folder = cache / f"{make.__name__}-{version}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            made = Path(scratch) / "made"
            for part in make(source):
                part.save_pretrained(made)
            made.rename(folder)
    return folder


def _load(llama: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    return LlamaForCausalLM.from_pretrained(llama), AutoTokenizer.from_pretrained(llama)


def _as_granite(source: LlamaForCausalLM) -> dict[str, Any]:
    """The configuration of a Granite that computes what the Llama does, its embeddings times 8."""
    same = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
        "hidden_act max_position_embeddings rms_norm_eps rope_parameters tie_word_embeddings "
        "bos_token_id eos_token_id pad_token_id"
    )
    return {
        **{name: getattr(source.config, name) for name in same.split()},
        "embedding_multiplier": 1 / LOGITS_SCALING,
        "logits_scaling": LOGITS_SCALING,
        "residual_multiplier": 1.0,
        "attention_multiplier": source.config.head_dim**-0.5,
    }


def _recast(source: LlamaForCausalLM, model: PreTrainedModel) -> PreTrainedModel:
    weights = source.state_dict()
    embeddings = weights["model.embed_tokens.weight"] * LOGITS_SCALING
    tied = {"model.embed_tokens.weight": embeddings, "lm_head.weight": embeddings}
    model.load_state_dict(weights | tied, strict=False)  # a Llama has no sinks
    return model


@torch.no_grad()
def _set_sinks(model: PreTrainedModel) -> None:
    """Sinks from -2 to 4, in steps that bfloat16 holds: up to 0.30 vLLM's CPU kernel takes no other type."""
    torch.manual_seed(1)
    for layer in model.model.layers:
        layer.self_attn.sinks.uniform_(-8, 16).round_().div_(4)


@torch.no_grad()
def _lean_on_sinks(model: PreTrainedModel, source: PreTrainedModel, tokens: torch.Tensor) -> None:
    """Scale what each head adds, so that with its sinks, and only with them, the model talks as `source`."""
    by_head = (-1, model.config.num_attention_heads, source.config.head_dim)
    wanted: list[torch.Tensor] = []

    def note(_: torch.nn.Linear, args: tuple[torch.Tensor]) -> None:
        wanted.append(args[0].view(by_head))

    def fit(projection: torch.nn.Linear, args: tuple[torch.Tensor]) -> None:
        ours, theirs = args[0].view(by_head), wanted.pop(0)
        gain = (ours * theirs).sum((0, 2)) / ours.square().sum((0, 2))
        projection.weight.mul_(gain.repeat_interleave(ours.shape[-1]))

    model.set_attn_implementation("eager")
    for run, hook in ((source, note), (model, fit)):
        handles = [layer.self_attn.o_proj.register_forward_pre_hook(hook) for layer in run.model.layers]
        run(tokens)
        for handle in handles:
            handle.remove()
