# SPDX-License-Identifier: Apache-2.0
"""The output head of a model: the part of its ForCausalLM class after the base model.

Shapes: N rows of hidden states, H hidden size, P input size of the projection, V vocabulary size.
"""
