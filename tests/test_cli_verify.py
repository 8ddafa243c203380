# SPDX-License-Identifier: Apache-2.0
"""vllm-tf-sinks verify: what it says of a model that agrees, that does not, and that is refused."""

import json
import re
import subprocess
import sys
from contextlib import nullcontext

import numpy as np
import pytest

from vllm_tf_sinks.cli import main, verify
from vllm_tf_sinks.parity import compare

SMALL = '{"kv_cache_memory_bytes": 67108864}'


@pytest.fixture
def run(vllm, monkeypatch, capsys):
    """Run verify, its jobs in forks of a process that has imported vLLM: status and output."""
    monkeypatch.setattr(verify, "ForkServer", lambda environment: nullcontext(vllm))

    def run_verify(folder, *arguments):
        status = main(["verify", folder, "--new-tokens", "4", "--engine-args", SMALL, *arguments])
        return status, capsys.readouterr().out

    return run_verify


def test_plugin_on_agrees_and_off_differs(run, checkpoint, vllm, tmp_path):
    folder = checkpoint(vllm, "granite_swa_scaled")
    picture = tmp_path / "picture.png"
    status, printed = run(folder, "--against", "off", "--json", "--plot", str(picture))
    report = json.loads(printed)
    on, off = report["runs"]
    assert status == 0
    assert report["dtype"] == "float32"
    assert [each["outcome"] for each in (on, off)] == ["agrees", "differs"]
    for part, places in (("prompt", 92), ("decode", 16)):
        assert on[part]["compared"] == on[part]["of"] == on[part]["greedy"] == places
        assert on[part]["largest"] < 1e-5
        assert off[part]["mean"] > 0.1
    assert off["worst"][0]["difference"] == pytest.approx(max(off[part]["largest"] for part in ("prompt", "decode")))
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_text_and_a_reference_of_another_machine(run, checkpoint, vllm, tmp_path, monkeypatch):
    """Words of a tokenizer, prompts of a file, a reference that is saved, and one that belongs to another model."""
    monkeypatch.setenv("COLUMNS", "100")
    folder = checkpoint(vllm, "granite", "support.cli_jobs:with_tokenizer")
    prompts, saved = tmp_path / "prompts.txt", tmp_path / "reference.npz"
    prompts.write_text("3 17 29 5 41 8\n9 4 33 70 21\n")
    reference = ("--prompts", str(prompts), "--dtype", "bfloat16")
    assert run(folder, *reference, "--save-reference", str(saved)) == (0, "")
    status, printed = run(folder, "--reference", str(saved), "--tolerance", "1e-9", "--against", "off")
    assert status == 1
    assert "bfloat16, 2 prompts of 5 to 6 tokens, 4 new tokens each" in printed
    assert re.search(r"' \d+' +after '( ?\d+)+'", printed), printed
    assert "Differs, plugin on: 1e-09 on average and 2e-08 at most are allowed." in printed
    assert max(map(len, printed.replace(folder, "MODEL").splitlines())) <= 100
    other = checkpoint(vllm, "granite", seed=1)
    assert run(other, "--reference", str(saved))[0] == 1


def test_refused_model(run, checkpoint, vllm):
    folder = checkpoint(vllm, "offset_llama", "remote", sink_form="doubled")
    status, printed = run(folder, "--trust-remote-code")
    assert status == 3
    assert "Refused, plugin on: SinkError: Doubled.forward passes the sink" in printed


def test_reference_in_a_process_of_its_own(checkpoint, vllm, tmp_path):
    """The installed command, without the warm process that stands in for it above."""
    folder, saved = checkpoint(vllm, "llama"), tmp_path / "reference.npz"
    command = [sys.executable, "-c", "import sys; from vllm_tf_sinks.cli import main; sys.exit(main())"]
    command += ["verify", folder, "--new-tokens", "2", "--save-reference", str(saved)]
    done = subprocess.run(command, env=vllm.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    reference = compare.Reference.load(saved)
    assert [len(answer.tokens) for answer in reference.sequences] == [26] * 4
    assert all(answer.logprobs.shape == (25, 1) for answer in reference.sequences)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--reference", "{missing}"], "No such file"),
        (["--reference", __file__], "was not written by --save-reference"),
        (["--prompts", "{missing}"], "No such file"),
    ],
)
def test_what_cannot_be_read(capsys, monkeypatch, tmp_path, arguments, message):
    monkeypatch.setattr(verify, "ForkServer", lambda environment: nullcontext())
    filled = [argument.format(missing=tmp_path / "missing") for argument in arguments]
    assert main(["verify", str(tmp_path), *filled]) == 1
    assert message in capsys.readouterr().err


def answer(tokens, prompt_length, logprobs, best):
    return compare.SequenceLogprobs(tokens, prompt_length, np.array(logprobs)[:, None], np.array(best))


def test_statistics():
    reference = answer([5, 6, 7, 8], 2, [-1.0, -2.0, -3.0], [6, 7, 9])
    served = answer([5, 6, 7, 8], 2, [-1.5, -2.0, np.nan], [6, 7, -1])
    comparison = compare.compare([reference], [served])
    prompt, decode = comparison.statistics(False), comparison.statistics(True)
    assert (prompt.mean, prompt.largest, prompt.compared, prompt.greedy) == (0.5, 0.5, 1, 1)
    assert (decode.mean, decode.compared, decode.of, decode.greedy) == (0.0, 1, 2, 1)
    assert comparison.worst(3) == [0]
    assert comparison.agrees(0.5)
    assert not comparison.agrees(0.4)


def test_what_is_not_known_does_not_agree():
    reference = answer([5, 6, 7], 2, [-1.0, -2.0], [6, 7])
    served = answer([5, 6, 7], 2, [-1.0, np.nan], [6, 3])
    assert not compare.compare([reference], [served]).agrees(1.0)


def test_one_large_difference_does_not_hide_in_the_mean():
    tokens = list(range(1001))
    far = [-1.0] * 999 + [-1.5]
    reference = answer(tokens, 500, [-1.0] * 1000, tokens[1:])
    comparison = compare.compare([reference], [answer(tokens, 500, far, tokens[1:])])
    assert comparison.statistics(True).mean < 1e-2
    assert not comparison.agrees(1e-2)


def test_excluded_tokens_are_equal():
    """Rows of a head that excludes tokens hold -inf on both sides."""
    row = np.array([[-np.inf, -1.0, -2.0]])
    one = compare.SequenceLogprobs([1, 2], 1, row, np.array([1]))
    assert compare.compare([one], [one]).difference.tolist() == [0.0]


def test_saved_reference_is_read_back(tmp_path):
    answers = [answer([5, 6, 7], 2, [-1.0, -2.0], [6, 7]), answer([1, 2], 1, [-3.0], [0])]
    reference = compare.Reference("model", "bfloat16", answers, [["a", "b", "c"], ["d", "e"]])
    reference.save(tmp_path / "file")
    read = compare.Reference.load(tmp_path / "file")
    assert (read.model, read.dtype, read.words) == (reference.model, reference.dtype, reference.words)
    for one, other in zip(read.sequences, answers, strict=True):
        assert (one.tokens, one.prompt_length) == (other.tokens, other.prompt_length)
        assert (one.logprobs == other.logprobs).all()
        assert (one.best == other.best).all()
