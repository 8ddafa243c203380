# SPDX-License-Identifier: Apache-2.0
"""A vLLM that nobody tested: this one, renumbered, in which something that is patched means something else.

Each function is a tamper of `support.jobs:served_rows`.
"""

import sys

UNTESTED = "0.99.0"


def renumber() -> None:
    """Let this vLLM have another number, and mean the same."""
    sys.modules["vllm.version"].__version__ = UNTESTED


def _base():
    from vllm.model_executor.models.transformers.base import Base

    renumber()
    return Base


def _causal():
    from vllm.model_executor.models.transformers.causal import CausalMixin

    renumber()
    return CausalMixin


def scale_logits() -> None:
    """Let the logits processor double what it is given, as if a fused kernel expected half of it."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    renumber()
    forward = LogitsProcessor.forward
    LogitsProcessor.forward = lambda self, *args, **kwargs: 2 * forward(self, *args, **kwargs)


def shift_vocabulary() -> None:
    """Let weights be loaded with the projection's rows moved by one, as if a special row came first."""
    mixin = _causal()
    load_weights = mixin.load_weights

    def load_shifted(self, weights):
        moved = ((name, tensor.roll(1, 0) if "lm_head" in name else tensor) for name, tensor in weights)
        return load_weights(self, moved)

    mixin.load_weights = load_shifted


def lose_projection() -> None:
    """Let weights be loaded without the projection's."""
    mixin = _causal()
    load_weights = mixin.load_weights

    def load_others(self, weights):
        return load_weights(self, ((n, t) for n, t in weights if "lm_head" not in n)) | {"lm_head.weight"}

    mixin.load_weights = load_others


def negate_sinks() -> None:
    """Let attention layers keep the negative of the sinks that they are given."""
    from vllm.model_executor.layers.attention import Attention

    renumber()
    init = Attention.__init__

    def init_negated(self, *args, sinks=None, **kwargs):
        init(self, *args, sinks=sinks, **kwargs)
        if sinks is not None:
            process = self.process_weights_after_loading

            def negated(*args, **kwargs):
                process(*args, **kwargs)
                self.impl.sinks = -self.impl.sinks

            self.process_weights_after_loading = negated

    Attention.__init__ = init_negated


def lose_sinks() -> None:
    """Let weights be loaded without the sinks, and with their names among those that were loaded."""
    base = _base()
    load_weights = base.load_weights

    def load_others(self, weights):
        sinks = {name for name, _ in self.named_parameters() if "sink" in name}
        return load_weights(self, ((n, t) for n, t in weights if "sink" not in n)) | sinks

    base.load_weights = load_others


def split_elsewhere() -> None:
    """Let the model be split over pipeline ranks by another method, and the patched one not be called."""
    base = _base()
    split = base.pipeline_parallel
    init = base.__init__

    def init_and_split(self, *args, **kwargs):
        self.pipeline_parallel = lambda: split(self)
        init(self, *args, **kwargs)

    base.__init__ = init_and_split


def split_late() -> None:
    """Let the model be split over pipeline ranks once more, after its attention layers are made."""
    base = _base()
    name = next(name for name in vars(base) if name.endswith("create_attention_instances"))
    create = getattr(base, name)

    def create_and_split(self, *args, **kwargs):
        self.pipeline_parallel()
        return create(self, *args, **kwargs)

    setattr(base, name, create_and_split)


def initialise_elsewhere() -> None:
    """Let parameters be given memory by another method, and the patched one not be called."""
    base = _base()
    initialise = base.init_parameters
    init = base.__init__

    def init_and_initialise(self, *args, **kwargs):
        self.init_parameters = lambda *args, **kwargs: initialise(self, *args, **kwargs)
        init(self, *args, **kwargs)

    base.__init__ = init_and_initialise


def load_otherwise() -> None:
    """Let the default loader load models by steps of its own."""
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    renumber()
    DefaultModelLoader.load_model = lambda self, *args, **kwargs: BaseModelLoader.load_model(self, *args, **kwargs)


def lose_the_check() -> None:
    """Let vLLM have no function by which loading ends."""
    from vllm.model_executor.model_loader import base_loader

    renumber()
    base_loader.finish = base_loader.process_weights_after_loading
    del base_loader.process_weights_after_loading
