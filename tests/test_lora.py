# SPDX-License-Identifier: Apache-2.0
"""LoRA: several adapters in one batch give the logprobs of the model that each was merged into, or are refused."""

import numpy as np
import pytest
from support.fork_server import JobError
from support.tp_jobs import ENV

CLOSE = 1e-4
DISTINCT = 0.05
WRONG = 1e-2
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]

# checkpoint: what is adapted, what each of two adapters calls the projection
CASES = {
    "gpt_oss": ([*ATTENTION, "embed_tokens", "lm_head"], ()),  # sinks, a head that is a projection only
    "granite": (["q_proj", "lm_head"], ()),  # a scale
    "gemma2": (["lm_head"], ()),  # a cap
    "gpt_neox": (["query_key_value", "lm_head"], ("lm_head", "embed_out")),  # as Transformers 4 called it
    "modernbert-decoder": (["Wo", "decoder"], ("decoder", "lm_head")),  # a dense layer before it
}


@pytest.fixture
def adapted(vllm, checkpoint, tmp_path):
    """Make a checkpoint and two adapters: its folder, theirs, and the rows of each adapter and of none."""

    def make(name: str, targets: list[str], tied: bool = False, **adapters):
        folder = checkpoint(vllm, name, tie_word_embeddings=tied)
        folders = [str(tmp_path / "A"), str(tmp_path / "B")]
        arguments = {"checkpoint": folder, "adapters": folders, "targets": targets, **adapters}
        return folder, folders, vllm.run("support.lora_jobs:adapted_rows", **arguments)

    return make


def difference(some: list, others: list) -> float:
    """The largest absolute difference of log-softmax rows, prompt and decode, of the same tokens."""
    worst = 0.0
    for (tokens, *rows), (other_tokens, *other_rows) in zip(some, others, strict=True):
        assert tokens == other_tokens
        worst = max(worst, *(float(np.abs(a - b).max()) for a, b in zip(rows, other_rows, strict=True)))
    return worst


def are_distinct(some: list, others: list) -> bool:
    """Whether every row of a prompt differs by more than `DISTINCT` somewhere."""
    return all(np.abs(a - b).max(axis=-1).min() > DISTINCT for (*_, a), (*_, b) in zip(some, others, strict=True))


def check(served: list, expected: list) -> None:
    for rows, right in zip(served, expected, strict=True):
        assert difference(rows, right) < CLOSE


@pytest.mark.parametrize("name", CASES)
def test_batch_of_adapters(vllm, adapted, name):
    targets, names = CASES[name]
    folder, adapters, expected = adapted(name, targets, names=names)
    one, other, none = expected
    assert are_distinct(one, other)
    assert are_distinct(one, none)
    assert are_distinct(other, none)
    check(vllm.run("support.lora_jobs:served_rows", checkpoint=folder, adapters=adapters), expected)


def test_adapters_of_tied_embeddings(vllm, adapted):
    # Merged into weights that are tied, peft's adapter of the one would change the other
    targets = ["embed_tokens", "q_proj", "lm_head"]
    folder, adapters, expected = adapted("granite", targets, tied=True, merge=False)
    check(vllm.run("support.lora_jobs:served_rows", checkpoint=folder, adapters=adapters), expected)


def test_adapters_of_two_workers(vllm, adapted):
    targets, names = CASES["granite"]
    folder, adapters, expected = adapted("granite", targets, names=names)
    job = "support.lora_jobs:served_by_two"
    check(vllm.run(job, env=ENV, checkpoint=folder, adapters=adapters), expected)


def test_adapters_with_drafts(vllm, adapted):
    """Each request has several rows of logits, all of its own adapter."""
    targets, names = CASES["granite"]
    folder, adapters, expected = adapted("granite", targets, names=names)
    served, drafted = vllm.run("support.lora_jobs:served_with_drafts", checkpoint=folder, adapters=adapters)
    check(served, expected)
    assert drafted > 0


def test_embedding_adapters_are_wrong_without_the_plugin(vllm, adapted):
    folder, adapters, expected = adapted("llama", ["embed_tokens"])
    off = {"VLLM_TF_SINKS": "0"}
    served = vllm.run("support.lora_jobs:served_rows", env=off, checkpoint=folder, adapters=adapters)
    with pytest.raises(AssertionError):
        check(served, expected)
    check(vllm.run("support.lora_jobs:served_rows", checkpoint=folder, adapters=adapters), expected)


def test_adapter_of_the_projection_is_refused_without_the_plugin(vllm, adapted):
    folder, adapters, _ = adapted("llama", ["lm_head"])
    off = {"VLLM_TF_SINKS": "0"}
    with pytest.raises(JobError, match="expected target modules"):
        vllm.run("support.lora_jobs:served_rows", env=off, checkpoint=folder, adapters=adapters)


def test_adapter_of_a_heads_dense_layer_is_refused(vllm, adapted):
    # `dense` is a name that vLLM knows, from the base model
    folder, adapters, _ = adapted("roberta", ["dense"])
    with pytest.raises(JobError, match=r"RobertaForCausalLM takes no adapter of lm_head\.dense"):
        vllm.run("support.lora_jobs:served_rows", checkpoint=folder, adapters=adapters)


def test_adapter_that_the_engine_was_not_started_for_is_refused(vllm, adapted):
    folder, adapters, _ = adapted("gpt_neox", ["query_key_value", "lm_head"])
    with pytest.raises(JobError, match="GPTNeoXForCausalLM takes no adapter of lm_head: this engine was started for"):
        vllm.run(
            "support.lora_jobs:served_rows",
            checkpoint=folder,
            adapters=adapters,
            lora_target_modules=["query_key_value"],
        )


def test_refusals_where_no_cpu_can_serve(vllm):
    refusals = vllm.run("support.lora_jobs:refusals")
    served = {case for case, refusal in refusals.items() if not refusal}
    also = {"speculative"} if vllm.run("support.lora_jobs:has_adapters_of_each_row") else set()
    assert served == {"none", "speculative, runner v1"} | also


LARGE = 258_112  # LoRA starts with no projection to so many tokens


@pytest.mark.parametrize(("vocabulary", "wrapped"), [(128, True), (LARGE, False)])
def test_what_projects(vllm, checkpoint, vocabulary, wrapped):
    folder = checkpoint(vllm, "granite", tie_word_embeddings=False, vocab_size=vocabulary)
    processor, has_shards = vllm.run("support.lora_jobs:projection", checkpoint=folder, enable_lora=True)
    assert processor == ("LogitsProcessorWithLoRA" if wrapped else "LogitsProcessor")
    assert not has_shards  # the one of LoRA gathers: vLLM then leaves out batch-sharded sampling
