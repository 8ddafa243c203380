# SPDX-License-Identifier: Apache-2.0
"""The table of patches: what the log, `status()`, the docs and the tests read."""

from vllm_tf_sinks import vllm_api
from vllm_tf_sinks.patches.patch import Patch


def _always_needed() -> str:
    return ""


CATALOGUE = (
    Patch(
        name="sinks.config",
        targets=(f"{vllm_api.BACKEND}.base:Base._patch_config",),
        parameters=("self",),
        replacement="vllm_tf_sinks.sinks.guards:refuse_by_config",
        why="models whose sinks belong to no ordinary attention fail in the dark while they are built, and the CPU "
        "misreads a KV cache whose dtype has another size than the model's",
        has=_always_needed,
        upstream="none yet",
        until="vLLM refuses them by name, or serves them",
    ),
    Patch(
        name="sinks.find",
        targets=(f"{vllm_api.BACKEND}.base:Base.pipeline_parallel",),
        parameters=("self",),
        replacement="vllm_tf_sinks.sinks.layers:find_after_pipeline_split",
        why="vLLM looks for a sink in one form only, from 0.30, and refuses late or not at all what cannot apply it",
        has=_always_needed,
        upstream="none yet",
        until="vLLM finds sinks by what a module passes and checks them before it allocates",
    ),
    Patch(
        name="sinks.layers",
        targets=(
            f"{vllm_api.BACKEND}.base:Base._create_attention_instances",
            f"{vllm_api.BACKEND}.base:Base.create_attention_instances",
        ),
        parameters=("self",),
        replacement="vllm_tf_sinks.sinks.layers:build_with_sinks",
        why="attention layers are built without sinks up to 0.29; later without those that are passed as an "
        "expression, kept in float32, or not sharded",
        has=_always_needed,
        upstream="sinks in the Transformers backend, vLLM 0.30",
        until="vLLM 0.30 is the oldest supported and its gaps are closed",
    ),
    Patch(
        name="sinks.attention",
        targets=("transformers.modeling_utils:ALL_ATTENTION_FUNCTIONS[vllm]",),
        parameters=("module", "query", "key", "value", "attention_mask"),
        replacement="vllm_tf_sinks.sinks.guards:guard_attention",
        why="a sink that did not reach its attention layer is dropped without a word",
        has=vllm_api.layers_take_sinks,
        upstream="check_sinks, vLLM 0.30",
        until="vLLM 0.30 is the oldest supported",
    ),
    Patch(
        name="sinks.mla_attention",
        targets=("transformers.modeling_utils:ALL_ATTENTION_FUNCTIONS[vllm_mla]",),
        parameters=("module", "query", "kv_c_normed", "k_pe", "attention_mask"),
        replacement="vllm_tf_sinks.sinks.guards:guard_attention",
        why="MLA layers take no sinks, and drop them without a word",
        has=vllm_api.no_mla_function,
        upstream="check_sinks, vLLM 0.30",
        until="vLLM 0.30 is the oldest supported",
    ),
    Patch(
        name="head.tie",
        targets=(f"{vllm_api.BACKEND}.base:Base._get_tie_word_embeddings",),
        parameters=("self",),
        replacement="vllm_tf_sinks.head.install:ties_as_transformers",
        why="vLLM ties every projection to the input embeddings where the config says so, though not every class does",
        has=vllm_api.runs_own_heads,
        upstream="none yet",
        until="vLLM runs the model's own head",
    ),
    Patch(
        name="head.init",
        targets=(f"{vllm_api.BACKEND}.causal:CausalMixin.__init__",),
        parameters=("self", "vllm_config", "prefix"),
        replacement="vllm_tf_sinks.head.install:init_with_head",
        why="vLLM takes every output head for a plain lm_head, adjusted by two fields of the config",
        has=vllm_api.runs_own_heads,
        upstream="none yet",
        until="vLLM runs the model's own head",
    ),
    Patch(
        name="head.load",
        targets=(f"{vllm_api.BACKEND}.causal:CausalMixin.load_weights",),
        parameters=("self", "weights"),
        replacement="vllm_tf_sinks.head.install:load_with_head",
        why="vLLM knows no weights of an output head but lm_head.weight and lm_head.bias",
        has=vllm_api.runs_own_heads,
        upstream="none yet",
        until="vLLM runs the model's own head",
    ),
    Patch(
        name="head.embedding_adapters",
        targets=(
            "vllm.lora.layers.vocab_parallel_embedding:VocabParallelEmbeddingWithLoRA.forward",
            "vllm.lora.layers.vocal_parallel_embedding:VocabParallelEmbeddingWithLoRA.forward",
        ),
        parameters=("self", "x"),
        replacement="vllm_tf_sinks.head.lora:embed_flat",
        why="the Transformers backend embeds a batch [1, N], of which every token gets the first one's adapter",
        has=_always_needed,
        upstream="none yet",
        until="vLLM's LoRA embeds tokens of any shape",
    ),
)
    Patch(
        name="head.cpu_adapters",
        targets=("vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU.__init__",),
        parameters=("self", "max_num_batched_tokens", "max_batches", "device"),
        replacement="vllm_tf_sinks.head.lora:init_for_adapted_rows",
        why="LoRA's CPU kernels give requests without an adapter the weights of the last one",
        has=vllm_api.leaves_unadapted_rows,
        upstream="no_lora_mask in LoRA's torch operations, vLLM 0.33",
        until="vLLM 0.33 is the oldest supported",
    ),
