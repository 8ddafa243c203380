# SPDX-License-Identifier: Apache-2.0
"""Compare the logprobs of vLLM's Transformers backend with those of Hugging Face's eager code.

Hugging Face runs first, and continues each prompt greedily. vLLM gets the same prompts. Its logprobs of the same
tokens are compared with Hugging Face's: those of the prompt, computed in one pass, and those of the new tokens,
computed one by one. If vLLM's greedy text differs at a token, the tokens after it cannot be compared.

Shapes: T tokens of a prompt, N new tokens, V vocabulary size. K is 1 if the logprob of each token is compared, and V
if the logprobs of all tokens are.
"""

import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_tf_sinks.parity.fork_server import ForkServer, JobError
from vllm_tf_sinks.settings import VARIABLE

Floats = NDArray[np.float64]
Booleans = NDArray[np.bool_]

# The largest mean difference that agrees, by the dtype of the model; a single difference may be LARGEST times that
TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
LARGEST = 20

ON, OFF = "plugin on", "plugin off"
AGREES, DIFFERS, REFUSED = "agrees", "differs", "refused"


@dataclass(frozen=True)
class SequenceLogprobs:
    """The logprobs of a prompt and its greedy continuation.

    Attributes:
        tokens: the T + N tokens of the prompt and its continuation.
        prompt_length: T.
        logprobs: [T + N - 1, K], in nats: of each token but the first, given those before it; NaN if unknown.
        best: [T + N - 1], the most likely token at each of these places.
    """

    tokens: list[int]
    prompt_length: int
    logprobs: Floats
    best: NDArray[np.int64]


@dataclass(frozen=True)
class Reference:
    """The logprobs of Hugging Face.

    Attributes:
        model: path or hub id.
        dtype: the dtype of the model, `float32` for example.
        sequences: one for each prompt.
        words: the text of each token, for each of `sequences`; empty without a tokenizer.
    """

    model: str
    dtype: str
    sequences: list[SequenceLogprobs]
    words: list[list[str]]

    def save(self, path: Path) -> None:
        """Write the reference to the file `path`, which `load` reads on any machine."""
        header = {
            "model": self.model,
            "dtype": self.dtype,
            "tokens": [sequence.tokens for sequence in self.sequences],
            "prompt_lengths": [sequence.prompt_length for sequence in self.sequences],
            "words": self.words,
        }
        with path.open("wb") as file:
            np.savez_compressed(
                file,
                header=np.array(json.dumps(header)),
                logprobs=np.concatenate([sequence.logprobs for sequence in self.sequences]),
                best=np.concatenate([sequence.best for sequence in self.sequences]),
            )

    @classmethod
    def load(cls, path: Path) -> "Reference":
        """Read a file that `save` wrote.

        Raises:
            OSError: if the file cannot be read.
            ValueError: naming the file, if `save` did not write it.
        """
        try:
            with np.load(path) as file:
                header = json.loads(str(file["header"]))
                logprobs, best = file["logprobs"], file["best"]
        except (AttributeError, EOFError, KeyError, ValueError, zipfile.BadZipFile) as error:
            raise ValueError(
                f"{path} was not written by --save-reference. Write a reference with this option first."
            ) from error
        ends = np.cumsum([len(tokens) - 1 for tokens in header["tokens"]])[:-1]
        parts = zip(
            header["tokens"], header["prompt_lengths"], np.split(logprobs, ends), np.split(best, ends), strict=True
        )
        return cls(header["model"], header["dtype"], [SequenceLogprobs(*part) for part in parts], header["words"])


@dataclass(frozen=True)
class Statistics:
    """Statistics of the absolute differences between logprobs, in nats.

    Attributes:
        compared: the number of places that were compared.
        of: the number of all places.
        mean, median, q90, q99, largest: mean, quantiles and maximum over the places that were compared.
        greedy: the number of compared places at which both have the same most likely token.
    """

    compared: int
    of: int
    mean: float
    median: float
    q90: float
    q99: float
    largest: float
    greedy: int


