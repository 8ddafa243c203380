# SPDX-License-Identifier: Apache-2.0
"""Engines that follow one another in one process: each model gets its own sinks and head, and nothing of the last."""

from support.comparison import from_hugging_face

CLOSE = 1e-4
WRONG = 1.0


def served_in_turn(vllm, folders, **options) -> list[float]:
    """How far the rows of each model are from Hugging Face's; every model is gone with its engine."""
    turns = vllm.run("support.process_jobs:served_in_turn", checkpoints=folders, **options)
    assert all(gone for _, gone in turns)
    return [from_hugging_face(vllm, folder, served) for folder, (served, _) in zip(folders, turns, strict=True)]


def test_models_in_turn(vllm, checkpoint):
    """With sinks, with neither, with a scaled head, with a head that has weights, and with other sinks."""
    names = ["gpt_oss", "llama", "granite", "modernbert-decoder"]
    folders = [*(checkpoint(vllm, name) for name in names), checkpoint(vllm, "gpt_oss", seed=1)]
    assert max(served_in_turn(vllm, folders)) < CLOSE


def test_taken_back_and_registered_again_between_engines(vllm, checkpoint):
    folder = checkpoint(vllm, "granite_swa_scaled")
    before = ["", "vllm_tf_sinks:revert", "vllm_tf_sinks:register"]
    on, off, again = served_in_turn(vllm, [folder] * 3, before=before)
    assert on < CLOSE
    assert off > WRONG
    assert again < CLOSE
