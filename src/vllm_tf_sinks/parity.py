# SPDX-License-Identifier: Apache-2.0
"""Compare the logprobs of vLLM's Transformers backend with those of Hugging Face's own eager code.

Hugging Face goes first and continues each prompt greedily. vLLM is given the same prompts, and its logprobs of
the same tokens are held against Hugging Face's: those of the prompt, computed in one pass, and those of the new
tokens, computed one by one. Where the greedy texts part, the rest of that prompt cannot be compared.

Shapes: T tokens of a prompt, N new ones, V vocabulary; K is 1 where the logprob of each token is compared, V where
whole rows are.
"""

import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_tf_sinks.settings import VARIABLE
from vllm_tf_sinks.zygote import JobError, Zygote

Floats = NDArray[np.float64]
Booleans = NDArray[np.bool_]

# Of the mean difference, by the dtype that a model is run in; the largest may be LARGEST times that
TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
LARGEST = 20

ON, OFF = "plugin on", "plugin off"
AGREES, DIFFERS, REFUSED = "agrees", "differs", "refused"


@dataclass(frozen=True)
class Answer:
    """A prompt and its greedy continuation, in numbers.

    Attributes:
        tokens: those of the prompt and the new ones, T + N.
        prompt_length: T.
        logprobs: [T + N - 1, K], of each token but the first, given those before it; NaN where it is not known.
        best: [T + N - 1], the most likely token at each of these places.
    """

    tokens: list[int]
    prompt_length: int
    logprobs: Floats
    best: NDArray[np.int64]


@dataclass(frozen=True)
class Reference:
    """What Hugging Face answers.

    Attributes:
        model: path or hub id.
        dtype: what it was computed in.
        words: the text of each token of `answers`, in turn; empty without a tokenizer.
    """

    model: str
    dtype: str
    answers: list[Answer]
    words: list[list[str]]

    def save(self, path: Path) -> None:
        """Write it to `path`, for another machine."""
        header = {
            "model": self.model,
            "dtype": self.dtype,
            "tokens": [answer.tokens for answer in self.answers],
            "prompt_lengths": [answer.prompt_length for answer in self.answers],
            "words": self.words,
        }
        with path.open("wb") as file:
            np.savez_compressed(
                file,
                header=np.array(json.dumps(header)),
                logprobs=np.concatenate([answer.logprobs for answer in self.answers]),
                best=np.concatenate([answer.best for answer in self.answers]),
            )

    @classmethod
    def load(cls, path: Path) -> "Reference":
        """Read what `save` wrote.

        Raises:
            OSError: if there is no such file.
            ValueError: if it is something else.
        """
        try:
            with np.load(path) as file:
                header = json.loads(str(file["header"]))
                logprobs, best = file["logprobs"], file["best"]
        except (AttributeError, EOFError, KeyError, ValueError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path} was not written by --save-reference.") from error
        ends = np.cumsum([len(tokens) - 1 for tokens in header["tokens"]])[:-1]
        parts = zip(
            header["tokens"], header["prompt_lengths"], np.split(logprobs, ends), np.split(best, ends), strict=True
        )
        return cls(header["model"], header["dtype"], [Answer(*part) for part in parts], header["words"])


@dataclass(frozen=True)
class Statistics:
    """How far logprobs are apart, in absolute differences.

    Attributes:
        compared: at how many places.
        of: how many places there are.
        greedy: at how many of those compared both hold the same token for the most likely.
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
    """Logprobs of vLLM against those of Hugging Face, place by place.

    Attributes:
        prompt: index of the prompt, for each place.
        position: of the token there.
        is_new: whether the token is a new one.
        reference, served: [places, K].
        same_best: whether both hold the same token for the most likely.
    """

    prompt: NDArray[np.int64]
    position: NDArray[np.int64]
    is_new: Booleans
    reference: Floats
    served: Floats
    same_best: Booleans

    @property
    def differences(self) -> Floats:
        """Absolute differences [places, K]; NaN where they are not known."""
        with np.errstate(invalid="ignore"):  # two -inf are equal
            apart: Floats = np.where(self.reference == self.served, 0.0, np.abs(self.reference - self.served))
        return apart

    @property
    def difference(self) -> Floats:
        """The largest of them at each place."""
        largest: Floats = self.differences.max(axis=1)
        return largest

    def statistics(self, is_new: bool) -> Statistics:
        """Of the prompts, or of the new tokens."""
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
        """The places where logprobs are furthest apart, worst first."""
        difference = self.difference
        order = np.argsort(-np.nan_to_num(difference, nan=-1.0), kind="stable")[:count]
        return [int(place) for place in order if difference[place] > 0]

    def agrees(self, tolerance: float) -> bool:
        """Whether prompts and new tokens are each within `tolerance` on average, and nowhere beyond LARGEST of it."""
        for statistics in (self.statistics(False), self.statistics(True)):
            # so that a NaN does not agree
            if not (statistics.mean <= tolerance and statistics.largest <= LARGEST * tolerance):
                return False
        return True


def compare(reference: Sequence[Answer], served: Sequence[Answer]) -> Comparison:
    """Hold `served` against `reference`, answer by answer; both are of the same tokens."""
    places = [(index, answer, at) for index, answer in enumerate(reference) for at in range(1, len(answer.tokens))]
    return Comparison(
        np.array([index for index, _, _ in places]),
        np.array([at for _, _, at in places]),
        np.array([at >= answer.prompt_length for _, answer, at in places]),
        np.concatenate([answer.logprobs for answer in reference]),
        np.concatenate([answer.logprobs for answer in served]),
        np.concatenate([one.best == other.best for one, other in zip(reference, served, strict=True)]),
    )


@dataclass
class Run:
    """vLLM with the plugin on or off.

    Attributes:
        plugin: which of them.
        outcome: `agrees`, `differs` or `refused`.
        reason: why it is refused.
        comparison: None where it is refused.
        log: the traceback and the log, where it is refused.
    """

    plugin: str
    outcome: str
    reason: str = ""
    comparison: Comparison | None = None
    log: str = ""


def serve(
    processes: Zygote,
    plugin: str,
    model: str,
    reference: Reference,
    tolerance: float,
    engine: Mapping[str, Any],
    on_progress: Callable[[tuple[int, int]], None] | None = None,
    env: Mapping[str, str] | None = None,
) -> Run:
    """Serve `model` with the `plugin` on or off, and hold it against `reference`."""
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **(env or {})}
    if plugin == OFF:
        environment[VARIABLE] = "0"
    whole = reference.answers[0].logprobs.shape[1] > 1
    job = "vllm_tf_sinks.answers:answer_with_vllm"
    try:
        served = processes.run(
            job, environment, on_progress, model=model, answers=reference.answers, whole=whole, **engine
        )
    except JobError as error:
        return Run(plugin, REFUSED, error.error, log=str(error))
    comparison = compare(reference.answers, served)
    return Run(plugin, AGREES if comparison.agrees(tolerance) else DIFFERS, comparison=comparison)
