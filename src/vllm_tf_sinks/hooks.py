# SPDX-License-Identifier: Apache-2.0
"""Hooks: other packages can describe a model to this one, and observe its decisions.

A hook plugin is a module or an object whose functions are marked with `hookimpl`. Its package names it in the
entry-point group `vllm_tf_sinks`:

    [project.entry-points.vllm_tf_sinks]
    my_models = "my_package.hooks"

Each process of vLLM loads the plugins when it builds the first model of the Transformers backend. It calls hooks
while it builds and loads models, and never in a forward pass. A plugin that cannot be loaded, or raises, is reported
in the log and disabled.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

import pluggy

from vllm_tf_sinks.errors import HookError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PretrainedConfig, PreTrainedModel

PROJECT = "vllm_tf_sinks"  # the name of pluggy's project and of the entry-point group

hookimpl = pluggy.HookimplMarker(PROJECT)
_hookspec = pluggy.HookspecMarker(PROJECT)

logger = logging.getLogger("vllm.tf_sinks")


@dataclass(frozen=True)
class Decision:
    """A decision about one model.

    Attributes:
        model: the name of the class that Transformers builds.
        subject: `sinks` or `head`.
        outcome: how the sinks or the head are served (`elementwise`), or the error of a refusal.
        refused: whether the model is refused. Then it does not load.
    """

    model: str
    subject: str
    outcome: str
    refused: bool = False


class Specifications:
    """The hooks. All are optional. A hook that does not apply to a model returns None."""

    @_hookspec
    def attention_sink(self, module: "nn.Module") -> "nn.Parameter | None":
        """Return the parameter that `module` passes to the attention interface as `s_aux`.

        This package calls the hook for each attention module of a model, which is as Transformers built it, on the
        meta device. The parameter has one element for each query head of the module, over all ranks. The module must
        pass its values unchanged, but may cast or reshape it. If a hook returns a parameter, this package does not
        read the source of the module.

        A value that is not a parameter of the model leads to a SinkError.
        """

    @_hookspec
    def causal_lm_class(self, config: "PretrainedConfig") -> "type[PreTrainedModel] | None":
        """Return the ForCausalLM class of a checkpoint with `config`, if the config does not name it.

        This package calls the hook once for each model. It builds the class from `config` with a stub for its base
        model, runs its code between base model and logits, and loads weights by the names in the class.

        A value that is not a subclass of `PreTrainedModel` leads to a HeadError.
        """

    @_hookspec
    def output_head(self, model: "PreTrainedModel") -> "Callable[[Tensor], Tensor] | None":
        """Return a function that computes the head of the ForCausalLM `model`, if its `forward` cannot.

        This package calls the hook once for each model, with the ForCausalLM on the meta device, and stubs for its
        base model and its projection. The function takes hidden states [1, N, H] and returns logits [1, N, V]. It
        calls the projection once, as a module, and depends on no other input. It is tested on random hidden states
        and traced, in place of the `forward`.

        A function that does not do so leads to a HeadError.
        """

    @_hookspec
    def decided(self, decision: Decision) -> None:
        """Observe a decision. Each process calls the hook once for the sinks of a model, and once for its head."""


@dataclass(frozen=True)
class HookResult:
    """The value that a hook of a plugin returned.

    Attributes:
        plugin: the name of the plugin's entry point.
        value: the value, which is not None.
    """

    plugin: str
    value: Any


class Plugins:
    """The hook plugins of one process.

    Attributes:
        manager: pluggy's manager, with which further plugins can be registered.
        broken: name of a disabled plugin -> the reason.
    """

    def __init__(self, found: Iterable[EntryPoint] = ()) -> None:
        """Load the plugins of the entry points `found`."""
        self.manager = pluggy.PluginManager(PROJECT)
        self.manager.add_hookspecs(Specifications)
        self.broken: dict[str, str] = {}
        for entry in found:
            self._load(entry)

    @property
    def names(self) -> list[str]:
        """The names of the plugins that are not disabled."""
        return [name for name, _ in self.manager.list_name_plugin()]

    def call(self, hook: str, **arguments: Any) -> HookResult | None:
        """Call `hook` of all plugins, and return the value that is not None; None if there is none.

        Raises:
            HookError: naming both plugins, if two return different values.
        """
        results = list(self._call(hook, arguments))  # pluggy omits values that are None
        for other in results[1:]:
            if other.value is not results[0].value:
                raise HookError(
                    f"The hook plugins {results[0].plugin!r} and {other.plugin!r} return different values for {hook}: "
                    f"{results[0].value!r} and {other.value!r}. Uninstall one of them."
                )
        return results[0] if results else None

    def notify(self, decision: Decision) -> None:
        """Call the hook `decided` of all plugins."""
        for _ in self._call("decided", {"decision": decision}):
            pass

    def _load(self, entry: EntryPoint) -> None:
        try:
            self.manager.register(entry.load(), entry.name)
            self.manager.check_pending()  # raises for a hook without a specification
        except Exception as error:  # importing a package may raise anything
            self._disable(entry.name, error)

    def _call(self, hook: str, arguments: dict[str, Any]) -> Iterator[HookResult]:
        """Yield the values of each plugin's hook, in the order of registration; disable a plugin that raises."""
        plugins = self.manager.list_name_plugin()
        for name, plugin in plugins:
            others = [other for _, other in plugins if other is not plugin]
            try:
                values = self.manager.subset_hook_caller(hook, others)(**arguments)
            except Exception as error:  # a plugin may raise anything
                self._disable(name, error, f" in {hook}")
            else:
                yield from (HookResult(name, value) for value in values)

    def _disable(self, name: str, error: Exception, where: str = "") -> None:
        self.broken[name] = f"{type(error).__name__}{where}: {error}"
        if self.manager.has_plugin(name):
            self.manager.unregister(name=name)
        logger.error("vllm-tf-sinks disables the hook plugin %r: %s", name, self.broken[name])


@cache
def plugins() -> Plugins:
    """The hook plugins of this process, which the first call loads."""
    return Plugins(entry_points(group=PROJECT))


@contextmanager
def notifying_refusal(model: Any, subject: str) -> Iterator[None]:
    """Notify observers of a refusal, which is a ValueError that is raised within the context.

    Args:
        model: vLLM's model of the Transformers backend.
        subject: `sinks` or `head`.
    """
    try:
        yield
    except ValueError as error:
        plugins().notify(Decision(type(model.model).__name__, subject, str(error), refused=True))
        raise
