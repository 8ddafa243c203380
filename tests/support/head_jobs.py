# SPDX-License-Identifier: Apache-2.0
"""Jobs that build a model or its head and look at what became of the head."""

import time

from support.jobs import ENGINE


class Loaded(Exception):
    """Carries what a model looked like right after it was loaded."""


def inspected(checkpoint: str, is_last_rank: bool = True, **engine) -> dict:
    """What a model has for a head, once it is loaded.

    Args:
        is_last_rank: whether it is told so; where not, it is the first of two pipeline ranks.
    """
    from vllm import LLM
    from vllm.distributed.parallel_state import GroupCoordinator
    from vllm.v1.worker.cpu_worker import CPUModelRunner

    load_model = CPUModelRunner.load_model

    def load_and_stop(self, *args, **kwargs):
        load_model(self, *args, **kwargs)
        raise Loaded(_head(self.model) if is_last_rank else _no_head(self.model))

    CPUModelRunner.load_model = load_and_stop
    if not is_last_rank:
        GroupCoordinator.is_last_rank = property(lambda self: False)
    try:
        LLM(checkpoint, **{**ENGINE, **engine})
    except Loaded as loaded:
        return loaded.args[0]
    raise AssertionError("the model was not loaded")


def _no_head(model) -> dict:
    return {"parameters": [name for name, _ in model.named_parameters()], "has_logits": "compute_logits" in vars(model)}


def _head(model) -> dict:
    import torch
    from vllm.compilation.counter import compilation_counter
    from vllm.model_executor.models.transformers.causal import CausalMixin

    hidden = torch.randn(5, model.text_config.hidden_size, dtype=model.model_config.dtype)
    logits = model.compute_logits(hidden.clone())
    local = getattr(model, "compute_logits_local", lambda hidden: None)(hidden)
    return {
        "shape": tuple(logits.shape),
        "dtype": str(logits.dtype),
        "shape_of_no_rows": tuple(model.compute_logits(hidden[:0]).shape),
        "local_agrees": None if local is None else torch.equal(local[:, : logits.shape[-1]], logits),
        "models_seen": compilation_counter.num_models_seen,
        "is_stock": model.compute_logits.__func__ is CausalMixin.compute_logits
        if hasattr(model.compute_logits, "__func__")
        else False,
        "scale": model.logits_processor.scale,
        "soft_cap": model.logits_processor.soft_cap,
        "head_dtype": str(model.logits_processor.head_dtype),
        "lm_head": {name: str(p.dtype) for name, p in model.lm_head.named_parameters()},
        "output_head": {name: str(p.dtype) for name, p in model.named_parameters() if name.startswith("output_head.")},
        "shares_embeddings": any(
            p.data_ptr() == model.lm_head.weight.data_ptr() for p in model.model.get_input_embeddings().parameters()
        ),
    }


def built_alone(layers: int) -> tuple[str, float, float]:
    """The kind of a Granite's head, and the seconds to build and to classify it: no decoder may be made."""
    import torch
    from transformers import GraniteConfig, GraniteForCausalLM, GraniteModel

    from vllm_tf_sinks.lm_head.build import build_head
    from vllm_tf_sinks.lm_head.classify import classify

    def refuse(self, *args, **kwargs):
        raise AssertionError("a decoder was constructed")

    GraniteModel.__init__ = refuse
    config = GraniteConfig(num_hidden_layers=layers, hidden_size=4096, vocab_size=49155, logits_scaling=8.0)
    torch.set_default_dtype(torch.bfloat16)
    start = time.perf_counter()
    head = build_head(GraniteForCausalLM, config, None)
    built = time.perf_counter()
    spec = classify(head, config.hidden_size)
    return spec.describe(), built - start, time.perf_counter() - built


def class_asked_for(**revisions: str) -> list:
    """What Transformers is asked for, for the class of remote code at a revision."""
    from transformers import LlamaConfig

    from vllm_tf_sinks.lm_head import build

    asked = []
    build.get_class_from_dynamic_module = lambda *args, **kwargs: asked.append((args, kwargs))
    config = LlamaConfig(auto_map={"AutoModelForCausalLM": "modeling.Own"}, architectures=["Own"])
    config._name_or_path = "someone/model"
    build.causal_lm_class(config, trust_remote_code=True, **revisions)
    return asked


def pooled(checkpoint: str, prompt: list[int]) -> float:
    """How far the embedding of a prompt is from Hugging Face's last hidden state, both of length 1."""
    import torch
    from transformers import AutoModelForCausalLM
    from vllm import LLM

    from support.checkpoints import add_tokenizer

    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        hidden = reference.eval()(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0, -1]
    add_tokenizer(checkpoint)
    llm = LLM(checkpoint, runner="pooling", **{**ENGINE, "skip_tokenizer_init": False})
    (output,) = llm.embed([{"prompt_token_ids": prompt}], use_tqdm=False)
    embedding = torch.tensor(output.outputs.embedding)
    return (embedding - torch.nn.functional.normalize(hidden, dim=0)).abs().max().item()


def multimodal_kind(model_type: str) -> tuple[str, str, str, str | None]:
    """The class, the projection's name, the kind of a multimodal model's head, and what its weight may be tied to."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    from support.census import HEAD_FIELDS
    from vllm_tf_sinks.lm_head.build import build_head, causal_lm_class, tied_to
    from vllm_tf_sinks.lm_head.classify import classify

    config = CONFIG_MAPPING[model_type]()
    config.architectures = [MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[model_type]]
    text = config.get_text_config()
    for field in ("final_logit_softcapping", "vocab_size"):
        setattr(text, field, HEAD_FIELDS[field])
    head = build_head(causal_lm_class(config), config, None)
    name = head.projection.name
    return head.name, name, classify(head, text.hidden_size).describe(), tied_to(head.model, f"{name}.weight")
