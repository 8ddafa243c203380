# SPDX-License-Identifier: Apache-2.0
"""Plugins of other people that change what ours changes or builds on, before us or after us."""

import functools
import importlib
import sys
from collections import Counter
from collections.abc import Callable

from support.jobs import served_rows
from support.patching import BACKEND, current, depth, import_backend, states
from vllm_tf_sinks import register, revert
from vllm_tf_sinks.patches.table import PATCHES

used: Counter[str] = Counter()  # how often something of the other plugin was called


Undo = list[Callable[[], None]]


def set_attribute(owner, name: str, value) -> Callable[[], None]:
    """Set it, and return what sets it back."""
    original = vars(owner)[name]
    setattr(owner, name, value)
    return lambda: setattr(owner, name, original)


def counting(function):
    """What a plugin wraps a function in."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        used[function.__name__] += 1
        return function(*args, **kwargs)

    return wrapper


def wrap_the_same() -> Undo:
    """Wrap every method that our catalogue patches."""
    targets = [patch.find() for patch in PATCHES if not patch.has()]
    undo = []
    for target in targets:
        original = target.get()
        target.set(counting(original))
        undo.append(functools.partial(target.set, original))
    return undo


def wrap_processor() -> Undo:
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    return [set_attribute(LogitsProcessor, "forward", counting(LogitsProcessor.forward))]


def project_in_float32() -> Undo:
    """Replace the method that projects, as trainers do that want float32 logits of a model of any dtype."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    return [set_attribute(LogitsProcessor, "_get_logits", _float32_logits)]


def _float32_logits(self, hidden_states, lm_head, embedding_bias, skip_gather=False):
    import torch

    used["_get_logits"] += 1
    bias = None if embedding_bias is None else embedding_bias.float()
    logits = torch.nn.functional.linear(hidden_states.float(), lm_head.weight.float(), bias)
    if skip_gather:
        return logits
    if lm_head.tp_size > 1:
        logits = self._gather_logits(logits)
    return logits if logits is None else logits[..., : self.org_vocab_size]


def replace_processor() -> Undo:
    """Put another class in the place of LogitsProcessor, one that cannot leave a rank its shard."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    class Float32LogitsProcessor(LogitsProcessor):
        _get_logits = _float32_logits

        def forward(self, lm_head, hidden_states, embedding_bias=None):
            return super().forward(lm_head, hidden_states, embedding_bias)

    return _replace_class(LogitsProcessor, Float32LogitsProcessor)


def replace_lm_head() -> Undo:
    """Put another class in the place of ParallelLMHead, one that multiplies in a way of its own."""
    import torch
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

    class Method(UnquantizedEmbeddingMethod):
        def apply(self, layer, x, bias=None):
            used["apply"] += 1
            return torch.nn.functional.linear(x, layer.weight, bias)

    class OwnLMHead(ParallelLMHead):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.quant_method = Method()

    return _replace_class(ParallelLMHead, OwnLMHead)


def _replace_class(original: type, replacement: type) -> Undo:
    """Put `replacement` wherever a module of vLLM's layers or models has `original`."""
    modules = [module for name, module in sys.modules.items() if name.startswith("vllm.model_executor.")]
    return [
        set_attribute(module, original.__name__, replacement)
        for module in modules
        if vars(module).get(original.__name__) is original
    ]


def predict_tokens() -> Undo:
    """Answer single rows with tokens in the place of logits, and let the sampler take them, as FlashHead does."""
    import torch
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    original = LogitsProcessor._get_logits

    def tokens(self, hidden_states, *args, **kwargs):
        logits = original(self, hidden_states, *args, **kwargs)
        return logits if len(hidden_states) > 1 else logits.argmax(-1, keepdim=True).to(torch.int32)

    return [set_attribute(LogitsProcessor, "_get_logits", tokens)]


def wrap_compute_logits() -> Undo:
    causal = importlib.import_module(f"{BACKEND}.causal")
    return [set_attribute(causal.CausalMixin, "compute_logits", counting(causal.CausalMixin.compute_logits))]


PLUGINS = {
    plugin.__name__: plugin
    for plugin in (
        wrap_the_same,
        wrap_processor,
        project_in_float32,
        replace_processor,
        replace_lm_head,
        predict_tokens,
        wrap_compute_logits,
    )
}


def install(plugin: str, order: str) -> Undo:
    """Apply another plugin `before` ours or `after`, and return what undoes it."""
    import_backend()
    if order == "after":
        register()
    undo = PLUGINS[plugin]()
    register()
    return undo


def served_beside(checkpoint: str, plugin: str, order: str, **engine) -> tuple[list, dict[str, int]]:
    """What is served beside another plugin, and how often each function of that was called."""
    install(plugin, order)
    return served_rows(checkpoint, **engine), dict(used)


def undone(plugin: str, order: str, first: str) -> dict:
    """Another plugin and ours are applied and undone, `first` of `ours` and `theirs` first; then ours is applied again.

    Returns:
        `left`, what is not as it was, and `off`, the states, once both are undone; `finally`, what is not as
        it was after a second revert(); and what is there once ours is applied again: the states `again`,
        and how many wrappers are around each target.
    """
    import_backend()
    originals = current()
    undo = install(plugin, order)
    steps = [revert, lambda: [step() for step in reversed(undo)]]
    for step in steps if first == "ours" else reversed(steps):
        step()

    def changed() -> list[str]:
        return [path for path, now in current().items() if now is not originals[path]]

    left, off = changed(), states()
    revert()
    finally_left = changed()
    register()
    wrappers = {path: depth(now) - depth(originals[path]) for path, now in current().items()}
    return {"left": left, "off": off, "finally": finally_left, "again": states(), "wrappers": wrappers}
