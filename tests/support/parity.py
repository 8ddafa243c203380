# SPDX-License-Identifier: Apache-2.0
"""Is a model type served with Hugging Face's logprobs? A tiny checkpoint of it is served and compared."""

import re
import signal
import tempfile
import traceback
from dataclasses import asdict, dataclass

import numpy as np

from support.fork_server import ForkServer, JobError
from support.jobs import ENGINE, PROMPTS, rows_of
from support.small import NOT_BUILT

CLOSE = 1e-4  # what float32 and two orders of summation leave; a dropped component shows above 1e-3
LIMIT = 200  # seconds
ASIDES = (" Use a native implementation", " Model type should be", " The available parameters")
RAISE_ON_PURPOSE = ("vllm", "vllm_tf_sinks", "transformers", "huggingface_hub")
ENVIRONMENT = {"VLLM_MLA_DISABLE": "1"}  # the CPU's MLA kernels take no float32


@dataclass(frozen=True)
class Verdict:
    """What came of serving one checkpoint.

    Attributes:
        outcome: `right`, `wrong`, `refused`, `crashed`, or `not built` where there is no tiny checkpoint.
        reason: of any outcome but `right`.
        prompt, decode: largest absolute differences of log-softmax rows.
    """

    outcome: str
    reason: str = ""
    prompt: float = 0.0
    decode: float = 0.0


WORST_FIRST = ("wrong", "crashed", "refused", "not built", "right")


def worst(verdicts: list[Verdict]) -> Verdict:
    """The verdict on a model type that was served in several ways."""
    return min(verdicts, key=lambda verdict: WORST_FIRST.index(verdict.outcome))


def check(vllm: ForkServer, model_type: str, tied: bool, settings: list[str], **changes) -> dict:
    """Build `model_type` and serve it under each value of `VLLM_TF_SINKS` in `settings`.

    Args:
        changes: fields of the config.

    Returns:
        What `support.small:build` says of the model, and a verdict under each of the `settings`.
    """
    if model_type in NOT_BUILT:
        return dict.fromkeys(settings, asdict(Verdict("not built", NOT_BUILT[model_type])))
    with tempfile.TemporaryDirectory() as folder:
        try:
            said = vllm.run("support.small:build", model_type=model_type, folder=folder, tied=tied, **changes)
        except JobError as error:
            reason = str(error).partition("--- log ---")[0].strip().splitlines()[-1]
            return dict.fromkeys(settings, asdict(Verdict("not built", reason)))
        return said | {setting: asdict(_serve(vllm, folder, setting)) for setting in settings}


def _serve(vllm: ForkServer, folder: str, setting: str) -> Verdict:
    try:
        served = vllm.run("support.parity:serve", env=ENVIRONMENT | {"VLLM_TF_SINKS": setting}, checkpoint=folder)
    except JobError as error:  # not even an exception
        return Verdict("crashed", str(error).strip().splitlines()[0])
    if isinstance(served, tuple):
        return Verdict(*served)
    sequences = [[*prompt, *new] for prompt, (new, _, _) in zip(PROMPTS, served, strict=True)]
    expected = vllm.run("support.jobs:reference_rows", checkpoint=folder, sequences=sequences)
    prompt, decode = differences(served, expected)
    if max(prompt, decode) < CLOSE:
        return Verdict("right", "", prompt, decode)
    return Verdict("wrong", f"logprobs are off by up to {max(prompt, decode):.1g}", prompt, decode)


def differences(served, expected) -> tuple[float, float]:
    """The largest absolute differences of prompt rows and of decode rows; infinite where one is not a number."""
    prompt, decode = [], []
    for tokens, (_, decode_rows, prompt_rows), rows in zip(PROMPTS, served, expected, strict=True):
        last, size = len(tokens) - 1, decode_rows.shape[-1]
        # A head may have no logit for tokens that are never predicted
        rows = np.pad(rows, ((0, 0), (0, max(0, size - rows.shape[-1]))), constant_values=-np.inf)
        prompt.append(_largest(prompt_rows[:, :size], rows[:last]))
        decode.append(_largest(decode_rows, rows[last:-1]))
    return max(prompt), max(decode)


def _largest(one: np.ndarray, other: np.ndarray) -> float:
    with np.errstate(invalid="ignore"):
        distance = np.where(one == other, 0, np.abs(one - other))  # both minus infinity is agreement
    return float(np.nan_to_num(distance, nan=np.inf).max())


def serve(checkpoint: str):
    """The rows that vLLM gives for `checkpoint`, or the outcome and its reason."""
    from vllm import LLM

    signal.alarm(LIMIT)
    try:
        llm = LLM(checkpoint, **ENGINE)
    except Exception as error:
        return _failure(error, "at load")
    try:
        return rows_of(llm)
    except Exception as error:
        return "crashed", _failure(error, "in use")[1]


def _failure(error: Exception, when: str) -> tuple[str, str]:
    """Whether vLLM or the plugin refused on purpose, or something broke; and the reason."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    message = str(error).strip()
    if type(error).__name__ == "ValidationError":  # pydantic's, around what vLLM raised
        message = message.partition("Value error, ")[2].partition(" [type=")[0] or message
        return "refused", _line(message)
    deliberate = isinstance(error, (ValueError, RuntimeError)) and (frame.line or "").startswith("raise ")
    if deliberate and when == "at load" and any(f"/{name}/" in frame.filename for name in RAISE_ON_PURPOSE):
        return "refused", _line(message)
    where = re.split(r"site-packages/|overlays/[^/]*/", frame.filename)[-1]
    return "crashed", f"{when}: {type(error).__name__}: {_line(message)} ({where}, {frame.name})"


def _line(message: str) -> str:
    """The first sentences of a message: what is wrong, and not what to do."""
    text = " ".join(message.split())
    return text[: min((text.find(each) for each in ASIDES if each in text), default=None)]
