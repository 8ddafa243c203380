# SPDX-License-Identifier: Apache-2.0
"""What other packages can tell this one about a model, and be told: specifications, and how plugins are asked.

A plugin is a module or an object whose functions are marked with `hookimpl`. Its package names it in the
entry-point group `vllm_tf_sinks`:

    [project.entry-points.vllm_tf_sinks]
    my_models = "my_package.hooks"

Plugins are loaded in each process of vLLM when the first model of the Transformers backend is built, and asked
while models are built, never in a forward pass. A plugin that cannot be loaded, or raises, is reported in
the log and left out from then on.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PretrainedConfig, PreTrainedModel

PROJECT = "vllm_tf_sinks"  # of pluggy, and the entry-point group

hookimpl = pluggy.HookimplMarker(PROJECT)
_hookspec = pluggy.HookspecMarker(PROJECT)

logger = logging.getLogger("vllm.tf_sinks")


class HookError(ValueError):
    """Plugins contradict each other, or one answers what its hook does not take."""


@dataclass(frozen=True)
class Decision:
    """What was decided about one model.

    Attributes:
        model: the class that Transformers builds.
        subject: `sinks` or `head`.
        outcome: what is done, or why the model is refused.
        refused: whether it is refused; it will not load.
    """

    model: str
    subject: str
    outcome: str
    refused: bool = False


class Specifications:
    """The hooks. All are optional; one that has nothing to say about a model returns None."""

    @_hookspec
    def attention_sink(self, module: "nn.Module") -> "nn.Parameter | None":
        """The parameter that `module` hands the attention interface as `s_aux`, where its source does not show it.

        Asked for each attention module of a model, which is still as Transformers built it, on the meta device:
        return the parameter itself, of as many numbers as the module has query heads over all ranks. Its values
        must reach the attention unchanged; a cast or a reshape is no change. With an answer the source is not read.

        Refused: an answer that is no parameter of the model.
        """

    @_hookspec
    def causal_lm_class(self, config: "PretrainedConfig") -> "type[PreTrainedModel] | None":
        """The ForCausalLM class whose head belongs to a checkpoint with `config`, where the config does not say so.

        Asked once a model. The class is built from `config` around a stand-in for its base model; what it does
        between base model and logits is run, and weights are loaded under the names that it gives them.

        Refused: an answer that is not a subclass of `PreTrainedModel`.
        """

    @_hookspec
    def output_head(self, model: "PreTrainedModel") -> "Callable[[Tensor], Tensor] | None":
        """What the ForCausalLM `model` does after its base model, where its `forward` cannot be run for that.

        Asked once a model, with the ForCausalLM on the meta device, its base model replaced by a stand-in and
        its projection by vLLM's. Return a function of hidden states [1, N, H] to logits [1, N, V] that calls the
        projection once, as a module, and depends on no other input. It is tried on random hidden states, and
        made cheap where it can be, like a `forward`.

        Refused: a function that does not keep to that.
        """

    @_hookspec
    def decided(self, decision: Decision) -> None:
        """Observe a decision about a model: called once each for its sinks and its head, in each process."""


@dataclass(frozen=True)
class Answer:
    """What a plugin answered.

    Attributes:
        plugin: the plugin's name, as its entry point gives it.
        value: the answer, not None.
    """

    plugin: str
    value: Any


class Plugins:
    """The plugins of one process.

    Attributes:
        manager: pluggy's manager; further plugins can be registered with it.
        broken: why plugins were left out, by name.
    """

    def __init__(self, found: Iterable[EntryPoint] = ()) -> None:
        """Load what `found` names."""
        self.manager = pluggy.PluginManager(PROJECT)
        self.manager.add_hookspecs(Specifications)
        self.broken: dict[str, str] = {}
        for entry in found:
            self._load(entry)

    @property
    def names(self) -> list[str]:
        """The names of the plugins that are asked."""
        return [name for name, _ in self.manager.list_name_plugin()]

    def ask(self, hook: str, **arguments: Any) -> Answer | None:
        """What the plugins answer to `hook`, or None where none does.

        Raises:
            HookError: if two answer differently, naming both.
        """
        answers = list(self._call(hook, arguments))  # pluggy leaves out those that are None
        for other in answers[1:]:
            if other.value is not answers[0].value:
                raise HookError(
                    f"Plugins {answers[0].plugin!r} and {other.plugin!r} of vllm-tf-sinks answer {hook} differently: "
                    f"{answers[0].value!r} and {other.value!r}. Uninstall one of them."
                )
        return answers[0] if answers else None

    def tell(self, decision: Decision) -> None:
        """Tell every observer of `decision`."""
        for _ in self._call("decided", {"decision": decision}):
            pass

    def _load(self, entry: EntryPoint) -> None:
        try:
            self.manager.register(entry.load(), entry.name)
            self.manager.check_pending()  # a hook that is not specified
        except Exception as error:  # whatever a package raises while it is imported
            self._leave_out(entry.name, error)

    def _call(self, hook: str, arguments: dict[str, Any]) -> Iterator[Answer]:
        """Each plugin's answer, in the order of registration; one that raises is left out."""
        everyone = self.manager.list_name_plugin()
        for name, plugin in everyone:
            others = [other for _, other in everyone if other is not plugin]
            try:
                answers = self.manager.subset_hook_caller(hook, others)(**arguments)
            except Exception as error:  # whatever a plugin raises
                self._leave_out(name, error, f" in {hook}")
            else:
                yield from (Answer(name, answer) for answer in answers)

    def _leave_out(self, name: str, error: Exception, where: str = "") -> None:
        self.broken[name] = f"{type(error).__name__}{where}: {error}"
        if self.manager.has_plugin(name):
            self.manager.unregister(name=name)
        logger.error("Plugin %r of vllm-tf-sinks is left out: %s", name, self.broken[name])


@cache
def plugins() -> Plugins:
    """The plugins of this process, loaded by the first call."""
    return Plugins(entry_points(group=PROJECT))


@contextmanager
def telling_refusal(model: Any, subject: str) -> Iterator[None]:
    """Tell observers where a model of vLLM's Transformers backend is refused within the context."""
    try:
        yield
    except ValueError as error:
        plugins().tell(Decision(type(model.model).__name__, subject, str(error), refused=True))
        raise