@dataclass(frozen=True)
class Comparison:
    """Logprobs of vLLM and of Hugging Face at each place, which is a token of a prompt or of its continuation.

    Attributes:
        prompt: [places], index of the prompt.
        position: [places], index of the token in its sequence.
        is_new: [places], whether the token belongs to the continuation.
        reference, served: [places, K], the logprobs of Hugging Face and of vLLM; NaN if unknown.
        same_best: [places], whether both have the same most likely token.
    """

    prompt: NDArray[np.int64]
    position: NDArray[np.int64]
    is_new: Booleans
    reference: Floats
    served: Floats
    same_best: Booleans

    @property
    def differences(self) -> Floats:
        """Absolute differences [places, K]; NaN if unknown."""
        with np.errstate(invalid="ignore"):  # two -inf are equal
            apart: Floats = np.where(self.reference == self.served, 0.0, np.abs(self.reference - self.served))
        return apart

    @property
    def difference(self) -> Floats:
        """The largest absolute difference at each place, [places]."""
        largest: Floats = self.differences.max(axis=1)
        return largest

    def statistics(self, is_new: bool) -> Statistics:
        """Statistics of the new tokens if `is_new`, else of the prompts."""
        part = self.is_new == is_new
        difference = self.difference[part]
        known = ~np.isnan(difference)
        numbers = difference[known] if known.any() else np.array([np.nan])
        median, q90, q99 = (float(q) for q in np.quantile(numbers, (0.5, 0.9, 0.99)))
        return Statistics(
            compared=int(known.sum()),
            of=int(part.sum()),
            mean=float(numbers.mean()),
            median=median,
            q90=q90,
            q99=q99,
            largest=float(numbers.max()),
            greedy=int(self.same_best[part][known].sum()),
        )

    def worst(self, count: int) -> list[int]:
        """The indices of up to `count` places with the largest differences, largest first."""
        difference = self.difference
        order = np.argsort(-np.nan_to_num(difference, nan=-1.0), kind="stable")[:count]
        return [int(place) for place in order if difference[place] > 0]

    def agrees(self, tolerance: float) -> bool:
        """Whether prompts and new tokens agree: mean difference up to `tolerance`, largest up to LARGEST times that."""
        for statistics in (self.statistics(False), self.statistics(True)):
            # In this form of the condition NaN does not agree
            if not (statistics.mean <= tolerance and statistics.largest <= LARGEST * tolerance):
                return False
        return True


def compare(reference: Sequence[SequenceLogprobs], served: Sequence[SequenceLogprobs]) -> Comparison:
    """Compare the sequences of `served` with those of `reference`. Both have the same tokens."""
    places = [
        (index, sequence, at) for index, sequence in enumerate(reference) for at in range(1, len(sequence.tokens))
    ]
    return Comparison(
        np.array([index for index, _, _ in places]),
        np.array([at for _, _, at in places]),
        np.array([at >= sequence.prompt_length for _, sequence, at in places]),
        np.concatenate([sequence.logprobs for sequence in reference]),
        np.concatenate([sequence.logprobs for sequence in served]),
        np.concatenate([one.best == other.best for one, other in zip(reference, served, strict=True)]),
    )


@dataclass
class Run:
    """The outcome of serving a model with the plugin on or off.

    Attributes:
        plugin: `plugin on` or `plugin off`.
        outcome: `agrees`, `differs` or `refused`.
        reason: the error in one line, if the model is refused.
        comparison: None if the model is refused.
        log: the traceback and the log, if the model is refused.
    """

    plugin: str
    outcome: str
    reason: str = ""
    comparison: Comparison | None = None
    log: str = ""


def run_vllm(
    processes: ForkServer,
    plugin: str,
    model: str,
    reference: Reference,
    tolerance: float,
    engine: Mapping[str, Any],
    on_progress: Callable[[tuple[int, int]], None] | None = None,
    env: Mapping[str, str] | None = None,
) -> Run:
    """Serve `model` with the `plugin` on or off, and compare its logprobs with `reference`.

    Args:
        processes: the fork server in which vLLM runs.
        plugin: `ON` or `OFF`.
        model: path or hub id.
        reference: the logprobs of Hugging Face.
        tolerance: the largest mean difference that agrees, in nats.
        engine: arguments of `vllm.LLM`.
        on_progress: called with the numbers of prompts that are done, and of all prompts.
        env: environment variables to serve the model with.
    """
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **(env or {})}
    if plugin == OFF:
        environment[VARIABLE] = "0"
    all_tokens = reference.sequences[0].logprobs.shape[1] > 1
    job = "vllm_tf_sinks.parity.logprobs:vllm_logprobs"
    try:
        served = processes.run(
            job, environment, on_progress, model=model, sequences=reference.sequences, all_tokens=all_tokens, **engine
        )
    except JobError as error:
        return Run(plugin, REFUSED, error.error, log=str(error))
    comparison = compare(reference.sequences, served)
    return Run(plugin, AGREES if comparison.agrees(tolerance) else DIFFERS, comparison=comparison)
